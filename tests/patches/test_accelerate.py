"""accelerate's own forwards on the instance: device maps, offloading, mixed precision."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from accelerate import Accelerator, cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from transformers import AutoModelForCausalLM

import flexvarlen as fv
from tests import forms
from tests.contract_oracle import Step, check_step, gradients_of, snapshot
from tests.oracle import assert_as_accurate
from tests.tiny_models import documents, exact_and_baseline, new_model, one_row

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

BATCH = one_row()
PACKED = {"input_ids": BATCH.ids, "labels": BATCH.ids, **forms.given("position_ids", BATCH)}
FORMS = {
    "position_ids": PACKED,
    "document_ids": {"input_ids": BATCH.ids, **forms.given("document_ids", BATCH)},
    "layout": {"input_ids": BATCH.ids, **forms.given("packed_layout", BATCH)},
}


def close(ours, expected):
    """Equal but for rounding: logits here reach 15, and a leak moves them by more than 1."""
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


def check_packed(model):
    exact, baseline = exact_and_baseline("qwen3", BATCH.order)
    for form in FORMS.values():
        with torch.no_grad():
            out = model(**form)
        assert_as_accurate(out.logits[0], exact.logits, baseline.logits, 2)
        if "labels" in form:
            close(out.loss, exact.loss.float())


def check_as_unpatched(model):
    """In the same documents one after another, which an unpatched model takes for one."""
    with torch.no_grad():
        assert torch.equal(model(BATCH.ids).logits, new_model("qwen3")(BATCH.ids).logits)


PARTS = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")


def on_one_device(model, folder):
    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


def half_on_disk(model, folder):
    places = {**dict.fromkeys(PARTS, "cpu"), "model.layers.1": "disk"}
    return dispatch_model(
        model, places, main_device="cpu", offload_dir=folder / "offload", force_hooks=True
    )


def all_on_disk(model, folder):
    disk_offload(model, folder / "offload", execution_device=torch.device("cpu"))
    return model


def in_memory(model, folder):
    cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def one_hook(model, folder):
    add_hook_to_module(model, ModelHook())
    return add_hook_to_module(model.model, ModelHook()) and model


def in_order(order, place):
    """A model that `place` changes after it is patched, or before."""
    model = new_model("qwen3")
    if order == "patch_first":
        return place(fv.patch_model(model, "sdpa"))
    return fv.patch_model(place(model), "sdpa")


ORDERS = pytest.mark.parametrize("order", ["patch_first", "place_first"])
EMPTY = (half_on_disk, all_on_disk, in_memory)  # weights come for a forward, and go


@pytest.mark.parametrize(
    ("place", "order"),
    [
        (on_one_device, "patch_first"),
        (half_on_disk, "place_first"),
        (all_on_disk, "patch_first"),
        (in_memory, "place_first"),
        (one_hook, "patch_first"),
    ],
)
def test_packs_and_generates_wherever_weights_are(place, order, tmp_path):
    model = in_order(order, partial(place, folder=tmp_path))
    assert (model.model.layers[1].mlp.up_proj.weight.device.type == "meta") == (place in EMPTY)
    check_packed(model)
    ids = BATCH.ids[:, 5:20]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    tokens = new_model("qwen3").generate(ids, **settings)
    assert torch.equal(model.generate(ids, **settings), tokens)
    fv.unpatch_model(model)
    check_as_unpatched(model)
    check_packed(fv.patch_model(model, "sdpa"))


@ORDERS
def test_unpatching_leaves_the_hooks_of_accelerate(order, tmp_path):
    """Then they can be removed."""
    hooked = []

    def noting(module, *args, **kwargs):
        hooked.append(type(module).__name__)
        return args, kwargs

    model = in_order(order, partial(one_hook, folder=tmp_path))
    for module in (model, model.model):
        module._hf_hook.pre_forward = noting
    fv.unpatch_model(model)
    check_as_unpatched(model)
    assert hooked == ["Qwen3ForCausalLM", "Qwen3Model"]
    remove_hook_from_module(model, recurse=True)
    check_as_unpatched(model)
    assert len(hooked) == 2


@ORDERS
def test_hooks_are_removed_from_a_patched_model(order, tmp_path):
    """accelerate gives back the forward that it found: ours, or the one before ours."""
    model = in_order(order, partial(one_hook, folder=tmp_path))
    remove_hook_from_module(model, recurse=True)
    if order == "place_first":  # ours is gone with the hook
        fv.patch_model(model, "sdpa")
    check_packed(model)
    fv.unpatch_model(model)
    check_as_unpatched(model)


def test_a_model_loaded_onto_a_device_map(tmp_path):
    new_model("qwen3").save_pretrained(tmp_path)
    for device_map in ({"": "cpu"}, "cpu", {**dict.fromkeys((*PARTS, "model.layers.1"), "cpu")}):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        check_packed(fv.patch_model(model, "sdpa"))
        check_as_unpatched(fv.unpatch_model(model))
    named = {"device_map": {"": "cpu"}, "attn_implementation": "flexvarlen_doc"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **named)
    exact, baseline = exact_and_baseline("qwen3", BATCH.order)
    with torch.no_grad():
        assert_as_accurate(model(**PACKED).logits[0], exact.logits, baseline.logits, 2)


# ---- training ----


def check_learns(model, backward, steps=1, *, autocast=False):
    """Steps of SGD, each held against the documents one by one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        weights = snapshot(model)
        out = model(**PACKED)
        assert out.logits.dtype == torch.float32
        backward(out.loss)
        step = Step(weights, out.loss.detach(), gradients_of(model))
        ids = [x.tolist() for x in documents()]
        check_step(step, new_model("qwen3"), ids, autocast=autocast)
        optimizer.step()
        optimizer.zero_grad()


def test_learns_on_a_device_map(tmp_path):
    model = on_one_device(fv.patch_model(new_model("qwen3"), "sdpa"), tmp_path).train()
    check_learns(model, torch.Tensor.backward)


@ORDERS
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_model_learns(precision, order):
    accelerator, low = Accelerator(cpu=True, mixed_precision=precision), precision == "bf16"
    model = in_order(order, accelerator.prepare).train()
    assert fv.is_patched(model)
    check_learns(model, accelerator.backward, steps=2, autocast=low)
    fv.unpatch_model(model)
    assert model.config._attn_implementation == "sdpa"
    plain = new_model("qwen3")
    plain.load_state_dict(model.state_dict())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
        expected = plain.train()(BATCH.ids).logits.float()
        assert torch.equal(model(BATCH.ids).logits, expected)


@pytest.mark.pairwise(
    keep=[True, False], order=["patch_first", "place_first"], precision=["no", "bf16"]
)
def test_unwrapped_model_still_packs(precision, order, keep):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = in_order(order, accelerator.prepare)
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=keep)
    with torch.no_grad():
        out = unwrapped(**PACKED)
    exact, _ = exact_and_baseline("qwen3", BATCH.order)
    low = precision == "bf16" and keep  # then logits are off by a tenth and more
    expected = exact.logits.to(out.logits.dtype)
    torch.testing.assert_close(out.logits[0], expected, rtol=0, atol=0.5 if low else 1e-3)
    assert out.loss.item() == pytest.approx(exact.loss.item(), rel=1e-2 if low else 1e-5)


def test_a_prepared_model_is_copied():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(fv.patch_model(new_model("qwen3"), "sdpa"))
    with torch.no_grad():
        expected = model(**PACKED)
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        out = twin(**PACKED)
    assert torch.equal(out.logits, expected.logits)
    assert torch.equal(out.loss, expected.loss)
