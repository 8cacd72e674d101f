"""`operator_drift`: its truth, its cases and its rows."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

import flexvarlen as fv
from flexvarlen.drift.difference import Difference
from flexvarlen.drift.op import exact as op_exact
from flexvarlen.drift.op.cases import SUITES, Inputs, OpCase, other_order, spans_of
from flexvarlen.drift.op.comparisons import OF_ONE
from flexvarlen.drift.op.exact import Answer, Sight, each_alone, keys_seen
from flexvarlen.drift.op.judge import Limit
from tests import oracle
from tests.drift.drift_ops import GROUPED, SMALL, drift
from tests.oracle import Documents, differentiate

CASES = [
    OpCase("bidirectional", (40, 1, 23), **GROUPED),
    SMALL,
    OpCase("causal window", (40, 1, 23), causal=True, window=7, **GROUPED),
    OpCase("bidirectional window", (40, 1, 23), window=7, **GROUPED),
    OpCase("one head each", (33, 31), num_heads=3, num_kv_heads=3, head_dim=8),
]
PARTS = ("out", "lse", "dq", "dk", "dv")
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


# --- the truth -----------------------------------------------------------------------------------


def expected(case, inputs, dtype):
    documents = Documents(case.lengths, case.total_tokens)
    mask = {"causal": case.causal, "window": case.window}
    qkv = [x.to(dtype) for x in (inputs.q, inputs.k, inputs.v)]
    _, lse = oracle.attend(*qkv, documents, **mask)
    out, grads = differentiate(
        lambda *qkv: oracle.attend(*qkv, documents, **mask)[0], qkv, inputs.dout
    )
    return Answer(out, lse, *grads)


def alone(case, inputs, dtype, gradients=True):
    sight = Sight.of(causal=case.causal, window=case.window)
    return each_alone(inputs, sight, case.scale, dtype, gradients=gradients)


@by_name
@pytest.mark.parametrize("piece", [1 << 25, 1500, 1], ids=["whole", "heads", "queries"])
def test_truth_is_that_of_the_oracle_in_pieces_of_any_size(monkeypatch, case, piece):
    monkeypatch.setattr(op_exact, "_PIECE", piece)
    inputs = Inputs.random(case, torch.float32, "cpu", 0)
    found, right = (f(case, inputs, torch.float64).parts() for f in (alone, expected))
    assert list(found) == list(PARTS)
    for name in PARTS:
        assert found[name].dtype == torch.float64
        torch.testing.assert_close(found[name], right[name], rtol=0, atol=1e-12)


@by_name
def test_peer_errs_as_the_oracle_does_in_low_precision(case):
    inputs = Inputs.random(case, torch.bfloat16, "cpu", 0)
    right = expected(case, inputs, torch.float64).parts()
    ours, theirs = (f(case, inputs, torch.bfloat16).parts() for f in (alone, expected))
    for name in PARTS:
        assert ours[name].dtype == theirs[name].dtype
        errors = [Difference.between(x[name], right[name]).mean_abs for x in (ours, theirs)]
        assert 0.7 < errors[0] / errors[1] < 1.4, (name, errors)


def test_truth_without_gradients_has_none():
    inputs = Inputs.random(SMALL, torch.float32, "cpu", 0)
    assert list(alone(SMALL, inputs, torch.float64, gradients=False).parts()) == ["out", "lse"]


@by_name
def test_keys_seen_counts_the_mask(case):
    sight = Sight.of(causal=case.causal, window=case.window)
    counted = [oracle.seen(n, causal=case.causal, window=case.window).sum(1) for n in case.lengths]
    found = keys_seen(case.lengths, sight, torch.device("cpu"))
    assert found.tolist() == torch.cat(counted).tolist()


def test_limit_counts_the_worse_of_both_errors():
    assert Limit(2.0, 1.0).ratio(2.0, 0.5) == 1.0
    assert Limit(2.0, 1.0).ratio(1.0, 3.0) == 3.0
    assert Limit(0.0, 0.0).ratio(0.0, 0.0) == 0.0
    assert Limit(0.0, 0.0).ratio(1e-9, 0.0) == float("inf")
    assert not Limit(2.0, 1.0).ratio(float("nan"), 0.0) <= 1
    assert not Limit(2.0, 1.0).ratio(0.0, float("nan")) <= 1


# --- cases ---------------------------------------------------------------------------------------


def test_study_is_the_published_one():
    study = SUITES["varlen-study"]
    assert [case.lengths for case in study] == [
        *[(256,), (319,), (320,), (320, 320), (321,), (384,), (299, 1115), (1088, 2368)],
        *[(1088, 4160), (4160,), (4160,) * 2, (4160,) * 4, (4160,) * 8],
    ]
    assert {(c.num_heads, c.num_kv_heads, c.head_dim, c.causal) for c in study} == {
        (24, 24, 128, False)
    }
    assert all(len({case.name for case in cases}) == len(cases) for cases in SUITES.values())


@pytest.mark.parametrize("lengths", [(5,), (5, 5), (5, 5, 5), (3, 9, 3, 1, 7), (8,) * 12, (1, 2)])
@pytest.mark.parametrize("seed", range(8))
def test_other_order_moves_every_document(lengths, seed):
    order = other_order(lengths, seed)
    assert sorted(set(order)) == list(range(len(lengths)))
    before = [start for start, _ in spans_of(lengths)]
    after = spans_of([lengths[document] for document in order])
    moved = {document: start for document, (start, _) in zip(order, after, strict=True)}
    assert all(moved[document] != before[document] for document in range(len(lengths)))


def test_inputs_are_the_same_numbers_in_every_dtype():
    wide, narrow = (Inputs.random(SMALL, d, "cpu", 3) for d in (torch.float32, torch.bfloat16))
    assert torch.equal(wide.q, narrow.q.float())
    assert not torch.equal(wide.q, Inputs.random(SMALL, torch.float32, "cpu", 4).q)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"lengths": (3, 0)}, "at least 1 token"), ({"num_kv_heads": 3}, "a multiple of")],
)
def test_bad_case(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(SMALL, **change)


# --- rows ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    seen = []
    rows = drift(SMALL, ["sdpa", "reference", "fa3"], append=seen.append, commit="0123")
    assert rows == seen
    return rows


def test_rows_are_of_every_comparison(rows):
    told = [(row.case["backend"], row.case["comparison"], row.case["other"]) for row in rows]
    assert len(set(told)) == len(told)
    for backend in ("sdpa", "reference", "fa3"):
        assert {c for b, c, _ in told if b == backend} >= {*OF_ONE, "runtime"}
    assert [x for x in told if x[1] == "backend-backend"] == [
        ("sdpa", "backend-backend", "reference")
    ]
    assert {row.suite for row in rows} == {"drift-op"}
    assert rows[0].environment["git_commit"] == "0123"


def test_rows_have_what_tables_read(rows):
    for row in rows:
        json.dumps(asdict(row))
        case, measures = row.case, row.measures
        assert case["lengths"] == list(SMALL.lengths)
        assert (case["dtype"], case["causal"], case["window"]) == ("float32", True, None)
        if case["backend"] == "fa3":
            assert row.status == "unsupported"
            assert "fa3 needs" in row.reason
            continue
        assert row.status == "ok", row.reason
        if case["comparison"] == "runtime":
            names = {f"{x}ms_{p}" for x in ("", "both_") for p in ("p20", "p50", "p80")}
            assert names | {"serial_ms_p50"} <= set(measures)
            continue
        # neither sdpa, nor two of which one is sdpa, have an LSE
        parts = [x for x in PARTS if x != "lse" or case["backend"] == "reference"]
        for part in PARTS:
            assert (Difference.of_measures(measures, part) is not None) == (part in parts)
            if case["comparison"] == "exact" and part in parts:
                assert Difference.of_measures(measures, f"peer_{part}") is not None
                assert 0 <= measures[f"ratio_{part}"] <= 1
            if case["comparison"] == "batch-serial" and part in parts:
                assert Difference.of_measures(measures, f"serial_{part}") is not None
                assert 0 <= measures[f"serial_ratio_{part}"] <= 1
        assert ("blame" in measures) == (case["comparison"] == "exact")


def test_serial_and_repeated_are_exact_and_compiled_is_close(rows):
    for row in rows:
        found = Difference.of_measures(row.measures, "out")
        if row.case["backend"] == "sdpa" and row.case["comparison"] in OF_ONE[1:4]:
            assert found.is_zero
        if row.case["comparison"] == "backend-backend":
            assert 0 < found.max_abs < 1e-5


def test_window_and_dtypes():
    rows = drift(CASES[2], ["sdpa"], dtypes=[torch.float16, torch.float32], comparisons=["exact"])
    assert [row.case["dtype"] for row in rows] == ["float16", "float32"]
    assert [row.status for row in rows] == ["ok", "ok"]
    assert rows[0].measures["out_mean_abs"] > 100 * rows[1].measures["out_mean_abs"]


def test_all_backends_end_in_rows():
    rows = drift(SMALL, fv.BACKENDS, comparisons=["exact"], train=False, dtypes=[torch.float64])
    assert {row.case["backend"] for row in rows} == set(fv.BACKENDS)
    for row in rows:
        right = row.case["backend"] in ("reference", "sdpa")
        assert row.status == ("ok" if right else "unsupported")
        assert right or row.case["backend"] in row.reason


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"backends": ["fa9"]}, "backends must be of"), ({"comparisons": ["x"]}, "comparisons must")],
)
def test_unknown_names(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        drift(**options)
