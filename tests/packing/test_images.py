"""Documents with images, collated into a row."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import flexvarlen as fv
from flexvarlen.packing import loader_pass
from flexvarlen.packing.rope_index import RopeIndex, rope_positions
from tests.patches.models import images, tower_images
from tests.tiny_models import new_model


def feature(document, kind=torch.Tensor):
    """What a processor returns for a document, with a row dimension or as lists."""
    given = {"input_ids": document.ids, "mm_token_type_ids": document.types}
    given["attention_mask"] = torch.ones_like(document.ids)
    if kind is torch.Tensor:
        given = {name: x[None] for name, x in given.items()}
    if len(document.grid):
        given |= {"pixel_values": document.patches, "image_grid_thw": document.grid}
    return given if kind is torch.Tensor else {name: kind(x) for name, x in given.items()}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", [torch.Tensor, torch.Tensor.tolist, torch.Tensor.numpy])
@pytest.mark.parametrize("family", images.KINDS)
def test_a_row_is_what_one_packs_by_hand(family, kind):
    total = sum(images.LENGTHS)
    model = fv.patch_model(new_model(family), "sdpa")
    collate = fv.PackedCollator(total_tokens=total + 5, model=model, capacity=len(images.LENGTHS))
    batch = collate([feature(x, kind) for x in images.documents()])
    expected = images.inputs_of(images.documents())
    assert torch.equal(batch["position_ids"][..., :total], images.four_rows(family))
    assert torch.equal(batch["image_grid_thw"], expected["image_grid_thw"])
    torch.testing.assert_close(batch["pixel_values"], expected["pixel_values"])
    assert torch.equal(batch["mm_token_type_ids"][0, :total], expected["mm_token_type_ids"][0])
    assert not batch["mm_token_type_ids"][0, total:].any()
    is_image = batch["mm_token_type_ids"] != 0
    assert (batch["labels"][is_image] == -100).all()
    assert (batch["labels"][~is_image] != -100).sum() == total - is_image.sum() - 5  # first tokens
    with torch.no_grad():
        logits = model(**batch).logits[:, :total]
        by_hand = model(**expected, position_ids=images.four_rows(family)).logits
        batch = fv.PackedCollator()([feature(x, kind) for x in images.documents()])
        assert "position_ids" not in batch
        made_by_the_model = model(**batch).logits[:, :total]
    torch.testing.assert_close(logits, by_hand)
    torch.testing.assert_close(made_by_the_model, by_hand)


@pytest.mark.parametrize("family", tower_images.PROCESSORS)
def test_a_row_of_models_without_grids(family):
    """Each document by a call of the processor of its own, whose padding differs."""
    documents = tower_images.documents(family)
    features = [tower_images.inputs_of(family, [x]) for x in documents]
    features = [
        {**x, "input_ids": x["input_ids"][0], "labels": x["input_ids"][0]} for x in features
    ]
    for each in features:
        each |= {
            name: each[name][0] for name in ("token_type_ids", "mm_token_type_ids") if name in each
        }
    model = fv.patch_model(new_model(family), "sdpa")
    row = tower_images.inputs_of(family, documents)
    layout = fv.PackedLayout.from_lengths(tower_images.lengths(family))
    with torch.no_grad():
        expected = model(**row, packed_layout=layout).logits
        found = model(**fv.PackedCollator(model=model)(features)).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", images.KINDS)
def test_positions_and_deltas_are_the_models_own_for_each_document(family):
    """Documents without images too, for which the model is not asked."""
    model, row = new_model(family).model, images.inputs_of(images.documents())
    grids = {"image_grid_thw": row["image_grid_thw"]}
    ids, types = row["input_ids"][0], row["mm_token_type_ids"][0]
    asked = []

    def rope(**inputs):
        asked.append(len(inputs["input_ids"]))
        return RopeIndex.of(model)(**inputs)

    positions, deltas = rope_positions(rope, images.layout(), ids, types, grids)
    assert asked == [sum(len(x.grid) > 0 for x in images.documents())]
    of_documents = positions.split(images.LENGTHS, dim=1)
    for document, found, delta in zip(images.documents(), of_documents, deltas, strict=True):
        own = model.get_rope_index(document.ids[None], document.types[None], document.grid)
        assert torch.equal(found[0], torch.arange(len(document.ids)))
        assert torch.equal(found[1:], own[0][:, 0])
        assert torch.equal(delta, own[1][0])


def test_images_of_another_document_change_the_logits():
    model, (first, _, third, *_) = fv.patch_model(new_model("qwen3_vl")), images.documents()
    documents = [feature(first), feature(third)]
    with torch.no_grad():
        before = model(**fv.PackedCollator()(documents)).logits
        documents[0]["pixel_values"] = documents[0]["pixel_values"].flip(0)
        after = model(**fv.PackedCollator()(documents)).logits
    length = len(first.ids)
    assert not torch.equal(before[:, :length], after[:, :length])
    torch.testing.assert_close(before[:, length : length + 11], after[:, length : length + 11])


def test_a_text_row_of_a_processor_has_positions_of_its_own():
    text = feature(images.documents()[1])
    batch = fv.PackedCollator(model=new_model("qwen3_vl"))([text, text])
    assert batch["position_ids"].ndim == 2
    assert "pixel_values" not in batch


def test_images_of_several_sizes_are_padded_with_zeros():
    """As Pixtral's processor pads those of one call."""
    one, two = np.ones((1, 3, 4, 6), np.float64), np.ones((2, 3, 8, 2), np.float64)
    tokens = {"input_ids": [5, 6], "completion_mask": [0, 1], "image_sizes": [[4, 6]]}
    given = [tokens | {"pixel_values": x} for x in (one, two)]
    batch = fv.PackedCollator()([{"input_ids": [1, 2]}, *given])
    assert batch["pixel_values"].shape == (3, 3, 8, 6)
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["pixel_values"].sum() == one.sum() + two.sum()
    assert batch["pixel_values"][0, :, :4].all()
    assert batch["pixel_values"][1:, ..., :2].all()
    assert batch["image_sizes"].tolist() == [[4, 6], [4, 6]]
    assert batch["position_ids"].ndim == 2


