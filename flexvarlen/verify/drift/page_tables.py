"""The records of `drift op` and `drift model` as one short table each, for docs/verification.md."""

from __future__ import annotations

from collections.abc import Sequence

from flexvarlen.report.records import Record, by_machine, commits_of, grouped, ran_on
from flexvarlen.report.table import NOTHING, Column, Table
from flexvarlen.verify.drift.report.tables import BACKWARD, FORWARD, PARTS, largest_of
from flexvarlen.verify.experiment.variant import THEIRS

OPERATOR_COMPARISONS = {
    "together against alone": "batch-serial",
    "the same call again": "run-run",
}
MODEL_COMPARISONS = {
    "packed against each document alone": "packed-alone",
    "packed against padded": "packed-padded",
    "another backend": "backend-backend",
    "float32 against bfloat16": "dtype",
    "compiled against eager": "eager-compiled",
}
LEAK = f"{THEIRS}sdpa"
MEASURES = {
    "logits": "logits_relative",
    "log-probability of a label": "logprob_mean_abs",
    "KL": "kl_mean",
    "gradients": "gradient_relative",
}

Records = Sequence[Record]


def section(records: Records) -> str:
    """The tables of one suite, "drift-op" or "drift-model": one for each machine and dtype."""
    make = operators if records[0].suite == "drift-op" else models
    tables = []
    for machine in by_machine(records):
        for own in grouped(machine, "dtype").values():
            ran = [record for record in own if record.status in ("ok", "wrong")]
            bad: dict[str, dict[str, None]] = {}
            for record in own:
                if record.status not in ("ok", "unsupported"):
                    what = f"`{record.case['variant']}`: {record.outcome}"
                    where = record.case.get("name", record.case["comparison"])
                    bad.setdefault(what, {})[where] = None
            notes = [f"{what} ({', '.join(where)})." for what, where in bad.items()]
            tables.append("\n\n".join([*([make(ran)] if ran else []), *notes]))
    return "\n\n".join(tables)


def operators(records: Records) -> str:
    """A line for each backend: its error, and its largest difference in each comparison."""

    def difference(title: str, comparison: str, parts: Sequence[str]) -> Column:
        names = [f"{part}_relative" for part in parts]
        return Column(title, lambda own: _largest(_compared(own, comparison), names, ".2g"))

    ratios = [f"ratio_{part}" for part in PARTS]
    columns = [
        Column("backend", lambda own: f"`{own[0].case['variant']}`"),
        Column("error / allowed", lambda own: _largest(_compared(own, "exact"), ratios, ".2f")),
        *(
            difference(f"{words}: {way}", comparison, parts)
            for words, comparison in OPERATOR_COMPARISONS.items()
            for way, parts in (("forward", FORWARD), ("backward", BACKWARD))
        ),
    ]
    first = records[0]
    cases = len({record.case["name"] for record in records})
    return (
        f"Largest relative differences over {cases} packings; {first.case['dtype']}, "
        f"{ran_on(first.environment)}{commits_of(records)}. 0: the same bits.\n\n"
        f"{Table.of(grouped(records, 'variant').values(), columns).markdown()}"
    )


def models(records: Records) -> str:
    """A line for each comparison: the range of each measure over our backends; then a leak."""
    ours = [record for record in records if not record.case["variant"].startswith(THEIRS)]
    lines = {
        words: _compared(ours, comparison) for words, comparison in MODEL_COMPARISONS.items()
    } | {
        "a leak: transformers' `sdpa`, packed against alone": [
            record
            for record in _compared(records, "packed-alone")
            if record.case["variant"] == LEAK
        ]
    }

    def column(title: str, measure: str) -> Column:
        return Column(title, lambda line: _range(line[1], measure))

    columns = [Column("what changes", lambda line: line[0])]
    columns += [column(title, measure) for title, measure in MEASURES.items()]
    first = records[0]
    names = " and ".join(dict.fromkeys(record.case["model"] for record in records))
    return (
        f"{names}, random weights, a packed row of {first.case['tokens']:,} tokens in "
        f"{first.measures['documents']} documents, {first.case['dtype']}; "
        f"{ran_on(first.environment)}{commits_of(records)}. Smallest and largest over backends and "
        "models; logits and gradients relative; 0: the same bits.\n\n"
        f"{Table.of(lines.items(), columns).markdown()}"
    )


def _compared(records: Records, comparison: str) -> list[Record]:
    return [record for record in records if record.case["comparison"] == comparison]


def _largest(records: Records, names: Sequence[str], digits: str) -> str:
    found = largest_of(records, names)
    return NOTHING if found is None else f"{found:{digits}}"


def _range(records: Records, name: str) -> str:
    values = [record.measures[name] for record in records if record.measures.get(name) is not None]
    if not values:
        return NOTHING
    return " to ".join(dict.fromkeys(f"{value:.2g}" for value in (min(values), max(values))))
