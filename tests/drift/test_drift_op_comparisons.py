"""Each comparison of `operator_drift` sees what it is there for; what a kernel raises is a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexvarlen.attention.backends.reference import ReferenceBackend
from flexvarlen.drift.op import case_run
from flexvarlen.drift.op.comparisons import COMPARISONS, OF_ONE
from flexvarlen.drift.op.failures import DeviceLostError
from tests.drift.drift_ops import SMALL, drift, only


@pytest.fixture
def plant(monkeypatch):
    """Change the output of `reference`: `change(out, mask)`."""

    def planted(change):
        right = ReferenceBackend.attend

        def attend(self, q, k, v, sinks, call, mask, plan):
            out, lse = right(self, q, k, v, sinks, call, mask, plan)
            return change(out, mask), lse

        monkeypatch.setattr(ReferenceBackend, "attend", attend)

    return planted


NUDGE = 1 + 2**-22  # within the rule


def zeros(case=SMALL, comparisons=OF_ONE[1:]):
    """Which comparisons find that nothing differs."""
    rows = drift(case, comparisons=comparisons)
    assert all(row.status == "ok" for row in rows), [row.reason for row in rows]
    return {row.case["comparison"] for row in rows if row.measures["out_max_abs"] == 0}


def test_batch_serial_sees_what_the_row_does(plant):
    # What else is in the row: the same in any order.
    plant(lambda out, mask: out * NUDGE**mask.layout.num_docs)
    found = zeros(comparisons=["batch-serial", "run-run", "place"])
    assert "batch-serial" not in found
    assert {"run-run", "place"} <= found


def test_kernel_that_errs_alike_in_batch_and_serial_is_called_exact(plant):
    plant(lambda out, mask: out * 1.1)
    row = only(drift(comparisons=["batch-serial"]))
    # Alike but for rounding: a product of other shapes may take another path of the BLAS.
    assert row.measures["out_max_abs"] < 1e-5
    assert row.measures["dq_max_abs"] < 1e-5
    assert row.status == "wrong"
    assert row.reason.startswith("one call a document: out, dq, dk, dv wrong: out is off by")
    assert "every output is multiplied by 1.1" in row.reason
    assert row.measures["serial_ratio_out"] > 1 >= row.measures["serial_ratio_lse"]
    assert row.measures["serial_out_max_abs"] > 0.01


@pytest.mark.parametrize(
    "comparisons", [["runtime"], ["exact", "runtime"], ["exact", "batch-serial", "runtime"]]
)
def test_what_is_wrong_in_serial_alone_is_timed(plant, comparisons):
    plant(lambda out, mask: out * (1.1 if mask.layout.num_docs == 1 else 1.0))
    rows = drift(SMALL, comparisons=comparisons)
    found = {row.case["comparison"]: row for row in rows}
    assert {name: row.status for name, row in found.items()} == {
        name: "ok" if name == "exact" else "wrong" for name in comparisons
    }
    assert found["runtime"].reason.startswith("one call a document: out, dq, dk, dv wrong")
    assert found["runtime"].measures == {}


def test_serial_answer_that_was_not_checked_is_ok(monkeypatch):
    def broken(*args, **options):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(case_run.Truth, "of", broken)
    row = only(drift(comparisons=["batch-serial"]))
    assert (row.status, row.measures["out_max_abs"]) == ("oom", 0)
    assert row.reason == "one call a document: not checked: OutOfMemoryError: too much"
    assert row.measures["why_serial_not_checked"] == "OutOfMemoryError: too much"
    assert "serial_ratio_out" not in row.measures


@pytest.mark.parametrize(
    "comparisons", [["runtime"], ["exact", "runtime"], ["exact", "batch-serial", "runtime"]]
)
def test_serial_answer_that_was_not_checked_is_timed(monkeypatch, comparisons):
    judged = case_run.CaseRun._judged

    def broken(self, answer):
        if answer is self.serial_of_reference:
            raise torch.OutOfMemoryError("too much")
        return judged(self, answer)

    start = case_run.CaseRun._start

    def started(self, backend):
        run = start(self, backend)
        self.serial_of_reference = run.serial
        return run

    monkeypatch.setattr(case_run.CaseRun, "_judged", broken)
    monkeypatch.setattr(case_run.CaseRun, "_start", started)
    found = {row.case["comparison"]: row for row in drift(SMALL, comparisons=comparisons)}
    assert found["runtime"].status == "oom"
    assert found["runtime"].measures == {}
    assert found["runtime"].reason == (
        "one call a document: not checked, so not timed: OutOfMemoryError: too much"
    )
    assert {found[name].status for name in comparisons if name == "exact"} <= {"ok"}


@pytest.mark.parametrize("comparisons", [["runtime"], ["batch-serial", "runtime"]])
def test_serial_calls_that_fail_once_are_timed_unchecked(plant, comparisons):
    failed = []

    def change(out, mask):
        if mask.layout.num_docs == 1 and not failed:
            failed.append(0)
            raise torch.OutOfMemoryError("too much")
        return out

    plant(change)
    for row in drift(SMALL, comparisons=comparisons):
        assert (row.status, row.measures) == ("oom", {})


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
    assert zeros(case, ["run-run", "place"]) == {"run-run"}


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
@pytest.mark.parametrize("comparison", ["exact", "batch-serial", "run-run", "runtime"])
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
    assert row.measures == {"device_lost": True}
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
