"""The decoder layer that stands for what is around an eager call of "auto"."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, LlamaModel

from flexvarlen.attention.auto import decoder_layer as layer
from flexvarlen.attention.call import AttentionCall
from flexvarlen.bench.suites.model.geometries import GEOMETRIES
from flexvarlen.measure import HostAndDevice, Timing

CPU = torch.device("cpu")
TOKENS = 24


def a_request(grad=False):
    return AttentionCall(CPU, torch.float32, 4, 2, 16, needs_grad=grad)


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


@pytest.fixture
def clock(monkeypatch):
    """Answers each timing from a list, host before device, and keeps what was asked."""
    asked, answers = [], []

    def timed(calls, **how):
        asked.append((calls[""], how))
        host, device = answers.pop(0) if answers else (2.0, 3.0)
        return {"": HostAndDevice(Timing(host, host, host, 1), Timing(device, device, device, 1))}

    monkeypatch.setattr(layer, "time_host_and_device", timed)
    return asked, answers


@pytest.mark.parametrize(("tokens", "rows"), [(TOKENS, 12), (12, 12), (5, 5)])
def test_it_grows_with_the_row(monkeypatch, clock, tokens, rows):
    """The device's part; the host launches as many kernels for any row."""
    monkeypatch.setattr(layer, "_MOST_WIDTH", 32)  # of 64
    monkeypatch.setattr(layer, "_MOST_ELEMENTS", 12 * 32)
    assert layer.time_layer(a_request(), tokens) == (2.0, 3.0 * tokens / rows * 4)
    ((ran, _),) = clock[0]
    assert ran.hidden_1TC.shape == (1, rows, 32)


def test_a_narrow_layer_is_run_at_more_tokens(monkeypatch, clock):
    monkeypatch.setattr(layer, "_MOST_ELEMENTS", 12 * 64)
    request = AttentionCall(CPU, torch.float32, 1, 1, 16)
    assert layer.time_layer(request, 40) == (2.0, 3.0)
    ((ran, _),) = clock[0]
    assert ran.rows == 40


def test_a_slow_host_is_given_more_time_ahead(clock):
    """A device that waited for the host would pass for a slow one."""
    asked, answers = clock
    answers += [(layer._BUSY_MS + 2, 9.0), (layer._BUSY_MS + 2, 1.0)]
    assert layer.time_layer(a_request(), TOKENS) == (layer._BUSY_MS + 2, 1.0)
    assert [how["busy_ms"] for _, how in asked] == [layer._BUSY_MS, 2 * layer._BUSY_MS + 4]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "kv_width", "width"),
    [(4, 2, 16, 32, 64), (8, 2, 16, 16, 64), (5, 1, 16, 16, 64), (1, 1, 80, 80, 80)],
)
def test_all_weights_have_gradients(monkeypatch, heads, kv_heads, head_dim, kv_width, width):
    """Of the request's dtype; wide layers with fewer heads, and as many for each of K's."""
    monkeypatch.setattr(layer, "_MOST_WIDTH", 64)
    gradients = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *given: gradients.extend(grad(*given)))
    request = AttentionCall(CPU, torch.bfloat16, heads, kv_heads, head_dim)
    ran = layer._DecoderLayer(request, TOKENS)
    assert [tuple(w.shape) for w in ran.qkv] == [(width, width), *[(kv_width, width)] * 2]
    ran()
    assert len(gradients) == 1 + 9
    assert all(x.dtype == torch.bfloat16 and x.abs().sum() > 0 for x in gradients)


def test_no_gradients_for_a_forward(monkeypatch):
    monkeypatch.setattr(torch.autograd, "grad", None)
    ran = layer._DecoderLayer(a_request(grad=False), TOKENS)
    ran()
    assert not any(x.requires_grad for x in ran.leaves())
