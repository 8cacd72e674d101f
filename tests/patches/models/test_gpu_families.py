"""Encoders, models of images and their towers on a GPU's kernels: packed equals one by one in bf16.

Decoders of text are in test_families. The oracle is the unpatched model in fp64, a document,
or an image, at a time; the baseline is the same in bf16.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForImageTextToText

import flexvarlen as fv
from flexvarlen.bench.suites.contract.tiny_configs import draw_weights
from flexvarlen.reference.recurrences import plain_recurrences
from tests.backends import ON_GPU
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.patches.models.test_encoders import ENCODERS, FIRST, labels, labels_of
from tests.patches.models.test_vision_families import CU, KINDS, LENGTHS, documents, inputs_of
from tests.tiny_models import config_of, new_model, one_row
from tests.tiny_models import documents as texts

# Of a head; 80 and 72 are those of the published towers.
TOWER_HEAD_DIMS = (64, 72, 80)


def on_the_gpu(inputs, dtype):
    """The same inputs there, floating ones in the dtype."""
    return {
        name: x.to("cuda", dtype if x.is_floating_point() else x.dtype)
        for name, x in inputs.items()
    }


def with_wide_towers(name, head_dim):
    """A tiny model in bf16 on the GPU, with vision heads as wide as a kernel serves."""
    config = config_of(name, head_dim=64, every_expert=True)
    config._experts_implementation = "eager"  # the others have no fp64
    vision, text_width = config.vision_config, config.text_config.hidden_size
    if name == "qwen2_vl":
        vision.embed_dim, vision.hidden_size = 2 * head_dim, text_width
    else:
        vision.hidden_size, vision.out_hidden_size = 2 * head_dim, text_width
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    return draw_weights(model).eval().to("cuda", torch.bfloat16)


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def patched_or_skip(model, backend):
    try:
        return fv.patch_model(model, backend)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize("head_dim", TOWER_HEAD_DIMS)
@pytest.mark.parametrize("name", KINDS)
def test_images_equal_image_by_image(name, head_dim, backend):
    """Images of one tower call see one another, or a kernel misreads a head_dim of 72 or 80."""
    model = with_wide_towers(name, head_dim)
    tower = model.model.visual
    patches = torch.cat([x.patches for x in documents()]).to("cuda", torch.bfloat16)
    grid = torch.cat([x.grid for x in documents()]).cuda()

    def alone(dtype):
        unpatched = copy.deepcopy(tower).to(dtype)
        images = zip(patches.to(dtype).split(grid.prod(-1).tolist()), grid, strict=True)
        out = torch.cat([unpatched(x, grid_thw=each[None]).pooler_output for x, each in images])
        out.square().sum().backward()
        return out.detach(), gradients_of(unpatched)

    exact, baseline = alone(torch.float64), alone(torch.bfloat16)
    patched_or_skip(model, backend)
    try:
        out = tower(patches, grid_thw=grid).pooler_output
        out.square().sum().backward()
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert_as_accurate(out.detach(), exact[0], baseline[0], 2)
    assert_gradients_as_accurate(gradients_of(tower), exact[1], baseline[1])


def one_by_one(model, dtype):
    """Logits of all documents, each with its own images, and the gradients of their squares."""
    unpatched, out = copy.deepcopy(model).to(dtype), []
    with plain_recurrences(unpatched):
        for document in documents():
            unpatched.model.rope_deltas = None  # of the document before
            inputs = on_the_gpu(inputs_of([document]), dtype)
            out.append(unpatched(**inputs, use_cache=False).logits[0])
        logits = torch.cat(out)
        (logits.square().sum() / len(logits)).backward()
    return logits.detach(), gradients_of(unpatched)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize("name", KINDS)
def test_images_and_text_equal_one_by_one(name, backend):
    """The tower's boundaries reach the text's layers, or the text's the tower's."""
    model = with_wide_towers(name, 64)
    exact, baseline = (one_by_one(model, dtype) for dtype in (torch.float64, torch.bfloat16))
    patched_or_skip(model, backend)
    inputs = on_the_gpu(inputs_of(documents()), torch.bfloat16)
    try:
        logits = model(**inputs, cu_seq_lens_q=CU.cuda(), use_cache=False).logits[0]
        (logits.square().sum() / len(logits)).backward()
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert len(logits) == sum(LENGTHS)
    assert_as_accurate(logits.detach(), exact[0], baseline[0], 2)
    assert_gradients_as_accurate(gradients_of(model), exact[1], baseline[1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_towers_compiled_by_layer(name):
    """Each layer in a graph of its own, windows and images by turns."""
    from accelerate.utils import compile_regions

    torch._dynamo.reset()
    model = with_wide_towers(name, 64)
    exact, baseline = (one_by_one(model, dtype)[0] for dtype in (torch.float64, torch.bfloat16))
    compiled = compile_regions(fv.patch_model(model, "varlen"))
    inputs = on_the_gpu(inputs_of(documents()), torch.bfloat16) | {"cu_seq_lens_q": CU.cuda()}
    own = len(documents()[0].patches)
    patches = inputs["pixel_values"].clone()
    patches[:own] = patches[:own].flip(0)
    with torch.no_grad():
        found = compiled(**inputs, use_cache=False).logits
        other = compiled(**{**inputs, "pixel_values": patches}, use_cache=False).logits
    assert_as_accurate(found[0], exact, baseline, 2)
    first = len(documents()[0].ids)
    assert torch.equal(other[:, first:], found[:, first:])
    assert not torch.equal(other[:, :first], found[:, :first])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_equal_one_by_one(name, backend):
    """A causal kernel, or a window with one side."""
    model = new_model(name, head_dim=64).to("cuda", torch.bfloat16)
    batch = one_row(device="cuda")
    count = sum(int((x != -100).sum()) for x in labels())

    def alone(dtype):
        unpatched, out, loss = copy.deepcopy(model).to(dtype), [], 0.0
        for index, _ in batch.order:
            out.append(unpatched(input_ids=texts()[index][None].cuda()).logits[0])
            wide = out[-1] if dtype == torch.float64 else out[-1].float()
            own = labels()[index].cuda()
            loss = loss + torch.nn.functional.cross_entropy(wide, own, reduction="sum")
        (loss / count).backward()
        return torch.cat(out).detach(), gradients_of(unpatched)

    exact, baseline = alone(torch.float64), alone(torch.bfloat16)
    patched_or_skip(model, backend)
    given = {"position_ids": batch.position_ids + FIRST[name]}
    try:
        out = model(batch.ids, labels=labels_of(one_row()).cuda(), **given)
        out.loss.backward()
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert_as_accurate(out.logits[0].detach(), exact[0], baseline[0], 2)
    assert_gradients_as_accurate(gradients_of(model), exact[1], baseline[1])
