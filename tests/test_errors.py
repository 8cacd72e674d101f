"""Bad input raises one sentence that says what to do, before any kernel runs."""

from __future__ import annotations

import re

import pytest
import torch

from flexvarlen import BACKENDS, PackedLayout, document_block_mask, packed_attention, why_not
from flexvarlen.backends import get_backend
from flexvarlen.bounds import MaskSpec

TOKENS = 16


@pytest.fixture(autouse=True)
def _no_kernel_may_run(monkeypatch):
    def attend(*_args, **_options):
        pytest.fail("a kernel was called")

    for name in BACKENDS:
        monkeypatch.setattr(type(get_backend(name)), "attend", attend)


def refused(error, contract, remedy, call):
    """`call` raises one sentence: the contract and what was given, a semicolon, and what to do."""
    with pytest.raises(error) as raised:
        call()
    sentence = str(raised.value)
    assert re.search(contract, sentence), sentence
    assert re.search(rf";[^;]*{remedy}", sentence), sentence
    assert sentence.endswith("."), sentence
    assert "\n" not in sentence
    return sentence


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def cu_seqlens(*values, **options):
    return lambda: PackedLayout.from_cu_seqlens(int32(*values), **options)


def lengths(*values, **options):
    return lambda: PackedLayout.from_lengths(values, **options)


@pytest.mark.parametrize(
    ("make", "contract", "remedy"),
    [
        pytest.param(cu_seqlens(1, 5), r"must start at 0, got 1", "put a 0", id="not_from_zero"),
        pytest.param(cu_seqlens(-1, 5), r"must start at 0, got -1", "put a 0", id="below_zero"),
        pytest.param(
            cu_seqlens(0, 5, 3, 8),
            r"never decrease, got 5 then 3 at index 2",
            "in order",
            id="decreasing",
        ),
        pytest.param(
            cu_seqlens(0, 5, 20, total_tokens=16),
            r"end at or before total_tokens=16, got 20",
            "shorten the documents",
            id="past_the_end",
        ),
        pytest.param(
            lengths(10, 7, total_tokens=16),
            "total_tokens=16, got 17",
            "shorten",
            id="lengths_past_the_end",
        ),
        pytest.param(
            lambda: PackedLayout.from_cu_seqlens(torch.tensor([0, 5])),
            r"torch.int32 tensor, got torch.int64",
            r"call \.to\(torch\.int32\)",
            id="int64",
        ),
        pytest.param(
            lambda: PackedLayout.from_cu_seqlens(torch.tensor([0.0, 5.0])),
            r"torch.int32 tensor, got torch.float32",
            r"call \.to\(torch\.int32\)",
            id="float",
        ),
        pytest.param(
            lambda: PackedLayout.from_cu_seqlens([0, 5]), "got list", r"torch\.int32", id="list"
        ),
        pytest.param(
            lambda: PackedLayout.from_cu_seqlens(int32(0, 5)[None]),
            r"shape \[num_docs \+ 1\].*got \(1, 2\)",
            "flatten it",
            id="two_dimensions",
        ),
        pytest.param(
            cu_seqlens(0),
            r"at least one document, got \(1,\)",
            "start it with 0",
            id="one_boundary",
        ),
        pytest.param(
            cu_seqlens(), r"at least one document, got \(0,\)", "start it with 0", id="no_boundary"
        ),
        pytest.param(
            lengths(4, 9, max_seqlen_bound=8),
            r"at least the longest document, 9 tokens, got 8",
            "raise the bound",
            id="bound_too_small",
        ),
        pytest.param(
            cu_seqlens(0, 4, 13, max_seqlen_bound=8),
            "9 tokens, got 8",
            "raise the bound",
            id="bound_of_cu_seqlens",
        ),
        pytest.param(
            lengths(1, 1, 1, capacity=2),
            "at least the 3 documents given, got 2",
            "raise capacity",
            id="capacity",
        ),
        pytest.param(
            lengths(4, -1), "at least 0, got -1 at index 1", "drop or mend", id="negative_length"
        ),
        pytest.param(
            lengths(4, True),
            "integers, got True at index 1",
            "number of tokens",
            id="boolean_length",
        ),
        pytest.param(
            lengths(4, 2.0), r"integers, got 2\.0 at index 1", "number of tokens", id="float_length"
        ),
        pytest.param(
            lambda: PackedLayout.from_lengths(torch.tensor([4.0, 2.0])),
            r"integers, got 4\.0 at index 0",
            "number of tokens",
            id="float_lengths_tensor",
        ),
        pytest.param(
            lambda: PackedLayout.from_lengths(torch.tensor([True, False])),
            "integers, got True at index 0",
            "number of tokens",
            id="mask_for_lengths",
        ),
        pytest.param(
            lengths(2**30, 2**30, 2**30), "fits in int32", "split the row", id="beyond_int32"
        ),
        pytest.param(
            lambda: PackedLayout.from_position_ids(torch.zeros(2, 4)),
            r"integer tensor \[B, S\], got torch.float32",
            "text row",
            id="float_positions",
        ),
        pytest.param(
            lambda: PackedLayout.from_position_ids(torch.ones(2, 4, dtype=torch.bool)),
            r"integer tensor \[B, S\], got torch.bool",
            "text row",
            id="mask_for_positions",
        ),
        pytest.param(
            lambda: PackedLayout.from_position_ids(torch.zeros(3, 2, 4, dtype=torch.int64)),
            r"\[B, S\], got torch.int64 \(3, 2, 4\)",
            "pass the text row",
            id="multimodal_positions",
        ),
        pytest.param(
            lambda: PackedLayout.from_position_ids(
                torch.zeros(1, 4, dtype=torch.int64), capacity=3
            ),
            "at least the 4 documents given, got 3",
            "raise capacity",
            id="capacity_of_positions",
        ),
    ],
)
def test_bad_boundaries(make, contract, remedy):
    refused(ValueError, contract, remedy, make)


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
        "at least 1 token",
        "default is 128",
        lambda: document_block_mask(layout, block_size=block_size),
    )