def test_two_sentences_are_no_image():
    document = {"input_ids": [5, 6, 7], "token_type_ids": [0, 1, 1]}
    batch = fv.PackedCollator(total_tokens=4)([document])
    assert batch["labels"].tolist() == [[-100, 6, 7, -100]]
    assert batch["token_type_ids"].tolist() == [[0, 1, 1, 0]]
    batch = fv.PackedCollator()([document | {"pixel_values": np.ones((1, 3, 2, 2))}])
    assert batch["labels"].tolist()[0][:3] == [-100, -100, -100]


def test_a_loader_worker_gets_no_weights():
    model = new_model("qwen2_5_vl")
    collate = fv.PackedCollator(model=model)
    parameters = sum(x.numel() for x in model.parameters())
    assert len(pickle.dumps(collate)) < 20_000 < parameters
    again = pickle.loads(pickle.dumps(collate))
    features = [feature(x) for x in images.documents()]
    assert torch.equal(again(features)["position_ids"], collate(features)["position_ids"])


IMAGE = {"input_ids": [1, 2], "pixel_values": np.ones((4, 2)), "image_grid_thw": [[1, 2, 2]]}
TYPES = {"mm_token_type_ids": [0, 1]}
NO_IMAGES, HIDDEN = {"mm_token_type_ids": [0, 0]}, {"attention_mask": [1, 0]}
TWO = {
    "input_ids": [1, 9, 2, 9],
    "mm_token_type_ids": [0, 1, 0, 1],
    "pixel_values": np.ones((8, 2)),
}
VIDEO = {
    "input_ids": [1, 2],
    "mm_token_type_ids": [0, 2],
    "pixel_values_videos": np.ones((4, 2)),
    "video_grid_thw": [[1, 2, 2]],
}
SECONDS = {"second_per_grid_ts": 0.5}
LIKE_GEMMA = {"input_ids": [1, 2], "labels": [1, 2], "pixel_values": np.ones((1, 3, 2, 2))}


