"""Vision towers: each frame a document, one call a layer, and all as before when unpatched."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from accelerate.utils import compile_regions
from transformers import Qwen2_5_VLForConditionalGeneration

import flexvarlen as fv
from flexvarlen.patches.attention.packed_forward import PackedForward
from tests.backends import ON_GPU, skip_if_refused
from tests.contract_oracle import gradients_of
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.patches.models.contract import CASES, moved, with_wide_towers
from tests.patches.models.images import GRID, KINDS, PATCHES, documents, inputs_of, layout
from tests.tiny_models import config_of, new_model


def outcome(tower, patches, images):
    """Outputs of the images, some a call, and the gradients of patches and parameters."""
    patches = patches.clone().requires_grad_()
    calls = zip(patches.split([int(grid.prod(-1).sum()) for grid in images]), images, strict=True)
    out = torch.cat([tower(x, grid_thw=grid).pooler_output for x, grid in calls])
    out.square().sum().backward()
    return out.detach(), {"patches": patches.grad, **gradients_of(tower)}


def check(model, backend, checkpointing=None):
    """All images in one call equal image by image."""
    tower = model.model.visual
    patches, grid = PATCHES.to(tower.device, tower.dtype), GRID.to(tower.device)
    exact, baseline = (
        outcome(copy.deepcopy(tower).to(dtype), patches.to(dtype), grid.split(1))
        for dtype in (torch.float64, tower.dtype)
    )
    fv.patch_model(model, backend)
    if checkpointing is not None:
        model.train().gradient_checkpointing_enable({"use_reentrant": checkpointing})
    out, gradients = outcome(tower, patches, [grid])
    assert_as_accurate(out, exact[0], baseline[0], 2)
    assert_gradients_as_accurate(gradients, exact[1], baseline[1])


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [*((name, None) for name in KINDS), ("qwen2_5_vl", False), ("qwen3_vl", True)],
)
def test_images_equal_image_by_image(name, checkpointing):
    """Frames of one image see one another, or a full layer gets the windows."""
    check(new_model(name), "sdpa", checkpointing)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize("head_dim", [64, 72, 80])  # 80 and 72 are those of the published towers
@pytest.mark.parametrize("name", KINDS)
@skip_if_refused
def test_images_equal_image_by_image_in_bf16(name, head_dim, backend):
    """Images of one tower call see one another, or a kernel misreads a head_dim of 72 or 80."""
    model = copy.deepcopy(with_wide_towers(name, head_dim))
    check(model, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_towers_compiled_by_layer(name):
    """Each layer in a graph of its own, windows and images by turns."""
    torch._dynamo.reset()
    model = copy.deepcopy(with_wide_towers(name, 64))
    case = CASES[f"{name}, images"]
    exact, baseline = case.alone("cu_seq_lens", dtype=torch.bfloat16, device="cuda", head_dim=64)
    compiled = compile_regions(fv.patch_model(model, "varlen"))
    inputs = {**moved(case.inputs("cu_seq_lens"), model), "labels": None, "use_cache": False}
    own = len(documents()[0].patches)
    patches = inputs["pixel_values"].clone()
    patches[:own] = patches[:own].flip(0)
    with torch.no_grad():
        found = compiled(**inputs).logits
        other = compiled(**{**inputs, "pixel_values": patches}).logits
    assert_as_accurate(found[0], exact.logits, baseline.logits, 2)
    first = len(documents()[0].ids)
    assert torch.equal(other[:, first:], found[:, first:])
    assert not torch.equal(other[:, :first], found[:, :first])


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
    exact, baseline = CASES["qwen2_5_vl, images"].alone("packed_layout")
    with torch.no_grad():
        logits = model(**inputs_of(documents()), packed_layout=layout()).logits[0]
    assert used == ["reference"] * 2 + ["sdpa"] * 2
    assert_as_accurate(logits, exact.logits, baseline.logits, 2)