def tensor(tokens=TOKENS, heads=4, dim=8, dtype=torch.float32, device="cpu"):
    return torch.zeros(tokens, heads, dim, dtype=dtype, device=device)


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
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
            "one logit a head",
            id="sinks_shape",
        ),
        pytest.param(
            {"sinks": torch.zeros(4, device="meta")},
            "on cpu, got .* on meta",
            "one logit a head",
            id="sinks_device",
        ),
    ],
)
def test_tensors_that_do_not_fit(tensors, contract, remedy, backend):
    given = {"q": tensor(), "k": tensor(), "v": tensor()} | tensors
    sinks = given.pop("sinks", None)
    layout = PackedLayout.from_lengths([10, 6])
    refused(
        ValueError,
        contract,
        remedy,
        lambda: packed_attention(*given.values(), layout, sinks=sinks, backend=backend),
    )


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_scale_that_is_no_number(scale):
    layout = PackedLayout.from_lengths([TOKENS])
    refused(
        ValueError,
        f"scale must be finite, got {scale}",
        "None",
        lambda: packed_attention(tensor(), tensor(), tensor(), layout, scale=scale),
    )


@pytest.mark.parametrize("checks", ["host", "device"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"total_tokens": 8.0},
        {"total_tokens": 2**31},
        {"capacity": 2.5},
        {"capacity": True},
        {"max_seqlen_bound": 4.0},
        {"max_seqlen_bound": -1},
    ],
    ids=str,
)
def test_sizes_that_are_no_sizes(sizes, checks):
    name = next(iter(sizes))
    device = "cpu" if checks == "host" else "meta"
    boundaries = int32(0, 4).to(device)
    refused(
        ValueError,
        f"{name} must be an integer that fits in int32, at least 0, got",
        "count",
        lambda: PackedLayout.from_cu_seqlens(
            boundaries, checks=checks, **({"total_tokens": 4} | sizes)
        ),
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


def test_unknown_backend():
    layout = PackedLayout.from_lengths([TOKENS])
    refused(
        ValueError,
        "one of reference, sdpa, flex, varlen, fa2 or auto, got 'flash'",
        "choose one",
        lambda: packed_attention(tensor(), tensor(), tensor(), layout, backend="flash"),
    )


@pytest.mark.parametrize(
    ("backend", "options", "contract", "remedy"),
    [
        ("flex", {"q": tensor().requires_grad_()}, "no backward on the CPU", "backend='sdpa'"),
        ("flex", {"return_lse": True}, "no LSE on the CPU", "backend='reference'"),
        ("flex", {"sinks": torch.zeros(4)}, "no LSE on the CPU", "backend='reference'"),
        ("flex", {"batch_invariant": True}, "batch invariant only where", "backend='sdpa'"),
        ("flex", {"dtype": torch.float64}, "got torch.float64", "backend='sdpa'"),
        ("varlen", {}, "needs a CUDA GPU, got cpu", "backend='sdpa'"),
        ("sdpa", {"softcap": 3.0}, "no softcap, no sinks and no LSE", "backend='flex'"),
        ("sdpa", {"sinks": torch.zeros(4)}, "no softcap, no sinks and no LSE", "backend='flex'"),
        ("sdpa", {"return_lse": True}, "no softcap, no sinks and no LSE", "backend='flex'"),
        ("sdpa", {"dtype": torch.int32}, "float dtype, got torch.int32", "convert"),
        ("reference", {"dtype": torch.int32}, "float dtype, got torch.int32", "convert"),
        ("reference", {"batch_invariant": True}, "not batch invariant", "backend='sdpa'"),
    ],
)
def test_backend_that_cannot_says_why_and_never_falls_back(backend, options, contract, remedy):
    options = dict(options)
    base = tensor(dtype=options.pop("dtype", torch.float32))
    q = options.pop("q", base)
    layout = PackedLayout.from_lengths([TOKENS])
    refused(
        NotImplementedError,
        rf"^{backend}.*{contract}",
        remedy,
        lambda: packed_attention(q, base, base, layout, backend=backend, **options),
    )


def test_auto_gives_the_reason_of_each_backend_that_it_tried():
    layout = PackedLayout.from_lengths([TOKENS])
    refused(
        NotImplementedError,
        "no backend can serve this call. sdpa: sdpa has no softcap",
        "backend='flex'",
        lambda: packed_attention(tensor(), tensor(), tensor(), layout, softcap=2.0),
    )


def test_missing_package_says_how_to_install_it(monkeypatch):
    from flexvarlen.backends import fa2

    monkeypatch.setattr(fa2, "find_spec", lambda name: None)
    reason = why_not("fa2", device="cuda", dtype=torch.bfloat16)
    assert "flash-attn" in reason
    assert re.search(r"; install it with: pip install '?flexvarlen\[fa2\]", reason)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "head_dim", "dtype", "contract", "remedy"),
    [
        ("varlen", 264, torch.bfloat16, "at most 256, got 264", "backend='flex'"),
        ("varlen", 60, torch.bfloat16, "multiple of 8.*got 60", "backend='flex'"),
        ("varlen", 64, torch.float32, "bfloat16 or float16, got torch.float32", "convert"),
        ("flex", 8, torch.bfloat16, "at least 16 on a GPU, got 8", "use 'sdpa'"),
    ],
)
def test_head_dim_or_dtype_that_a_gpu_kernel_lacks(backend, head_dim, dtype, contract, remedy):
    x = tensor(dim=head_dim, dtype=dtype, device="cuda")
    layout = PackedLayout.from_lengths([TOKENS], device="cuda")
    refused(
        NotImplementedError,
        contract,
        remedy,
        lambda: packed_attention(x, x, x, layout, backend=backend),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("values", "contract"),
    [
        ((1, 16), "must start at 0, got 1"),
        ((0, 9, 3, 16), "never decrease"),
        ((0, 9, 40), "total_tokens=16, got 40"),
    ],
)
def test_boundaries_that_only_the_gpu_knows_are_read_back_and_checked(values, contract):
    refused(
        ValueError,
        contract,
        "",
        lambda: PackedLayout.from_cu_seqlens(int32(*values).cuda(), total_tokens=TOKENS),
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
