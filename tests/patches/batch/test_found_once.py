"""A forward finds its documents once: one plan for each kind of layer, no read of the device.

However many layers there are, eagerly too.
"""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.patches.batch import given
from tests.backends import ON_GPU, skip_if_refused
from tests.tiny_models import LENGTHS, new_model, one_row

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy")


def count(monkeypatch, place, name):
    """A list that grows by one with each call of `place.name`."""
    calls, real = [], getattr(place, name)

    def counted(*args, **kwargs):
        calls.append(name)
        return real(*args, **kwargs)

    monkeypatch.setattr(place, name, counted)
    return calls


def run(model, device="cpu"):
    layout = fv.PackedLayout.from_lengths(LENGTHS, device=device)
    ids = one_row(device).ids
    model(ids, packed_layout=layout, use_cache=False)  # what is remembered by the process
    return lambda: model(ids, packed_layout=layout, use_cache=False)


@pytest.mark.parametrize("depth", [2, 6])
@pytest.mark.parametrize(("kind", "kinds"), [("llama", 1), ("qwen3_windows", 2)])
@pytest.mark.parametrize("backend", ["flex", "sdpa"])
def test_one_plan_for_each_kind_of_layer(monkeypatch, kind, kinds, backend, depth):
    model = fv.patch_model(new_model(kind, num_hidden_layers=depth), backend)
    with torch.no_grad():
        forward = run(model)
        plans = count(monkeypatch, type(get_backend(backend)), "plan")
        found = count(monkeypatch, given, "find_layout")
        forward()
    assert len(plans) == kinds
    assert len(found) == 1


@pytest.mark.parametrize("depth", [2, 6])
@pytest.mark.parametrize("backend", ["flex", "reference"])  # sdpa loops on the host
def test_no_value_is_read_whatever_the_depth(monkeypatch, backend, depth):
    model = fv.patch_model(new_model("qwen3_windows", num_hidden_layers=depth), backend)
    with torch.no_grad():
        forward = run(model)
        reads = [count(monkeypatch, torch.Tensor, name) for name in READS]
        forward()
    assert [name for calls in reads for name in calls] == []


patched_run = skip_if_refused(lambda model, backend: run(fv.patch_model(model, backend), "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [name for name in ON_GPU if name != "cudnn"])
def test_no_sync_on_a_gpu(backend):
    model = new_model("qwen3_windows", head_dim=64, num_hidden_layers=4)
    model = model.to("cuda", torch.bfloat16)
    forward = patched_run(model, backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward().logits.float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_positions_are_read_once_for_all_layers(monkeypatch):
    """Boundaries that only the tensors show: found eagerly, by the same reads for any depth."""
    counts = []
    for depth in (2, 6):
        model = fv.patch_model(new_model("llama", num_hidden_layers=depth), "flex")
        batch = one_row()
        given = {"position_ids": batch.position_ids, "use_cache": False}
        with torch.no_grad(), monkeypatch.context() as context:
            model(batch.ids, **given)
            reads = [count(context, torch.Tensor, name) for name in READS]
            model(batch.ids, **given)
            counts.append(sum(map(len, reads)))
    assert counts[0] == counts[1] > 0
