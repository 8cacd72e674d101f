"""What surrounds every kernel over cu_seqlens, with a plain kernel in its place that runs anywhere.

Shape legend: T = tokens of the row, H = num_heads, D = head_dim, L = tokens of one document.
"""

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
from flexvarlen.layout import launch_sizes as launch
from flexvarlen.layout.launch_sizes import SHORT_ROW
from flexvarlen.mask.chunks import chunk_boundaries
from tests import oracle
from tests.attention.accuracy import assert_right, assert_same_bits
from tests.attention.backends.plain_kernel import attend
from tests.attention.backends.test_backend_accuracy import DOCUMENTS, TOKENS
from tests.attention.test_mask_kinds import attend_plainly, case_of, inputs_of
from tests.oracle import differentiate, random_qkv
from tests.rows import layout_of

ROWS = [
    "boundary_off_block",
    "padded_tail",
    "padding_inside",
    "nothing_but_padding",
    "empty_document",
]


@pytest.fixture(autouse=True)
def _long_rows(monkeypatch):
    """Rows of the tests are launched for their own documents, as long ones are."""
    monkeypatch.setattr(launch, "SHORT_ROW", 0)


def attention(backend, layout, *, return_lse=False, **kind):
    """A function of q, k, v and perhaps sinks, which gives the output and the LSE."""
    mask = DocumentMask.of(layout, **kind)

    def ours(q, k, v, sinks=None):
        return attend(backend, q, k, v, mask, sinks, return_lse=return_lse)

    return ours


MASKS = {
    "causal": {},
    "window": {"window": 20},
    "chunk": {"chunk": 16},
    "chunk_of_no_causal": {"chunk": 16, "causal": False},
    "chunk_as_long_as_the_row": {"chunk": TOKENS},
}


@pytest.mark.pairwise(
    compiled=[False, True],
    mask=MASKS,
    documents=ROWS,
    with_sinks=[False, True],
    short_row=[SHORT_ROW, 0],
)
def test_kernel_gets_the_right_boundaries_and_sinks(
    backend, monkeypatch, mask, documents, compiled, with_sinks, short_row
):
    """Launched for the bounds, as short rows are, or for the row's own documents."""
    monkeypatch.setattr(launch, "SHORT_ROW", short_row)
    documents, kind = DOCUMENTS[documents], MASKS[mask]
    *inputs, grad = random_qkv(TOKENS, 6, 2, 16)
    if with_sinks:
        inputs.append(torch.tensor([-3.0, 0.0, 1.0, 2.0, 4.0, 8.0]))
    run = attention(backend, layout_of(documents), **kind)

    def ours(*x):
        return run(*x)[0]

    def plain(q, k, v, s=None):
        return oracle.attend(q, k, v, documents, sinks=s, scale=0.25, **kind)[0]

    if compiled:
        torch._dynamo.reset()
        ours = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_right(ours, plain, inputs, grad, blank=documents.padded())


def cross_attention(backend, row):
    """To keys of another row: the function, the documents, q, k, v, and the output's gradient."""
    case = case_of(row, "cross_causal")
    mask = case.mask()

    def run(q, k, v, sinks=None):
        return attend(backend, q, k, v, mask, sinks)[0]

    return run, case, *inputs_of(case, "cpu", torch.float32, 16)


@pytest.mark.parametrize("short_row", [SHORT_ROW, 0])
@pytest.mark.parametrize("row", ["mixed", "below_one_block", "padding_inside"])
def test_keys_of_other_documents(backend, monkeypatch, row, short_row):
    """Documents without keys, queries that see none, and padding on either side."""
    monkeypatch.setattr(launch, "SHORT_ROW", short_row)
    run, case, qkv, grad = cross_attention(backend, row)
    assert_right(run, attend_plainly(case, scale=0.25), [*qkv, torch.randn(6)], grad)


