"""`compare` over documents with images: each alone with its own, and leaks from images."""

import pytest
import torch

import flexvarlen as fv
from flexvarlen.verify.compare import compare
from flexvarlen.verify.compare.pairs import model_drift
from tests.patches.forward.test_unpad_images import videos
from tests.patches.models import images, tower_images
from tests.slow import with_slow
from tests.tiny_models import new_model

pytestmark = pytest.mark.usefixtures("timed_briefly")


def collated(kind, model, **options):
    """The documents of a family with images, as the collator packs what its processor gives."""
    of = images if kind in images.KINDS else tower_images
    own = () if of is images else (kind,)
    features = []
    for document in of.documents(*own):
        inputs = of.inputs_of(*own, [document])
        ids = inputs["input_ids"]
        features.append({**inputs, "labels": ids, "attention_mask": torch.ones_like(ids)})
    return fv.PackedCollator(**options, model=model)(features)


@pytest.mark.parametrize("kind", with_slow(["qwen3_vl", "gemma3", "internvl"], ["internvl"]))
def test_each_document_has_its_own_images(kind):
    """Plain transformers loses Gemma 3's runs of images in a packed row."""
    model = new_model(kind)
    names = ["sdpa", "transformers:sdpa", "transformers:sdpa@default_cache"]
    report = compare(model, collated(kind, model, total_tokens=128), names)
    theirs = "wrong" if kind == "gemma3" else "right"
    assert [report.verdict(name) for name in names[:2]] == ["right", theirs]
    assert report.verdict(names[2]) == (theirs if kind == "gemma3" else "leaks")
    m = report.record("sdpa").measures
    assert 0 < m["logits_max"] < 1e-4
    assert 0 < m["gradient_max"] < 1e-4
    assert (m["leaked_documents"], m["backward_repeats"], m["other_packings"]) == (0, True, 0)


def test_positions_are_made_where_the_batch_has_none():
    model = new_model("qwen2_5_vl")
    batch = collated("qwen2_5_vl", None)
    assert "position_ids" not in batch
    report = compare(model, batch, "sdpa,transformers:sdpa", train=False)
    assert [report.verdict(x) for x in ("sdpa", "transformers:sdpa")] == ["right", "right"]


def test_documents_are_found_by_the_first_of_four_rows_of_positions():
    row = images.inputs_of(images.documents()) | images.FORMS["four_rows"]("qwen3_vl")
    report = compare(new_model("qwen3_vl"), row, "sdpa", train=False)
    assert report.record("sdpa").case["documents"] == len(images.LENGTHS)
    assert report.verdict("sdpa") == "right"


@pytest.mark.parametrize("kind", with_slow(["qwen2_5_vl", "qwen3_vl"], ["qwen3_vl"]))
def test_videos_of_padded_rows(kind):
    """With the seconds of their frames; transformers makes such positions of input_ids alone."""
    names = ["sdpa", "transformers:sdpa", "transformers:sdpa@position_ids"]
    batch = videos(kind)
    if "second_per_grid_ts" in batch:
        batch["second_per_grid_ts"] = batch["second_per_grid_ts"].tolist()
    report = compare(new_model(kind), batch, names, train=False)
    assert [report.verdict(name) for name in names] == ["right", "unsupported", "right"]
    assert "make the batch with PackedCollator(model=model)" in report.record(names[1]).reason


@pytest.mark.parametrize("variant", with_slow(["sdpa", "transformers:sdpa"], ["transformers:sdpa"]))
def test_leak_of_an_image_into_another_image_is_found(variant):
    """Below rounding, and in the tower, which sees no token."""
    model = new_model("qwen3_vl")
    add_mean = lambda module, inputs, patches: patches + patches.mean() * 1e-6  # noqa: E731
    model.model.visual.patch_embed.register_forward_hook(add_mean)
    report = compare(model, collated("qwen3_vl", model), variant, train=False)
    m = report.record(variant).measures
    assert (m["verdict"], m["leaked_outputs"]) == ("leaks", 3)  # those with images
    assert m["why"].startswith("the logits of documents 0, 2, 3 change")


def tree_of_images(batch):
    tree = fv.PackedLayout.from_tree([8, batch["input_ids"].numel() - 8], [-1, 0])
    return {"input_ids": batch["input_ids"], "packed_layout": tree, **pixels_of(batch)}


def pixels_of(batch):
    return {name: batch[name] for name in ("pixel_values", "image_grid_thw") if name in batch}


@pytest.mark.parametrize(
    ("kind", "change", "error", "words"),
    [
        ("mistral3", dict, NotImplementedError, "got image_sizes of shape"),
        ("qwen3_vl", tree_of_images, NotImplementedError, "packed_layout has trees"),
        (
            "qwen3_vl",
            lambda batch: batch | {"mm_token_type_ids": None},
            ValueError,
            "must have mm_token_type_ids, got none",
        ),
        (
            "qwen3_vl",
            lambda batch: batch | {"pixel_values": None},
            ValueError,
            "pixel_values must have equally many rows .* got 0 rows for 42 tokens",
        ),
        (
            "internvl",
            lambda batch: batch | {"pixel_values": batch["pixel_values"][:-1]},
            ValueError,
            "pixel_values must have equally many rows .* got 5 rows for 24 tokens",
        ),
    ],
)
def test_images_that_cannot_be_told_apart_are_refused(kind, change, error, words):
    model = new_model(kind)
    with pytest.raises(error, match=words):
        compare(model, change(collated(kind, model)), "sdpa")


def test_images_of_a_text_model_are_refused():
    batch = {"input_ids": torch.ones(1, 4).long(), "pixel_values": torch.ones(1)}
    with pytest.raises(ValueError, match=r"pixel_values .* got 1 rows for 0 tokens"):
        compare(new_model("llama"), batch)


def test_drift_refuses_images():
    model = new_model("internvl")
    with pytest.raises(NotImplementedError, match="drift supports documents of text alone"):
        model_drift(model, collated("internvl", model))
