"""`lm_head` of hidden states gives the model's own logits, where `model.lm_head` does not."""

from __future__ import annotations

import copy
from functools import partial

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import flexvarlen as fv
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.patches.parts import ModelParts
from tests.tiny_models import config_of, new_model

DOCUMENTS = [[5, 6, 7, 8, 9], [11, 12, 13]]
SCALED = {  # where it is not 1 or none by default
    "granite": {"logits_scaling": 8.0},
    "cohere2": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma4_text": {"final_logit_softcapping": 3.0},
    "granitemoehybrid": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 8.0},
    "falcon_h1": {"lm_head_multiplier": 0.25},
    "gemma3_text": {"final_logit_softcapping": 3.0},
}
BARE = r"head must scale or cap the logits .* got its .* alone; pass flexvarlen.lm_head\(model\)"
OTHERS = sorted({*BY_TYPE} - {*SCALED})


def check(model, *, scaled=False, hidden_of=None):
    batch = fv.PackedCollator()(DOCUMENTS)
    labels, layout = batch.pop("labels"), batch["packed_layout"]
    if not fv.is_patched(model):
        batch = {"input_ids": batch["input_ids"]}
    base = hidden_of or ModelParts.of(model).base(model)
    with torch.no_grad():
        hidden = base(**batch).last_hidden_state
        logits = model(**batch).logits
        assert torch.equal(fv.lm_head(model)(hidden), logits)
        assert torch.equal(fv.lm_head(model)(hidden[0]), logits[0])
        expected = fv.document_logprobs(logits, labels, layout).sums
        for chunk in (3, 1024):
            head = fv.lm_head(model)
            found = fv.document_logprobs(hidden, labels, layout, head=head, chunk_tokens=chunk)
            torch.testing.assert_close(found.sums, expected)
        layer = getattr(model, "lm_head", None)  # an encoder's has another name
        bare = partial(fv.document_logprobs, hidden, labels, layout, head=layer)
        if scaled and fv.is_patched(model):
            with pytest.raises(ValueError, match=BARE):
                bare()
            with pytest.raises(ValueError, match=BARE):
                fv.token_logprobs(hidden, labels, head=model.get_output_embeddings())
        elif layer is not None:
            assert torch.allclose(bare().sums, expected, rtol=1e-2) != scaled


def test_logits_are_not_the_first_output():
    """Where the config asks for the logits of routers."""
    check(new_model("mixtral", output_router_logits=True))


@pytest.mark.parametrize("kind", SCALED)
def test_a_family_that_changes_its_logits(kind):
    model = new_model(kind, **SCALED[kind])
    check(model, scaled=True)
    check(fv.patch_model(model), scaled=True)
    check(copy.deepcopy(model), scaled=True)
    check(fv.unpatch_model(model), scaled=True)
    for name in SCALED[kind]:
        setattr(model.config, name, None if "cap" in name else 1.0)
    check(fv.patch_model(type(model)(model.config).eval()))


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.sampled(6)
def test_each_family(kind):
    model = new_model(kind)
    check(fv.patch_model(model))


def test_gradients_are_those_of_the_whole_model():
    model = fv.patch_model(new_model("gemma2", final_logit_softcapping=3.0))
    batch = fv.PackedCollator()(DOCUMENTS)
    labels, layout = batch.pop("labels"), batch["packed_layout"]
    fv.document_logprobs(model(**batch).logits, labels, layout).sums.sum().backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    hidden = model.model(**batch).last_hidden_state
    head = fv.lm_head(model)
    found = fv.document_logprobs(hidden, labels, layout, head=head, chunk_tokens=3)
    found.sums.sum().backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, expected[name], msg=name)


def test_inside_peft_and_compiled():
    """An adapter of the head itself counts, and the weights are those at the call."""
    adapter = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False
    )
    plain = new_model("granite", logits_scaling=8.0, tie_word_embeddings=False)
    model = peft.get_peft_model(plain, adapter).eval()
    inner = model.get_base_model()
    check(fv.patch_model(model), scaled=True, hidden_of=inner.model)
    head = fv.lm_head(model)
    compiled = torch.compile(head, fullgraph=True, backend="eager")
    states = torch.randn(4, inner.config.hidden_size)
    for _ in range(2):
        assert torch.equal(head(states), fv.lm_head(copy.deepcopy(model))(states))
        torch.testing.assert_close(compiled(states), head(states))
        with torch.no_grad():
            inner.lm_head.weight.mul_(2)


@pytest.mark.parametrize("patch_first", [False, True])
@pytest.mark.parametrize("how", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_a_wrapped_head_is_not_known(how, patch_first):
    """PEFT puts a module around the linear layer, or a copy of it beside it."""
    model = new_model("gemma2", final_logit_softcapping=3.0, tie_word_embeddings=False)
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], **how})
    if patch_first:
        fv.patch_model(model)
    wrapped = peft.get_peft_model(model, config)
    if not patch_first:
        fv.patch_model(wrapped)
    layout, labels = fv.PackedLayout.from_lengths([3]), torch.zeros(3, dtype=torch.long)
    call = partial(fv.document_logprobs, torch.zeros(3, 48), labels, layout)
    for head in (model.lm_head, torch.compile(model.lm_head), copy.deepcopy(model.lm_head)):
        with pytest.raises(ValueError, match=BARE):
            call(head=head)
    call(head=fv.lm_head(wrapped))
    fv.unpatch_model(wrapped)
    call(head=model.lm_head)


def test_no_head():
    for model in (
        new_model("llama").model,
        AutoModelForSequenceClassification.from_config(config_of("llama")),
    ):
        with pytest.raises(
            ValueError, match=f"head around its base model, got {type(model).__name__}"
        ):
            fv.lm_head(model)


def test_a_whole_model_as_the_head():
    model, layout = new_model("llama"), fv.PackedLayout.from_lengths([3])
    states, labels = torch.zeros(3, 48), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"head must map .* pass flexvarlen.lm_head\(model\)"):
        fv.document_logprobs(states, labels, layout, head=model)
