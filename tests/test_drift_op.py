"""`operator_drift`: its truth, its rows, and that each comparison sees what it is there to see."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

import flexvarlen as fv
from flexvarlen.backends.reference import ReferenceBackend
from flexvarlen.drift.difference import Difference
from flexvarlen.drift.op import case_run
from flexvarlen.drift.op import exact as op_exact
from flexvarlen.drift.op.cases import SUITES, Inputs, OpCase, other_order, spans_of
from flexvarlen.drift.op.comparisons import COMPARISONS, OF_ONE, operator_drift
from flexvarlen.drift.op.exact import Answer, Sight, each_alone, keys_seen
from flexvarlen.drift.op.failures import DeviceLostError
from flexvarlen.drift.op.judge import Limit
from tests import oracle
from tests.oracle import Documents, differentiate

GROUPED = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
CASES = [
    OpCase("bidirectional", (40, 1, 23), **GROUPED),
    OpCase("causal", (40, 1, 23), causal=True, **GROUPED),
    OpCase("causal window", (40, 1, 23), causal=True, window=7, **GROUPED),
    OpCase("bidirectional window", (40, 1, 23), window=7, **GROUPED),
    OpCase("one head each", (33, 31), num_heads=3, num_kv_heads=3, head_dim=8),
]
SMALL = CASES[1]
PARTS = ("out", "lse", "dq", "dk", "dv")
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def drift(case=SMALL, backends=("reference",), **options):
    options = {"dtypes": [torch.float32], "repeats": 1} | options
    return operator_drift([case], list(backends), device="cpu", **options)


def only(rows):
    (row,) = rows
    return row


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


# --- what each comparison sees -------------------------------------------------------------------


@pytest.fixture
def plant(monkeypatch):
    """Change the output of `reference`: `change(out, mask)`."""

    def planted(change):
        right = ReferenceBackend.attend

        def attend(self, q, k, v, mask, plan, options):
            out, lse = right(self, q, k, v, mask, plan, options)
            return change(out, mask), lse

        monkeypatch.setattr(ReferenceBackend, "attend", attend)

    return planted


NUDGE = 1 + 2**-20


def zeros(case=SMALL, **options):
    """Which comparisons find that nothing differs."""
    rows = drift(case, comparisons=OF_ONE[1:], **options)
    assert all(row.status == "ok" for row in rows), [row.reason for row in rows]
    return {row.case["comparison"] for row in rows if row.measures["out_max_abs"] == 0}


def test_batch_serial_sees_what_the_row_does(plant):
    # What else is in the row: the same in any order.
    plant(lambda out, mask: out * NUDGE**mask.layout.num_docs)
    assert "batch-serial" not in zeros()
    assert {"run-run", "place"} <= zeros()


def test_run_run_sees_what_changes_from_call_to_call(plant):
    calls = []

    def change(out, mask):
        calls.append(0)
        return out * NUDGE ** len(calls)

    plant(change)
    (row,) = drift(comparisons=["run-run"])
    assert row.measures["out_max_abs"] > 0


@pytest.mark.parametrize("lengths", [(40, 1, 23), (40,), (16, 16)])
def test_place_sees_where_a_document_lies(plant, lengths):
    plant(lambda out, mask: out * (1 + 2**-16 * torch.arange(len(out))[:, None, None]))
    case = replace(SMALL, lengths=lengths)
    assert "place" not in zeros(case)
    assert "run-run" in zeros(case)


def test_compiled_sees_what_compilation_does(plant):
    plant(lambda out, mask: out * 2 if torch.compiler.is_compiling() else out)
    row = only(drift(comparisons=["eager-compiled"]))
    assert row.measures["out_relative"] == pytest.approx(1.0, rel=1e-3)
    row = only(drift(comparisons=["eager-compiled"], compile=[]))
    assert (row.status, row.measures) == ("skipped", {})


@pytest.mark.parametrize("comparisons", [["runtime"], ["exact", "runtime"]])
def test_what_is_wrong_is_not_timed(plant, comparisons):
    plant(lambda out, mask: out * 1.1)
    rows = drift(SMALL, ["reference", "sdpa"], comparisons=comparisons)
    times = {row.case["backend"]: row for row in rows if row.case["comparison"] == "runtime"}
    assert (times["reference"].status, times["reference"].measures) == ("wrong", {})
    assert "every output is multiplied by 1.1" in times["reference"].reason
    assert times["sdpa"].status == "ok"
    assert {row.case["comparison"] for row in rows} == set(comparisons)


def test_a_backend_without_backward_is_compared_forward(monkeypatch):
    right = ReferenceBackend.why_not

    def why_not(self, request):
        return "no backward here." if request.needs_grad else right(self, request)

    monkeypatch.setattr(ReferenceBackend, "why_not", why_not)
    rows = drift(SMALL, ["reference", "sdpa"], comparisons=COMPARISONS)
    for row in rows:
        assert row.status == "ok", row.reason
        of_both = row.case["backend"] == "sdpa" and row.case["other"] is None
        gradient = "both_ms_p50" if row.case["comparison"] == "runtime" else "dq_max_abs"
        assert (gradient in row.measures) == of_both


class CompilerError(Exception):
    """As of CuTe DSL and Triton: of no class but Exception."""


FAILURES = [
    (CompilerError("no such layout"), "failed", "CompilerError: no such layout"),
    (RuntimeError("the kernel broke\nat length"), "failed", "RuntimeError: the kernel broke"),
    (torch.OutOfMemoryError("too much"), "oom", "OutOfMemoryError: too much"),
    (NotImplementedError("not here"), "unsupported", "NotImplementedError: not here"),
    (ImportError("no package"), "unsupported", "ImportError: no package"),
]


@pytest.mark.parametrize(("error", "status", "reason"), FAILURES, ids=lambda x: str(x)[:12])
def test_what_a_kernel_raises_is_its_rows_and_ends_nothing(plant, error, status, reason):
    def change(out, mask):
        raise error

    plant(change)
    rows = drift(SMALL, ["reference", "sdpa"], comparisons=["exact", "run-run", "runtime"])
    for row in rows:
        if row.case["backend"] == "sdpa":
            assert row.status == "ok"
        else:
            assert reason in row.reason
            assert row.status == status
            assert row.measures == {}


def test_what_ends_the_program_is_no_row(plant):
    def change(out, mask):
        raise KeyboardInterrupt

    plant(change)
    with pytest.raises(KeyboardInterrupt):
        drift()


LOST = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered\nCompile with"),
    CompilerError("cudaErrorLaunchFailure: unspecified launch failure"),
]


@pytest.mark.parametrize("error", LOST, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("comparison", ["exact", "run-run", "runtime"])
def test_a_lost_device_ends_the_run_after_its_row(plant, error, comparison):
    def change(out, mask):
        raise error

    plant(change)
    seen = []
    with pytest.raises(DeviceLostError, match="the device is lost after reference") as raised:
        drift(SMALL, ["reference", "sdpa"], comparisons=[comparison], append=seen.append)
    assert raised.value.__cause__ is error
    row = only(seen)
    assert (row.case["backend"], row.case["comparison"]) == ("reference", comparison)
    assert row.status == "failed"
    assert str(error).partition("\n")[0] in row.reason


def test_a_refused_launch_loses_no_device(plant):
    def change(out, mask):
        raise RuntimeError("CUDA error: invalid argument")

    plant(change)
    rows = drift(SMALL, ["reference", "sdpa"], comparisons=["exact"])
    assert [row.status for row in rows] == ["failed", "ok"]


@pytest.mark.parametrize("comparisons", [["runtime"], ["exact", "runtime"]])
def test_what_is_wrong_stays_wrong_if_blame_fails(monkeypatch, plant, comparisons):
    def broken(*args):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(case_run, "blame", broken)
    plant(lambda out, mask: out * 1.1)
    for row in drift(SMALL, ["reference"], comparisons=comparisons):
        assert row.status == "wrong"
        assert row.reason.startswith("out, dq, dk, dv wrong: out is off by")
        assert row.reason.endswith("Why is not known: OutOfMemoryError: too much")
        assert ("out_max_abs" in row.measures) == (row.case["comparison"] == "exact")


@pytest.mark.parametrize("comparisons", [["runtime"], ["exact", "runtime"]])
def test_what_cannot_be_checked_is_not_timed(monkeypatch, comparisons):
    def broken(*args, **options):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(case_run.Truth, "of", broken)
    rows = drift(SMALL, ["reference", "sdpa"], comparisons=comparisons)
    assert {row.status for row in rows} == {"oom"}
    timed = [row for row in rows if row.case["comparison"] == "runtime"]
    assert [row.reason.partition(": ")[0] for row in timed] == ["not checked, so not timed"] * 2
    assert [row.measures for row in timed] == [{}, {}]


@pytest.mark.parametrize("good_calls", [5, 8, 12])
def test_what_fails_while_timed_is_dropped_and_the_others_are_timed(plant, good_calls):
    calls = []

    def change(out, mask):
        calls.append(0)
        if len(calls) > good_calls:
            raise torch.OutOfMemoryError("too much")
        return out

    plant(change)
    case = replace(SMALL, lengths=(40,))
    rows = drift(case, ["reference", "sdpa"], comparisons=["runtime"], repeats=3)
    found = {row.case["backend"]: row for row in rows}
    assert len(rows) == len(found) == 2
    assert (found["reference"].status, found["reference"].measures) == ("oom", {})
    assert "too much" in found["reference"].reason
    assert found["sdpa"].status == "ok"
    assert found["sdpa"].measures["repeats"] == 3
