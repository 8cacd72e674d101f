"""`loss_chunk_tokens` learns what logits of all tokens do, and never has them."""

from __future__ import annotations

import copy
import functools

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaForCausalLM,
)

import flexvarlen as fv
from flexvarlen.patches.models.families import BY_TYPE
from tests.backends import DEVICES
from tests.contract_oracle import gradients_of
from tests.patches.forward.test_trees import samples
from tests.patches.kinds import KINDS, assert_learned_alone, row_of
from tests.patches.test_lm_head import SCALED
from tests.slow import with_slow
from tests.tiny_models import VOCABULARY, new_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document"),
    pytest.mark.filterwarnings("ignore:num_items_in_batch counts labels"),
]

CHUNK = 7
ENCODERS = ("bert", "roberta", "modernbert")
FAST = ("gemma2", "granite", "falcon_h1", "qwen3_5_moe_text")
FAMILIES = with_slow(BY_TYPE, {*BY_TYPE} - {*FAST, *ENCODERS})


def rows():
    """Two rows, whose documents end inside chunks, and a label that counts nowhere."""
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 4:9] = -100
    layout = fv.PackedLayout.from_lengths([30, 10, 27, 13])
    return {"input_ids": ids, "labels": labels, "packed_layout": layout}


def padded():
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :11] = mask[1, 30:] = 0
    inputs = rows() | {"attention_mask": mask}
    del inputs["packed_layout"]
    return inputs


def shifted():
    inputs = rows()
    labels = inputs["labels"].roll(-1, 1)
    labels[:, -1] = -100
    return inputs | {"shift_labels": labels}


FORMS = {
    "rows": (rows, {}),
    "divided_by_the_step": (lambda: rows() | {"num_items_in_batch": 50}, {}),
    "shift_labels": (shifted, {}),
    "padded": (padded, {}),
    "unpadded": (padded, {"unpad": True}),
    "prefixes_shared": (padded, {"unpad": True, "share_prefixes": True}),
    "trees": (lambda: fv.share_prefixes(samples()).batch(), {}),
}


def learned(model, inputs):
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out, gradients_of(model)


def assert_close(found, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def check(family, inputs, settings=None, **changes):
    backend = "reference" if family in ("gemma2", "gpt_oss") else "sdpa"
    model = new_model(family, **changes).train()
    if hasattr(model.config.get_text_config(), "output_router_logits"):
        inputs = inputs | {"output_router_logits": True}
    fv.patch_model(model, backend, **settings or {})
    expected, gradients = learned(model, inputs)
    fv.patch_model(model, backend, loss_chunk_tokens=CHUNK, **settings or {})
    found, chunked = learned(model, inputs)
    assert found.logits is None
    assert ("aux_loss" in found) == ("aux_loss" in expected)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert chunked.keys() == gradients.keys()
    for name, gradient in chunked.items():
        error = (gradient - gradients[name]).norm()
        assert error <= 1e-5 * gradients[name].norm() + 1e-9, f"{name} is off by {error}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    if family in ENCODERS:
        with pytest.raises(NotImplementedError, match="loss_chunk_tokens needs the language-model"):
            fv.patch_model(new_model(family), loss_chunk_tokens=CHUNK)
        return
    check(family, rows(), **SCALED.get(family, {}))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "encoder"])
def test_each_kind_of_model(kind):
    """Learns what its documents one by one do."""
    model = fv.patch_model(KINDS[kind].model(), "sdpa", loss_chunk_tokens=32)
    out, gradients = learned(model, row_of(kind))
    assert_learned_alone(kind, out.loss.detach(), gradients)


OTHERS = [(family, form) for family in ("mamba2", "gemma4") for form in ("unpadded", "padded")]


@pytest.mark.parametrize(
    ("family", "form"), [*((x, form) for x in ("llama", "mixtral") for form in FORMS), *OTHERS]
)
def test_every_form(family, form):
    inputs, options = FORMS[form]
    check(family, inputs(), options)


