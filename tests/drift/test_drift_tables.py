"""Tables of operator drift from rows made by hand: what stands where, what the sentences say."""

from __future__ import annotations

import math

import pytest

from flexvarlen.drift.difference import Difference
from flexvarlen.drift.grid import share
from flexvarlen.drift.op.tables import (
    differences_table,
    exact_table,
    runtime_table,
    stability_table,
    study_tables,
)
from flexvarlen.drift.report.verdicts import plain_sentences
from flexvarlen.rows import Row

ZERO = Difference(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 100)
OFF = Difference(0.25, 0.125, 0.5, 2.0, 1.0, 0.75, 100)
FAR = Difference(0.125, 0.1, 0.9, 2.0, 1.0, 0.5, 100)
LOST = Difference(math.nan, math.nan, math.nan, math.nan, math.nan, 0.5, 100)


def row(comparison, backend="fa2", name="256", other=None, status="ok", reason=None, **measures):
    case = {"name": name, "lengths": [256], "num_heads": 24, "num_kv_heads": 24, "head_dim": 128}
    case |= {"causal": False, "window": None, "dtype": measures.pop("dtype", "bfloat16")}
    case |= {"backend": backend, "comparison": comparison, "other": other}
    found = {}
    for key, value in measures.items():
        found |= value.measures(key) if isinstance(value, Difference) else {key: value}
    return Row("drift-op", case, status, reason, found)


