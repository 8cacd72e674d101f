"""`backend="auto"` takes no kernel whose results are not what the reference computes."""

# ruff: noqa: F811
# (fixtures are arguments by the names that they are imported by)

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from flexvarlen import env as switches
from flexvarlen.attention import choose
from flexvarlen.attention.auto import cache_file
from flexvarlen.attention.auto.candidate_call import CandidateCall, RandomTensors
from flexvarlen.attention.auto.check_results import TOLERANCE, Expected, WrongResultError
from flexvarlen.attention.backends import registry as backends
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.document_mask import DocumentMask
from tests.attention.auto.auto_candidates import (  # noqa: F401
    FAST_S,
    SLOW_S,
    StandIn,
    a_layout,
    attend,
    candidates,
    explain,
)


def doubled(out, q):
    return 2 * out


def nan_in_one_row(out, q):
    return out.index_fill(0, torch.tensor([7]), float("nan"))


def gradient_doubled(out, q):
    """The output is right."""
    return out + (out - out.detach())


def last_document_lost(out, q):
    return torch.cat([out[:-4], torch.zeros_like(out[-4:])])


WRONG = (doubled, nan_in_one_row, gradient_doubled, last_document_lost)


class WrongKernel(StandIn):
    """The fastest of all, and wrong."""

    def __init__(self, name, change):
        super().__init__(name, FAST_S)
        self.change = change

    def attend(self, q_THD, *rest):
        out, lse = super().attend(q_THD, *rest)
        return self.change(out, q_THD), lse


@pytest.mark.parametrize("change", WRONG)
def test_fast_garbage_taken(candidates, change):
    """An FA2 built without head_dim 256 computes garbage there and raises nothing."""
    candidates(WrongKernel("garbage", change), StandIn("slow", SLOW_S))
    with pytest.warns(UserWarning, match="garbage failed when auto tried it .wrong results: its"):
        explanation = explain()
    assert (explanation.chosen, explanation.compiled) == ("slow", "slow")
    reasons = {c.name: (c.reason, c.timing) for c in explanation.candidates}
    assert "failed: wrong results" in reasons["garbage"][0]
    assert reasons["garbage"][1] is None
    choose.clear_cache()
    assert explain().why.startswith("from the cache file")  # nor by the next process
    assert explain().chosen == "slow"


def test_an_answer_of_before_there_were_checks(candidates):
    candidates(StandIn("slow", SLOW_S), StandIn("fast", FAST_S))
    explain()
    path = cache_file.cache_path()
    path.write_text(path.read_text().replace(f'"format": {cache_file.FORMAT}', '"format": 4'))
    choose.clear_cache()
    with pytest.warns(UserWarning, match="not format"):
        assert explain().why == "measured"


def test_the_only_candidate_is_wrong(candidates):
    candidates(WrongKernel("garbage", doubled))
    with pytest.warns(UserWarning, match="garbage failed"):
        assert explain().chosen == "sdpa"


def test_no_memory_to_time_is_no_reason_against_a_kernel(candidates, monkeypatch):
    """The next call may have the memory; sdpa, a call a document, would be taken for good."""
    candidates(StandIn("full", FAST_S, fails=torch.OutOfMemoryError("CUDA out of memory ...")))
    monkeypatch.setattr(backends, "AUTO_ORDER", {"cpu": ("full", "sdpa")})
    with pytest.warns(UserWarning, match="full failed"):
        explanation = explain()
    assert explanation.chosen == "full"
    assert {c.name: c.reason for c in explanation.candidates}["full"] == "failed: out of memory"


@pytest.mark.parametrize("change", WRONG[:3])
def test_garbage_by_the_static_order(candidates, change, monkeypatch):
    garbage, _ = candidates(WrongKernel("garbage", change), StandIn("right", SLOW_S))
    monkeypatch.setattr(backends, "AUTO_ORDER", {"cpu": ("garbage", "right")})
    monkeypatch.setenv(switches.AUTO, "static")
    with pytest.warns(UserWarning, match="garbage failed"):
        attend(requires_grad=True)
    assert explain().chosen == "right"
    tried = garbage.calls
    attend(requires_grad=True)
    assert garbage.calls == tried


def test_garbage_in_a_graph_that_is_compiled_first(candidates, monkeypatch):
    candidates(WrongKernel("garbage", doubled), StandIn("right", SLOW_S))
    monkeypatch.setattr(backends, "AUTO_ORDER", {"cpu": ("garbage", "right")})
    torch._dynamo.reset()
    layout, q = a_layout(), torch.randn(64, 4, 16)

    def call(q):
        return fv.packed_attention(q, q, q, layout, backend="auto")

    with pytest.warns(UserWarning, match="garbage failed"):
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    torch.testing.assert_close(out, fv.packed_attention(q, q, q, layout, backend="sdpa"))
    torch._dynamo.reset()


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
