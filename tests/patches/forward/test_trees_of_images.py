"""Samples that share a prompt with images: the same logits and gradients as each alone."""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from tests.patches.models import images
from tests.patches.models.contract import forget_positions
from tests.tiny_models import new_model


def sample(document, answer, patches=None):
    """A prompt with images and an answer of text, which alone is learned."""
    ids = torch.cat([document.ids, torch.tensor(answer)])
    types = torch.cat([document.types, torch.zeros(len(answer), dtype=torch.long)])
    labels = ids.clone()
    labels[: len(document.ids)] = -100
    columns = {"input_ids": ids, "mm_token_type_ids": types, "labels": labels}
    if len(document.grid):
        columns["pixel_values"] = document.patches if patches is None else patches
        columns["image_grid_thw"] = document.grid
    return columns


DOCUMENTS = images.documents()
TWO_IMAGES = DOCUMENTS[2]
SAMPLES = [
    sample(TWO_IMAGES, [5, 6, 7, 8]),
    sample(DOCUMENTS[1], [5, 6]),  # text alone
    sample(TWO_IMAGES, [5, 9]),
    sample(TWO_IMAGES, [5, 6, 7, 8], TWO_IMAGES.patches.flip(0)),  # the same text, other images
    sample(DOCUMENTS[0], [11]),
    sample(TWO_IMAGES, [8, 8, 8]),
]


def alone(model, columns):
    forget_positions(model)
    inputs = {name: x[None] if x.ndim == 1 else x for name, x in columns.items()}
    inputs.pop("labels")
    return model(**inputs, use_cache=False).logits[0]


@pytest.mark.parametrize("family", images.KINDS)
def test_each_sample_is_as_alone(family):
    model = new_model(family)
    logits = [alone(model, columns) for columns in SAMPLES]
    weights = [torch.randn(x.shape, generator=torch.manual_seed(i)) for i, x in enumerate(logits)]
    sum((x * w).sum() for x, w in zip(logits, weights, strict=True)).backward()
    expected = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    fv.patch_model(model, "sdpa")
    shared = fv.share_prefixes(SAMPLES, model=model, total_tokens=150)
    once = [TWO_IMAGES.patches, TWO_IMAGES.patches.flip(0), DOCUMENTS[0].patches]
    assert len(shared.images["pixel_values"]) == sum(map(len, once))
    batch = shared.batch()
    found = shared.unfold(model(**batch).logits)
    for x, y in zip(found, logits, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)
    sum((x * w).sum() for x, w in zip(found, weights, strict=True)).backward()
    for name, x in model.named_parameters():
        assert (x.grad - expected[name]).norm() < 2e-5 * expected[name].norm(), name


def test_images_of_the_row_change_with_those_of_a_sample():
    model = fv.patch_model(new_model("qwen3_vl"))
    before, after = (
        model(**fv.share_prefixes([sample(TWO_IMAGES, [5, 6], x)], model=model).batch()).loss
        for x in (TWO_IMAGES.patches, TWO_IMAGES.patches.flip(0))
    )
    assert not torch.equal(before, after)


def test_a_shared_prompt_too_short_to_share_repeats_its_images():
    shared = fv.share_prefixes(SAMPLES[:3], model=new_model("qwen3_vl"), min_tokens=200)
    assert len(shared.images["pixel_values"]) == 2 * len(TWO_IMAGES.patches)


def test_a_collator_makes_the_same_row():
    model = new_model("qwen2_vl")
    expected = fv.share_prefixes(SAMPLES, model=model).batch()
    batch = fv.TreeCollator(model=model)(SAMPLES)
    layouts = [x.pop("packed_layout") for x in (batch, expected)]
    assert torch.equal(*(x.position_ids() for x in layouts))
    assert batch.keys() == expected.keys()
    assert all(torch.equal(x, batch[name]) for name, x in expected.items())


def without_text_after():
    """An image, then labels that differ: its last token would predict two."""
    ids, types = TWO_IMAGES.ids[:-3], TWO_IMAGES.types[:-3]
    document = images.Document(ids, types, TWO_IMAGES.grid, TWO_IMAGES.patches)
    return [sample(document, [5]), sample(document, [6])]


WRONG = {
    "image_grid_thw must have a row for each run": [
        SAMPLES[0] | {"pixel_values": TWO_IMAGES.patches[:-4]}
    ],
    "mm_token_type_ids of sample 1 must have a value for each": [
        SAMPLES[0],
        SAMPLES[1] | {"mm_token_type_ids": torch.zeros(2, dtype=torch.long)},
    ],
    "for 0 runs of 0 tokens": [SAMPLES[0] | {"mm_token_type_ids": None}],
    "samples must not branch inside an image": without_text_after(),
}


@pytest.mark.parametrize("words", WRONG)
def test_mistakes_are_sentences(words):
    with pytest.raises(ValueError, match=words):
        fv.share_prefixes(WRONG[words], model=new_model("qwen3_vl"))


def test_the_model_must_be_given():
    with pytest.raises(ValueError, match="model must be given where samples have images"):
        fv.share_prefixes(SAMPLES)
    with pytest.raises(ValueError, match="model must have positions in three dimensions"):
        fv.TreeCollator(model=new_model("llama"))
