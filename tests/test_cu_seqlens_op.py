"""What surrounds every kernel over cu_seqlens, with a plain kernel in its place that runs anywhere.

Shape legend: T = tokens of the row, H = num_heads, D = head_dim, L = tokens of one document.
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from flexvarlen import DocumentMask, PackedLayout
from flexvarlen import layout as layout_module
from flexvarlen.backends import cu_seqlens_op
from flexvarlen.backends.cu_seqlens_backend import CuSeqlensBackend
from flexvarlen.backends.cu_seqlens_op import KERNELS
from flexvarlen.backends.protocol import AttentionOptions
from flexvarlen.chunks import chunk_boundaries
from flexvarlen.layout import SHORT_ROW
from flexvarlen.measure import watch_compilation
from tests import oracle
from tests.mask_cases import slots_of
from tests.oracle import Documents, assert_as_accurate, differentiate, random_qkv
from tests.rows import layout_of
from tests.test_mask_kinds import other_lengths

TOKENS = 256
DOCUMENTS = {
    "no_padding": Documents((50, 77, 129), TOKENS),
    "padded_tail": Documents((130, 61), TOKENS),
    "padding_inside": Documents((9, 60, 30, 100, 1, 20), TOKENS, frozenset({0, 2, 4})),
    "nothing_but_padding": Documents((0,), TOKENS),
    "empty_document": Documents((0, 100, 0, 0, 156, 0), TOKENS),
}


class PlainKernel:
    """As FlashAttention behaves: tails unwritten, +inf where nothing is seen, sinks unknown."""

    def __init__(self):
        self.forwards = 0

    def _documents(self, call):
        spans_q, spans_k = (
            list(zip(cu.tolist(), cu.tolist()[1:], strict=False))
            for cu in (call.cu_seqlens_q, call.cu_seqlens_k)
        )
        for (a, b), (c, d) in zip(spans_q, spans_k, strict=True):
            assert b - a <= call.max_seqlen_q
            assert d - c <= call.max_seqlen_k
            window = (call.left, call.right)
            yield slice(a, b), slice(c, d), oracle.seen(b - a, d - c, causal=False, window=window)

    def _probabilities(self, q, k, seen, lse, call):
        scores = torch.einsum("qhd,khd->hqk", q, k) * call.scale
        scores = scores.masked_fill(~seen, float("-inf"))
        if lse is None:
            lse = scores.logsumexp(-1)
            lse = torch.where(lse.isneginf(), float("inf"), lse)
        return (scores - lse[..., None]).exp(), lse

    def forward(self, call):
        self.forwards += 1
        q, k, v = call[:3]
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = torch.full_like(q, float("nan"))
        lse = q.new_full((q.shape[1], q.shape[0]), float("nan"))
        for rows, keys, seen in self._documents(call):
            p, lse[:, rows] = self._probabilities(q[rows], k[keys], seen, None, call)
            out[rows] = torch.einsum("hqk,khd->qhd", p, v[keys])
        return out, lse

    def backward(self, call, grad, out, lse):
        q, k, v = call[:3]
        groups, repeats = k.shape[1], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
        for rows, keys, seen in self._documents(call):
            p, _ = self._probabilities(q[rows], k[keys], seen, lse[:, rows], call)
            dv[keys] = torch.einsum("hqk,qhd->khd", p, grad[rows])
            delta = (grad[rows] * out[rows]).sum(-1).T[..., None]
            ds = p * (torch.einsum("qhd,khd->hqk", grad[rows], v[keys]) - delta) * call.scale
            dq[rows] = torch.einsum("hqk,khd->qhd", ds, k[keys])
            dk[keys] = torch.einsum("hqk,qhd->khd", ds, q[rows])
        return dq, *(x.unflatten(1, (groups, repeats)).sum(2) for x in (dk, dv))


class PlainBackend(CuSeqlensBackend):
    name = "plain"


@pytest.fixture(autouse=True, params=[SHORT_ROW, 0], ids=["short_rows", "long_rows"])
def _launch(request, monkeypatch):
    """Rows of the tests are launched for their bounds, or for their own documents."""
    monkeypatch.setattr(layout_module, "SHORT_ROW", request.param)


@pytest.fixture
def backend():
    kernel = PlainKernel()
    yield PlainBackend(kernel)
    del KERNELS["plain"]


@pytest.fixture
def told(backend):
    """What the kernel is told, call by call."""
    kernel, calls = KERNELS["plain"], []
    forward, backward = kernel.forward, kernel.backward

    def noting_forward(call):
        calls.append(call)
        return forward(call)

    def noting_backward(call, *rest):
        calls.append(call)
        return backward(call, *rest)

    kernel.forward, kernel.backward = noting_forward, noting_backward
    return calls


def attend(backend, layout, *, sinks=None, return_lse=False, layout_k=None, **kind):
    mask = DocumentMask.of(layout, layout_k=layout_k, **kind)
    options = AttentionOptions(scale=0.25, sinks_H=sinks, return_lse=return_lse)

    def ours(q, k, v, *s):
        chosen = options if not s else AttentionOptions(0.25, sinks_H=s[0], return_lse=return_lse)
        return backend.attend(q, k, v, mask, backend.plan(mask), chosen)

    return ours


MASKS = {
    "causal": {},
    "window": {"window": 20},
    "chunk": {"chunk": 16},
    "chunk_of_no_causal": {"chunk": 16, "causal": False},
    "chunk_as_long_as_the_row": {"chunk": TOKENS},
}


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("mask", MASKS)
def test_kernel_gets_the_right_boundaries_and_sinks(backend, mask, documents, compiled, with_sinks):
    if compiled and mask not in ("causal", "chunk"):
        pytest.skip("two masks are enough")
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
    peer, peer_grads = differentiate(plain, inputs, grad)
    assert_as_accurate(out, exact, peer, 2)
    for which, mine, good, coarse in zip("qkvs", grads, exact_grads, peer_grads, strict=False):
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
    settings = (*boundaries, -1, 0, 0.25, 0.0, False, False, 1, True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ops = torch.ops.flexvarlen
    for given in (None, sinks, sinks.clone().requires_grad_()):
        torch.library.opcheck(ops.cu_seqlens_forward.default, ("plain", *leaves, given, *settings))
        given = None if given is None else given.detach()
        out, lse = ops.cu_seqlens_forward("plain", q, k, v, given, *settings)
        torch.library.opcheck(
            ops.cu_seqlens_backward.default, ("plain", grad, q, k, v, given, out, lse, *settings)
        )


@pytest.mark.parametrize("keep", [True, False])
def test_selective_checkpointing_keeps_attention_by_name(backend, keep):
    """Eagerly a plain autograd.Function, of which a checkpoint's policy would see nothing."""
    kernel = KERNELS["plain"]
    run = attend(backend, layout_of(DOCUMENTS["no_padding"]))
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
    assert kernel.forwards - before == (1 if keep else 2)
    for mine, theirs in zip([saved[0], *saved[1]], [plainly[0], *plainly[1]], strict=True):
        assert torch.equal(mine, theirs)


