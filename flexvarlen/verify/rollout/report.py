"""Records of "drift-rollout" as sentences and a picture: what is closest, what causes the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record, commits_of, grouped_by, ran_on
from flexvarlen.report.table import NOTHING, markdown, number, share
from flexvarlen.verify.experiment.variant import is_ours
from flexvarlen.verify.rollout.drift import (
    ALONE,
    FP32_HEAD,
    FP32_MODEL,
    PACKED,
    REFERENCE,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DISTANCE = "log_ratio_rms"
"""The distance from the engine that ranks runs: its squares add up where causes are independent."""
AS_CLOSE = 1.02
"""Distances within this factor of the smallest count as equal."""


def closest(records: Sequence[Record]) -> list[Record]:
    """The records nearest to the engine, the nearest first."""
    ranked = sorted(records, key=lambda r: r.measures[DISTANCE])
    return [r for r in ranked if _distance(r) <= AS_CLOSE * _distance(ranked[0])]


def causes(records: Sequence[Record]) -> tuple[Record, dict[str, Record]]:
    """Our nearest backend packed in the model's dtype, and the runs that change one thing of it.

    Of attention these are the reference, and the nearest other one.
    """
    packed = sorted((r for r in records if r.case["pass"] == PACKED), key=_distance)
    ours = [r for r in packed if is_ours(r.case["variant"]) and r.case["variant"] != REFERENCE]
    base = (ours or packed)[0]
    own = {r.case["pass"]: r for r in records if r.case["variant"] == base.case["variant"]}
    others = [r for r in packed if r is not base]
    nearest = [r for r in others if r.case["variant"] != REFERENCE][:1]
    exact = [r for r in others if r.case["variant"] == REFERENCE]
    found = {f"{r.case['variant']} attention": r for r in (*nearest, *exact)}
    names = {"fp32 head": FP32_HEAD, "each alone": ALONE, "fp32 model": FP32_MODEL}
    return base, found | {name: own[of] for name, of in names.items() if of in own}


def sentence(records: Sequence[Record]) -> str:
    """What comes closest, and what each change of the trainer does to the distance."""
    said = []
    for own in _files(records):
        near, (base, changed) = closest(own), causes(own)
        m, names = near[0].measures, "; ".join(map(_name, near[:3]))
        said.append(
            f"{own[0].case['file']}: closest to the engine: {names} (rms of the log-ratio "
            f"{number(_distance(near[0]))}, {share(m['outside_0.8_1.2'])} of "
            f"{m['completion_tokens']:,} tokens outside 0.8 to 1.2, "
            f"{share(m['outside_0.9_1.1'])} outside 0.9 to 1.1, KL {number(m['kl_k3'])})."
        )
        parts = [f"{name} {_change(base, r)}" for name, r in changed.items()]
        if parts:
            said.append(
                f"Of the mean square of {_name(base)} (rms {number(_distance(base))}): "
                f"{', '.join(parts)}."
            )
    return " ".join(said)


def section(records: Sequence[Record]) -> str:
    """The tables of a page, one a model."""
    ran = [r for r in records if r.status == "ok"]
    return "\n\n".join(map(_table, grouped_by(ran, lambda r: r.case["model"]).values()))


def _table(records: Sequence[Record]) -> str:
    """A column for each file, a line for each attention, and for each other thing changed."""
    cells: dict[str, dict[str, str]] = {}
    files = []
    for own in _files(records):
        base, changed = causes(own)
        lines = {r.case["variant"]: r for r in own if r.case["pass"] == PACKED}
        lines |= {f"{name} \\*": r for name, r in changed.items() if r.case["pass"] != PACKED}
        files.append(own[0].case["file"].partition(".")[0])
        for name, r in lines.items():
            of_base = ", \\*" if r is base else ""
            text = f"{number(_distance(r))} ({share(r.measures['outside_0.9_1.1'])}{of_base})"
            cells.setdefault(name, {})[files[-1]] = text
    table = [[name, *(line.get(file, NOTHING) for file in files)] for name, line in cells.items()]
    case, m = records[0].case, records[0].measures
    return (
        f"{case['model']}, {case['dtype']}; {m['completion_tokens']:,} tokens of {m['responses']} "
        f"responses a file; {ran_on(records[0].environment)}{commits_of(records)}. Rms of the "
        "log-ratio, and the share of tokens whose ratio is outside 0.9 to 1.1.\n\n"
        f"{markdown(['attention', *files], table)}"
    )


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """A picture of each file's records; returns the files."""
    paths: list[Path] = []
    files = _files([r for r in records if r.status == "ok"])
    for own in files:
        first, (base, changed) = closest(own)[0], causes(own)
        finding = f"{_name(first)} is closest to the engine"
        if changed:
            cause, run = min(changed.items(), key=lambda one: _distance(one[1]))
            finding += f"; of the difference of {_name(base)}, {cause} {_change(base, run)}"
        caption = (
            f"{own[0].case['file']}: {first.measures['completion_tokens']:,} tokens of "
            f"{first.measures['responses']} responses; {own[0].case['model']}, "
            f"{own[0].case['dtype']}; {ran_on(own[0].environment)}{commits_of(own)}; flexvarlen "
            "drift rollout. Left: packed, by attention. Right: one thing changed."
        )
        figure, (left, right) = chart(finding, caption, height_px=340, panels=2)
        packed = [r for r in own if r.case["pass"] == PACKED]
        _bars(left, {r.case["variant"]: r for r in packed})
        _bars(right, {_name(base): base, **changed}, base.case["variant"])
        name = "rollout.png" if len(files) == 1 else f"rollout-{len(paths) + 1}.png"
        paths.append(save(figure, folder / name))
    return paths


def _bars(axes: Axes, records: dict[str, Record], variant: str = "") -> None:
    colors = [style_of(variant or r.case["variant"]).color for r in records.values()]
    values = {name: _distance(r) for name, r in records.items()}
    texts = [number(x) for x in values.values()]
    bars(axes, values, label="rms of log(trainer ÷ engine), nats", colors=colors, texts=texts)


def _files(records: Sequence[Record]) -> list[list[Record]]:
    keys = ("file", "crc32", "model", "dtype")
    return list(grouped_by(records, lambda r: tuple(r.case[key] for key in keys)).values())


def _distance(record: Record) -> float:
    found: float = record.measures[DISTANCE]
    return found


def _name(record: Record) -> str:
    return f"{record.case['variant']} {record.case['pass']}"


def _change(base: Record, record: Record) -> str:
    """By how much the mean square of the log-ratio falls or rises: such shares of causes add up.

    >>> of = [Record("", {}, "ok", None, {DISTANCE: x}) for x in (0.1, 0.05)]
    >>> _change(*of), _change(*reversed(of)), _change(of[0], of[0])
    ('removes 75.00%', 'adds 300%', 'changes nothing')
    """
    left = (_distance(record) / _distance(base)) ** 2 if _distance(base) else 1.0
    if left == 1:
        return "changes nothing"
    return f"removes {share(1 - left)}" if left < 1 else f"adds {share(left - 1)}"
