"""`verify_isolation`, and the halves by which documents are replaced."""

import itertools

import pytest
import torch

import flexvarlen as fv
from flexvarlen.patches.isolation.report import IsolationError
from flexvarlen.patches.isolation.tokens import halves, with_other_tokens
from flexvarlen.patches.isolation.verify import verify_isolation
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.models import build_model

LENGTHS = (5, 11, 1, 8, 7)


@pytest.fixture(scope="module")
def model():
    return build_model("llama")[0].eval()


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    return PackedBatch(torch.randint(1024, (1, sum(LENGTHS)), generator=generator), LENGTHS)


@pytest.mark.parametrize("num_docs", [0, 1, 2, 3, 5, 8, 21])
def test_every_ordered_pair_of_documents_is_separated(num_docs):
    separated = {
        pair
        for replaced, watched in halves(num_docs)
        for pair in itertools.product(replaced, watched)
    }
    assert separated == set(itertools.permutations(range(num_docs), 2))


def test_replaced_documents_change_in_every_token_and_others_in_none():
    ids = torch.randint(50, (20,))
    changed = with_other_tokens(ids, [slice(4, 15)], 50, seed=0)
    assert (changed != ids).tolist() == [False] * 4 + [True] * 11 + [False] * 5
    assert changed.max() < 50


def test_unpatched_packed_model_is_named_with_layer_and_documents(model, batch):
    with pytest.raises(IsolationError, match="leaks into document") as caught:
        verify_isolation(model, batch)
    assert caught.value.layer == 0
    assert caught.value.source < caught.value.target  # causal attention leaks forward only
    source, target = caught.value.source, caught.value.target
    starts = [sum(LENGTHS[:document]) for document in (source, target)]
    for document, start in zip((source, target), starts, strict=True):
        end = start + LENGTHS[document] - 1
        assert f"document {document} (tokens {start} to {end})" in str(caught.value)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_patched_model_passes(model, batch, backend):
    with fv.patched(model, backend):
        verify_isolation(model, batch)


def test_a_batch_the_model_honours_passes_and_one_it_ignores_raises(model, batch):
    """transformers honours position_ids without a cache, and casts document ids to booleans."""
    without_cache = batch.inputs() | {"use_cache": False}
    verify_isolation(model, without_cache)
    numbers = torch.repeat_interleave(torch.arange(1, 6), torch.tensor(LENGTHS))[None]
    numbered = {"input_ids": batch.input_ids, "attention_mask": numbers}
    with pytest.raises(IsolationError):
        verify_isolation(model, numbered)
    with fv.patched(model, "sdpa"):
        verify_isolation(model, numbered)


@pytest.mark.gpu
def test_a_collators_row_passes_on_a_gpu():
    row = fv.PackedCollator(total_tokens=32)([{"input_ids": [5] * n} for n in (9, 12)])
    model = fv.patch_model(build_model("llama", device="cuda")[0], "reference")
    assert verify_isolation(model, row).gradients == "bits"


def test_padded_rows_of_an_unpatched_model_pass(model):
    """Padding is no document: what a mask hides may be anything."""
    mask = torch.tensor([[1] * 6 + [0] * 4, [1] * 10])
    ids = torch.randint(1024, (2, 10), generator=torch.Generator().manual_seed(1))
    verify_isolation(model, {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"documents": 0}, "documents must be at least 1"),
        ({"documents": [7]}, "documents must be indices from 0 to 4"),
        ({"layout": fv.PackedLayout.from_lengths([5, 5])}, "layout must cover"),
    ],
)
def test_bad_option_is_one_sentence(model, batch, change, words):
    with pytest.raises(ValueError, match=words):
        verify_isolation(model, batch, **change)


def test_bad_model_or_batch_is_one_sentence(model, batch):
    with pytest.raises(ValueError, match="must be, or wrap, a transformers PreTrainedModel"):
        verify_isolation(torch.nn.Linear(2, 2), batch)
    with pytest.raises(ValueError, match="at least two documents, got 1"):
        verify_isolation(model, {"input_ids": batch.input_ids})


def test_sample_replaces_some_documents_and_watches_all_others(model, batch):
    with fv.patched(model, "sdpa"):
        report = verify_isolation(model, batch, documents=1, seed=3)
        again = verify_isolation(model, batch, documents=1, seed=3)
    assert report == again
    assert (len(report.documents), report.num_docs, report.forwards) == (1, 5, 3)
    with pytest.raises(IsolationError) as caught:
        verify_isolation(model, batch, documents=[2])
    assert (caught.value.source, caught.value.target) == (2, 3)


@pytest.mark.parametrize("lengths", [(3, 4), (1,) * 21])
def test_cost_is_what_the_docstring_says(model, lengths):
    ids = torch.randint(3, 1024, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with fv.patched(model, "sdpa"):
            report = verify_isolation(model, PackedBatch(ids, lengths))
    finally:
        handle.remove()
    assert report.forwards == len(calls) == 2 + 2 * (len(lengths) - 1).bit_length()
    assert (report.layers, report.gradients) == (2, "bits")


def test_a_loss_that_leaves_no_logits(model, batch, monkeypatch):
    """As a fused cross-entropy does, which is all that labels could bring."""
    forward = type(model).forward

    def fused(self, *args, labels=None, num_items_in_batch=None, **kwargs):
        assert num_items_in_batch is None
        out = forward(self, *args, **kwargs)
        if labels is not None:
            out.logits = None
        return out

    monkeypatch.setattr(type(model), "forward", fused)
    inputs = batch.inputs()
    counted = torch.tensor(batch.total_tokens)
    with fv.patched(model, "sdpa"):
        verify_isolation(
            model, {**inputs, "labels": inputs["input_ids"], "num_items_in_batch": counted}
        )
