"""Every backend against per-document attention in fp64, beside a low-precision baseline.

Shape legend: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flexvarlen import DocumentMask, PackedLayout, packed_attention, why_not
from flexvarlen.attention.backends.registry import BACKENDS, get_backend
from tests import oracle
from tests.attention.accuracy import assert_right, assert_same_bits
from tests.attention.deterministic import torch_is_deterministic
from tests.backends import ALL, DEVICES, LACKS, differentiable, kernels, refuses
from tests.oracle import Documents, assert_as_accurate, differentiate, random_qkv
from tests.rows import layout_of, poison_spare_memory

TOKENS = 256  # one T: the CPU's flex compiles a kernel for each

DOCUMENTS = {
    "boundary_off_block": Documents((50, 77, 129), TOKENS),
    "boundary_on_block": Documents((128, 128), TOKENS),
    "one_document": Documents((256,), TOKENS),
    "empty_document": Documents((0, 100, 0, 0, 156, 0), TOKENS),
    "one_token_document": Documents((1, 127, 1, 126, 1), TOKENS),
    "padded_tail": Documents((130, 61), TOKENS),
    "padding_inside": Documents((9, 60, 30, 100, 1, 20), TOKENS, frozenset({0, 2, 4})),
    "nothing_but_padding": Documents((0,), TOKENS),
}
MASKS = {
    "causal": {"causal": True},
    "bidirectional": {"causal": False},
    "causal_window": {"causal": True, "window": 20},
    "bidirectional_window": {"causal": False, "window": 20},
    "uneven_window": {"causal": False, "window": (30, 5)},
    "one_sided_window": {"causal": False, "window": (-1, 7)},
}

everything = pytest.mark.parametrize("kernel", kernels(*ALL))


def head_dim_on(device):
    return 16 if device == "cpu" else 64


def row_of(kernel, documents):
    """q, k, v and the output's gradient, and the layout, on the kernel's device."""
    _, device, dtype = kernel
    made = random_qkv(TOKENS, 6, 2, head_dim_on(device), dtype=dtype, device=device)
    return made, layout_of(documents, device=device)


def check(kernel, documents, heads=(6, 2), head_dim=None, *, layout=None, sinks=None, **options):
    """Output, and gradients where there are any, by the 2x and 3x rule; padding exactly zero."""
    name, device, dtype = kernel
    sizes = (documents.total_tokens, *heads, head_dim or head_dim_on(device))
    *inputs, grad = random_qkv(*sizes, dtype=dtype, device=device)
    inputs += [] if sinks is None else [sinks.to(device)]
    layout = layout_of(documents, device=device) if layout is None else layout
    if device == "cuda":
        poison_spare_memory()

    def ours(q, k, v, s=None):
        return packed_attention(q, k, v, layout, backend=name, sinks=s, **options)

    wanted = [word for word in ("window", "softcap") if options.get(word) is not None]
    if refuses(kernel, lambda: ours(*inputs), *wanted, *(() if sinks is None else ["sinks"])):
        return

    def plain(q, k, v, s=None):
        return oracle.attend(q, k, v, documents, sinks=s, **options)[0]

    has_backward, padded = differentiable(kernel), documents.padded().to(device)
    assert_right(ours, plain, inputs, grad, has_backward=has_backward, blank=padded)


@pytest.mark.pairwise(kernel=kernels(*ALL), documents=DOCUMENTS, mask=MASKS)
def test_document_sees_itself_alone(kernel, documents, mask):
    check(kernel, DOCUMENTS[documents], **MASKS[mask])


@everything
@pytest.mark.parametrize(
    ("heads", "cpu_head_dim"),
    [((28, 4), 40), ((7, 1), 8), ((4, 4), 64)],
    ids=["28over4", "7over1", "4over4"],
)
def test_query_head_reads_its_own_kv_head(kernel, heads, cpu_head_dim):
    """On the CPU also of a head_dim that is no power of two."""
    head_dim = cpu_head_dim if kernel[1] == "cpu" else 128
    check(kernel, DOCUMENTS["boundary_off_block"], heads, head_dim)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", kernels(*ALL, cpu=False))
def test_long_documents_over_many_tiles(kernel, head_dim):
    documents = Documents((1000, 1, 2300, 0, 700), 4096)
    for mask in ({"causal": True}, {"causal": False}, {"causal": False, "window": (300, 40)}):
        check(kernel, documents, (4, 2), head_dim, **mask)


@pytest.mark.parametrize("kernel", kernels("flex", cpu=False))
@pytest.mark.parametrize("tokens", [1, 100, 127])
def test_row_shorter_than_a_block(kernel, tokens):
    """Under 128 queries AUTO would take the decoding kernel."""
    check(kernel, Documents((tokens // 2, tokens - tokens // 2), tokens))


@everything
@pytest.mark.parametrize("options", [{"scale": 0.5}, {"softcap": 3.0, "scale": 1.0}], ids=str)
def test_scores_are_scaled_and_capped(kernel, options):
    """The cap beside a scale that drives the scores far past it."""
    name, device, dtype = kernel
    if name == "fa3" and "softcap" in options:
        reason = why_not(name, device=device, dtype=dtype, softcap=3.0)
        if "without softcap" in (reason or ""):
            pytest.skip("this build of FlashAttention 3 has no softcap")
    check(kernel, DOCUMENTS["padding_inside"], **options)


@pytest.mark.pairwise(
    kernel=[*kernels("reference", "sdpa"), *kernels(*ALL[2:], cpu=False)],
    documents=["padding_inside", "padded_tail", "nothing_but_padding"],
    mask=["causal_window", "causal", "bidirectional"],
)
def test_sinks_join_the_denominator(kernel, documents, mask):
    sinks = torch.tensor([-3.0, 0.0, 1.0, 2.0, 4.0, 8.0])
    check(kernel, DOCUMENTS[documents], sinks=sinks, **MASKS[mask])


@pytest.mark.parametrize("kernel", [*kernels("reference", "sdpa"), *kernels(*ALL[2:], cpu=False)])
@pytest.mark.parametrize("documents", ["padding_inside", "padded_tail", "empty_document"])
def test_lse_is_that_of_the_scores_and_minus_infinity_at_padding(kernel, documents):
    documents = DOCUMENTS[documents]
    (q, k, v, _), layout = row_of(kernel, documents)

    def ours():
        return packed_attention(q, k, v, layout, backend=kernel[0], return_lse=True)

    if refuses(kernel, ours, "lse"):
        return
    out, lse = ours()
    exact_out, exact = oracle.attend(q.double(), k.double(), v.double(), documents)
    baseline_out, baseline = oracle.attend(q, k, v, documents)
    padded = documents.padded().to(q.device)
    assert lse.dtype == torch.float32
    assert (lse[:, padded] == float("-inf")).all()
    assert_as_accurate(lse[:, ~padded], exact[:, ~padded], baseline[:, ~padded], 2, "lse")
    assert_as_accurate(out, exact_out, baseline_out, 2)


@pytest.mark.parametrize("kernel", [*kernels("reference"), *kernels("flex", cpu=False)])
def test_lse_has_a_gradient(kernel):
    documents = DOCUMENTS["padded_tail"]
    (*qkv, _), layout = row_of(kernel, documents)
    real = ~documents.padded().to(layout.device)
    weights = torch.randn(6, int(real.sum()), generator=torch.Generator().manual_seed(1))

    def ours(q, k, v):
        return packed_attention(q, k, v, layout, backend=kernel[0], return_lse=True)[1][:, real]

    def plain(q, k, v):
        return oracle.attend(q, k, v, documents)[1][:, real]

    assert_right(ours, plain, qkv, weights.to(layout.device))


def test_reference_has_a_forward_mode_gradient():
    layout = PackedLayout.from_lengths([3, 5])
    inputs = [torch.randn(8, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    attend = partial(packed_attention, layout=layout, backend="reference")
    torch.autograd.gradcheck(attend, inputs, check_forward_ad=True, fast_mode=True)


@everything
def test_views_of_a_fused_projection(kernel):
    """q, k and v as slices of one matrix product: no kernel may take them for contiguous."""
    documents = DOCUMENTS["padding_inside"]
    (q, k, v, _), layout = row_of(kernel, documents)
    exact, _ = oracle.attend(q.double(), k.double(), v.double(), documents)
    baseline, _ = oracle.attend(q, k, v, documents)
    fused = torch.cat([q, k, v], dim=1).split([6, 2, 2], dim=1)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    for views in (fused, heads_first):
        assert not any(x.is_contiguous() for x in views)
        assert_as_accurate(packed_attention(*views, layout, backend=kernel[0]), exact, baseline, 2)


@pytest.mark.pairwise(
    kernel=kernels(*ALL), mask=["causal", "bidirectional_window"], changed=[0, 1, 2]
)
def test_changing_one_document_changes_no_bit_of_another(kernel, mask, changed):
    name, device, dtype = kernel
    documents = DOCUMENTS["boundary_off_block"]
    first, layout = row_of(kernel, documents)
    head_dim = head_dim_on(device)
    second = random_qkv(TOKENS, 6, 2, head_dim, dtype=dtype, device=device, seed=1)
    start, end = documents.spans()[changed]
    mixed = [x.clone() for x in first]
    for x, other in zip(mixed, second, strict=True):
        x[start:end] = 3 * other[start:end]  # larger, so that the softmax's maximum moves too

    def run(q, k, v, grad):
        def ours(*qkv):
            promise = {"deterministic": name in ("fa2", "fa3", "fa4")}
            return packed_attention(*qkv, layout, backend=name, **promise, **MASKS[mask])

        if not differentiable(kernel):
            return [ours(q, k, v)]
        out, grads = differentiate(ours, [q, k, v], grad)
        return [out, *grads]

    if "window" in MASKS[mask] and "window" in LACKS.get(name, ()):
        return
    with torch_is_deterministic(name in ("varlen", "nested")):  # which are only so under it
        before, after = run(*first), run(*mixed)
    others = torch.ones(TOKENS, dtype=torch.bool, device=device)
    others[start:end] = False
    if kernel[:2] == ("sdpa", "cuda") or name == "flex_fa4":  # no deterministic backward
        before, after = before[:1], after[:1]
    for what, x, y in zip(("out", "dq", "dk", "dv"), before, after, strict=False):
        assert torch.equal(x[others], y[others]), f"{what} of another document has changed"
        assert not torch.equal(x[~others], y[~others]), f"{what} of the changed document has not"


@everything
@pytest.mark.parametrize("documents", ["boundary_off_block", "padded_tail", "padding_inside"])
def test_spare_slots_and_a_larger_bound_change_nothing(kernel, documents):
    name, device, _ = kernel
    documents = DOCUMENTS[documents]
    (*qkv, _), tight = row_of(kernel, documents)
    loose = layout_of(documents, device=device, capacity=50, max_seqlen_bound=TOKENS)
    outs = [packed_attention(*qkv, layout, backend=name) for layout in (tight, loose)]
    assert torch.equal(*outs)
    check(kernel, documents, layout=loose)


@pytest.mark.parametrize("kernel", kernels("reference", "sdpa", gpu=False))
def test_unwritten_memory_reaches_nothing_on_the_cpu(kernel):
    """torch fills what it allocates with NaN in this mode."""
    with torch_is_deterministic():
        assert torch.utils.deterministic.fill_uninitialized_memory
        check(kernel, DOCUMENTS["padding_inside"])
        check(kernel, DOCUMENTS["nothing_but_padding"])


@pytest.mark.parametrize("kernel", kernels(*ALL, cpu=False))
def test_unwritten_memory_reaches_nothing_on_the_gpu(kernel):
    """The flash kernels leave rows past the last boundary unwritten, gradients included."""
    for _ in range(10):  # which block the allocator hands out is its own choice
        check(kernel, Documents((130, 61), 1024))


@pytest.mark.parametrize("kernel", kernels("reference", "flex", "fa2", "fa3", "fa4", cpu=False))
def test_deterministic_backward_gives_the_same_bits_every_time(kernel):
    name, device, dtype = kernel
    *qkv, grad = random_qkv(4096, 6, 2, 64, dtype=dtype, device=device)
    layout = PackedLayout.from_lengths([1000, 2000, 500], total_tokens=4096, device=device)

    def ours(q, k, v):
        return packed_attention(q, k, v, layout, backend=name, deterministic=True)

    _, first = differentiate(ours, qkv, grad)
    for _ in range(5):
        _, again = differentiate(ours, qkv, grad)
        assert_same_bits(again, first)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_made_once_serves_every_layer(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    (q, k, v, _), layout = row_of((None, device, dtype), DOCUMENTS["padding_inside"])
    for name in BACKENDS:
        if why_not(name, device=device, dtype=dtype, needs_grad=False) is not None:
            continue
        window = None if "window" in LACKS.get(name, ()) else 20
        plan = get_backend(name).plan(DocumentMask.of(layout, window=window))
        ours = packed_attention(q, k, v, layout, backend=name, window=window, plan=plan)
        fresh = packed_attention(q, k, v, layout, backend=name, window=window)
        assert torch.equal(ours, fresh), name


@pytest.mark.parametrize(
    "bad", [{"window": 4.0}, {"window": True}, {"causal": 1}, {"chunk": 2.0}], ids=str
)
def test_an_argument_of_the_wrong_type_is_no_repetition_of_a_good_one(bad):
    """1, 1.0 and True are one key of a dict: what was served must not stand for them."""
    layout = PackedLayout.from_lengths([8])
    three = random_qkv(8, 2, 2, 8)[:3]
    good = {name: True if name == "causal" else int(value) for name, value in bad.items()}
    packed_attention(*three, layout, backend="reference", **good)
    with pytest.raises(ValueError, match="must be"):
        packed_attention(*three, layout, backend="reference", **bad)


def test_what_was_served_is_no_answer_for_another_layout():
    class Own(PackedLayout):
        pass

    def own(lengths):
        layout = Own.from_lengths(lengths)
        assert type(layout) is Own
        return layout

    three = random_qkv(8, 2, 2, 8)[:3]
    packed_attention(*three, own([8]), backend="reference")
    for layout in (own([8 + 4]), PackedLayout.from_lengths([8 + 4])):
        with pytest.raises(ValueError, match="total_tokens"):
            packed_attention(*three, layout, backend="reference")
