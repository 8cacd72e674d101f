"""The front page's table: what users ask first, on a GPU, from the rows of many suites.

A line is there if its rows are; its numbers are those of the suites' own tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from flexvarlen.bench.mask_build.figure import with_variants
from flexvarlen.bench.mask_build.tables import BASELINES as MASK_BASELINES
from flexvarlen.bench.mask_build.tables import COMPARED
from flexvarlen.bench.model.compile_tables import small_inference_groups
from flexvarlen.bench.model.geometries import GEOMETRY_TITLES
from flexvarlen.bench.model.packings_tables import packings_groups
from flexvarlen.bench.training.convergence_tables import PADDED, judged
from flexvarlen.bench.training.convergence_tables import groups_of as convergence_groups
from flexvarlen.bench.training.end_to_end_tables import OURS, TARGETS
from flexvarlen.bench.training.end_to_end_tables import groups_of as end_to_end_groups
from flexvarlen.bench.training.scaling_ranks_tables import NAMES as PARALLEL
from flexvarlen.bench.training.scaling_ranks_tables import efficiency_of
from flexvarlen.bench.training.scaling_ranks_tables import groups_of as scaling_ranks_groups
from flexvarlen.drift.training.verdict import BEYOND, WITHIN
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row

MOST_TOKENS = 131_072  # of a row, as people pack today; masks of longer ones flatter

Line = tuple[str, str, str]
"""What was measured, flexvarlen's value, and the others' beside it."""


def _name(variant: str) -> str:
    """A variant in words.

    >>> _name("packed:transformers:flash_attention_3@cu_seq_lens")
    'packed transformers flash_attention_3 told cu_seq_lens'
    """
    return variant.replace("@", " told ").replace(":", " ")


def _beside(times: Mapping[str, float], ours: float, form: str, *, more_is_better: bool) -> str:
    """The others, the best of them first."""
    order = sorted(times, key=times.__getitem__, reverse=more_is_better)
    ratios = {name: ours / times[name] if more_is_better else times[name] / ours for name in order}
    shown = {name: f"{x:.2f}" if x < 10 else f"{x:,.0f}" for name, x in ratios.items()}
    return "; ".join(f"{_name(x)} {times[x]:{form}} ({shown[x]}×)" for x in order)


def _packings(rows: Sequence[Row]) -> Iterator[Line]:
    for group in packings_groups(rows):
        case = group[0].case
        what = (
            f"forward and backward, compiled, {_model(case)}, {case['tokens']:,} tokens in "
            f"documents of mean {case['mean_doc']:,}, ms"
        )
        yield from _auto_and_theirs(what, group, ",.0f")


def _auto_and_theirs(what: str, rows: Sequence[Row], form: str) -> Iterator[Line]:
    """Milliseconds of "auto" beside transformers' own, if both were measured."""
    ms = {row.case["variant"]: row.measures["ms_p50"] for row in rows if row.status == "ok"}
    theirs = {name: took for name, took in ms.items() if name.startswith("transformers:")}
    if "auto" in ms and theirs:
        beside = _beside(theirs, ms["auto"], form, more_is_better=False)
        yield what, f"{ms['auto']:{form}}", beside


def _model(case: Mapping[str, object]) -> str:
    geometry = str(case["geometry"])
    return f"{GEOMETRY_TITLES.get(geometry, geometry)} of {case['layers']} layers"


def _end_to_end(rows: Sequence[Row]) -> Iterator[Line]:
    for group in end_to_end_groups(rows):
        speed = {
            row.case["variant"]: row.measures["tokens_per_s"] for row in group if row.status == "ok"
        }
        theirs = {name: speed[name] for name in TARGETS if name in speed}
        if OURS in speed and theirs:
            case = group[0].case
            commits = {row.case["variant"]: row.environment.get("git_commit") for row in group}
            apart = [_name(name) for name in theirs if commits[name] != commits[OURS]]
            beside = _beside(theirs, speed[OURS], ",.0f", more_is_better=True)
            yield (
                f"Trainer, {case['mode']}, {_model(case)}, {case['tokens']:,} tokens a step, "
                "documents' tokens a second",
                f"{speed[OURS]:,.0f}",
                beside + (f"; at another commit: {', '.join(apart)}" if apart else ""),
            )


