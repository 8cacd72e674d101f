"""Bad masks and tensors raise one sentence that says what to do, before any kernel runs."""

from __future__ import annotations

import math

import pytest
import torch

from flexvarlen import BACKENDS, PackedLayout, document_block_mask
from flexvarlen.mask.spec import MaskSpec
from tests.sentences import attend, failed_refusals, no_kernel_runs, tensor  # noqa: F401


def keys(**changes):
    return {name: tensor(**changes) for name in "kv"}


def test_tensors_that_do_not_fit_reach_a_kernel():
    short = "must have the layout's total_tokens=16 rows, got 8"
    heads = "num_heads must be a multiple of num_kv_heads, got 4 and "
    sinks = "sinks must be floating point [4] on cpu, got"
    cases = [
        ("q must have shape [tokens, heads, head_dim], got (1, 16, 4, 8)", {"q": tensor()[None]}),
        ("k must have shape [tokens, heads, head_dim], got (16, 8)", {"k": tensor()[:, 0]}),
        ("q must have the layout's total_tokens=16 rows, got 20", {"q": tensor(20)}),
        (f"k {short}", {"k": tensor(8)}),
        (f"v {short}", {"v": tensor(8)}),
        ("q must be on the layout's device cpu, got meta", {"q": tensor(device="meta")}),
        ("v must be on the layout's device cpu, got meta", {"v": tensor(device="meta")}),
        (
            "q, k and v must have one dtype, got torch.float32 and torch.float16 for k",
            {"k": tensor(dtype=torch.float16)},
        ),
        (
            "k and v must have shape [tokens, kv_heads, 8], got (16, 2, 8) and (16, 4, 8)",
            {"k": tensor(heads=2)},
        ),
        ("k and v must have shape [tokens, kv_heads, 8], got (16, 4, 4)", keys(dim=4)),
        (f"{heads}3", keys(heads=3)),
        (f"{heads}8", keys(heads=8)),
        (f"{heads}0", keys(heads=0)),
        (f"{sinks} torch.float32 (3,)", {"sinks": torch.zeros(3)}),
        (f"{sinks} torch.int64 (4,)", {"sinks": torch.zeros(4, dtype=torch.int64)}),
        (f"{sinks} torch.float32 (4,) on meta", {"sinks": torch.zeros(4, device="meta")}),
    ]
    assert failed_refusals(cases, attend) == []


def test_numbers_that_would_give_nan():
    """Without a check, sdpa gives it at a scale of 0 and below, of documents and of trees.

    FlashAttention takes a softcap of 0 for none, the others divide by it.
    """
    tree = PackedLayout.from_tree([10, 4, 2], [-1, 0, 0])
    cases = [
        (f"{name} must be above 0 and finite, got {value}", {name: value, **others})
        for name in ("scale", "softcap")
        for value in (0.0, -0.0, -1.0, math.inf, -math.inf, math.nan)
        for others in ({}, {"layout": tree}, *({"backend": name} for name in BACKENDS))
    ]
    assert failed_refusals(cases, attend) == []


def test_windows_that_are_none_mask_something():
    pair = "window must be an integer or (left, right), each at least -1, got "
    cases = [
        *((f"window must be at least 1, got {window}", window) for window in (0, -1)),
        *((f"{pair}{window}", window) for window in ((-2, 3), (3, -2), (3,), (1, 2, 3), (1.5, 2))),
        *((f"{pair}{window}", window) for window in (True, 4.0)),
    ]
    layout = PackedLayout.from_lengths([16])
    for call in (
        lambda window: attend({"window": window}),
        lambda window: document_block_mask(layout, window=window),
        lambda window: MaskSpec.of(window=window, causal=False),
    ):
        assert failed_refusals(cases, call) == []


@pytest.mark.gpu
def test_layout_on_another_device_than_the_tokens():
    words = "q must be on the layout's device cpu, got cuda:0; call layout.to()"
    on_gpu = {name: tensor(device="cuda") for name in "qkv"}
    assert failed_refusals([(words, on_gpu)], attend) == []