def test_sink_of_minus_infinity_is_no_sink(backend):
    """Beside queries that see no key: -inf minus -inf is NaN."""
    run, _, qkv, grad = cross_attention(backend, "below_one_block")
    found = differentiate(run, [*qkv, torch.full((6,), float("-inf"))], grad)
    out, grads = differentiate(run, qkv, grad)
    torch.testing.assert_close(found, (out, [*grads, torch.zeros(6)]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("documents", ROWS)
def test_lse_is_without_sinks_and_minus_infinity_at_padding(backend, documents):
    documents = DOCUMENTS[documents]
    q, k, v, _ = random_qkv(TOKENS, 6, 2, 16)
    run = attention(backend, layout_of(documents), return_lse=True)
    _, lse = run(q, k, v, torch.randn(6))
    _, exact = oracle.attend(q.double(), k.double(), v.double(), documents, scale=0.25)
    torch.testing.assert_close(lse.double(), exact, atol=1e-5, rtol=1e-5)


LAYOUTS = {
    "documents": layout_of(DOCUMENTS["boundary_off_block"]),
    "trees": PackedLayout.from_tree([100, 30, 20, 10, 56, 25, 15], [-1, 0, 0, 0, -1, 4, 4]),
}


@pytest.mark.parametrize("row", LAYOUTS)
@pytest.mark.parametrize("keep", [True, False])
def test_selective_checkpointing_keeps_attention_by_name(backend, keep, row):
    """Eagerly a plain autograd.Function, of which a checkpoint's policy would see nothing."""
    run, calls = attention(backend, LAYOUTS[row]), {"documents": 1, "trees": 2}[row]
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
    backend.given.clear()
    saved = differentiate(checkpointed, qkv, grad)
    assert len(backend.given) == calls * (2 if keep else 3)  # forward, perhaps again, backward
    assert_same_bits(saved, plainly)


@pytest.mark.parametrize("row", LAYOUTS)
@pytest.mark.parametrize("watched", [False, True], ids=["plainly", "operators"])
def test_gradient_of_the_gradient_is_refused(backend, watched, row):
    """Also where something watches operators: autograd would leave them out of it."""
    run = attention(backend, LAYOUTS[row])
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

    run = attention(backend, layout_of(DOCUMENTS["boundary_off_block"]), return_lse=True)
    q, k, v, _ = random_qkv(TOKENS, 6, 2, 16)
    q.requires_grad_()
    Nothing.apply(run(q, k, v)[0]).backward()
    assert q.grad is None or not q.grad.any()


@pytest.mark.parametrize(
    ("compiled", "of"),
    [(None, "q"), (None, "k"), ("attention", "k"), ("attention", "qk"), ("loss", "q")],
)
def test_lse_hinders_nothing_until_it_is_differentiated(backend, of, compiled):
    """AOTAutograd asks for the gradients of all outputs of a graph, wanted or not."""
    run = eager = attention(backend, layout_of(DOCUMENTS["padded_tail"]), return_lse=True)
    q, k, v, grad = random_qkv(TOKENS, 6, 2, 16)
    leaves = [x.requires_grad_() for name, x in {"q": q, "k": k}.items() if name in of]
    torch._dynamo.reset()
    if compiled == "attention":
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    (out, lse), (expected, expected_lse) = run(q, k, v), eager(q, k, v)
    torch.testing.assert_close(lse.detach(), expected_lse.detach())
    found = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, grad))

    def loss(q, k, v):
        out, lse = run(q, k, v)
        return out.sum() + lse[:, :9].sum()

    if compiled == "loss":
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="has no gradient for the LSE"):
        torch.autograd.grad(loss(q, k, v), leaves)


def test_gradient_at_the_tail_reaches_no_sink(backend):
    """What comes in at padding may be anything: nothing reads those outputs."""
    documents = DOCUMENTS["padded_tail"]
    *inputs, grad = random_qkv(TOKENS, 6, 2, 16)
    inputs.append(torch.randn(6))
    run = attention(backend, layout_of(documents))
    _, clean = differentiate(lambda *x: run(*x)[0], inputs, grad)
    grad[documents.padded()] = float("nan")
    _, poisoned = differentiate(lambda *x: run(*x)[0], inputs, grad)
    assert_same_bits(poisoned, clean)


@pytest.mark.parametrize("row", LAYOUTS)
def test_transforms_of_torch_func_are_refused(backend, row):
    run = attention(backend, LAYOUTS[row])
    *qkv, _ = random_qkv(TOKENS, 6, 2, 16)
    with pytest.raises(NotImplementedError, match=r"does not support torch\.func transforms"):
        torch.func.grad(lambda *x: run(*x)[0].sum())(*qkv)


def test_window_wider_than_the_row_is_no_reason_for_another_kernel(backend):
    """Batch invariant: by the longest document a kernel takes a window nothing fills for none."""
    q, k, v, _ = random_qkv(TOKENS, 6, 2, 16)
    for kind in ({"window": 1000}, {"causal": False, "window": (1000, 900)}):
        mask = DocumentMask.of(layout_of(DOCUMENTS["boundary_off_block"]), **kind)
        attend(backend, q, k, v, mask, batch_invariant=True)
        assert backend.given[-1].boundaries.max_seqlen_k - 1 > mask.spec.left
        assert backend.given[-1].boundaries.max_seqlen_q - 1 > mask.spec.right


def test_chunks_beyond_the_row_overflow_nowhere():
    boundaries = chunk_boundaries(torch.tensor([0, 2**20], dtype=torch.int32), 2**30, 2**20)
    many = torch.tensor([0, *[2**20] * 4200], dtype=torch.int32)
    assert boundaries.tolist()[:2] == [0, 2**20]
    assert chunk_boundaries(many, 2**19 - 1, 2**20).diff().min() >= 0