def test_parts_of_a_tree():
    shared, found = fv.share_prefixes(samples()), []
    for chunk in (None, CHUNK):
        model = fv.patch_model(new_model("llama").train(), "sdpa", loss_chunk_tokens=chunk)
        for part in shared.parts(model, 25):
            model(**part).loss.backward()
        found.append(gradients_of(model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_under_checkpoints_with_lora_on_the_head():
    found = []
    for chunk in (None, CHUNK):
        config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        torch.manual_seed(0)
        model = peft.get_peft_model(new_model("llama").train(), config)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        fv.patch_model(model, "sdpa", loss_chunk_tokens=chunk)
        found.append(learned(model, rows())[1])
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


class Largest(TorchDispatchMode):
    """The most rows of any tensor of logits."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        weights = (48, VOCABULARY)  # of the head, transposed
        if isinstance(out, torch.Tensor) and out.shape[-1:] == weights[1:] and out.shape != weights:
            self.rows = max(self.rows, out.numel() // VOCABULARY)
        return out


@pytest.mark.parametrize("form", ["rows", "unpadded", "trees"])
def test_logits_of_all_tokens_never_exist(form):
    """Neither in the forward nor in the backward."""
    inputs, options = FORMS[form]
    model = fv.patch_model(new_model("llama").train(), "sdpa", loss_chunk_tokens=CHUNK, **options)
    with Largest() as seen:
        learned(model, inputs())
    assert seen.rows == CHUNK
    fv.patch_model(model, "sdpa", **options)
    with Largest() as seen:
        learned(model, inputs())
    assert seen.rows >= 80


@pytest.mark.parametrize("device", DEVICES)
def test_one_graph(device):
    torch._dynamo.reset()
    model = new_model("llama").train().to(device)
    fv.patch_model(model, "sdpa" if device == "cpu" else "flex", loss_chunk_tokens=32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = {name: x.to(device) for name, x in rows().items()}
    expected, gradients = learned(model, inputs)
    out = compiled(**inputs)
    model.zero_grad()
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected.loss)
    assert_close(gradients_of(model), gradients)


def test_logits_come_back():
    """Without labels, in generation, in a copy, and without the option."""
    model = fv.patch_model(new_model("llama").eval(), "sdpa", loss_chunk_tokens=CHUNK)
    inputs = rows()
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    assert copy.deepcopy(model)(**inputs, labels=labels).logits is None
    assert model.generate(inputs["input_ids"][:, :5], max_new_tokens=3).shape == (2, 8)
    fv.patch_model(model, "sdpa")
    assert torch.equal(model(**inputs, labels=labels).logits, logits)
    with fv.patched(model, "sdpa", loss_chunk_tokens=CHUNK):
        assert model(**inputs, labels=labels).logits is None
    assert torch.equal(model(**inputs, labels=labels).logits, logits)


def test_the_base_model_alone():
    model = fv.patch_model(new_model("llama"), "sdpa", unpad=True, loss_chunk_tokens=CHUNK)
    inputs = {name: x for name, x in padded().items() if name != "labels"}
    expected = fv.patch_model(new_model("llama"), "sdpa", unpad=True).model(**inputs)
    assert torch.equal(model.model(**inputs).last_hidden_state, expected.last_hidden_state)


def test_adapters_in_low_precision():
    """As a head in bfloat16: too many chunks would stall their sum."""
    lora = peft.LoraConfig(target_modules=["lm_head"])
    model = new_model("llama").to(torch.bfloat16)
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    fv.patch_model(model, "sdpa", loss_chunk_tokens=1)
    with pytest.raises(ValueError, match=r"at least 2 of 80 tokens, .* loss_chunk_tokens"):
        model(**rows())
    model.requires_grad_(False)
    assert model(**rows()).loss.isfinite()


def halved(module, inputs, outputs):
    return type(outputs)(last_hidden_state=outputs.last_hidden_state / 2)


def hook_base(model):
    model.model.register_forward_hook(halved)


def wrap_base(model):
    own = model.model.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        return halved(None, args, own(*args, **kwargs))

    model.model.forward = forward


@pytest.mark.parametrize("change", [hook_base, wrap_base])
def test_a_base_model_whose_outputs_change(change):
    model = fv.patch_model(new_model("llama"), "sdpa")
    change(model)
    expected, gradients = learned(model, rows())
    fv.patch_model(model, "sdpa", loss_chunk_tokens=CHUNK)
    found, chunked = learned(model, rows())
    torch.testing.assert_close(found.loss, expected.loss)
    assert_close(chunked, gradients)
    assert len(model.model._forward_hooks) == (change is hook_base)


def test_hooks_in_a_graph():
    model = fv.patch_model(new_model("llama"), "sdpa", loss_chunk_tokens=CHUNK)
    hook_base(model)
    expected = model(**rows()).loss
    torch._dynamo.reset()
    with pytest.raises(Exception, match="LlamaModel with a forward hook"):
        torch.compile(model, backend="eager", fullgraph=True)(**rows())
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager")(**rows()).loss, expected)


class OwnLoss(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):
        return super().forward(input_ids, labels=labels, logits_to_keep=logits_to_keep, **kwargs)


def with_another_forward():
    model = new_model("llama")
    own = model.forward
    model.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
    return model


REFUSED_MODELS = {
    "another forward": (with_another_forward, "transformers' own forward, got a LlamaForCausalLM"),
    "own forward": (lambda: OwnLoss(new_model("llama").config), "with transformers' own forward"),
    "z-loss": (lambda: new_model("bamba", z_loss_coefficient=0.1), "z_loss_coefficient=0.1"),
}


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_models_with_more_in_their_loss(case):
    make, words = REFUSED_MODELS[case]
    with pytest.raises(NotImplementedError, match=words):
        fv.patch_model(make(), "reference", loss_chunk_tokens=CHUNK)


REFUSED = {
    "none": ({"loss_chunk_tokens": 0}, ValueError, "loss_chunk_tokens must be a positive number"),
    "same_bits": (
        {"loss_chunk_tokens": 8, "same_bits": 64},
        ValueError,
        "loss_chunk_tokens must not be given with same_bits",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_are_refused(case):
    options, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        fv.patch_model(new_model("llama"), "sdpa", **options)


CALLS = {
    "logits_to_keep": ({"logits_to_keep": 2}, {}, "logits_to_keep must not be given"),
    "tokens": ({"logits_to_keep": torch.tensor([1, 2])}, {}, "logits_to_keep must not be given"),
    "return_dict": ({"return_dict": False}, {}, "return_dict must stay True"),
    "loss": ({}, {"loss_function": lambda logits, labels, **_: logits.sum()}, "another loss"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_are_refused(case):
    keywords, attributes, words = CALLS[case]
    model = fv.patch_model(new_model("llama"), "sdpa", loss_chunk_tokens=CHUNK)
    for name, value in attributes.items():
        setattr(model, name, value)
    with pytest.raises((ValueError, NotImplementedError), match=words):
        model(**rows(), **keywords)
