"""Models whose images replace tokens before a verified text model, and change nothing else.

That packed equals one by one is tested for all families in test_families.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import flexvarlen as fv
from tests.oracle import assert_as_accurate
from tests.patches.models.contract import CASES
from tests.patches.models.tower_images import (
    PROCESSORS,
    documents,
    inputs_of,
    lengths,
)
from tests.tiny_models import new_model, shared_model


def layout(name):
    return fv.PackedLayout.from_lengths(lengths(name))


@pytest.mark.parametrize("name", PROCESSORS)
def test_images_of_another_document(name):
    """Two images of one size change places: their documents change, and no other one's bit."""
    model, inputs = shared_model(name), inputs_of(name, documents(name))
    pixels = inputs["pixel_values"].clone()
    images = pixels[0] if name == "smolvlm" else pixels  # 6 of them: of documents 0, 2 and 3
    images[[1, 5]] = images[[5, 1]]
    swapped = {**inputs, "pixel_values": pixels}
    with torch.no_grad(), fv.patched(model, "sdpa"):
        before, after = (
            model(**x, packed_layout=layout(name)).logits[0].split(lengths(name))
            for x in (inputs, swapped)
        )
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert changed == [False, False, True, True, False]


@pytest.mark.parametrize("name", PROCESSORS)
def test_padded_rows(name):
    """Images in two rows, one or two documents in each, padding on the left of the first."""
    exact, baseline = CASES[f"{name}, images"].alone("packed_layout")
    width = max(sum(lengths(name)[:2]), lengths(name)[2]) + 3
    ids, types, mask = (torch.zeros(2, width, dtype=torch.long) for _ in range(3))
    for row, at, indices in ((0, width - sum(lengths(name)[:2]), (0, 1)), (1, 0, (2,))):
        for index in indices:
            tokens = slice(at, at + lengths(name)[index])
            ids[row, tokens], mask[row, tokens] = documents(name)[index].ids, index + 1
            types[row, tokens] = documents(name)[index].types
            at = tokens.stop
    inputs = {**inputs_of(name, documents(name)[:3]), "input_ids": ids, "attention_mask": mask}
    inputs |= {key: types for key in inputs if key == PROCESSORS[name].types}
    with torch.no_grad(), fv.patched(shared_model(name), "sdpa") as model:
        found = model(**inputs, use_cache=False).logits[mask > 0]
    alone = (x.logits[: sum(lengths(name)[:3])] for x in (exact, baseline))
    assert_as_accurate(found, *alone, 2)


@pytest.mark.parametrize("name", PROCESSORS)
def test_base_model_alone(name):
    """Its documents come with its own call."""
    model, inputs = new_model(name), inputs_of(name, documents(name))
    whole = shared_model(name)
    with torch.no_grad():
        with fv.patched(whole, "sdpa"):
            expected = whole.model(**inputs, packed_layout=layout(name)).last_hidden_state
        base = fv.patch_model(model.model, "sdpa")
        found = base(**inputs, packed_layout=layout(name)).last_hidden_state
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", PROCESSORS)
def test_padded_batch_that_is_unpadded(name):
    """Images go with the real tokens, in their order."""
    exact, baseline = CASES[f"{name}, images"].alone("packed_layout")
    some = documents(name)
    ids, types = (
        pad_sequence([getattr(x, key) for x in some], batch_first=True) for key in ("ids", "types")
    )
    mask = pad_sequence([torch.ones_like(x.ids) for x in some], batch_first=True)
    inputs = {**inputs_of(name, some), "input_ids": ids, "attention_mask": mask}
    inputs |= {key: types for key in inputs if key == PROCESSORS[name].types}
    with torch.no_grad(), fv.patched(shared_model(name), "sdpa", unpad=True) as model:
        found = model(**inputs).logits[mask > 0]
    assert_as_accurate(found, exact.logits, baseline.logits, 2)


def test_images_in_a_tree():
    model = fv.patch_model(new_model("internvl"), "sdpa")
    inputs = inputs_of("internvl", documents("internvl")[:1])
    tree = fv.PackedLayout.from_tree([8, 2, inputs["input_ids"].shape[1] - 10], [-1, 0, 0])
    with pytest.raises(NotImplementedError, match="trees is not supported with images"):
        model(**inputs, packed_layout=tree)


def test_images_of_a_shard():
    with pytest.raises(NotImplementedError, match="takes images, whose tokens cannot be sharded"):
        fv.patch_model(new_model("smolvlm"), sequence_parallel_group=object())