def test_gradient_of_the_gradient_is_refused(backend):
    run = attend(backend, layout_of(DOCUMENTS["no_padding"]))
    q, k, v, grad = random_qkv(TOKENS, 6, 2, 16)
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient of its gradient"):
        torch.autograd.grad(run(q, k, v)[0], q, grad, create_graph=True)


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
    with pytest.raises(Exception, match="gives the LSE no gradient"):
        loss(q, k, v).backward()
    out, _ = run(q, k, v)  # unused, it hinders nothing
    out.backward(grad)


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


def test_transforms_of_torch_func_are_refused(backend):
    run = attend(backend, layout_of(DOCUMENTS["no_padding"]))
    *qkv, _ = random_qkv(TOKENS, 6, 2, 16)
    with pytest.raises(NotImplementedError, match=r"transforms of torch\.func"):
        torch.func.grad(lambda *x: run(*x)[0].sum())(*qkv)


def test_window_wider_than_the_row_is_no_reason_for_another_kernel(backend, told):
    """Batch invariant: by the longest document a kernel takes a window nothing fills for none."""
    q, k, v, _ = random_qkv(TOKENS, 6, 2, 16)
    for kind in ({"window": 1000}, {"causal": False, "window": (1000, 900)}):
        mask = DocumentMask.of(layout_of(DOCUMENTS["no_padding"]), **kind)
        options = AttentionOptions(scale=0.25, batch_invariant=True)
        backend.attend(q, k, v, mask, backend.plan(mask, batch_invariant=True), options)
        assert told[-1].max_seqlen_k - 1 > mask.spec.left
        assert told[-1].max_seqlen_q - 1 > mask.spec.right


