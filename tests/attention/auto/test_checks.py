"""`backend="auto"` takes no kernel whose results are not what the reference computes."""

from __future__ import annotations

import warnings

import pytest
import torch

import flexvarlen as fv
from flexvarlen.attention import choose
from flexvarlen.attention.auto import decide as auto
from flexvarlen.attention.auto.candidate_call import CandidateCall, RandomTensors
from flexvarlen.attention.auto.check_results import TOLERANCE, Expected, WrongResultError
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.document_mask import DocumentMask
from tests.attention.auto.first_step import later_s
from tests.attention.auto.stand_ins import (
    StandIn,
    a_layout,
    attend,
    entries,
    explain,
    run_inside_a_backward,
)


def doubled(out):
    return 2 * out


def nan_in_one_row(out):
    return out.index_fill(0, torch.tensor([7]), float("nan"))


def gradient_doubled(out):
    """The output is right."""
    return out + (out - out.detach())


def last_document_lost(out):
    return torch.cat([out[:-4], torch.zeros_like(out[-4:])])


WRONG = (doubled, nan_in_one_row, gradient_doubled, last_document_lost)


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_kernel_is_reported_and_passed_over(candidates, change):
    """An FA2 built without head_dim 256 computes garbage there and raises nothing."""
    garbage, right = candidates(StandIn("garbage", 1.0, change=change), StandIn("right", 2.0))
    assert explain().chosen == "garbage"  # nothing has run yet
    with pytest.warns(UserWarning, match="garbage failed when auto tried it .wrong results: its"):
        attend(requires_grad=True)
    assert (garbage.calls, right.calls) == (1, 2)
    explanation = explain()
    assert explanation.chosen == "right"
    assert explanation.why.endswith("; garbage failed")
    reasons = {c.name: c.reason for c in explanation.candidates}
    assert reasons["garbage"].startswith("failed: wrong results")
    attend(requires_grad=True)
    assert (garbage.calls, right.calls) == (1, 3)


def test_a_right_kernel_is_checked_once_on_a_machine(candidates):
    (right,) = candidates(StandIn("right", 1.0))
    attend()
    assert right.calls == 2
    (key,) = entries()
    assert key.endswith("; right is right")
    choose.clear_cache()  # as another process
    attend()
    assert right.calls == 3
    attend(requires_grad=True)  # another kind of call
    assert right.calls == 5


def test_all_are_wrong(candidates):
    candidates(StandIn("garbage", 1.0, change=doubled))
    with pytest.warns(UserWarning, match="garbage failed"):
        attend()
    assert explain(needs_grad=False).chosen == "sdpa"


def test_a_kernel_that_raises_is_passed_over(candidates):
    error = RuntimeError("kernel image is invalid\nsecond line")
    candidates(StandIn("broken", 1.0, fails=error), StandIn("right", 2.0))
    with pytest.warns(UserWarning, match="broken failed when auto tried it .RuntimeError"):
        attend()
    reasons = {c.name: c.reason for c in explain(needs_grad=False).candidates}
    assert reasons["broken"] == "failed: RuntimeError: kernel image is invalid"


def test_no_memory_is_no_reason_against_a_kernel(candidates):
    """The next call may have the memory; sdpa, a call a document, would be taken for good."""
    (full,) = candidates(StandIn("full", 1.0, fails=torch.OutOfMemoryError("CUDA out of memory")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                attend()
    assert full.calls == 4
    full.fails = None
    attend()
    assert len(entries()) == 1


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_wrong_kernel_in_a_graph_that_is_compiled_first(candidates):
    candidates(StandIn("garbage", 1.0, change=doubled), StandIn("right", 2.0))
    layout, q = a_layout(), torch.randn(64, 4, 16)

    def call(q):
        return fv.packed_attention(q, q, q, layout, backend="auto")

    with pytest.warns(UserWarning, match="garbage failed"):
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    torch.testing.assert_close(out, fv.packed_attention(q, q, q, layout, backend="sdpa"))


@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_kernels_are_checked_on_the_documents_of_the_call(candidates, monkeypatch):
    """Other sizes would be compiled for the check alone; while a graph is traced, none can be."""
    (compiled,) = candidates(StandIn("compiled", 1.0))
    monkeypatch.setattr(auto, "_COMPILED", ("compiled",))
    seen = []
    compiled.change = lambda out: seen.append(len(out)) or out
    layout, q = a_layout(), torch.randn(64, 4, 16)

    def call(q):
        return fv.packed_attention(q, q, q, layout, backend="auto")

    torch.compile(call, fullgraph=True, backend="eager")(q)
    assert compiled.calls == 0
    call(q)
    assert seen[-2:] == [64, 64]
    assert compiled.calls == 2


def test_nothing_is_checked_inside_a_backward(candidates):
    """There it would wait for the thread that it runs in, on a GPU."""
    (right,) = candidates(StandIn("right", 1.0))
    run_inside_a_backward(attend)
    assert right.calls == 1
    attend()
    assert right.calls == 3


MASKS = {
    "causal": {},
    "window": {"window": 9},
    "one_key": {"window": 1},
    "bidirectional": {"causal": False},
    "chunks": {"chunk": 16},
    "prefix": {"prefix": 5},
    "cross": {"layout_k": fv.PackedLayout.from_lengths([3, 40, 80], capacity=3)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", MASKS)
def test_right_results_are_not_refused(mask, dtype):
    """Errors of sdpa, which is right, are far below the tolerance; beyond it by a little is not."""
    layout = fv.PackedLayout.from_lengths([30, 1, 90], total_tokens=130, capacity=3)
    document_mask = DocumentMask.of(layout, **MASKS[mask])
    request = AttentionCall(layout.device, dtype, 4, 2, 32, document_mask.spec).kind()
    tensors = RandomTensors.of(request, document_mask)
    expected = Expected.of(request, document_mask, tensors)
    call = CandidateCall("sdpa", request, document_mask, tensors)
    expected.check(call)
    backend, tolerance = get_backend("sdpa"), TOLERANCE[dtype]

    class Scaled(type(backend)):
        def attend(self, *args):
            out, lse = super().attend(*args)
            return out * (1 + 2 * tolerance), lse

    call.backend = Scaled()
    with pytest.raises(WrongResultError, match="its output is off by"):
        expected.check(call)


@pytest.mark.gpu
def test_gpu_the_first_step_of_a_process_is_at_most_a_second_later():
    assert later_s() < 1.0
