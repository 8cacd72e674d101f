"""Models of text and images: positions in three dimensions, padding between images, text alone.

That packed equals one by one is tested for all families in test_families.py, the vision towers in
test_vision_towers.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

import flexvarlen as fv
from tests.oracle import assert_as_accurate
from tests.patches.models.contract import CASES, forget_positions
from tests.patches.models.images import (
    KINDS,
    LENGTHS,
    ROW,
    documents,
    four_rows,
    inputs_of,
    layout,
    positions,
)
from tests.tiny_models import config_of, new_model


@pytest.mark.pairwise(name=KINDS, rows=[((0,), (2,)), ((0, 1), (2, 3))], left=[False, True])
def test_padded_rows(name, rows, left):
    """Padding between images, one document per row or two."""
    exact, baseline = CASES[f"{name}, images"].alone("packed_layout")
    width = max(sum(LENGTHS[i] for i in row) for row in rows) + 3
    ids, types, mask = (torch.zeros(2, width, dtype=torch.long) for _ in range(3))
    for row, indices in enumerate(rows):
        at = width - sum(LENGTHS[i] for i in indices) if left else 0
        for number, index in enumerate(indices):
            tokens = slice(at, at + LENGTHS[index])
            ids[row, tokens] = documents()[index].ids
            types[row, tokens] = documents()[index].types
            mask[row, tokens] = number + 1
            at += LENGTHS[index]
    order = [index for row in rows for index in row]
    inputs = {**inputs_of([documents()[i] for i in order]), "attention_mask": mask}
    inputs |= {"input_ids": ids, "mm_token_type_ids": types}
    with torch.no_grad():
        logits = fv.patch_model(new_model(name), "sdpa")(**inputs, use_cache=False).logits
    alone = (x.logits.split(LENGTHS) for x in (exact, baseline))
    assert_as_accurate(logits[mask > 0], *(torch.cat([x[i] for i in order]) for x in alone), 2)


REFUSED = {
    "three_rows_alone": (lambda rope: {"position_ids": rope[:, None]}, r"\[4, B, S\]"),
    "text_positions_on_images": (lambda rope: {"position_ids": ROW.position_ids}, "4 rows"),
    "five_rows": (lambda rope: {"position_ids": rope[[0, 0, 1, 1, 2]][:, None]}, "text row"),
    "types_left_out": (
        lambda rope: {"packed_layout": layout(), "mm_token_type_ids": None},
        "mm_token_type_ids",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_positions_that_tell_no_documents(case):
    make, words = REFUSED[case]
    model = fv.patch_model(new_model("qwen2_5_vl"), "sdpa")
    with pytest.raises(ValueError, match=words):
        model(**{**inputs_of(documents()), **make(positions("qwen2_5_vl"))})


def test_a_classifier_of_images():
    """One document per row has its images; packed rows may hold text alone."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config_of("qwen3_5", num_labels=2))
    model.eval()
    some, texts = documents()[:2], [x.ids[x.types == 0] for x in documents()]

    @torch.no_grad()
    def logits(**inputs):
        forget_positions(model)
        return model(**inputs).logits

    alone = torch.cat([logits(**inputs_of([x])) for x in some])
    texts_alone = torch.cat([logits(input_ids=x[None]) for x in texts])
    fv.patch_model(model, "sdpa")
    row = {**inputs_of(documents()), "packed_layout": layout()}
    with pytest.raises(NotImplementedError, match="must hold text alone"):
        logits(**row)
    padded = {
        "input_ids": pad_sequence([x.ids for x in some], batch_first=True),
        "mm_token_type_ids": pad_sequence([x.types for x in some], batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(x.ids) for x in some], batch_first=True),
    }
    torch.testing.assert_close(logits(**{**inputs_of(some), **padded}), alone)
    text_layout = fv.PackedLayout.from_lengths([len(x) for x in texts])
    found = logits(input_ids=torch.cat(texts)[None], packed_layout=text_layout)
    torch.testing.assert_close(found, texts_alone)


@pytest.mark.parametrize("name", KINDS)
def test_decoding_from_where_the_images_end(name):
    """Positions that nobody passes go on from those that were made for the prompt."""
    model, inputs = new_model(name), inputs_of(documents()[:1])

    def decode():
        forget_positions(model)
        with torch.no_grad():
            cache = model(**inputs, use_cache=True).past_key_values
            return model(torch.tensor([[7]]), past_key_values=cache).logits

    before = decode()
    fv.patch_model(model, "sdpa")
    torch.testing.assert_close(decode(), before, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_positions_after_the_images_of_another_batch(name):
    """Left to the model, positions of embeddings would be made of the placeholder mask."""
    model, ids = fv.patch_model(new_model(name), "sdpa"), documents()[1].ids[None]
    with torch.no_grad():
        expected = model(ids).logits
        model(**inputs_of(documents()[:1]))
        found = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", KINDS)
def test_text_tower_alone(name):
    exact, baseline = new_model(name).double().model.language_model, new_model(name).model
    baseline, rope = baseline.language_model, positions(name)
    ids = torch.cat([x.ids for x in documents()])[None]
    alone = []
    with torch.no_grad():
        for tower in (exact, baseline):
            pieces = zip(ids.split(LENGTHS, 1), rope[:, None].split(LENGTHS, 2), strict=True)
            out = [tower(x, position_ids=at, use_cache=False)[0][0] for x, at in pieces]
            alone.append(torch.cat(out))
        out = fv.patch_model(baseline, "sdpa")(ids, position_ids=four_rows(name)).last_hidden_state
    assert_as_accurate(out[0], *alone, 2)
