"""`deterministic` and `batch_invariant`: bit for bit, forward and backward, or a refusal.

Shape legend: T = tokens of the row, L = tokens of one document.
"""

from __future__ import annotations

import pytest
import torch

from flexvarlen import DocumentMask, PackedLayout, packed_attention, why_not
from flexvarlen.attention.backends.registry import get_backend
from tests.attention.accuracy import assert_same_bits
from tests.attention.deterministic import torch_is_deterministic
from tests.backends import FLASH, kernels, with_values
from tests.oracle import differentiate, random_qkv

WIDE = 700  # wider than the shorter rows: kernels take such a window for none
ROWS = {
    "alone": ((), 0, None),
    "behind_another": ((500,), 1, None),
    "longer_neighbour_and_bound": ((3, 1200), 1, 2048),
    "inside_many": ((7,) * 40, 20, None),
    "beside_empty_ones": ((0, 190, 0), 2, None),
    "before_a_longer_one": ((2048, 300), 0, None),
    "inside_very_many": ((50,) * 200, 100, 4096),
}
"""Its neighbours, its place among them, and the bound on lengths."""
CPU_TOKENS = {
    "alone": 150,
    "behind_another": 650,
    "inside_many": 430,
    "beside_empty_ones": 400,
}
"""Of the rows that are short enough for the CPU, where flex compiles for each number of tokens.

Arranged, the second and the last have as many.
"""
MASKS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 50},
    "wide_window": {"window": WIDE},
    "wide_two_sided_window": {"causal": False, "window": (WIDE, WIDE)},
}


def document_in(row, length, heads, head_dim, dtype, device, total=None):
    """q, k, v and grad of a row with the same document in it, its layout and its tokens.

    `total` tokens; default: as many as the documents have.
    """
    neighbours, place, bound = row
    lengths = [*neighbours[:place], length, *neighbours[place:]]
    total, start = sum(lengths) if total is None else total, sum(neighbours[:place])
    shape = {"dtype": dtype, "device": device}
    own = random_qkv(length, *heads, head_dim, seed=length, **shape)
    made = random_qkv(total, *heads, head_dim, seed=1000 + len(lengths), **shape)
    for x, mine in zip(made, own, strict=True):
        x[start : start + length] = mine
    if bound is not None:
        bound = max(bound, length)
    layout = PackedLayout.from_lengths(
        lengths, total_tokens=total, device=device, max_seqlen_bound=bound
    )
    return made, layout, slice(start, start + length)


def run(name, made, layout, grads=True, **options):
    *qkv, grad = made

    def ours(q, k, v):
        return packed_attention(q, k, v, layout, backend=name, **options)

    if not grads:
        return [ours(*qkv)]
    out, gradients = differentiate(ours, qkv, grad)
    return [out, *gradients]


def check_rows(name, rows, length, *shape, runs=1, totals=None, **options):
    """Output and gradients of a document of that length in each of the rows, by their names."""
    expected = None
    for which, row in rows.items():
        total = None if totals is None else totals[which]
        made, layout, tokens = document_in(row, length, *shape, total)
        for _ in range(runs):
            found = [x[tokens] for x in run(name, made, layout, **options)]
            expected = found if expected is None else expected
            for what, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=False):
                assert torch.equal(x, y), f"{what} of {length} tokens, {which}"


@pytest.mark.pairwise(
    kernel=kernels(*FLASH, cpu=False), mask=MASKS, sizes=[((32, 8), 128), ((6, 6), 64)]
)
def test_document_has_the_same_bits_in_any_batch(kernel, mask, sizes):
    (name, device, dtype), options = kernel, {"batch_invariant": True, **MASKS[mask]}
    with torch_is_deterministic(name == "varlen"):
        for length in (1, 77, 320, 1000):
            check_rows(name, ROWS, length, *sizes, dtype, device, runs=2, **options)


# On the CPU one size, and of flex, which compiles for each length there, two masks.
CPU_MASKS = {"sdpa": MASKS, "flex": ("causal", "wide_two_sided_window")}


@pytest.mark.parametrize(
    ("kernel", "mask", "head_dim"),
    [
        with_values(param, mask, head_dim)
        for param in kernels("sdpa", "flex")
        for on_cpu in [param.values[0][1] == "cpu"]
        for mask in (CPU_MASKS[param.values[0][0]] if on_cpu else MASKS)
        for head_dim in ((16,) if on_cpu else (64, 128))
    ],
)
def test_document_has_the_same_outputs_in_any_batch(kernel, mask, head_dim):
    """What promises no gradients on every device: `sdpa` has them on the CPU."""
    name, device, dtype = kernel
    options = {"batch_invariant": True, **MASKS[mask]}
    rows, lengths, heads = ROWS, (1, 77, 320, 1000, 1633), (32, 8)
    if device == "cpu":
        rows, lengths, heads = {x: ROWS[x] for x in CPU_TOKENS}, (1, 77, 150), (4, 2)
        options |= {"totals": CPU_TOKENS}
    grads = (name, device) == ("sdpa", "cpu")
    for length in lengths:
        shape = (heads, head_dim, dtype, device)
        check_rows(name, rows, length, *shape, grads=grads, **options)