def _scaling_ranks(rows: Sequence[Row]) -> Iterator[Line]:
    """Of the most GPUs: a GPU's tokens a second in its share of one GPU's, by order of the rows."""
    for group in scaling_ranks_groups(rows):
        most = max(row.case["ranks"] for row in group)
        found: dict[str, dict[str, float]] = {}
        for row in group:
            if row.case["variant"] in PARALLEL and row.case["ranks"] == most > 1:
                share = efficiency_of(row, group)
                if share is not None:
                    found.setdefault(row.case["order"], {})[row.case["variant"]] = share
        if set(found) == {"balanced", "shuffled"}:
            case = group[0].case
            said = {
                order: ", ".join(f"{PARALLEL[name]} {share:.1%}" for name, share in own.items())
                for order, own in found.items()
            }
            yield (
                f"training on {most} GPUs, {_model(case)}, {case['tokens']:,} tokens a GPU and "
                "step, each GPU's tokens a second of one GPU's alone",
                f"`BalancedSampler`: {said['balanced']}",
                f"rows in random order: {said['shuffled']}",
            )


def _small_inference(rows: Sequence[Row]) -> Iterator[Line]:
    for group in small_inference_groups(rows):
        case = group[0].case
        what = f"forward in CUDA graphs, {_model(case)}, {sum(case['documents'])} tokens, ms"
        graphs = [row for row in group if row.case["mode"] == "cuda graphs"]
        yield from _auto_and_theirs(what, graphs, ".2f")


def _mask_build(rows: Sequence[Row]) -> Iterator[Line]:
    """Of the longest row, of those as long as people pack, whose mask all have built."""
    us: dict[int, dict[str, float]] = {}
    for row in with_variants(rows):
        if row.case["part"] == "build" and row.status == "ok" and row.case["tokens"] <= MOST_TOKENS:
            us.setdefault(row.case["tokens"], {})[row.case["variant"]] = row.measures["wall_us_p50"]
    whole = [tokens for tokens, found in us.items() if {COMPARED, *MASK_BASELINES} <= set(found)]
    if whole:
        tokens = max(whole)
        ours = us[tokens][COMPARED]
        theirs = {name: us[tokens][name] for name in MASK_BASELINES}
        yield (
            f"a BlockMask of {tokens:,} tokens, from boundaries on the device, µs",
            f"{ours:,.0f}",
            _beside(theirs, ours, ",.0f", more_is_better=False),
        )


def _leaks(rows: Sequence[Row]) -> Iterator[Line]:
    leaky: dict[str, set[str]] = {}
    for row in rows:
        if row.status in ("ok", "wrong"):
            found = leaky.setdefault(row.case["implementation"], set())
            found |= {row.case["form"]} if row.status == "wrong" else set()
    ours = {name: forms for name, forms in leaky.items() if name.startswith("flexvarlen:")}
    theirs = {name: forms for name, forms in leaky.items() if name not in ours}
    if ours and theirs:
        most = max(len(forms) for forms in ours.values())
        yield (
            f"of {len({row.case['form'] for row in rows})} forms of a packed batch those that "
            "leak or give false numbers, without a word",
            f"{most}",
            "; ".join(f"{_name(name)} {len(forms)}" for name, forms in theirs.items()),
        )


def _convergence(rows: Sequence[Row]) -> Iterator[Line]:
    for group in convergence_groups(rows):
        found = {each.variant: each for each in judged(group) if each.variant != PADDED}
        said = {
            verdict: [f"`{name}`" for name, each in found.items() if each.verdict == verdict]
            for verdict in (WITHIN, BEYOND)
        }
        if any(said.values()):
            yield (
                "final loss of packed against padded training",
                f"{WITHIN}: {', '.join(said[WITHIN]) or 'none'}",
                f"{BEYOND}: {', '.join(said[BEYOND]) or 'none'}",
            )


SUMMARIES: dict[str, Callable[[Sequence[Row]], Iterator[Line]]] = {
    "packings": _packings,
    "end-to-end": _end_to_end,
    "scaling-ranks": _scaling_ranks,
    "small-inference": _small_inference,
    "mask-build": _mask_build,
    "leaks": _leaks,
    "convergence": _convergence,
}
"""The lines of a suite's rows, in their order."""


def summary_section(rows: Sequence[Row]) -> str:
    """A table of each GPU; empty of rows of none."""
    tables = []
    for gpu in filter(None, dict.fromkeys(row.environment.get("gpu") for row in rows)):
        own = [row for row in rows if row.environment.get("gpu") == gpu]
        lines = [
            line
            for suite, lines_of in SUMMARIES.items()
            for line in lines_of([row for row in own if row.suite == suite])
        ]
        if lines:
            header = [f"on an {gpu}", "flexvarlen", "others (how many times as good ours is)"]
            tables.append(markdown(header, lines))
    return "\n\n".join(tables)