LONG = SHORT_ROW + 100
MANY = [[LONG], [700, 900], [LONG - 2, 1, 1], [8] * 8, [0, 0, 5], []]


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_kernels_are_launched_for_the_documents_that_there_are(backend, told, compiler):
    """Other documents recompile nothing; a short row, or one that is told to, keeps its bounds."""
    q = torch.randn(LONG, 2, 8, requires_grad=True)

    def run(layout):
        mask = DocumentMask.of(layout)
        options = AttentionOptions(scale=0.25)
        return backend.attend(q * 2, q, q, mask, backend.plan(mask), options)[0]

    torch._dynamo.reset()
    called = torch.compile(run, fullgraph=True, backend=compiler) if compiler else run
    with watch_compilation() as stats:
        for lengths in MANY:
            told.clear()
            layout = PackedLayout.from_lengths(
                lengths, total_tokens=LONG, capacity=8, max_seqlen_bound=LONG
            )
            called(layout).sum().backward()
            assert len(told) == 2  # forward and backward
            for call in told:
                slots = max(1, len(lengths))  # kernels refuse a batch of none
                assert call.cu_seqlens_q.tolist() == layout.cu_seqlens[: slots + 1].tolist()
                assert call.max_seqlen_q == call.max_seqlen_k == max([2, *lengths])
    assert stats.compilations == (1 if compiler else 0)
    told.clear()
    run(layout.fix_launch_sizes())
    run(layout.copy_(PackedLayout.from_lengths([9], total_tokens=LONG, capacity=8)))
    for call in told:
        assert (call.cu_seqlens_q.shape[0], call.max_seqlen_q) == (9, LONG)


@pytest.mark.parametrize("tokens", [TOKENS, LONG])
def test_a_tail_is_zeroed_where_there_is_one(backend, monkeypatch, tokens):
    """In a compiled graph too, which is not made anew for it."""
    zeroed = []

    def zero(cu_seqlens, *tensors):
        zeroed.append(cu_seqlens[-1].item())
        for x in tensors:
            x[cu_seqlens[-1] :] = 0

    monkeypatch.setattr(cu_seqlens_op, "_zero_tail", zero)
    q = torch.randn(tokens, 2, 8, requires_grad=True)
    cu_seqlens_op._is_first(q)

    def run(layout):
        mask = DocumentMask.of(layout)
        return backend.attend(q, q, q, mask, backend.plan(mask), AttentionOptions(scale=0.25))[0]

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with watch_compilation() as stats:
        for called in (run, compiled):
            for lengths in ([tokens], [tokens - 9], [9, tokens - 9], [5]):
                zeroed.clear()
                layout = PackedLayout.from_lengths(
                    lengths, total_tokens=tokens, capacity=2, max_seqlen_bound=tokens
                )
                out = called(layout)
                (grad,) = torch.autograd.grad(out.sum(), q)
                end = sum(lengths)
                assert set(zeroed) == ({end} if end < tokens else set()), lengths
                assert not out[end:].any()
                assert not grad[end:].any()
                assert out.isfinite().all()
    assert stats.compilations == 1


