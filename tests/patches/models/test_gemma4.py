"""Gemma 4: layers that share keys and values, with a head_dim and KV heads by layer type."""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from flexvarlen.attention.backends.registry import get_backend, refusal
from flexvarlen.attention.call import AttentionCall
from flexvarlen.patches.parts import ModelParts
from tests.oracle import assert_as_accurate
from tests.tiny_models import LENGTHS, exact_and_baseline, new_model, one_row

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {
    "gemma4_text": [(SLIDING, 9, 2, 16), (FULL, None, 2, 32)],
    "gemma4": [(SLIDING, 9, 2, 16), (FULL, None, 3, 32)],
}


@pytest.mark.parametrize("name", KINDS)
def test_head_dim_and_kv_heads_of_the_config(name):
    """They are those of its sliding layers; other kernels serve the full ones."""
    found = [
        (k.layer_type, k.window, k.num_kv_heads, k.head_dim)
        for k in ModelParts.of(new_model(name)).kinds
    ]
    assert found == KINDS[name]


@pytest.mark.parametrize("backend", ["reference", {SLIDING: "reference", FULL: "sdpa"}])
def test_mixed_backends(backend):
    """Keys of one layer's kernel in another layer."""
    model, batch = fv.patch_model(new_model("gemma4_text"), backend), one_row()
    with torch.no_grad():
        found = model(batch.ids, position_ids=batch.position_ids).logits[0]
    exact, baseline = exact_and_baseline("gemma4_text", batch.order)
    assert_as_accurate(found, exact.logits, baseline.logits, 2)


@pytest.mark.parametrize("keep", [1, 40, torch.tensor([3, 70])])
@pytest.mark.parametrize("name", KINDS)
def test_queries_of_dropped_logits(name, keep):
    """transformers runs the last tokens alone through the layers with shared keys."""
    model = fv.patch_model(new_model(name), "sdpa")
    layout, ids = fv.PackedLayout.from_lengths(LENGTHS), one_row().ids
    with torch.no_grad():
        whole = model(ids, packed_layout=layout).logits
        found = model(ids, packed_layout=layout, logits_to_keep=keep).logits
    expected = whole[:, -keep:] if isinstance(keep, int) else whole[:, keep]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["varlen", "fa2", "fa3", "fa4", "cudnn"])
def test_head_dim_512_given_to_a_kernel_of_256(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    call = AttentionCall(torch.device("cuda"), torch.bfloat16, 8, 1, 512)
    assert "got 512; use backend='flex'" in refusal(backend, call)
    assert all(refusal(name, call) is None for name in ("flex", "sdpa"))


def test_one_kernel_named_for_all_layers(monkeypatch):
    """The published models have a head_dim of 256 and 512; the sentence gives a mapping."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for name in ("why_missing", "why_lacking", "why_unsupported"):
        monkeypatch.setattr(get_backend("fa3"), name, lambda of: None)
    model = new_model("gemma4_text", head_dim=256)
    sentence = "fa3 cannot serve the full_attention layers: .*512.*backend={'full_attention': "
    with pytest.raises(NotImplementedError, match=sentence):
        fv.patch_model(model, "fa3")


@pytest.mark.usefixtures("timed_briefly")
def test_compare_asks_for_each_kind_of_layer():
    """The config has no one head_dim, and raises for it."""
    batch = one_row()
    inputs = {"input_ids": batch.ids, "position_ids": batch.position_ids}
    report = fv.compare(new_model("gemma4_text"), inputs, backends="sdpa")
    assert "right" in str(report)
