"""Vision towers: each frame a document, one call a layer, and all as before when unpatched."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

import flexvarlen as fv
from flexvarlen.patches.attention.packed_forward import PackedForward
from tests.oracle import assert_as_accurate
from tests.patches.models.test_vision_families import (
    KINDS,
    documents,
    inputs_of,
    layout,
    one_by_one,
)
from tests.tiny_models import config_of, new_model

PATCHES = torch.cat([x.patches for x in documents()])
GRID = torch.cat([x.grid for x in documents()])
SIZES = GRID.prod(-1).tolist()


def image_by_image(tower, dtype):
    """Outputs of each image alone, unpatched, and the gradients of patches and parameters."""
    tower, patches = copy.deepcopy(tower).to(dtype), PATCHES.to(dtype, copy=True).requires_grad_()
    images = zip(patches.split(SIZES), GRID, strict=True)
    out = torch.cat([tower(x, grid_thw=grid[None]).pooler_output for x, grid in images])
    out.square().sum().backward()
    gradients = {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}
    return out.detach(), {"patches": patches.grad, **gradients}


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [*((name, None) for name in KINDS), ("qwen2_5_vl", False), ("qwen3_vl", True)],
)
def test_images_equal_image_by_image(name, checkpointing):
    """Frames of one image see one another, or a full layer gets the windows."""
    model = new_model(name)
    tower = model.model.visual
    exact, baseline = (image_by_image(tower, dtype) for dtype in (torch.float64, torch.float32))
    fv.patch_model(model, "sdpa")
    if checkpointing is not None:
        model.train().gradient_checkpointing_enable({"use_reentrant": checkpointing})
    patches = PATCHES.clone().requires_grad_()
    out = tower(patches, grid_thw=GRID).pooler_output
    out.square().sum().backward()
    assert_as_accurate(out.detach(), exact[0], baseline[0], 2)
    found = {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}
    for name, gradient in {"patches": patches.grad, **found}.items():
        assert_as_accurate(gradient, exact[1][name], baseline[1][name], 3, name)


@pytest.mark.parametrize("name", KINDS)
def test_one_call_a_layer(name, monkeypatch):
    """A loop over images, each with a read of the device."""
    model = fv.patch_model(new_model(name), "sdpa")
    calls, reads = [], []
    route, tolist = PackedForward.route, torch.Tensor.tolist

    def counted(packed, *args):
        calls.append(packed.layout.num_docs)
        return route(packed, *args)

    def noted(tensor):
        reads.append(tensor)
        return tolist(tensor)

    monkeypatch.setattr(PackedForward, "route", counted)
    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    with torch.no_grad():
        model.model.visual(PATCHES, grid_thw=GRID)
    frames = int(GRID[:, 0].sum())
    windows = name == "qwen2_5_vl"  # 8 x 4, 4 x 4, 12 x 6 and two of 6 x 4 in windows of 4 x 4
    assert calls == [2 + 1 + 6 + 2 * 2, frames] if windows else calls == [frames, frames]
    assert sum(x is GRID for x in reads) == 1


def names(model):
    config = model.config
    parts = (config, config.text_config, config.vision_config)
    return [part._attn_implementation for part in parts]


BEFORE = (
    {"text_config": "eager", "vision_config": "eager"},
    "sdpa",
    {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"},
)


@pytest.mark.parametrize("name", [*KINDS, "gemma3"])
def test_implementations_of_towers_not_restored(name):
    model = new_model(name)
    for implementation in BEFORE:
        model.set_attn_implementation(implementation)
        before = names(model)
        with fv.patched(model, "sdpa"), fv.patched(model, "reference"):
            assert names(model)[:2] == ["flexvarlen_reference"] * 2
        assert names(model) == before
    left = [key for module in model.modules() for key in vars(module) if "flexvarlen" in key]
    assert left == []


@pytest.mark.parametrize("first", [0, 1])
def test_a_tower_of_two_models_of_one_config(first):
    """One unpatched, the other not: the tower of neither is left with half a patch."""
    config = config_of("qwen2_5_vl")
    models = [Qwen2_5_VLForConditionalGeneration(config).eval() for _ in range(2)]
    inputs, second = inputs_of(documents()[:1]), 1 - first
    with torch.no_grad():
        expected = [model(**inputs).logits for model in models]
        for model in models:
            fv.patch_model(model, "sdpa")
        fv.unpatch_model(models[first])
        found = models[second](**inputs).logits
        torch.testing.assert_close(found, expected[second], atol=1e-3, rtol=1e-3)
        with pytest.raises(NotImplementedError, match=r"call flexvarlen\.patch_model"):
            models[first](**inputs)  # attends by the plugin name alone
        fv.unpatch_model(models[second])
        for model, logits in zip(models, expected, strict=True):
            assert torch.equal(model(**inputs).logits, logits)


@pytest.mark.parametrize("name", KINDS)
def test_positions_after_the_images_of_another_batch(name):
    """Left to the model, positions of embeddings would be made of the placeholder mask."""
    model, ids = fv.patch_model(new_model(name), "sdpa"), documents()[1].ids[None]
    with torch.no_grad():
        expected = model(ids).logits
        model(**inputs_of(documents()[:1]))
        found = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    torch.testing.assert_close(found, expected)


def test_a_copy_runs_its_own_tower():
    model = fv.patch_model(new_model("qwen3_vl"), "sdpa")
    twin, inputs = copy.deepcopy(model), inputs_of(documents()[:1])
    with torch.no_grad():
        expected = model(**inputs).logits
        for parameter in model.model.visual.parameters():
            parameter.zero_()
        assert torch.equal(twin(**inputs).logits, expected)


@pytest.mark.parametrize("wrap", ["peft", "compiled"])
@pytest.mark.parametrize("when", ["base after", "tower after", "tower before"])
def test_a_base_model_or_tower_that_is_wrapped(when, wrap):
    """The wrapper holds the towers under other names."""

    def wrapped(module):
        lora = peft.LoraConfig(target_modules=["q_proj"])
        return peft.get_peft_model(module, lora) if wrap == "peft" else torch.compile(module)

    model, inputs = new_model("qwen2_5_vl"), inputs_of(documents()[:1])
    if when == "tower before":
        model.model.language_model = wrapped(model.model.language_model)
    fv.patch_model(model, "sdpa")
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected = model(**inputs).logits
        if when == "tower after":
            model.model.language_model = wrapped(model.model.language_model)
        elif when == "base after":
            model.model = wrapped(model.model)
        assert torch.equal(model(**inputs).logits, expected)
    fv.unpatch_model(model)
    assert not fv.is_patched(model)


def test_backends_of_towers(monkeypatch):
    """A mapping names the vision tower's layers too."""
    used, route = [], PackedForward.route

    def noted(packed, *args):
        found = route(packed, *args)
        used.append(found.backend.name)
        return found

    monkeypatch.setattr(PackedForward, "route", noted)
    model = new_model("qwen2_5_vl")
    with pytest.raises(ValueError, match="vision_attention"):
        fv.patch_model(model, {"full_attention": "sdpa"})
    fv.patch_model(model, {"full_attention": "sdpa", "vision_attention": "reference"})
    exact, baseline = (one_by_one("qwen2_5_vl", x)[0] for x in (torch.float64, torch.float32))
    with torch.no_grad():
        logits = model(**inputs_of(documents()), packed_layout=layout()).logits[0]
    assert used == ["reference"] * 2 + ["sdpa"] * 2
    assert_as_accurate(logits, exact, baseline, 2)
