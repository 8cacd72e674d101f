"""Gemma 3 and 4: tokens of images that see one another both ways, and only those of one document.

That packed equals one by one is tested in test_families.py, the masks themselves in
mask/test_runs.py.
"""

from __future__ import annotations

import importlib

import pytest
import torch

import flexvarlen as fv
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch import image_runs
from tests.patches.models.contract import CASES
from tests.patches.models.tower_images import PROCESSORS, documents, inputs_of, lengths
from tests.tiny_models import new_model, one_row

FULL, SLIDING = "full_attention", "sliding_attention"
NAMES = ("gemma3", "gemma4")


def row_of(name):
    layout = fv.PackedLayout.from_lengths(lengths(name))
    return {**inputs_of(name, documents(name)), "packed_layout": layout}


@pytest.fixture
def forwards(monkeypatch):
    """The `PackedForward` of each forward."""
    made, prepare = [], PackedForward.prepare

    def noting(self, *args, **how):
        made.append(self)
        return prepare(self, *args, **how)

    monkeypatch.setattr(PackedForward, "prepare", noting)
    return made


def masks_of_transformers(model, name, index):
    """bool `[L, L]` by layer type: what the model's own code makes for a document alone."""
    kind, document = model.config.model_type, documents(name)[index]
    own = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = model.config.text_config
    given = {
        "config": config,
        "inputs_embeds": torch.zeros(1, len(document.ids), config.hidden_size),
        "attention_mask": None,
        "cache": None,
        "position_ids": torch.arange(len(document.ids))[None],
    }
    types = document.types[None]
    if name == "gemma4" and config.use_bidirectional_attention != "vision":
        masks = own.create_masks_for_generate(**given)
    else:
        blocks = own.get_block_sequence_ids_for_mask(types, device=types.device)
        masks = own.create_masks_for_vision_model(**given, block_sequence_ids=blocks)
    return {layer_type: mask[0, 0] == 0 for layer_type, mask in masks.items()}  # eager's


@pytest.mark.parametrize(
    ("name", "changes", "with_runs"),
    [
        ("gemma3", {}, {FULL, SLIDING}),
        ("gemma4", {}, {SLIDING}),
        ("gemma4", {"use_bidirectional_attention": None}, set()),
    ],
)
def test_mask_of_transformers(name, changes, with_runs, forwards):
    """Entry by entry: runs of several images, cut by a window, between two documents."""
    model = new_model(name, **changes)
    alone = [masks_of_transformers(model, name, i) for i in range(len(documents(name)))]
    fv.patch_model(model, "reference")
    with torch.no_grad():
        model(**row_of(name))
    (packed,) = forwards
    assert {kind.layer_type for kind in packed.routes} == {FULL, SLIDING}
    for kind, route in packed.routes.items():
        expected = torch.block_diag(*(masks[kind.layer_type] for masks in alone)).bool()
        assert torch.equal(route.mask.to_dense(), expected)
        assert route.call.spec.runs is (kind.layer_type in with_runs)
        assert bool(expected.triu(1).any()) is (kind.layer_type in with_runs)


