"""document_logprobs: those of each document alone, and never logits of more than a chunk."""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from flexvarlen import PackedLayout
from flexvarlen.measure import watch_compilation
from tests.layout.test_per_document import COMPILERS, FORMS

V = 11


def alone(logits, labels, slots):
    """Per document in plain torch: sums, counts, and per_token and entropies of the row."""
    per_token, entropies = (logits.new_zeros(len(logits)) for _ in range(2))
    sums, counts = [], []
    for slot in slots:
        start, end = slot or (0, 0)
        total, count = logits.new_zeros(()), 0
        for t in range(start + 1, end):
            if labels[t] == -100:
                continue
            p = logits[t - 1].softmax(0)
            total, count = total + p[labels[t]].log(), count + 1
            per_token[t] = p[labels[t]].log()
            entropies[t] = -(p * p.log()).sum()
        sums.append(total)
        counts.append(count)
    return torch.stack(sums) if sums else logits.new_zeros(0), counts, per_token, entropies


def new_labels(tokens, ignored=0.25):
    labels = torch.randint(0, V, (tokens,))
    return torch.where(torch.rand(tokens) < ignored, -100, labels)


@pytest.mark.parametrize("chunk_tokens", [2, 1024])
@pytest.mark.parametrize("form", FORMS)
def test_a_document_is_scored_by_other_than_its_own_logits(form, chunk_tokens):
    make, slots = FORMS[form]
    layout = make()
    logits = torch.randn(layout.total_tokens, V, dtype=torch.float64, requires_grad=True)
    labels = new_labels(layout.total_tokens)
    found = fv.document_logprobs(
        logits[None], labels[None], layout, entropy=True, chunk_tokens=chunk_tokens
    )
    sums, counts, per_token, entropies = alone(logits, labels, slots)
    means = sums / torch.tensor(counts).clamp(min=1)
    assert found.counts.tolist() == counts
    expected = (sums, means, per_token, entropies)
    torch.testing.assert_close(
        (found.sums, found.means, found.per_token, found.entropies), expected
    )
    grads = [torch.randn_like(x) for x in expected]
    losses = (
        sum((x * grad).sum() for x, grad in zip(of, grads, strict=True)) + 0 * logits.sum()
        for of in ((found.sums, found.means, found.per_token, found.entropies), expected)
    )
    of_found, of_alone = (torch.autograd.grad(loss, logits)[0] for loss in losses)
    torch.testing.assert_close(of_found, of_alone)


def test_the_head_sees_more_tokens_than_a_chunk():
    """Forward and backward; and the gradients are those of all logits at once."""
    layout = PackedLayout.from_lengths([9, 0, 20, 3], total_tokens=37)
    labels = new_labels(37)
    head = torch.nn.Linear(5, V, bias=False).double()
    hidden = torch.randn(1, 37, 5, dtype=torch.float64, requires_grad=True)
    seen, kept = [], []

    def counted(x):
        seen.append(len(x))
        return head(x)

    def pack(x):
        kept.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = fv.document_logprobs(
            hidden, labels, layout, head=counted, entropy=True, chunk_tokens=8
        )
    assert seen == [8, 8, 8, 8, 5]
    assert not [shape for shape in kept if shape[-1:] == (V,)], "logits are kept for the backward"
    loss = found.sums.square().sum() + found.entropies.sum()
    grads = torch.autograd.grad(loss, (hidden, head.weight))
    assert sorted(seen) == sorted([8, 8, 8, 8, 5] * 2)

    sums, _, _, entropies = alone(head(hidden[0]), labels, [(0, 9), None, (9, 29), (29, 32)])
    expected = torch.autograd.grad(sums.square().sum() + entropies.sum(), (hidden, head.weight))
    torch.testing.assert_close(grads, expected)


def test_token_logprobs_are_those_of_all_logits():
    head, hidden = torch.nn.Linear(5, V).double(), torch.randn(2, 9, 5).double().requires_grad_()
    labels = new_labels(18).view(2, 9)
    weights = torch.randn(2, 9).double()
    expected = -torch.nn.functional.cross_entropy(
        head(hidden).transpose(1, 2), labels, reduction="none"
    )
    found = fv.token_logprobs(hidden, labels, head=head, chunk_tokens=4)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(fv.token_logprobs(head(hidden), labels), expected)
    inputs = (hidden, *head.parameters())
    grads, wanted = (torch.autograd.grad((x * weights).sum(), inputs) for x in (found, expected))
    torch.testing.assert_close(grads, wanted)


# ---- the distribution that an engine sampled from ----


