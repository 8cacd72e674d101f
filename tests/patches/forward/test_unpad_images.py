"""`patch_model(unpad=True)` of models of text and images: a padded batch in and out.

The reference is the unpatched model on the same padded batch.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

import flexvarlen as fv
from tests.patches.forward.padded_runs import (
    assert_same,
    pair,
    seen_tokens,
    unpadding,
)
from tests.patches.models.contract import forget_positions
from tests.patches.models.images import BEGIN, END, IMAGE, KINDS, documents, inputs_of
from tests.tiny_models import config_of, new_model

VIDEO = 91
ALL_KINDS = (*KINDS, "qwen3_5_moe")
SOME = documents()[:3]  # one image, none, two
TEXTS = [documents()[i] for i in (1, 4)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:flexvarlen. recurrent layers run one document after another"
)


def rows_of(ids, types, side):
    """Ids and types `[L]` of documents as a padded batch, and labels that no padding predicts."""

    def rows(columns, value=0):
        return pad_sequence(columns, batch_first=True, padding_value=value, padding_side=side)

    labels = [torch.cat([torch.tensor([-100]), x[1:]]) for x in ids]
    return {
        "input_ids": rows(ids),
        "mm_token_type_ids": rows(types),
        "attention_mask": rows([torch.ones_like(x) for x in ids]),
        "labels": rows(labels, -100),
    }


def padded(some=SOME, side="right"):
    """What a processor gives for these documents, and labels: no pixel_values without images."""
    return inputs_of(some) | rows_of([x.ids for x in some], [x.types for x in some], side)


def videos(kind):
    """A batch of two documents of text and a video each: Qwen3 has text between its frames."""
    grid = torch.tensor([(2, 4, 6), (3, 4, 4)])
    ids, types = [], []
    for text, (frames, height, width) in zip(([5, 6], [9]), grid.tolist(), strict=True):
        runs, of_frame = (frames, 1) if kind.startswith("qwen3") else (1, frames)
        tokens = of_frame * height * width // 4
        own = [*text, *[11, BEGIN, *[VIDEO] * tokens, END] * runs, 13]
        ids.append(torch.tensor(own))
        types.append(2 * (ids[-1] == VIDEO).long())
    pixels = torch.randn(int(grid.prod(-1).sum()), 96, generator=torch.Generator().manual_seed(5))
    inputs = {"pixel_values_videos": pixels, "video_grid_thw": grid}
    if kind == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([1.0, 0.5])
    return inputs | rows_of(ids, types, "left")


def real_tokens(some):
    return sum(len(x.ids) for x in some)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_loss_and_hidden_states_of_a_language_model(kind, side):
    plain, ours, shapes = pair("ImageTextToText", kind)
    inputs = padded(side=side)
    out, expected = assert_same(plain, ours, inputs | {"output_hidden_states": True})
    assert shapes == [(1, real_tokens(SOME))]
    real = inputs["attention_mask"] == 1
    found = (out.logits, *out.hidden_states)
    assert len(found) > 2
    for states, of_padded in zip(found, (expected.logits, *expected.hidden_states), strict=True):
        torch.testing.assert_close(states[real], of_padded[real], rtol=1e-4, atol=1e-4)
        assert not states[~real].any()


@pytest.mark.parametrize("kind", KINDS)
def test_videos(kind):
    plain, ours, shapes = pair("ImageTextToText", kind)
    inputs = videos(kind)
    assert_same(plain, ours, inputs)
    assert shapes == [(1, int(inputs["attention_mask"].sum()))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_text_after_images(kind):
    """Positions of the batch before must not be used again, nor may images be needed."""
    plain, ours, shapes = pair("ImageTextToText", kind)
    with torch.no_grad():
        ours(**padded())
    forget_positions(plain)
    inputs = padded(TEXTS)
    assert "pixel_values" not in inputs
    assert_same(plain, ours, inputs)
    del inputs["mm_token_type_ids"]
    assert_same(plain, ours, inputs)
    assert shapes[1:] == 2 * [(1, real_tokens(TEXTS))]


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_loss_of_a_router(kind):
    plain, ours, _ = pair("ImageTextToText", kind)
    for model in (plain, ours):
        model.config.text_config.output_router_logits = True
    out, _ = assert_same(plain, ours, padded())
    assert out.aux_loss > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing(kind):
    plain, ours, _ = pair("ImageTextToText", kind)
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(plain, ours, padded())


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_four_rows(kind):
    """Text, time, height and width, `[4, B, S]`, as `generate` makes them."""
    plain, ours, shapes = pair("ImageTextToText", kind)
    inputs = padded(side="left")
    names = ("input_ids", "mm_token_type_ids", "attention_mask", "image_grid_thw")
    rope, _ = plain.model.get_rope_index(**{name: inputs[name] for name in names})
    text = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    rope[:, 0, -2:] += 3  # others than the model would make
    given = inputs | {"position_ids": torch.cat([text[None], rope])}
    _, expected = assert_same(plain, ours, given)
    assert shapes == [(1, real_tokens(SOME))]
    with torch.no_grad():
        assert (plain(**inputs).loss - expected.loss).abs() > 1e-4


def test_a_grid_of_the_shape_of_the_batch():
    """`[1, 3]` for one row of three tokens: it has no value for each token."""
    plain, ours, shapes = pair("ImageTextToText", "qwen3_vl")
    inputs = {
        "input_ids": torch.tensor([[IMAGE, 5, 0]]),
        "mm_token_type_ids": torch.tensor([[1, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 0]]),
        "labels": torch.tensor([[-100, 5, -100]]),
        "pixel_values": torch.randn(4, 96),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }
    assert_same(plain, ours, inputs)
    assert shapes == [(1, 2)]


def test_spare_tokens_stand_for_no_image():
    """They fill up a row behind a batch whose last token is part of an image."""
    plain, _, _ = pair("ImageTextToText", "qwen2_vl")
    last = documents()[0]
    cut = int(last.types.nonzero()[-1]) + 1
    last = replace(last, ids=last.ids[:cut], types=last.types[:cut])
    inputs = padded([*SOME[1:], last], side="left")
    assert inputs["input_ids"][-1, -1] == IMAGE
    ours = fv.patch_model(copy.deepcopy(plain), "sdpa", unpad=True, unpad_to_multiple_of=64)
    shapes = seen_tokens(ours)
    assert_same(plain, ours, inputs)
    assert shapes == [(1, 128)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("head", "num_labels"),
    [("SequenceClassification", 1), ("SequenceClassification", 3), ("TokenClassification", 3)],
)
def test_loss_of_a_classifier(head, num_labels, side):
    config = config_of("qwen3_5")
    config.num_labels = config.text_config.num_labels = num_labels
    torch.manual_seed(0)
    auto_class = getattr(transformers, f"AutoModelFor{head}")
    plain = auto_class.from_config(config, attn_implementation="eager").eval()
    ours = unpadding(plain)
    inputs = padded(side=side)
    if head == "TokenClassification":
        inputs["labels"] = (inputs["input_ids"] % 3).where(inputs["attention_mask"] == 1, -100)
    else:
        inputs["labels"] = torch.tensor([0.3, -1.0, 2.0] if num_labels == 1 else [0, 2, 1])
    shapes = seen_tokens(ours)
    assert_same(plain, ours, inputs)
    assert shapes == [(1, real_tokens(SOME))]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_generates_as_the_unpatched_model(kind, use_cache):
    model = new_model(kind)
    inputs = padded(side="left")
    del inputs["labels"]
    some = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = [
        each.generate(**inputs, **some, use_cache=use_cache) for each in (model, unpadding(model))
    ]
    assert torch.equal(*found)


def test_base_model_alone():
    model = new_model("qwen3_vl").model
    ours, inputs = unpadding(model), padded()
    del inputs["labels"]
    real = inputs["attention_mask"] == 1
    with torch.no_grad():
        expected, found = (x(**inputs).last_hidden_state for x in (model, ours))
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
    assert not found[~real].any()


def with_answers(document, answers, patches=None):
    """A prompt with images, and each answer to it."""
    made = []
    for answer in answers:
        ids = torch.cat([document.ids, torch.tensor(answer)])
        types = torch.cat([document.types, torch.zeros(len(answer), dtype=torch.long)])
        own = document.patches if patches is None else patches
        made.append(replace(document, ids=ids, types=types, patches=own))
    return made


PROMPT = documents()[2]
GROUP = [
    *with_answers(PROMPT, [[7, 8, 9], [9, 5], [7, 8, 11, 12]]),
    *TEXTS,
    *with_answers(PROMPT, [[7, 8]], PROMPT.patches.flip(0)),  # the same ids, other images
]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_prompt_with_images_is_shared(kind):
    plain, ours, shapes = pair(
        "ImageTextToText",
        kind,
        lambda model: fv.patch_model(copy.deepcopy(model), "sdpa", unpad=True, share_prefixes=True),
    )
    patches = []
    ours.model.visual.register_forward_pre_hook(lambda _, given: patches.append(len(given[0])))
    assert_same(plain, ours, padded(GROUP))
    assert shapes == [(1, real_tokens(GROUP) - 2 * len(PROMPT.ids))]
    assert patches == [2 * len(PROMPT.patches)]


def test_images_without_grids_are_not_shared():
    model = fv.patch_model(new_model("qwen3_vl"), "sdpa", unpad=True, share_prefixes=True)
    inputs = padded(GROUP)
    types = inputs.pop("mm_token_type_ids")
    positions = torch.arange(types.shape[1]).expand(4, *types.shape)
    with pytest.raises(
        NotImplementedError,
        match="is not supported with images of models other",
    ):
        model(**inputs, position_ids=positions)
    short = {"pixel_values": inputs["pixel_values"][:-1], "mm_token_type_ids": types}
    with pytest.raises(ValueError, match="image_grid_thw must have a row for each run"):
        model(**inputs | short)
