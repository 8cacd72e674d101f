"""What surrounds every kernel over cu_seqlens, with a plain kernel in its place that runs anywhere.

Shape legend: T = tokens of the row, H = num_heads, D = head_dim, L = tokens of one document.
"""

# ruff: noqa: F811
# (fixtures are arguments by the names that they are imported by)

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from flexvarlen import DocumentMask, PackedLayout
from flexvarlen.attention.backends.cu_seqlens.kernel import KERNELS
from flexvarlen.layout import launch_sizes as launch
from flexvarlen.layout.launch_sizes import SHORT_ROW
from flexvarlen.mask.chunks import chunk_boundaries
from flexvarlen.mask.spec import MaskSpec
from tests import oracle
from tests.attention.backends.plain_kernel import backend, call_of, given  # noqa: F401
from tests.attention.test_mask_kinds import other_lengths
from tests.mask_cases import slots_of
from tests.oracle import Documents, assert_as_accurate, differentiate, random_qkv
from tests.rows import layout_of

TOKENS = 256
DOCUMENTS = {
    "no_padding": Documents((50, 77, 129), TOKENS),
    "padded_tail": Documents((130, 61), TOKENS),
    "padding_inside": Documents((9, 60, 30, 100, 1, 20), TOKENS, frozenset({0, 2, 4})),
    "nothing_but_padding": Documents((0,), TOKENS),
    "empty_document": Documents((0, 100, 0, 0, 156, 0), TOKENS),
}


@pytest.fixture(autouse=True, params=[SHORT_ROW, 0], ids=["short_rows", "long_rows"])
def _launch(request, monkeypatch):
    """Rows of the tests are launched for their bounds, or for their own documents."""
    monkeypatch.setattr(launch, "SHORT_ROW", request.param)


def attend(backend, layout, *, sinks=None, return_lse=False, layout_k=None, **kind):
    mask = DocumentMask.of(layout, layout_k=layout_k, **kind)

    def ours(q, k, v, *s):
        sinks_H = s[0] if s else sinks
        call = call_of(q, k, mask, sinks=sinks_H is not None, return_lse=return_lse)
        out, lse = backend.attend(q, k, v, sinks_H, call, mask, backend.plan(mask))
        return out, lse

    return ours


MASKS = {
    "causal": {},
    "window": {"window": 20},
    "chunk": {"chunk": 16},
    "chunk_of_no_causal": {"chunk": 16, "causal": False},
    "chunk_as_long_as_the_row": {"chunk": TOKENS},
}


@pytest.mark.pairwise(
    compiled=[False, True], mask=MASKS, documents=DOCUMENTS, with_sinks=[False, True]
)
def test_kernel_gets_the_right_boundaries_and_sinks(backend, mask, documents, compiled, with_sinks):
    documents, kind = DOCUMENTS[documents], MASKS[mask]
    *inputs, grad = random_qkv(TOKENS, 6, 2, 16)
    if with_sinks:
        inputs.append(torch.tensor([-3.0, 0.0, 1.0, 2.0, 4.0, 8.0]))
    run = attend(backend, layout_of(documents), **kind)

    def ours(*x):
        return run(*x)[0]

    def plain(q, k, v, s=None):
        return oracle.attend(q, k, v, documents, sinks=s, scale=0.25, **kind)[0]

    if compiled:
        torch._dynamo.reset()
        ours = torch.compile(ours, fullgraph=True, backend="aot_eager")
    out, grads = differentiate(ours, inputs, grad)
    exact, exact_grads = differentiate(plain, [x.double() for x in inputs], grad.double())
    baseline, baseline_grads = differentiate(plain, inputs, grad)
    assert_as_accurate(out, exact, baseline, 2)
    for which, mine, good, coarse in zip("qkvs", grads, exact_grads, baseline_grads, strict=False):
        assert_as_accurate(mine, good, coarse, 3, f"gradient of {which}")
    assert (out[documents.padded()] == 0).all()
    for x in grads[:3]:
        assert (x[documents.padded()] == 0).all()


