"""Bad masks and tensors raise one sentence that says what to do, before any kernel runs."""

from __future__ import annotations

import pytest
import torch

from flexvarlen import BACKENDS, PackedLayout, document_block_mask, packed_attention
from flexvarlen.mask.spec import MaskSpec
from tests.sentences import TOKENS, _no_kernel_may_run, refused, tensor  # noqa: F401


@pytest.mark.parametrize(
    ("window", "contract"),
    [
        (0, "at least 1, got 0"),
        (-1, "at least 1, got -1"),
        ((-2, 3), r"each at least -1, got \(-2, 3\)"),
        ((3, -2), r"each at least -1, got \(3, -2\)"),
        ((3,), r"or \(left, right\).*got \(3,\)"),
        ((1, 2, 3), r"or \(left, right\).*got \(1, 2, 3\)"),
        (True, "must be an integer or .*got True"),
        (4.0, r"got 4\.0"),
        ((1.5, 2), r"got \(1\.5, 2\)"),
    ],
)
def test_bad_window(window, contract):
    layout = PackedLayout.from_lengths([TOKENS])
    q = torch.zeros(TOKENS, 2, 8)
    remedy = "None|no limit"
    refused(ValueError, contract, remedy, lambda: document_block_mask(layout, window=window))
    refused(ValueError, contract, remedy, lambda: MaskSpec.of(window=window, causal=False))
    refused(ValueError, contract, remedy, lambda: packed_attention(q, q, q, layout, window=window))


@pytest.mark.parametrize("block_size", [0, (128, 0), -128])
def test_bad_block_size(block_size):
    layout = PackedLayout.from_lengths([TOKENS])
    refused(
        ValueError,
        "an integer of at least 1",
        "default is 128",
        lambda: document_block_mask(layout, block_size=block_size),
    )


@pytest.mark.parametrize(
    ("tensors", "contract", "remedy"),
    [
        pytest.param(
            {"q": tensor()[None]},
            r"q must have shape.*got \(1, 16, 4, 8\)",
            "batch dimension",
            id="batch",
        ),
        pytest.param(
            {"k": tensor()[:, 0]},
            r"k must have shape.*got \(16, 8\)",
            "batch dimension",
            id="no_heads",
        ),
        pytest.param(
            {"q": tensor(20)},
            "q must have.*total_tokens=16 rows, got 20",
            "padding",
            id="q_too_long",
        ),
        pytest.param(
            {"k": tensor(8)},
            "k must have.*total_tokens=16 rows, got 8",
            "total_tokens=",
            id="k_too_short",
        ),
        pytest.param(
            {"v": tensor(8)},
            "v must have.*total_tokens=16 rows, got 8",
            "total_tokens=",
            id="v_too_short",
        ),
        pytest.param(
            {"q": tensor(device="meta")},
            "q must be on.*cpu, got meta",
            r"layout\.to",
            id="q_device",
        ),
        pytest.param(
            {"v": tensor(device="meta")},
            "v must be on.*cpu, got meta",
            r"layout\.to",
            id="v_device",
        ),
        pytest.param(
            {"k": tensor(dtype=torch.float16)},
            "one dtype, got torch.float32 and torch.float16",
            "cast",
            id="dtype",
        ),
        pytest.param(
            {"k": tensor(heads=2)},
            r"got \(16, 2, 8\) and \(16, 4, 8\)",
            "head_dim",
            id="k_and_v_heads",
        ),
        pytest.param(
            {"k": tensor(dim=4), "v": tensor(dim=4)},
            r"kv_heads, 8\], got \(16, 4, 4\)",
            "must be q's",
            id="head_dim_of_k",
        ),
        pytest.param(
            {"k": tensor(heads=3), "v": tensor(heads=3)},
            "multiple of num_kv_heads, got 4 and 3",
            "heads were split",
            id="heads_not_divisible",
        ),
        pytest.param(
            {"k": tensor(heads=8), "v": tensor(heads=8)},
            "multiple of num_kv_heads, got 4 and 8",
            "heads were split",
            id="more_kv_heads",
        ),
        pytest.param(
            {"k": tensor(heads=0), "v": tensor(heads=0)},
            "multiple of num_kv_heads, got 4 and 0",
            "heads were split",
            id="no_kv_heads",
        ),
        pytest.param(
            {"sinks": torch.zeros(3)},
            r"sinks must have shape \[4\].*got \(3,\)",
            "one logit per head",
            id="sinks_shape",
        ),
        pytest.param(
            {"sinks": torch.zeros(4, device="meta")},
            "on cpu, got .* on meta",
            "one logit per head",
            id="sinks_device",
        ),
    ],
)
def test_tensors_that_do_not_fit(tensors, contract, remedy):
    given = {"q": tensor(), "k": tensor(), "v": tensor()} | tensors
    sinks = given.pop("sinks", None)
    layout = PackedLayout.from_lengths([10, 6])
    refused(
        ValueError,
        contract,
        remedy,
        lambda: packed_attention(*given.values(), layout, sinks=sinks),
    )


@pytest.mark.parametrize(
    ("scale", "backend"),
    [
        *((float(x), "sdpa") for x in ("inf", "nan", "-0.0", "-1.0", "-inf")),
        *((0.0, name) for name in ("auto", *BACKENDS)),
    ],
)
def test_scale_that_is_not_above_zero_and_finite(scale, backend):
    """Without a check, sdpa would give NaN at 0 and below, of documents and of trees."""
    plain = PackedLayout.from_lengths([TOKENS])
    for layout in (plain, PackedLayout.from_tree([10, 4, 2], [-1, 0, 0])):
        for options in ({}, {"softcap": 2.0}):
            call = {"scale": scale, "backend": backend, **options}
            refused(
                ValueError,
                f"scale must be above 0 and finite, got {scale}",
                "None",
                lambda layout=layout, call=call: packed_attention(*[tensor()] * 3, layout, **call),
            )


@pytest.mark.parametrize("softcap", [0.0, -3.0, float("inf"), float("nan")])
def test_softcap_that_is_no_limit(softcap):
    """FlashAttention takes 0 for none, the others divide by it."""
    layout = PackedLayout.from_lengths([TOKENS])
    refused(
        ValueError,
        rf"softcap must be above 0 and finite, got {softcap}",
        "None",
        lambda: packed_attention(
            tensor(), tensor(), tensor(), layout, softcap=softcap, backend="reference"
        ),
    )


@pytest.mark.gpu
def test_layout_on_another_device_than_the_tokens():
    x = tensor(device="cuda")
    refused(
        ValueError,
        "q must be on the layout's device cpu, got cuda:0",
        r"call layout\.to",
        lambda: packed_attention(x, x, x, PackedLayout.from_lengths([TOKENS])),
    )