@pytest.mark.parametrize(
    ("words", "features"),
    [
        ("a document with images must have mm_token_type_ids", [IMAGE | {"labels": [1, 2]}]),
        ("image_grid_thw must have a row for each run", [IMAGE | TYPES | NO_IMAGES]),
        (
            "image_grid_thw must have a row for each run",
            [IMAGE | TYPES, TYPES | {"input_ids": [1, 2]}],
        ),
        (
            "image_grid_thw must have a row for each run",
            [IMAGE | TYPES | HIDDEN],
        ),
        ("image_grid_thw must have a row for each run", [TWO | {"image_grid_thw": [[1, 2, 4]]}]),
        ("second_per_grid_ts must be given for all 2 videos", [VIDEO, VIDEO | SECONDS]),
        (
            "token_type_ids must be given for all documents with images",
            [LIKE_GEMMA, LIKE_GEMMA | {"token_type_ids": [0, 1]}],
        ),
        (
            "features with images must have labels, or token types",
            [{"input_ids": [1, 2], "pixel_values": LIKE_GEMMA["pixel_values"]}],
        ),
        (
            "input_ids must be one document where it has images, got 2 rows",
            {**IMAGE, "input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [1, 1]]},
        ),
        ("mm_token_type_ids must have a value for each", IMAGE | {"mm_token_type_ids": [1]}),
        (
            "pixel_values must have the same number of dimensions",
            [IMAGE | TYPES, IMAGE | TYPES | {"pixel_values": np.ones((4, 2, 2))}],
        ),
    ],
)
def test_mistakes_are_sentences(words, features):
    with pytest.raises(ValueError, match=words):
        fv.PackedCollator()(features)


def test_one_process_does_not_load_images_for_all(monkeypatch):
    monkeypatch.setattr("flexvarlen.packing.collator.is_dispatched", lambda: True)
    with pytest.raises(ValueError, match="cannot be loaded in one process") as raised:
        fv.PackedCollator()([IMAGE | TYPES])
    assert loader_pass.DISPATCH_NOTHING in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x | {"pixel_values": x["pixel_values"].bfloat16()},
        lambda x: x | {"pixel_values": list(x["pixel_values"].bfloat16())},
        lambda x: x | {"pixel_values": (x["pixel_values"] > 0).to(torch.uint8)},
        lambda x: x | {"image_grid_thw": x["image_grid_thw"][0]},
        lambda x: x | {"pixel_values_videos": [], "video_grid_thw": []},
    ],
)
def test_images_given_in_other_ways(change):
    """By the collator, and where samples share a prompt; beside a document without any."""
    model = fv.patch_model(new_model("qwen2_vl"), "sdpa")
    first, text = images.documents()[:2]
    features = [change(feature(first)), feature(text) | {"pixel_values": [], "image_grid_thw": []}]
    batch = fv.PackedCollator(model=model)(features)
    assert batch["image_grid_thw"].tolist() == first.grid.tolist()
    flat = [
        {n: x[0] if n in ("input_ids", "mm_token_type_ids") else x for n, x in f.items()}
        for f in features
    ]
    samples = [{n: x for n, x in f.items() if n != "attention_mask"} for f in flat]
    shared = fv.share_prefixes([*samples, samples[0]], model=model)
    assert shared.images["image_grid_thw"].tolist() == first.grid.tolist()
    with torch.no_grad():
        expected = model(**batch).logits
        found = shared.unfold(model(**shared.batch()).logits)
    torch.testing.assert_close(torch.cat(found[:2]), expected[0])


def test_pixels_of_two_kinds():
    whole, half = np.ones((1, 3, 4, 4), np.uint8), np.full((1, 3, 8, 8), 0.5)
    given = [{"input_ids": [1, 2], "labels": [1, 2], "pixel_values": x} for x in (whole, half)]
    assert fv.PackedCollator()(given)["pixel_values"].sum() == 48 + 96


def test_seconds_as_a_list():
    """As processors return them; a patched model reads them as an unpatched one does."""
    ids = torch.tensor([[7, 8, images.BEGIN, *[91] * 8, images.END, 5, 6]])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == 91) * 2}
    inputs |= {"pixel_values_videos": torch.randn(32, 96), "second_per_grid_ts": [3.0]}
    inputs |= {"video_grid_thw": torch.tensor([[2, 4, 4]])}
    model = new_model("qwen2_5_vl")
    with torch.no_grad():
        expected = model(**inputs).logits
        fv.patch_model(model, "sdpa")
        layout = fv.PackedLayout.from_lengths([ids.shape[1]])
        found = model(**inputs, packed_layout=layout).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_forward_whose_images_do_not_fit():
    """transformers would raise StopIteration, by which a loop ends as if it were done."""
    model, row = fv.patch_model(new_model("qwen2_vl")), images.inputs_of(images.documents())
    row["image_grid_thw"] = row["image_grid_thw"][:-1]
    with pytest.raises(ValueError, match="image_grid_thw must have a row for each run"):
        model(**row, packed_layout=images.layout())
