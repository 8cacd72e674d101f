"""Per-document operations: each document's result is that of the document alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexvarlen as fv
from flexvarlen import PackedLayout
from flexvarlen.measure import watch_compilation
from tests.overwrite import overwrite

HOW = ("last", "first", "mean", "max")
BY_HAND = {
    "last": lambda tokens: tokens[-1],
    "first": lambda tokens: tokens[0],
    "mean": lambda tokens: tokens.sum(0) / len(tokens),
    "max": lambda tokens: tokens.amax(0),
}
lengths_of = st.lists(st.integers(0, 9), min_size=1, max_size=6)
# Graphs and compilations are counted on the CPU; a GPU's inductor gives the numbers.
COMPILERS = [("cpu", "eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]


def from_runs(*runs, device="cpu"):
    """A layout of documents, and of padding runs as negative lengths."""
    starts = [i == 0 for run in runs for i in range(abs(run))]
    padding = [run < 0 for run in runs for _ in range(abs(run))]
    return PackedLayout.from_starts(
        torch.tensor(starts, device=device), padding_T=torch.tensor(padding, device=device)
    )


def only_on_the_device(cu_seqlens, total):
    return PackedLayout(
        torch.tensor(cu_seqlens, dtype=torch.int32),
        cu_seqlens_host=None,
        total_tokens=total,
        max_seqlen_bound=total,
        num_docs=None,
        max_seqlen=None,
    )


FORMS = {  # a layout, and the start and end of what each of its slots holds; None for no document
    "full": (lambda: PackedLayout.from_lengths([3, 2]), [(0, 3), (3, 5)]),
    "empty documents": (
        lambda: PackedLayout.from_lengths([0, 3, 0, 2, 0]),
        [None, (0, 3), None, (3, 5), None],
    ),
    "trailing padding": (
        lambda: PackedLayout.from_lengths([3, 2, 1], total_tokens=9),
        [(0, 3), (3, 5), (5, 6)],
    ),
    "padding runs": (
        lambda: from_runs(-2, 3, -1, 2, -2),
        [None, (2, 5), None, (6, 8), None],
    ),
    "spare slots of the device": (
        lambda: only_on_the_device([0, 3, 3, 5, 5], 7),
        [(0, 3), None, (3, 5), None],
    ),
    "no documents": (lambda: PackedLayout.from_lengths([], total_tokens=3), []),
    "no tokens": (lambda: PackedLayout.from_lengths([0, 0]), [None, None]),
}


def pooled_alone(x, slots, how):
    zero = x.new_zeros(x.shape[-1])
    rows = [zero if slot is None else BY_HAND[how](x[slot[0] : slot[1]]) for slot in slots]
    return torch.stack(rows) if rows else x.new_zeros(0, x.shape[-1])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS)
def test_a_pooled_row_or_its_gradient_holds_another_documents_tokens(form, how):
    make, slots = FORMS[form]
    layout = make()
    x = torch.randn(layout.total_tokens, 4, dtype=torch.float64, requires_grad=True)
    found, expected = fv.pool(x[None], layout, how), pooled_alone(x, slots, how)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    if layout.total_tokens:
        losses = found.sin().sum(), expected.sin().sum() + 0 * x.sum()
        of_found, of_expected = (torch.autograd.grad(loss, x)[0] for loss in losses)
        torch.testing.assert_close(of_found, of_expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("how", HOW)
def test_nan_of_one_document_or_of_padding_reaches_another(how):
    layout = from_runs(2, -2, 3, 1)
    x = torch.randn(8, 3)
    spoilt = x.clone()
    spoilt[2:4] = float("nan")
    spoilt[7] = float("nan")
    clean, found = (fv.pool(each.requires_grad_(), layout, how) for each in (x, spoilt))
    assert torch.equal(found[:3], clean[:3])
    assert found[3].isnan().all()
    found[:3].sum().backward()
    assert spoilt.grad.isfinite().all()
    assert not spoilt.grad[2:4].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mean_of_a_long_document_stops_growing_in_half_precision(dtype):
    x = torch.rand(5000, 2).to(dtype)
    found = fv.pool(x, PackedLayout.from_lengths([5000]), "mean")
    assert found.dtype == dtype
    assert torch.equal(found, x.double().mean(0, keepdim=True).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_equal_maxima_share_the_gradient(dtype):
    """As in torch.amax, a gradient below 0 too; in rows with padding, and without."""
    generator = torch.Generator().manual_seed(0)
    for runs in ((3, 1, 4, -2), (2, -2, 3, 3), (400, 300)):
        layout = from_runs(*runs)
        x = torch.randint(3, (layout.total_tokens, 5), generator=generator).to(dtype)
        grad = torch.randn(layout.capacity, 5, generator=generator).to(dtype)
        x, y = (each.clone().requires_grad_() for each in (x, x))
        found = fv.pool(x, layout, "max")
        found.backward(grad[: len(found)])
        for i, run in enumerate(layout.split(y)):
            if runs[i] > 0:
                run.amax(0).backward(grad[i], retain_graph=True)
        expected = torch.zeros_like(y) if y.grad is None else y.grad
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("shape", [(6, 3), (1, 6, 3), (2, 3, 3)])
def test_rows_of_a_batch_are_not_taken_one_after_another(shape):
    x = torch.arange(18.0).view(shape)
    found = fv.pool(x, PackedLayout.from_lengths([2, 4]), "first")
    assert found.tolist() == [[0, 1, 2], [6, 7, 8]]


def test_a_strided_input_is_read_as_if_it_were_contiguous():
    x = torch.randn(3, 6).T
    layout = PackedLayout.from_lengths([2, 4])
    for how in HOW:
        assert torch.equal(fv.pool(x, layout, how), fv.pool(x.contiguous(), layout, how))


@given(lengths_of, st.integers(0, 5), st.booleans())
def test_first_and_last_tokens_leave_the_document_or_the_row(lengths, tail, device_only):
    layout = PackedLayout.from_lengths(lengths, total_tokens=sum(lengths) + tail)
    slots = layout.num_docs
    if device_only:
        layout = only_on_the_device(layout.cu_seqlens.tolist(), layout.total_tokens)
        slots = layout.capacity
    first, last, real = layout.first_tokens(), layout.last_tokens(), layout.real_documents()
    assert first.dtype == last.dtype == torch.int64
    assert first.shape == last.shape == real.shape == (slots,)
    begin = 0
    for i, n in enumerate(lengths):
        assert real[i] == (n > 0)
        if n > 0:
            assert (first[i], last[i]) == (begin, begin + n - 1)
        begin += n
    assert not real[len(lengths) :].any()
    if layout.total_tokens:
        for index in (first, last):
            assert ((index >= 0) & (index < layout.total_tokens)).all()


def test_a_padding_run_counts_as_a_document():
    layout = from_runs(2, -2, 3)
    assert layout.real_documents().tolist() == [True, False, True]
    assert layout.first_tokens().tolist() == [0, 2, 4]
    assert layout.last_tokens().tolist() == [1, 3, 6]


@given(lengths_of, st.integers(0, 5), st.booleans())
def test_split_copies_or_keeps_the_padding(lengths, tail, batched):
    layout = PackedLayout.from_lengths(lengths, total_tokens=sum(lengths) + tail)
    x = torch.arange(2 * layout.total_tokens).view(-1, 2)
    parts = layout.split(x[None] if batched else x)
    assert [len(part) for part in parts] == lengths
    assert torch.equal(torch.cat(parts), x[: sum(lengths)])
    assert all(part._base is x or part._base is x._base for part in parts)


def test_split_loses_gradients():
    x = torch.randn(1, 6, 2, dtype=torch.float64, requires_grad=True)
    layout = PackedLayout.from_lengths([2, 0, 3], total_tokens=6)
    assert torch.autograd.gradcheck(lambda x: [part.sin().sum() for part in layout.split(x)], x)


def test_split_of_documents_that_the_host_does_not_know():
    layout = only_on_the_device([0, 2, 3], 3)
    with pytest.raises(ValueError, match="boundaries that the host knows"):
        layout.split(torch.zeros(3))
    known = PackedLayout.from_lengths([3])
    compiled = torch.compile(lambda x, layout: layout.split(x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="boundaries that the host knows"):
        compiled(torch.zeros(3), known)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda layout: layout.split(torch.zeros(4)), r"\[3, ...\] or \[1, 3, ...\].*got \(4,\)"),
        (lambda layout: layout.split(torch.zeros(())), r"got \(\)"),
        (lambda layout: fv.pool(torch.zeros(4, 2), layout), r"total_tokens=3.*\(4, 2\)"),
        (lambda layout: fv.pool(torch.zeros(3), layout), r"float32 \(3,\)"),
        (lambda layout: fv.pool(torch.zeros(3, 2).long(), layout), "floating point"),
        (lambda layout: fv.pool(torch.zeros(3, 2, device="meta"), layout), "device cpu, got meta"),
        (lambda layout: fv.pool(torch.zeros(3, 2), layout, "sum"), "got 'sum'; choose one"),
    ],
)
def test_an_input_that_does_not_fit_gives_torchs_error(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(PackedLayout.from_lengths([3]))


def documents(lengths, device):
    return PackedLayout.from_lengths(
        lengths, total_tokens=12, capacity=4, max_seqlen_bound=12, device=device
    )


@pytest.mark.parametrize(("device", "backend"), COMPILERS)
def test_other_documents_compile_pool_and_ids_again(device, backend):
    """All in one graph: other documents give their own results, equal maxima among them.

    Inductor's search of torch 2.11 reads boundaries that are a view from their base.
    """

    def numbers(layout):
        return layout.document_ids(), layout.position_ids(), layout.real_tokens()

    def pooled(x, layout):
        count = layout.real_documents().sum()
        ends = layout.first_tokens() + layout.last_tokens()
        return [fv.pool(x, layout, how) for how in HOW], count, ends, numbers(layout)

    compiled = torch.compile(pooled, backend=backend, fullgraph=True)
    compilations = []
    for lengths in ([3, 0, 2, 7], [4, 5], [12], [0, 1]):
        layout = documents(lengths, device)
        x = torch.randint(3, (1, 12, 8), device=device).float().requires_grad_()
        with watch_compilation() as stats:
            found, count, ends, numbered = compiled(x, layout)
            (grad,) = torch.autograd.grad(sum(each.square().sum() for each in found), x)
        compilations.append(stats.compilations)
        of_docs = [part for part in layout.split(x) if len(part)]
        assert count == len(of_docs)
        assert ends.shape == (4,)
        by_hand = [i for i, n in enumerate(lengths) for _ in range(n)]
        assert numbered[0].tolist() == by_hand + [4] * (12 - len(by_hand))
        assert all(map(torch.equal, numbered, numbers(layout)))
        real = torch.tensor([n > 0 for n in [*lengths, 0, 0, 0][:4]], device=device)
        expected = [torch.stack([BY_HAND[how](part) for part in of_docs]) for how in HOW]
        for one, other in zip(found, expected, strict=True):
            assert one.shape == (4, 8)
            torch.testing.assert_close(one[real], other)
            assert not one[~real].any()
        (of_expected,) = torch.autograd.grad(sum(each.square().sum() for each in expected), x)
        torch.testing.assert_close(grad, of_expected)
    assert compilations == [1, 0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOW)
def test_pool_syncs_or_differs_between_runs_or_from_the_cpu(how):
    lengths = [700, 0, 1, 3000]
    host = PackedLayout.from_lengths(lengths, total_tokens=4096)
    layout = host.to("cuda")
    x = torch.randn(4096, 64, device="cuda", requires_grad=True)
    fv.pool(x, layout, how).sum().backward()
    runs = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            found = fv.pool(x, layout, how)
            runs.append((found, torch.autograd.grad(found.square().sum(), x)[0]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for again in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], again, strict=True))
    on_cpu = x.detach().double().cpu().requires_grad_()
    expected = fv.pool(on_cpu, host, how)
    (grad,) = torch.autograd.grad(expected.square().sum(), on_cpu)
    torch.testing.assert_close(runs[0][0].cpu().double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(runs[0][1].cpu().double(), grad, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_captured_graph_pools_the_documents_that_it_was_captured_with():
    layout = documents([3, 2, 7], "cuda")
    x = torch.randn(12, 8, device="cuda")
    fv.pool(x, layout, "mean")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fv.pool(x, layout, "mean")
    other = documents([1, 4, 2, 5], "cuda")
    overwrite(layout, other)
    graph.replay()
    assert torch.equal(found, fv.pool(x, other, "mean"))