@pytest.mark.parametrize("trace", ["export", "strict export", "make_fx"])
@pytest.mark.parametrize("tokens", [TOKENS, LONG])
def test_a_program_that_outlives_its_call_is_made_for_any_documents(backend, tokens, trace):
    """What it was traced on is a constant to it; `copy_` writes others into the same tensors."""
    sizes = {"total_tokens": tokens, "capacity": 8, "max_seqlen_bound": tokens}
    layout = PackedLayout.from_lengths([70, tokens - 70], **sizes)

    class Model(torch.nn.Module):
        def forward(self, q):
            mask = DocumentMask.of(layout)
            options = AttentionOptions(scale=0.25)
            return backend.attend(q, q, q, mask, backend.plan(mask), options)[0]

    q = torch.randn(tokens, 2, 8)
    if trace == "make_fx":
        program = make_fx(Model())(q)
    else:
        program = torch.export.export(Model(), (q,), strict=trace == "strict export").module()
    for lengths in ([1, tokens - 11, 4], [30] * 7):
        layout.copy_(PackedLayout.from_lengths(lengths, **sizes))
        torch.testing.assert_close(program(q), Model()(q))


def test_a_pickled_layout_still_recompiles_nothing(backend):
    sizes = {"total_tokens": LONG, "capacity": 8, "max_seqlen_bound": LONG}
    q = torch.randn(LONG, 2, 8)

    def run(layout):
        mask = DocumentMask.of(layout)
        return backend.attend(q, q, q, mask, backend.plan(mask), AttentionOptions(scale=0.25))[0]

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    with watch_compilation() as stats:
        for lengths in ([LONG], [9, 50, 3]):
            # As DataLoader's workers hand a layout over: tensors lose what Dynamo wrote on them.
            dumped = ForkingPickler.dumps(PackedLayout.from_lengths(lengths, **sizes))
            compiled(pickle.loads(dumped))
    assert stats.compilations == 1


def test_documents_that_one_side_does_not_know_are_launched_for(backend, told):
    """Cross-attention: slots past the known ones hold keys all the same."""
    known = PackedLayout.from_lengths([5, 6], total_tokens=LONG, capacity=4)
    keys = PackedLayout.from_lengths([5, 6, 7, 8], total_tokens=LONG, capacity=4)
    keys.num_docs = keys.max_seqlen = None
    keys._note_launch_sizes()
    mask = DocumentMask.of(known, layout_k=keys)
    q = torch.randn(LONG, 2, 8)
    backend.attend(q, q, q, mask, backend.plan(mask), AttentionOptions(scale=0.25))
    assert told[-1].cu_seqlens_k.diff().tolist() == [5, 6, 7, 8]
    assert told[-1].cu_seqlens_q.shape == told[-1].cu_seqlens_k.shape


def test_documents_copied_into_a_layout_are_launched_for(backend, told):
    q = torch.randn(LONG, 2, 8)
    layout = PackedLayout.from_lengths([9, 9, 9], total_tokens=LONG, capacity=8)
    other = PackedLayout.from_lengths([3] * 7, total_tokens=LONG, capacity=8)
    options, mask = AttentionOptions(scale=0.25), DocumentMask.of(layout)
    for lengths in ([9, 9, 9], [3] * 7):
        backend.attend(q, q, q, mask, backend.plan(mask), options)
        assert told[-1].cu_seqlens_q.diff().tolist() == lengths
        assert told[-1].max_seqlen_q == lengths[0]
        layout.copy_(other)


def test_chunks_beyond_the_row_overflow_nowhere():
    boundaries = chunk_boundaries(torch.tensor([0, 2**20], dtype=torch.int32), 2**30, 2**20)
    many = torch.tensor([0, *[2**20] * 4200], dtype=torch.int32)
    assert boundaries.tolist()[:2] == [0, 2**20]
    assert chunk_boundaries(many, 2**19 - 1, 2**20).diff().min() >= 0