@pytest.mark.parametrize("row", ["no_padding", "padded_tail", "padding_inside"])
def test_keys_of_other_documents(backend, row):
    """Documents without keys, queries that see none, and padding on either side."""
    documents = DOCUMENTS[row]
    keys = other_lengths(documents)
    q, _, _, grad = random_qkv(TOKENS, 6, 2, 16)
    _, k, v, _ = random_qkv(keys.total_tokens, 6, 2, 16, seed=1)
    sinks = torch.randn(6)
    run = attend(backend, slots_of(documents, "cpu"), layout_k=slots_of(keys, "cpu"))

    def plain(q, k, v, s):
        return oracle.attend(q, k, v, documents, keys, sinks=s, scale=0.25)[0]

    out, grads = differentiate(lambda *x: run(*x)[0], [q, k, v, sinks], grad)
    inputs = [x.double() for x in (q, k, v, sinks)]
    exact, exact_grads = differentiate(plain, inputs, grad.double())
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    for mine, good in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(mine.double(), good, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_lse_is_without_sinks_and_minus_infinity_at_padding(backend, documents):
    documents = DOCUMENTS[documents]
    q, k, v, _ = random_qkv(TOKENS, 6, 2, 16)
    run = attend(backend, layout_of(documents), return_lse=True, sinks=torch.randn(6))
    _, lse = run(q, k, v)
    _, exact = oracle.attend(q.double(), k.double(), v.double(), documents, scale=0.25)
    torch.testing.assert_close(lse.double(), exact, atol=1e-5, rtol=1e-5)


def test_operators_pass_opcheck(backend):
    layout = layout_of(DOCUMENTS["padded_tail"])
    q, k, v, grad = random_qkv(TOKENS, 6, 2, 16)
    sinks = torch.randn(6)
    sizes = (layout.num_docs, TOKENS, TOKENS, TOKENS, TOKENS)
    boundaries = (layout.cu_seqlens, layout.cu_seqlens, *sizes)
    settings = (*boundaries, 1, MaskSpec().as_ints(), 0.25, 0.0, False, False, True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ops = torch.ops.flexvarlen
    for own in (None, sinks, sinks.clone().requires_grad_()):
        torch.library.opcheck(ops.cu_seqlens_forward.default, ("plain", *leaves, own, *settings))
        own = None if own is None else own.detach()
        out, lse = ops.cu_seqlens_forward("plain", q, k, v, own, *settings)
        torch.library.opcheck(
            ops.cu_seqlens_backward.default, ("plain", grad, q, k, v, own, out, lse, *settings)
        )


ROWS = {
    "documents": layout_of(DOCUMENTS["no_padding"]),
    "trees": PackedLayout.from_tree([100, 30, 20, 10, 56, 25, 15], [-1, 0, 0, 0, -1, 4, 4]),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("keep", [True, False])
def test_selective_checkpointing_keeps_attention_by_name(backend, keep, row):
    """Eagerly a plain autograd.Function, of which a checkpoint's policy would see nothing."""
    kernel, calls = KERNELS["plain"], {"documents": 1, "trees": 2}[row]
    run = attend(backend, ROWS[row])
    *qkv, grad = random_qkv(TOKENS, 6, 2, 16)

    def policy(context, op, *args, **kwargs):
        kept = keep and op is torch.ops.flexvarlen.cu_seqlens_forward.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return run(2 * q, k, v)[0] * 3

    def checkpointed(*x):
        return checkpoint(
            block,
            *x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    plainly = differentiate(block, qkv, grad)
    before = kernel.forwards
    saved = differentiate(checkpointed, qkv, grad)
    assert kernel.forwards - before == (calls if keep else 2 * calls)
    for mine, theirs in zip([saved[0], *saved[1]], [plainly[0], *plainly[1]], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("watched", [False, True], ids=["plainly", "operators"])
def test_gradient_of_the_gradient_is_refused(backend, watched, row):
    """Also where something watches operators: autograd would leave them out of it."""
    run = attend(backend, ROWS[row])
    q, k, v, grad = random_qkv(TOKENS, 6, 2, 16)
    q.requires_grad_()
    with (
        FlopCounterMode(display=False) if watched else nullcontext(),
        pytest.raises(NotImplementedError, match="no double backward"),
    ):
        torch.autograd.grad(run(q, k, v)[0], q, grad, create_graph=True)


def test_output_that_nobody_differentiates_has_no_gradients(backend):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return None

    run = attend(backend, layout_of(DOCUMENTS["no_padding"]), return_lse=True)
    q, k, v, _ = random_qkv(TOKENS, 6, 2, 16)
    q.requires_grad_()
    Nothing.apply(run(q, k, v)[0]).backward()
    assert q.grad is None or not q.grad.any()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradient_of_the_lse_is_refused_and_not_dropped(backend, compiled):
    run = attend(backend, layout_of(DOCUMENTS["no_padding"]), return_lse=True)
    q, k, v, grad = random_qkv(TOKENS, 6, 2, 16)
    q.requires_grad_()

    def loss(q, k, v):
        out, lse = run(q, k, v)
        return out.sum() + lse.sum()

    if compiled:
        torch._dynamo.reset()
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="has no gradient for the LSE"):
        loss(q, k, v).backward()
    out, _ = run(q, k, v)  # unused, it hinders nothing
    out.backward(grad)


def test_lse_that_a_compiled_function_returns_hinders_nothing_until_it_is_differentiated(backend):
    """AOTAutograd asks for the gradients of all outputs of a graph, wanted or not."""
    run = attend(backend, layout_of(DOCUMENTS["padded_tail"]), return_lse=True)
    q, k, v, grad = random_qkv(TOKENS, 6, 2, 16)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    out, lse = compiled(q, k, v)
    found = torch.autograd.grad(out, inputs, grad)
    expected, expected_lse = run(q, k, v)
    torch.testing.assert_close(lse.detach(), expected_lse.detach())
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, grad))
    with pytest.raises(RuntimeError, match="has no gradient for the LSE"):
        torch.autograd.grad(compiled(q, k, v)[1][:, :9].sum(), inputs)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("of", ["k alone", "k beside q"])
def test_gradient_of_the_lse_is_refused_of_the_keys_too(backend, of, compiled):
    run = attend(backend, layout_of(DOCUMENTS["no_padding"]), return_lse=True)
    q, k, v, _ = random_qkv(TOKENS, 6, 2, 16)
    k.requires_grad_()
    q.requires_grad_(of == "k beside q")
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    out, lse = run(q, k, v)
    with pytest.raises(Exception, match="has no gradient for the LSE"):
        torch.autograd.grad(out.sum() + lse.sum(), [k])


def test_sink_of_minus_infinity_is_no_sink(backend):
    """Beside queries that see no key: -inf minus -inf is NaN."""
    documents = DOCUMENTS["padded_tail"]
    keys = other_lengths(documents)
    layouts = {"layout": slots_of(documents, "cpu"), "layout_k": slots_of(keys, "cpu")}
    q, _, _, grad = random_qkv(TOKENS, 6, 2, 16)
    _, k, v, _ = random_qkv(keys.total_tokens, 6, 2, 16, seed=1)
    run = attend(backend, **layouts)
    sinks = torch.full((6,), float("-inf"))
    out, grads = differentiate(lambda *x: run(*x)[0], [q, k, v, sinks], grad)
    plain, plain_grads = differentiate(lambda *x: run(*x)[0], [q, k, v], grad)
    for mine, theirs in zip([out, *grads], [plain, *plain_grads, torch.zeros(6)], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def test_gradient_at_the_tail_reaches_no_sink(backend):
    """What comes in at padding may be anything: nothing reads those outputs."""
    documents = DOCUMENTS["padded_tail"]
    *inputs, grad = random_qkv(TOKENS, 6, 2, 16)
    inputs.append(torch.randn(6))
    run = attend(backend, layout_of(documents))
    _, clean = differentiate(lambda *x: run(*x)[0], inputs, grad)
    grad[documents.padded()] = float("nan")
    _, poisoned = differentiate(lambda *x: run(*x)[0], inputs, grad)
    for mine, theirs in zip(poisoned, clean, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("row", ROWS)
def test_transforms_of_torch_func_are_refused(backend, row):
    run = attend(backend, ROWS[row])
    *qkv, _ = random_qkv(TOKENS, 6, 2, 16)
    with pytest.raises(NotImplementedError, match=r"does not support torch\.func transforms"):
        torch.func.grad(lambda *x: run(*x)[0].sum())(*qkv)


def test_window_wider_than_the_row_is_no_reason_for_another_kernel(backend, given):
    """Batch invariant: by the longest document a kernel takes a window nothing fills for none."""
    q, k, v, _ = random_qkv(TOKENS, 6, 2, 16)
    for kind in ({"window": 1000}, {"causal": False, "window": (1000, 900)}):
        mask = DocumentMask.of(layout_of(DOCUMENTS["no_padding"]), **kind)
        call = call_of(q, k, mask, batch_invariant=True)
        plan = backend.plan(mask, batch_invariant=True)
        backend.attend(q, k, v, None, call, mask, plan)
        assert given[-1].boundaries.max_seqlen_k - 1 > mask.spec.left
        assert given[-1].boundaries.max_seqlen_q - 1 > mask.spec.right


def test_chunks_beyond_the_row_overflow_nowhere():
    boundaries = chunk_boundaries(torch.tensor([0, 2**20], dtype=torch.int32), 2**30, 2**20)
    many = torch.tensor([0, *[2**20] * 4200], dtype=torch.int32)
    assert boundaries.tolist()[:2] == [0, 2**20]
    assert chunk_boundaries(many, 2**19 - 1, 2**20).diff().min() >= 0