def sampled(logits, labels, temperature, kept):
    """In plain torch: only the kept tokens have a logit."""
    scaled = logits.double() / temperature
    for t, ids in enumerate(kept):
        if ids:
            masked = torch.full_like(scaled[t], -torch.inf)
            masked[ids] = scaled[t, ids]
            scaled = scaled.index_put((torch.tensor(t),), masked)
    return -torch.nn.functional.cross_entropy(scaled, labels, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_token_is_normalised_over_others_than_the_engine_kept(dtype):
    logits = torch.randn(9, V).mul(3).to(dtype).requires_grad_()
    labels = new_labels(9)
    kept = [sorted({i % V, (i + 4) % V, max(int(labels[i]), 0)}) for i in range(9)]
    kept[5] = []  # of a prompt: no tokens were cut
    mask = torch.tensor([ids + [-1] * (4 - len(ids)) for ids in kept])
    found = fv.token_logprobs(logits, labels, temperature=0.7, sampling_mask=mask, chunk_tokens=4)
    expected = sampled(logits, labels, 0.7, kept)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(x.sum(), logits)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads)
    layout = PackedLayout.from_lengths([9])
    of_row = fv.document_logprobs(
        logits, labels.roll(1), layout, temperature=0.7, sampling_mask=mask
    )
    torch.testing.assert_close(of_row.per_token[1:], found[:-1])


def test_masks_of_an_engine_are_aligned_with_the_tokens_before():
    one, other = fv.sampling_masks([[[7, 8], [9]], [[3]]], prompt_tokens=[2, 1])
    assert one.tolist() == [[-1, -1], [7, 8], [9, -1], [-1, -1]]
    assert other.tolist() == [[3, -1], [-1, -1]]
    shared = fv.share_prefixes([[5, 6, 7, 9], [5, 6, 8, 3]])
    kept = [[[7, 8], [9]], [[8, 7], [3, 1]]]  # in any order, also of the token that both share
    masks = fv.sampling_masks(kept, prompt_tokens=[2, 2])
    assert masks[1].tolist() == [[-1, -1], [7, 8], [1, 3], [-1, -1]]
    row = shared.fold(masks, -1)
    assert row.shape == (1, shared.layout.total_tokens, 2)
    assert all(map(torch.equal, shared.unfold(row), masks))


def folded(values):
    return fv.share_prefixes([[5, 6, 7], [5, 6, 8]]).fold(values, -1)


SAMPLING = {
    "temperature must be a positive number, got 0": lambda: fv.token_logprobs(
        torch.zeros(2, V), torch.tensor([1, 2]), temperature=0
    ),
    "sampling_mask must be a tensor of token ids": lambda: fv.token_logprobs(
        torch.zeros(2, V), torch.tensor([1, 2]), sampling_mask=[[1], [2]]
    ),
    "sampling_mask must be integers": lambda: fv.token_logprobs(
        torch.zeros(2, V), torch.tensor([1, 2]), sampling_mask=torch.ones(2, 1)
    ),
    r"ids for each of 2 tokens, got shape \(3, 1\)": lambda: fv.token_logprobs(
        torch.zeros(2, V), torch.tensor([1, 2]), sampling_mask=torch.tensor([[1], [2], [3]])
    ),
    "must contain the label": lambda: fv.token_logprobs(
        torch.zeros(2, V), torch.tensor([1, 2]), sampling_mask=torch.tensor([[2], [1]])
    ),
    "out of bounds|Expected index": lambda: fv.token_logprobs(
        torch.zeros(2, V), torch.tensor([1, 2]), sampling_mask=torch.tensor([[1, V], [2, -1]])
    ),
    "prompt_tokens must have a number for each of 1": lambda: fv.sampling_masks([[[1]]], [1, 2]),
    r"prompt_tokens\[0\] must be": lambda: fv.sampling_masks([[[1]]], [0]),
    r"kept\[0\]\[1\] must hold token ids": lambda: fv.sampling_masks([[[1], [-1]]], [1]),
    r"must have lengths \[3, 3\]": lambda: folded([torch.ones(3)]),
    "must be equal there": lambda: folded([torch.ones(3), 2 * torch.ones(3)]),
}


@pytest.mark.parametrize("sentence", SAMPLING)
def test_another_distribution_is_replayed(sentence):
    with pytest.raises((ValueError, RuntimeError, IndexError), match=sentence):
        SAMPLING[sentence]()


def test_a_document_changes_bits_of_another():
    layout = PackedLayout.from_lengths([4, 5, 3])
    logits, labels = torch.randn(12, V), new_labels(12, ignored=0)
    other_logits, other_labels = logits.clone(), labels.clone()
    other_logits[4:9] = float("nan")
    other_labels[4:9] = 0
    one = fv.document_logprobs(logits, labels, layout)
    other = fv.document_logprobs(other_logits, other_labels, layout)
    assert torch.equal(one.sums[[0, 2]], other.sums[[0, 2]])
    assert other.sums[1].isnan()


def test_a_document_without_labels_divides_by_zero():
    layout = PackedLayout.from_lengths([1, 3, 2], total_tokens=7)
    logits = torch.randn(7, V, requires_grad=True)
    labels = torch.tensor([3, 2, -100, -100, 5, 1, 0])
    found = fv.document_logprobs(logits, labels, layout)
    assert found.counts.tolist() == [0, 0, 1]
    assert (found.sums[:2].tolist(), found.means[:2].tolist()) == ([0, 0], [0, 0])
    found.means.sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.any(dim=1).tolist() == [False] * 4 + [True] + [False] * 2
    assert found.entropies is None


