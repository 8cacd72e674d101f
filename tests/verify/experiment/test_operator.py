"""`drift op`: planted bugs are findings, right backends are not, what breaks is a record."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexvarlen.attention.backends.reference import ReferenceBackend
from flexvarlen.reference import acceptance
from flexvarlen.verify.experiment.operator import COMPARISONS, operator_drift
from flexvarlen.verify.experiment.operator_cases import SUITES, Inputs, OpCase
from tests.planted import plant
from tests.verify.planted import leak, nan, wrong_scale

SMALL = OpCase((40, 1, 23), num_heads=4, num_kv_heads=2, head_dim=16, causal=True, window=9)


def drift(
    backends=("reference",), comparisons=COMPARISONS, *, case=SMALL, dtype=torch.float32, **options
):
    return operator_drift(
        [case], backends, device="cpu", dtypes=[dtype], comparisons=comparisons, **options
    )


def only(records):
    (record,) = records
    return record


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


def test_inputs_are_other_numbers_in_each_dtype():
    narrow, wide, other = (
        Inputs.random(replace(SMALL, dtype=dtype, seed=seed), "cpu")
        for dtype, seed in ((torch.bfloat16, 3), (torch.float32, 3), (torch.float32, 4))
    )
    assert torch.equal(wide.q, narrow.q.float())
    assert not torch.equal(wide.q, other.q)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"lengths": (3, 0)}, "at least 1 token"), ({"num_kv_heads": 3}, "a multiple of")],
)
def test_bad_case_is_taken(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(SMALL, **change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_right_backend_is_called_wrong(dtype, causal):
    records = drift(("reference", "sdpa"), case=replace(SMALL, causal=causal), dtype=dtype)
    assert len(records) == 2 * len(COMPARISONS)
    assert {record.status for record in records} == {"ok"}
    for record in records:
        if record.case["comparison"] == "exact":
            ratios = [v for k, v in record.measures.items() if k.startswith(("ratio", "serial_r"))]
            assert len(ratios) >= 8  # output and gradients, in one call and one call per document
            assert 0 < max(ratios) < 1
        else:
            other = "sdpa" if record.case["comparison"] == "backend-backend" else None
            assert record.case["other"] == other
            limit = 0.01 if dtype == torch.bfloat16 else 1e-5
            assert record.measures["dq_relative"] < limit


@pytest.mark.parametrize("bug", [wrong_scale, leak, nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bug_is_called_right(monkeypatch, bug, dtype):
    plant(monkeypatch, bug)
    records = drift(("reference", "sdpa"), ["exact"], dtype=dtype)
    right, wrong = records
    assert (right.status, wrong.status) == ("ok", "wrong")
    assert wrong.reason.startswith("out: largest error")
    assert "in document" in wrong.reason


def test_rule_is_another_than_the_references(monkeypatch):
    """Twice the baseline's error for outputs, three times for gradients."""
    monkeypatch.setattr(acceptance, "OUTPUT_FACTOR", 1e-9)
    record = only(drift(comparisons=["exact"]))
    assert (record.status, record.reason.split(":")[0]) == ("wrong", "out")
    assert record.measures["ratio_out"] > 1e6 > 1 > record.measures["ratio_dq"]


def test_reason_names_another_document(monkeypatch):
    """A leak into the last document alone."""

    def into_the_last(attend, q, k, v, *rest):
        out, lse = attend(q, k, v, *rest)
        return (torch.cat([out[:-23], out[-23:] + v[-24].mean()]) if len(q) == 64 else out), lse

    plant(monkeypatch, into_the_last)
    record = only(drift(["sdpa"], ["exact"]))
    assert "largest in document 2 (23 tokens)" in record.reason


def test_one_call_a_document_is_not_checked(monkeypatch):
    def alone(attend, q, *rest):
        out, lse = attend(q, *rest)
        return (out * 1.5 if len(q) < 40 else out), lse

    plant(monkeypatch, alone)
    record = only(drift(["sdpa"], ["exact"]))
    assert (record.status, record.measures["ratio_out"] < 1) == ("wrong", True)
    assert record.reason.startswith("one call per document: out: ")
    assert only(drift(["sdpa"], ["batch-serial"])).measures["out_relative"] > 0.1


@pytest.mark.parametrize("comparison", [name for name in COMPARISONS if name != "exact"])
def test_results_that_are_not_finite_are_ok(monkeypatch, comparison):
    plant(monkeypatch, nan)
    record = only(drift(["sdpa"], [comparison]))
    assert record.status == "wrong", record.reason


def test_what_changes_from_call_to_call_is_the_same(monkeypatch):
    calls = []

    def other(attend, *args):
        calls.append(args)
        out, lse = attend(*args)
        return out + len(calls), lse

    plant(monkeypatch, other)
    assert only(drift(["sdpa"], ["run-run"])).measures["out_max_abs"] == pytest.approx(1)


def test_backend_without_a_backward_has_no_record(monkeypatch):
    def why_not(self, call):
        return "no backward here" if call.needs_grad else None

    monkeypatch.setattr(ReferenceBackend, "why_not", why_not)
    record = only(drift(comparisons=["exact"]))
    assert record.status == "ok"
    assert "ratio_out" in record.measures
    assert "ratio_dq" not in record.measures


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "varlen", "fa2", "fa3", "fa4", "cudnn"])
def test_kernel_of_a_gpu_is_called_wrong(backend):
    case = OpCase((200, 1, 127, 300, 76), 8, 4, 64, causal=True)
    for record in operator_drift([case], [backend], device="cuda"):
        assert record.status in ("ok", "unsupported"), record.reason
