"""Masks in which tokens of one run, such as those of an image, see one another both ways."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flexvarlen as fv
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.block_mask import block_mask_of
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import MaskSpec
from flexvarlen.mask.vectors import runs_of
from tests.oracle import assert_as_accurate

LENGTHS = (40, 1, 7, 130, 20)
MARKED = ((3, 9), (9, 10), (30, 44), (47, 49), (100, 170), (178, 198))
"""Runs that touch, one over the ends of three documents, one longer than a window, a whole one."""
SPECS = [MaskSpec.of(), MaskSpec.of(window=16), MaskSpec.of(chunk=24)]


def marked(tokens):
    flags = torch.zeros(tokens, dtype=torch.bool)
    for start, end in MARKED:
        flags[start:end] = True
    return flags


def mask_of(spec, **layout):
    layout = fv.PackedLayout.from_lengths(LENGTHS, total_tokens=205, **layout)
    runs = runs_of(marked(205))
    return DocumentMask(layout, spec.with_runs(), runs=runs)


def expected(spec):
    """Token by token, of each document alone."""
    seen = torch.zeros(205, 205, dtype=torch.bool)
    flags, at = marked(205).tolist(), 0
    for length in LENGTHS:
        for q in range(length):
            for k in range(length):
                between = flags[at + min(q, k) : at + max(q, k) + 1]
                in_window = spec.left < 0 or k >= q - spec.left
                in_chunk = not spec.chunk or q // spec.chunk == k // spec.chunk
                seen[at + q, at + k] = (k <= q or all(between)) and in_window and in_chunk
        at += length
    return seen


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_what_a_run_sees(spec):
    """Its own document, both ways inside the run, no more than the window on the left."""
    assert torch.equal(mask_of(spec).dense(), expected(spec))


@pytest.mark.parametrize("block_size", [16, (32, 16), 128])
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_block_tables(spec, block_size):
    """No block is missing, and none is full that is not."""
    seen = expected(spec)
    found = block_mask_of(mask_of(spec), block_size=block_size)
    made = create_block_mask(
        lambda b, h, q, k: seen[q, k], None, None, 205, 205, device="cpu", BLOCK_SIZE=block_size
    )
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(made, name))
    assert torch.equal(found.to_dense(), made.to_dense())
    narrow = mask_of(spec).tables(
        (block_size, block_size) if isinstance(block_size, int) else block_size, compact=True
    )
    assert torch.equal(narrow.kv_num_blocks, made.kv_num_blocks)


def attend(backend, spec, q, k, v, traced=False):
    mask = mask_of(spec)
    call = AttentionCall(q.device, q.dtype, 2, 1, 16, mask.spec, 0.25, batch_invariant=traced)
    kernel = get_backend(backend)
    plan = kernel.plan(mask)
    if backend == "flex":  # no gradients on a CPU
        return kernel.attend(q, k, v, None, call, mask, plan)[0], ()
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, _ = kernel.attend(q, k, v, None, call, mask, plan)
    return out, torch.autograd.grad(out.square().sum(), (q, k, v))


@pytest.mark.parametrize("spec", SPECS[:2], ids=repr)
@pytest.mark.parametrize(
    ("backend", "traced"),
    [
        ("reference", False),
        ("sdpa", False),
        ("sdpa", True),
        pytest.param("flex", False, marks=pytest.mark.slow),  # its block masks are tested above
    ],
)
def test_attention_of_runs(backend, traced, spec):
    """Outputs and gradients; `sdpa` also by its operator for compiled graphs."""
    torch.manual_seed(0)
    q, k, v = torch.randn(205, 2, 16), torch.randn(205, 1, 16), torch.randn(205, 1, 16)

    def dense(q, k, v):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        seen = expected(spec)
        scores = torch.einsum("qhd,kgd->hqk", q, k) * 0.25
        weights = scores.masked_fill(~seen, -1e9).softmax(-1) * seen
        out = torch.einsum("hqk,kgd->qhd", weights, v)
        return out, torch.autograd.grad(out.square().sum(), (q, k, v))

    out, gradients = attend(backend, spec, q, k, v, traced)
    exact, exact_gradients = dense(*(x.double() for x in (q, k, v)))
    plain, plain_gradients = dense(q, k, v)
    assert_as_accurate(out.detach(), exact.detach(), plain.detach(), 2)
    for found, right, baseline in zip(gradients, exact_gradients, plain_gradients, strict=False):
        assert_as_accurate(found, right, baseline, 3)


@pytest.mark.parametrize("backend", ["varlen", "fa2", "fa3", "fa4", "nested"])
def test_kernel_without_runs(backend, monkeypatch):
    monkeypatch.setattr(type(get_backend(backend)), "why_missing", lambda *of: None, raising=False)
    call = AttentionCall(torch.device("cuda"), torch.bfloat16, 2, 1, 64, MaskSpec().with_runs())
    assert "runs" in get_backend(backend).why_not(call)


def test_runs_in_trees_and_cross_attention():
    for spec in (MaskSpec().with_trees(), MaskSpec.of(cross=True), MaskSpec.of(prefix=True)):
        with pytest.raises(NotImplementedError):
            spec.with_runs()
    with pytest.raises(ValueError, match="runs=True cannot have right"):
        MaskSpec.of(causal=False).with_runs()
    with pytest.raises(ValueError, match="does not match"):
        DocumentMask(fv.PackedLayout.from_lengths([3]), MaskSpec().with_runs())


def test_runs_that_a_caller_names():
    layout = fv.PackedLayout.from_lengths([100, 105])
    found = DocumentMask.of(layout, window=40, runs=marked(205))
    expected = DocumentMask(layout, MaskSpec.of(window=40).with_runs(), runs=runs_of(marked(205)))
    assert torch.equal(found.to_dense(), expected.to_dense())
    with pytest.raises(ValueError, match="runs must be a bool tensor"):
        DocumentMask.of(layout, runs=marked(205).int())
    with pytest.raises(NotImplementedError, match="runs"):
        DocumentMask.of(layout, runs=marked(205), prefix=3)
    with pytest.raises(ValueError, match="runs must be given with causal=True"):
        DocumentMask.of(layout, runs=marked(205), causal=False)