def test_a_masked_vocabulary_has_no_entropy():
    logits = torch.randn(3, V)
    logits[:, 4:] = -torch.inf
    logits.requires_grad_()
    found = fv.document_logprobs(
        logits, torch.tensor([0, 1, 2]), PackedLayout.from_lengths([3]), entropy=True
    )
    expected = torch.distributions.Categorical(logits=logits[:2, :4]).entropy()
    torch.testing.assert_close(found.entropies[1:], expected)
    (found.entropies.sum() + found.sums.sum()).backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_rounds_to_half_precision(dtype):
    logits = torch.randn(40, 300).to(dtype)
    labels = torch.randint(0, 300, (40,))
    layout = PackedLayout.from_lengths([40])
    found = fv.document_logprobs(logits, labels, layout)
    assert found.sums.dtype == found.per_token.dtype == torch.float32
    exact = fv.document_logprobs(logits.double(), labels, layout)
    torch.testing.assert_close(found.sums.double(), exact.sums, rtol=1e-6, atol=1e-5)


def test_the_callers_labels_are_masked_in_place():
    labels = torch.ones(1, 4, dtype=torch.int64)
    fv.document_logprobs(torch.randn(4, V), labels, PackedLayout.from_lengths([2, 2]))
    assert labels.tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.zeros(5, V)}, "total_tokens=4"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"each of 4 tokens.*int64 \(3,\)"),
        ({"labels": torch.zeros(4)}, "must be int64.*float32"),
        ({"labels": torch.zeros(4, dtype=torch.int64, device="meta")}, "device cpu, got meta"),
        ({"chunk_tokens": 0}, "at least 1, got 0"),
    ],
)
def test_an_input_that_does_not_fit_gives_torchs_error(change, sentence):
    given = {"x": torch.zeros(4, V), "labels": torch.zeros(4, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=sentence):
        fv.document_logprobs(layout=PackedLayout.from_lengths([4]), **given)


@pytest.mark.parametrize(("device", "backend"), COMPILERS)
def test_other_documents_compile_logprobs_again(device, backend):
    head = torch.nn.Linear(6, V, device=device)

    mask = torch.arange(V, device=device).expand(12, V).clone()
    mask[::2] = -1

    def scores(hidden, labels, layout):
        return fv.document_logprobs(
            hidden,
            labels,
            layout,
            head=head,
            entropy=True,
            temperature=2.0,
            sampling_mask=mask,
            chunk_tokens=5,
        )

    compiled = torch.compile(scores, backend=backend, fullgraph=True)
    compilations = []
    for lengths in ([3, 0, 2, 7], [4, 5], [1, 2, 3]):
        layout = PackedLayout.from_lengths(
            lengths, total_tokens=12, capacity=4, max_seqlen_bound=12, device=device
        )
        hidden = torch.randn(1, 12, 6, device=device, requires_grad=True)
        labels = new_labels(12).to(device)[None]
        grads = []
        with watch_compilation() as stats:
            found = compiled(hidden, labels, layout)
            loss = found.means.square().sum() + found.entropies.sum()
            grads.append(torch.autograd.grad(loss, (hidden, head.weight)))
        compilations.append(stats.compilations)
        expected = scores(hidden, labels, layout)
        loss = expected.means.square().sum() + expected.entropies.sum()
        grads.append(torch.autograd.grad(loss, (hidden, head.weight)))
        torch.testing.assert_close(*grads)
        for name in ("sums", "means", "counts"):
            one, other = getattr(found, name), getattr(expected, name)
            torch.testing.assert_close(one[: len(lengths)], other)
            assert not one[len(lengths) :].any()
        torch.testing.assert_close(found.per_token, expected.per_token)
    assert compilations == [1, 0, 0]


@pytest.mark.gpu
def test_logprobs_sync_or_hold_all_logits_on_a_gpu():
    tokens, hidden_size, vocabulary = 8192, 64, 32_000
    host = PackedLayout.from_lengths([3000, 0, 1, 5000], total_tokens=tokens)
    layout = host.to("cuda")
    head = torch.nn.Linear(hidden_size, vocabulary, bias=False, device="cuda")
    hidden = torch.randn(tokens, hidden_size, device="cuda", requires_grad=True)
    labels = torch.randint(0, vocabulary, (1, tokens), device="cuda")

    def step():
        found = fv.document_logprobs(hidden, labels, layout, head=head, chunk_tokens=256)
        return found, torch.autograd.grad(found.means.sum(), (hidden, head.weight))

    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, grads = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < tokens * vocabulary * 4 / 3, "at most a third of the logits"
    logits = hidden.double() @ head.weight.double().T
    expected = fv.document_logprobs(logits, labels, layout)
    of_expected = torch.autograd.grad(expected.means.sum(), (hidden, head.weight))
    torch.testing.assert_close(found.sums.double(), expected.sums, rtol=1e-5, atol=1e-3)
    for one, other in zip(grads, of_expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