@pytest.mark.pairwise(
    dtype=[torch.float32, torch.float64, torch.bfloat16],
    heads=[(1, 1), (3, 1), (4, 2)],
    mask=["causal", "window"],
)
def test_a_document_behind_any_number_of_tokens_of_an_odd_head_dim(mask, heads, dtype):
    """Without a copy, its bits would depend on its offset modulo a vector's width."""
    options = {"batch_invariant": True, **MASKS[mask]}
    rows = {f"behind {n} tokens": ((n,), 1, None) for n in (0, 1, 2, 3, 5, 8)}
    for head_dim in (1, 33, 65):
        for length in (13, 60):
            check_rows("sdpa", rows, length, heads, head_dim, dtype, "cpu", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flex_is_deterministic_whatever_rows_were_between(head_dim):
    """Of rows of other lengths inductor would make a kernel for any, and take that from then on."""
    torch._dynamo.reset()
    rows = [
        document_in(((77,), 0, None), length, (32, 8), head_dim, torch.bfloat16, "cuda")[:2]
        for length in (16_000, 500, 1633)
    ]
    first, *_, again = (
        run("flex", *row, deterministic=True) for row in (rows[0], *rows[1:], rows[0])
    )
    assert_same_bits(first, again)


@pytest.mark.gpu
@pytest.mark.parametrize("fixed", [True, False])
def test_flex_is_deterministic_in_a_graph_if_torch_is(fixed):
    """Inductor chooses a kernel of its backward by timing: other bits in another process."""
    made, layout, _ = document_in(ROWS["alone"], 320, (32, 8), 128, torch.bfloat16, "cuda")
    *qkv, grad = made

    def ours(q, k, v):
        return packed_attention(q, k, v, layout, backend="flex", deterministic=True)

    results = []
    for _ in range(2):
        torch._dynamo.reset()
        with torch_is_deterministic(fixed):
            compiled = torch.compile(ours, fullgraph=True)
            if not fixed:
                with pytest.raises(Exception, match="use_deterministic_algorithms"):
                    compiled(*qkv)
                return
            results.append(differentiate(compiled, qkv, grad))
    assert_same_bits(*results)


@pytest.mark.slow
def test_flex_without_the_promise_would_fail_the_test_above():
    """Documents inside a block are summed in other pieces: arranging them is not idle."""
    same, made_of = True, ((4, 2), 16, torch.float32, "cpu", 512)
    for length in (150, 300, 400):
        alone, alone_layout, own = document_in(ROWS["alone"], length, *made_of)
        made, layout, tokens = document_in(((57, 33), 1, None), length, *made_of)
        expected = run("flex", alone, alone_layout, grads=False)[0][own]
        same &= torch.equal(run("flex", made, layout, grads=False)[0][tokens], expected)
    assert not same


@pytest.mark.gpu
def test_promises_that_cannot_be_had_are_refused():
    gpu = {"device": "cuda", "dtype": torch.bfloat16}
    for promise in ("deterministic", "batch_invariant"):
        for name in ("varlen", "sdpa"):
            assert "deterministic" in why_not(name, **gpu, **{promise: True})
    assert "only in its outputs" in why_not("flex", **gpu, batch_invariant=True)
    assert why_not("flex", **gpu, batch_invariant=True, needs_grad=False) is None
    assert why_not("sdpa", **gpu, batch_invariant=True, needs_grad=False) is None
    assert why_not("varlen", **gpu, batch_invariant=True, needs_grad=False) is None
    assert why_not("varlen", **gpu, deterministic=True, needs_grad=False) is None
    for name in ("nested", "flex_fa4", "cudnn"):
        if why_not(name, **gpu, needs_grad=False) is None:
            promises = why_not(name, **gpu, needs_grad=False, batch_invariant=True)
            assert "batch invariance" in promises, name


@pytest.mark.gpu
def test_switch_that_is_turned_off_before_the_backward_is_noticed():
    """varlen is deterministic under torch's switch only."""
    q, k, v, grad = random_qkv(256, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    layout = PackedLayout.from_lengths([256], device="cuda")
    q.requires_grad_()
    with torch_is_deterministic(True):
        out = packed_attention(q, k, v, layout, backend="varlen", deterministic=True)
    with pytest.raises(RuntimeError, match="no longer holds; keep it on"):
        out.backward(grad)
    with pytest.raises(NotImplementedError, match="use_deterministic_algorithms"):
        packed_attention(q, k, v, layout, backend="varlen", deterministic=True)


def test_plan_made_without_the_promise_is_refused():
    """flex keeps the promise by its plan: another one would cancel it."""
    made, layout, _ = document_in(ROWS["alone"], 150, (4, 2), 16, torch.float32, "cpu")
    mask = DocumentMask.of(layout)
    for promised in (True, False):
        plan = get_backend("flex").plan(mask, batch_invariant=not promised)
        with pytest.raises(ValueError, match=f"got a plan with batch_invariant={not promised}"):
            run("flex", made, layout, grads=False, batch_invariant=promised, plan=plan)
