"""flexvarlen.auto.layer: the decoder layer that stands for what is around an eager call."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, LlamaModel

from flexvarlen.auto import layer
from flexvarlen.backends import AttentionRequest
from flexvarlen.bench.model.geometries import GEOMETRIES
from flexvarlen.measure import HostAndDevice, Timing

CPU = torch.device("cpu")
TOKENS = 24


def a_request(grad=False):
    return AttentionRequest(CPU, torch.float32, 4, 2, 16, needs_grad=grad)


@pytest.fixture
def theirs():
    """Transformers' layer of the same sizes, with queries for attention's output."""
    name = "test_queries_as_output"
    AttentionInterface.register(name, lambda module, q, *_, **__: (q.transpose(1, 2), None))
    config = GEOMETRIES["llama-tiny"](1)
    config.intermediate_size = 3 * config.hidden_size
    config._attn_implementation = name
    return LlamaModel(config)


class Operators(TorchDispatchMode):
    """Counts what is called, by name; views are free on a GPU."""

    def __init__(self):
        super().__init__()
        self.called = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.called[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_it_computes_what_transformers_layer_does(theirs):
    ours = layer._DecoderLayer(a_request(), TOKENS)
    block = theirs.layers[0]
    with torch.no_grad():
        block.input_layernorm.weight.copy_(ours.norms[0])
        block.post_attention_layernorm.weight.copy_(ours.norms[1])
        attention = block.self_attn
        for linear, weight in zip(
            (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
            (*ours.qkv, ours.out),
            strict=True,
        ):
            linear.weight.copy_(weight)
        block.mlp.gate_proj.weight.copy_(ours.gate)
        block.mlp.up_proj.weight.copy_(ours.up)
        block.mlp.down_proj.weight.copy_(ours.down)
        rotation = (ours.cos_TD[None], ours.sin_TD[None])
        with Operators() as expected:
            out = block(ours.hidden_1TC, position_embeddings=rotation, attention_mask=None)
        with Operators() as found:
            mine, _, _ = ours.forward()
    torch.testing.assert_close(mine, out, atol=1e-5, rtol=1e-5)
    assert found.called == expected.called


@pytest.mark.parametrize("grad", [False, True])
def test_it_grows_with_the_row(monkeypatch, grad):
    """The device's part; the host launches as many kernels for any row."""
    monkeypatch.setattr(layer, "_MOST_ROWS", TOKENS // 2)
    monkeypatch.setattr(layer, "_MOST_WIDTH", 32)
    ran, gradients = [], []

    def timed(calls, **_):
        ran.extend(calls.values())
        return {name: HostAndDevice(*[Timing(1.0, 1.0, 1.0, 1)] * 2) for name in calls}

    def backward(*args, of=torch.autograd.grad):
        gradients.extend(of(*args))

    monkeypatch.setattr(layer, "time_host_and_device", timed)
    monkeypatch.setattr(torch.autograd, "grad", backward)
    assert layer.time_layer(a_request(grad), TOKENS) == (1.0, 2.0 * 4)
    (call,) = ran
    assert call.hidden_1TC.shape == (1, TOKENS // 2, 32)
    call()
    assert len(gradients) == (len(call.leaves()) if grad else 0)
    assert all(x.abs().sum() > 0 for x in gradients)
