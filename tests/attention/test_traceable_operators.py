"""torch's own checks of the operators that stand for kernels in compiled graphs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings

from flexvarlen import DocumentMask, PackedLayout
from flexvarlen.attention.backends.cu_seqlens.kernel import KernelSizes
from flexvarlen.attention.backends.cu_seqlens.levels import Levels
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.mask.spec import MaskSpec
from tests.attention.backends.test_backend_accuracy import DOCUMENTS, TOKENS
from tests.attention.deterministic import torch_is_deterministic
from tests.backends import DEVICES, FLASH, kernels, with_values
from tests.mask_cases import KINDS, cases
from tests.oracle import random_qkv
from tests.rows import layout_of
from tests.trees import EXAMPLES

OPS = torch.ops.flexvarlen
WINDOWS = [(-1, 0), (-1, -1), (20, 0), (30, 5)]


@pytest.mark.parametrize(
    ("documents", "window"),
    [
        ("boundary_off_block", (-1, 0)),
        ("padding_inside", (-1, -1)),
        ("empty_document", (20, 0)),
        ("padding_inside", (30, 5)),
    ],
)
def test_sdpa_operators(documents, window):
    layout = layout_of(DOCUMENTS[documents])
    q, k, v, grad = random_qkv(TOKENS, 6, 2, 16)
    mask = DocumentMask.of(layout, causal=False, window=window)
    settings = (get_backend("sdpa").plan(mask), mask.spec.as_ints(), 0.25)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(OPS.sdpa_forward.default, (*leaves, *settings))
    # No gradient of the gradient: the backward has no autograd formula, and says so.
    torch.library.opcheck(OPS.sdpa_backward.default, (grad, q, k, v, *settings))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_mask_operators(kind, device):
    @settings(max_examples=1 if device == "cpu" else 2, phases=[Phase.generate])
    @given(cases(kind))
    def check(case):
        arguments = case.mask(device).inputs
        torch.library.opcheck(OPS.query_bounds.default, arguments)
        sizes = ([128, 64], [40, 80])
        torch.library.opcheck(OPS.build_tables.default, (*arguments, *sizes))

    check()


PLAIN = ("plain", "cpu", torch.float32)  # the fixture `backend`


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("kernel", "window", "with_sinks"),
    [
        (PLAIN, (-1, 0), False),
        (PLAIN, (30, 5), True),
        *(
            with_values(param, window, with_sinks)
            for param in kernels(*FLASH, cpu=False)
            for window in WINDOWS
            for with_sinks in (False, True)
        ),
    ],
)
def test_cu_seqlens_operators(kernel, window, with_sinks):
    name, device, dtype = kernel
    forward, backward = OPS.cu_seqlens_forward.default, OPS.cu_seqlens_backward.default
    layout = PackedLayout.from_lengths([50, 77, 0, 100], total_tokens=TOKENS, device=device)
    q, k, v, grad = random_qkv(TOKENS, 6, 2, 64, dtype=dtype, device=device)
    sinks = torch.randn(6, device=device) if with_sinks else None
    bound = layout.max_seqlen_bound
    sizes = KernelSizes(layout.num_docs, layout.max_seqlen, layout.max_seqlen, bound, bound, 1)
    boundaries = (layout.cu_seqlens, layout.cu_seqlens, *sizes)
    settings = (*boundaries, MaskSpec.of(window=window).as_ints(), 0.125, 0.0, True, False, True)
    # The backward is asked to be deterministic, and torch's own made so: opcheck compares runs.
    with torch_is_deterministic():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        trained = sinks.clone().requires_grad_() if with_sinks and name == "plain" else sinks
        torch.library.opcheck(forward, (name, *leaves, trained, *settings))
        out, lse = forward(name, q, k, v, sinks, *settings)
        torch.library.opcheck(backward, (name, grad, q, k, v, sinks, out, lse, *settings))


@pytest.mark.usefixtures("backend")
def test_cu_seqlens_operator_of_trees():
    tree = EXAMPLES["levels"]
    layout = tree.layout()
    qkv = [x.requires_grad_() for x in random_qkv(tree.total_tokens, 6, 2, 16)[:3]]
    sizes = KernelSizes(len(tree.lengths), *[layout.max_seqlen_bound] * 4, 0)
    settings = (*sizes, MaskSpec().with_trees().as_ints(), 0.25, 0.0, False, False, True)
    torch.library.opcheck(
        OPS.cu_seqlens_forward.default,
        ("plain", *qkv, None, *Levels.of(layout.segments), *settings),
    )


@pytest.mark.parametrize("kernel", kernels("nested", cpu=False))
def test_nested_operators(kernel):
    _, device, dtype = kernel
    layout = PackedLayout.from_lengths([50, 77, 0, 100], total_tokens=TOKENS, device=device)
    q, k, v, grad = random_qkv(TOKENS, 6, 2, 64, dtype=dtype, device=device)
    settings = (layout.cu_seqlens.long(), layout.max_seqlen_bound, True, 0.125)
    # Only what is written: the operator leaves the rows behind the documents to its caller.
    out = OPS.nested_forward(q, k, v, *settings)
    assert out.shape == q.shape
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(OPS.nested_forward.default, (*leaves, *settings), test_utils=utils)
    torch.library.opcheck(OPS.nested_backward.default, (grad, q, k, v, *settings), test_utils=utils)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [False, True])
def test_operators_that_rearrange_boundaries(device, padded):
    layout = layout_of(DOCUMENTS["padding_inside" if padded else "padded_tail"], device=device)
    cu_seqlens = layout.cu_seqlens
    torch.library.opcheck(OPS.chunk_boundaries.default, (cu_seqlens, 20, TOKENS))
    torch.library.opcheck(OPS.align.default, (cu_seqlens, layout.padding, TOKENS, 128))
