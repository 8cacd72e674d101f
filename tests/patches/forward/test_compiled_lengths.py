"""A compiled patched model on rows of ever other lengths: few graphs, where sizes may vary."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flexvarlen as fv
from tests import forms
from tests.tiny_models import VOCABULARY, new_model

# More than Dynamo's limit of 8 graphs, on both sides of 64, of powers of two and of 4·128 tokens.
LENGTHS = (40, 100, 64, 200, 513, 900, 129, 333, 50, 700)
MOST_GRAPHS = 3  # one for the first length, one for any, one where a kernel is launched otherwise
# Two computations of the same in fp32; a leak moves the logits by a tenth and more.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def inputs_of(form: str, batch: int, tokens: int) -> tuple[dict, list[list[slice]]]:
    """Keyword arguments of a forward, and where each row's documents are."""
    if form == "padding":
        ends = [max(tokens - 7 * row, 1) for row in range(batch)]
        mask = torch.arange(tokens)[None] < torch.tensor(ends)[:, None]
        return {"attention_mask": mask.long()}, [[slice(0, end)] for end in ends]
    if form == "plain":
        return {}, [[slice(0, tokens)]] * batch
    cut = tokens // 3
    row = forms.given(form, forms.row_of([cut, tokens - cut]))
    halves = [[slice(0, cut), slice(cut, tokens)]] * batch
    return {name: x.repeat(batch, 1) for name, x in row.items()}, halves


@pytest.mark.parametrize(
    ("backend", "form", "batch", "dynamic"),
    [
        ("sdpa", "plain", 1, None),
        ("sdpa", "plain", 1, True),
        ("sdpa", "plain", 3, None),
        ("sdpa", "position_ids", 1, None),
        ("sdpa", "position_ids", 1, True),
        ("sdpa", "document_ids", 1, None),
        ("sdpa", "padding", 3, None),
        ("flex", "position_ids", 1, None),
    ],
)
@pytest.mark.sampled(2)
def test_one_graph_a_length(backend, form, batch, dynamic):
    """At the ninth Dynamo gives up. A plain batch's second length did not trace at all."""
    torch._dynamo.reset()
    alone = new_model("llama", num_hidden_layers=1)
    model = fv.patch_model(new_model("llama", num_hidden_layers=1), backend)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=dynamic)
    for tokens in LENGTHS:
        ids = torch.randint(3, VOCABULARY, (batch, tokens))
        given, documents = inputs_of(form, batch, tokens)
        with torch.no_grad():
            logits = compiled(input_ids=ids, use_cache=False, **given).logits
            for row, places in enumerate(documents):
                for place in places:
                    expected = alone(input_ids=ids[row : row + 1, place]).logits[0]
                    torch.testing.assert_close(logits[row, place], expected, **TOLERANCE)
    assert counter.frame_count <= MOST_GRAPHS


def test_batches_of_other_numbers_of_rows():
    """The last batch of an evaluation is smaller, and `capacity` is the user's."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(x, capacity):
        layout = fv.PackedLayout.from_rows(*x.shape, device=x.device, capacity=capacity)
        return layout.cu_seqlens, layout.document_ids(), layout.position_ids()

    for capacity in (None, 16):
        counter.clear()
        for batch, tokens in ((4, 30), (4, 41), (3, 20), (2, 77), (5, 33), (8, 50)):
            layout = fv.PackedLayout.from_lengths([tokens] * batch, capacity=capacity or batch)
            found = compiled(torch.zeros(batch, tokens), capacity)
            expected = layout.cu_seqlens, layout.document_ids(), layout.position_ids()
            assert all(map(torch.equal, found, expected)), (batch, tokens, capacity)
        assert counter.frame_count <= MOST_GRAPHS


def test_one_graph_a_length_of_long_rows():
    """Past 8,192 tokens the number of slots grows with powers of two, and so do the graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(position_ids):
        return fv.PackedLayout.from_position_ids(position_ids).cu_seqlens

    sizes = [*range(8704, 16384, 1024), 17000, 20000, 30000]
    for tokens in sizes:
        cu_seqlens = compiled(torch.arange(tokens)[None] % 1000)
        assert cu_seqlens.unique().tolist() == [*range(0, tokens, 1000), tokens]
        assert len(cu_seqlens) == (128 if tokens <= 16384 else 256) + 1
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({"capacity": 2}, "capacity must be"), ({"max_seqlen_bound": 20}, "max_seqlen_bound must be")],
)
def test_rows_past_the_sizes(sizes, words):
    """Refused while the graph is made: kernels would leave out what is past them."""
    torch._dynamo.reset()
    model = fv.patch_model(new_model("llama", num_hidden_layers=1), "sdpa", **sizes)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(Exception, match=words):
        compiled(input_ids=torch.ones(3, 30, dtype=torch.long), use_cache=False)