def test_global_and_local_layers_without_runs():
    """The small Gemma 4 models are causal in every layer."""
    model = new_model("gemma4", use_bidirectional_attention=None)
    alone = []
    with torch.no_grad():
        for document in documents("gemma4"):
            alone.append(model(**inputs_of("gemma4", [document])).logits)
        found = fv.patch_model(model, "sdpa")(**row_of("gemma4")).logits
    torch.testing.assert_close(found, torch.cat(alone, 1), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("types", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_text_alone_keeps_its_kernels(name, types, forwards):
    """A processor gives types of text too."""
    model, batch = fv.patch_model(new_model(name), "sdpa"), one_row()
    given = {PROCESSORS[name].types: torch.zeros_like(batch.ids)} if types else {}
    with torch.no_grad():
        model(batch.ids, position_ids=batch.position_ids, **given)
    (packed,) = forwards
    assert packed.row.image_runs is None
    assert not any(route.call.spec.runs for route in packed.routes.values())


def test_images_merged_into_embeddings(forwards):
    """Types without pixels say where the images are."""
    model, row = fv.patch_model(new_model("gemma3"), "sdpa"), row_of("gemma3")
    with torch.no_grad():
        model(**{name: x for name, x in row.items() if name != "pixel_values"})
    assert all(route.call.spec.runs for route in forwards[0].routes.values())


@pytest.mark.parametrize("name", NAMES)
def test_images_without_types(name):
    """Their tokens would be causal."""
    row = row_of(name)
    del row[PROCESSORS[name].types]
    model = fv.patch_model(new_model(name), "sdpa")
    with pytest.raises(ValueError, match=f"{PROCESSORS[name].types} must come with the images"):
        model(**row)


def test_types_of_other_tokens():
    row = row_of("gemma3")
    row["token_type_ids"] = row["token_type_ids"][:, :-1]
    with pytest.raises(ValueError, match="token_type_ids must be an integer tensor"):
        fv.patch_model(new_model("gemma3"), "sdpa")(**row)


def test_kernel_that_cannot_serve_images():
    """Text alone still runs on it."""
    model = fv.patch_model(new_model("gemma3"), "flex", batch_invariant=True)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"sliding_attention.* runs or"):
        model(**row_of("gemma3"))


def test_backend_that_auto_takes(forwards):
    """One that can serve runs, after it was compared with the reference on some."""
    model = fv.patch_model(new_model("gemma3"), "auto")
    with torch.no_grad():
        model(**row_of("gemma3"))
    served = {route.backend.name for route in forwards[0].routes.values()}
    assert served <= {"sdpa", "flex", "reference"}


def test_runs_on_another_device(forwards):
    """accelerate moves the documents of a forward to each layer's device, with their runs."""
    model = fv.patch_model(new_model("gemma3"), "sdpa")
    with torch.no_grad():
        model(**row_of("gemma3"))
    moved = forwards[0].to("meta")
    assert moved.row.image_runs.tokens.device == moved.layout.device == torch.device("meta")


@pytest.mark.parametrize("name", ["input_features", "mm_encoder_outputs"])
def test_sound(name):
    given = {"input_features": torch.zeros(1, 16, 8), "mm_encoder_outputs": {"audio": object()}}
    model = fv.patch_model(new_model("gemma4"), "sdpa")
    with pytest.raises(NotImplementedError, match=r"sound .* is not supported"):
        model(torch.ones(1, 16, dtype=torch.long), **{name: given[name]})


def test_runs_that_an_older_release_does_not_cut(monkeypatch):
    """There a run sees past the window: the same only where it fits into it."""
    monkeypatch.setattr(image_runs, "windows_cut_runs", lambda model_type: False)
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="no more than 9 tokens of images follow"):
            fv.patch_model(new_model("gemma3"), "sdpa")(**row_of("gemma3"))
        fv.patch_model(new_model("gemma3", sliding_window=20), "sdpa")(**row_of("gemma3"))
        with pytest.raises(NotImplementedError, match="upgrade transformers"):
            fv.patch_model(new_model("gemma4", sliding_window=20), "sdpa")(**row_of("gemma4"))


def test_a_compiled_model():
    """Runs of a graph follow the types, whichever tokens are images'."""
    model, row = fv.patch_model(new_model("gemma3"), "sdpa"), row_of("gemma3")
    del row["pixel_values"]
    other = {**row, "token_type_ids": row["token_type_ids"].roll(3, dims=1)}
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        before, after = model(**row).logits, model(**other).logits
        assert not torch.equal(before, after)
        torch.testing.assert_close(compiled(**row).logits, before, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(compiled(**other).logits, after, atol=1e-4, rtol=1e-3)


def test_images_in_a_tree():
    model, row = fv.patch_model(new_model("gemma3"), "sdpa"), row_of("gemma3")
    tokens = row["input_ids"].shape[1]
    row["packed_layout"] = fv.PackedLayout.from_tree([10, 20, tokens - 30], [-1, 0, 0])
    with pytest.raises(NotImplementedError, match="trees is not supported with images"):
        model(**row)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_checkpointed_layers(name):
    """A layer that is run again has the same runs."""
    model, case = fv.patch_model(new_model(name), "sdpa").train(), CASES[f"{name}, images"]
    gradients = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**case.inputs("packed_layout")).loss.backward()
        gradients.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
        model.zero_grad()
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-4)