def cells(table):
    """The rows of a Markdown table, as lists of cells; the rule under the header left out."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return [line for line in lines if set(line) != {"---"}]


RUNTIME = [
    row("runtime", "fa2", ms_p50=2.0, both_ms_p50=8.0),
    row("runtime", "flex", ms_p50=3.0, both_ms_p50=6.0),
    row("runtime", "cudnn", ms_p50=1.0),
    row("runtime", "fa3", status="wrong", reason="x"),
]


def test_runtime_over_the_baseline():
    assert cells(runtime_table(RUNTIME, "fa2")) == [
        ["documents", "pass", "fa2", "flex", "cudnn", "fa3"],
        ["256", "forward", "2", "3 (1.50×)", "1 (0.50×)", "wrong"],
        ["256", "forward + backward", "8", "6 (0.75×)", "–", "–"],
    ]


def test_differences_of_every_part():
    rows = [
        row("batch-serial", out=ZERO, dq=OFF, dk=LOST, serial_ratio_out=0.25, serial_ratio_dq=0.5),
        row("batch-serial", "flex", status="wrong", out=ZERO, serial_ratio_out=7.0),
        row("batch-serial", "fa4", status="unsupported", reason="no package"),
        row("run-run", out=OFF),
    ]
    table = cells(differences_table(rows, "batch-serial"))
    assert [line[1] for line in table[1:]] == ["fa2", "flex (wrong)", "fa4"]
    cells_of_fa2 = ["exact", "–", "2.50e-01, 1.25e-01, 75.00%", "nan, nan, 50.00%", "–", "0.5"]
    assert table[1][2:] == cells_of_fa2
    assert table[2][2:] == ["exact", "–", "–", "–", "–", "7"]
    assert table[3][2:] == ["unsupported", "–", "–", "–", "–", "–"]


def test_pairs_with_the_baseline_alone():
    rows = [
        row("backend-backend", a, other=b, out=OFF)
        for a, b in (("fa2", "flex"), ("fa2", "fa3"), ("flex", "fa3"))
    ]

    def of(**options):
        return [x[1] for x in cells(differences_table(rows, "backend-backend", **options))]

    assert of()[1:] == ["fa2 : flex", "fa2 : fa3", "flex : fa3"]
    assert of(only="fa3")[1:] == ["fa2 : fa3", "flex : fa3"]


def test_study_has_three_tables_a_dtype():
    rows = [*RUNTIME, row("batch-serial", out=ZERO), row("batch-serial", dtype="float16", out=OFF)]
    text = study_tables(rows)
    assert [line for line in text.splitlines() if line.startswith("###")] == [
        "### bfloat16: runtime of all documents in one call, ms",
        "### bfloat16: all documents in one call against one call a document",
        "### bfloat16: one call a document, fa2 against the others",
        "### float16: runtime of all documents in one call, ms",
        "### float16: all documents in one call against one call a document",
        "### float16: one call a document, fa2 against the others",
    ]
    assert "3 (1.50×)" in text
    assert "2 (0.67×)" in study_tables(rows, baseline="flex")


def test_baseline_is_the_first_known_one_that_ran():
    def titles(*backends):
        made = [
            row("runtime", name, ms_p50=1.0) if name != "fa2" else row("runtime", status="oom")
            for name in backends
        ]
        return study_tables(made)

    for backends, baseline in (
        (["reference", "sdpa", "flex"], "flex"),
        (["reference", "sdpa"], "sdpa"),
        (["reference", "fa2", "varlen"], "varlen"),
        (["reference", "cudnn"], "reference"),
    ):
        assert f"one call a document, {baseline} against the others" in titles(*backends)


def test_exact_names_what_is_wrong():
    judged = {"peer_out": FAR, "ratio_out": 1.5}
    rows = [
        row("exact", "fa2", out=OFF, **(judged | {"ratio_out": 0.5}), blame=None),
        row("exact", "flex", status="wrong", reason="r", out=OFF, **judged, blame="wrong scale"),
        row("exact", "fa3", status="oom", reason="r"),
    ]
    table = cells(exact_table(rows))
    assert [line[-1] for line in table[1:]] == ["right", "wrong scale", "oom"]
    assert table[1][3] == "2.50e-01 (1.25e-01; 0.5)"


def test_stability_says_exact_or_what_differs_most():
    rows = [
        row("run-run", out=ZERO, dq=ZERO),
        row("place", out=OFF, dq=FAR),
        row("eager-compiled", status="failed", reason="x"),
        row("run-run", "flex", out=OFF, dk=LOST),
    ]
    assert cells(stability_table(rows))[1:] == [
        ["bfloat16", "256", "fa2", "exact", "dq: 1.25e-01", "failed"],
        ["bfloat16", "256", "flex", "dk: nan", "–", "–"],
    ]


def test_what_cannot_run_at_all_stands_in_no_table():
    rows = [
        *RUNTIME,
        *(row(c, out=ZERO) for c in ("batch-serial", "run-run")),
        row("exact", out=OFF, peer_out=OFF, ratio_out=0.5),
        row("exact", "flex", status="unsupported", reason="not this one"),
        *(
            row(comparison, "fa4", status="unsupported", reason="no package")
            for comparison in ("runtime", "batch-serial", "run-run", "exact")
        ),
    ]
    for table in (study_tables, exact_table, stability_table):
        assert "fa2" in table(rows)
        assert "fa4" not in table(rows)
    assert "unsupported" in exact_table(rows)  # flex runs elsewhere


BATCH = "bfloat16, all documents in one call, against one call a document"


def test_sentence_counts_the_cases_that_each_backend_ran():
    rows = [
        row("batch-serial", name="256", out=ZERO, lse=ZERO, dq=ZERO, dk=ZERO),
        row("batch-serial", name="320,320", out=ZERO, lse=ZERO, dq=OFF, dk=ZERO),
        row("batch-serial", name="4160", out=ZERO, lse=ZERO, dq=FAR, dk=ZERO),
        row("batch-serial", "cudnn", out=ZERO),
        row("batch-serial", "reference", out=ZERO, dq=ZERO),
        row("batch-serial", "reference", name="320,320", status="oom", reason="no room"),
        row("batch-serial", "reference", name="4160", status="oom", reason="no room"),
        row("batch-serial", "fa4", status="unsupported", reason="fa4 needs a package."),
    ]
    assert plain_sentences(rows) == [
        f"{BATCH}, 3 cases: the same bits forward, not backward: fa2 (dq by 9.0e-01 relative in "
        "4160) in 2 of 3; the same bits forward (no backward compared): cudnn [ran 1 of 3]; the "
        "same bits, forward and backward: reference [ran 1 of 3; oom: 320,320, 4160]."
    ]


def test_a_backward_in_some_cases_is_not_one_in_all():
    rows = [
        row("batch-serial", out=ZERO, dq=ZERO),
        row("batch-serial", name="320", out=ZERO),
    ]
    (sentence,) = plain_sentences(rows)
    assert sentence.endswith("forward and backward: fa2, with a backward in 1.")


def test_an_lse_that_differs_is_no_exact_forward():
    (sentence,) = plain_sentences([row("batch-serial", out=ZERO, lse=OFF)])
    assert "1 case: other bits: fa2 (lse by" in sentence


@pytest.mark.parametrize(
    ("part", "text"),
    [(1.0, "100%"), (0.0, "0"), (0.999999, "99.99%"), (1e-7, "<0.01%"), (0.123456, "12.35%")],
)
def test_share_is_all_or_none_only_if_so(part, text):
    assert share(part) == text
