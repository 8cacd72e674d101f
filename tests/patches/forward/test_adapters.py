"""PEFT's adapters: those that act on each token alone are served, those of rows are refused."""

from __future__ import annotations

import inspect

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import (
    DataCollatorWithFlattening,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import flexvarlen as fv
from flexvarlen.patches.adapters import _ON_EACH_TOKEN
from flexvarlen.verify.isolation.callback import IsolationCallback
from tests.tiny_models import new_model

DOCUMENTS = [list(range(3, 12)), list(range(40, 44)), list(range(60, 66))]
LENGTHS = [len(each) for each in DOCUMENTS]
IDS = torch.tensor([each + [0] * (9 - len(each)) for each in DOCUMENTS])

OF_METHOD = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 1},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "CPT": {"cpt_token_ids": [3], "cpt_mask": [1], "cpt_tokens_type_mask": [1]},
    "FOURIERFT": {"n_frequency": 10},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 3, "num_tasks": 1},
    "OFT": {"oft_block_size": 4},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4], "target_modules": ["embed_tokens"]},
    "VBLORA": {"num_vectors": 10, "vector_length": 4, "topk": 2},
    "WAVEFT": {"n_frequency": 10},
}


def config(method, **changes):
    cls = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(method)]
    given = {"target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": 3} | changes
    given |= OF_METHOD.get(method, {})
    if method == "ADAPTION_PROMPT":
        del given["target_modules"]
    known = inspect.signature(cls).parameters
    return cls(task_type="CAUSAL_LM", **{k: v for k, v in given.items() if k in known})


def plain():
    return new_model("llama", head_dim=8, num_key_value_heads=6)  # as ADAPTION_PROMPT needs


def tuned(adapter, model=None):
    """With an effect of its own, in eval mode."""
    model = plain() if model is None else model
    model = peft.get_peft_model(model, adapter)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.1
    return model.eval()


@pytest.mark.parametrize("method", sorted(_ON_EACH_TOKEN))
@pytest.mark.sampled(8)
@torch.no_grad()
def test_a_method_that_acts_on_each_token(method):
    """Each document gives what it gives alone: packed, and padded under `unpad`."""
    model = tuned(config(method))
    alone = torch.cat([model(input_ids=torch.tensor([each])).logits[0] for each in DOCUMENTS])
    assert not torch.equal(alone[:9], plain()(IDS[:1]).logits[0])
    fv.patch_model(model, "sdpa")
    batch = fv.PackedCollator()(DOCUMENTS)
    torch.testing.assert_close(model(**batch).logits[0], alone, rtol=1e-4, atol=1e-4)
    fv.patch_model(model, "sdpa", unpad=True)
    padded = model(input_ids=IDS, attention_mask=(IDS != 0).long()).logits[IDS != 0]
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-4)


OF_ROWS = [
    pytest.param(config("LORA", alora_invocation_tokens=[7, 8]), id="alora"),
    *("LILY", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CARTRIDGE", "CPT", "SHADOW", "POLY"),
]


@pytest.mark.parametrize("adapter", OF_ROWS)
@torch.no_grad()
def test_row_adapters_are_refused(adapter):
    """Added before or after, packed or padded; every public function refuses it."""
    adapter = config(adapter) if isinstance(adapter, str) else adapter
    refused = pytest.raises(
        NotImplementedError, match=f"act on each token alone, .* got {type(adapter).__name__}"
    )
    before = tuned(adapter)
    with refused:
        fv.patch_model(before, "sdpa")
    assert not any(hasattr(module, "_flexvarlen_patch") for module in before.modules())
    with refused:
        fv.verify_isolation(before, fv.PackedCollator()(DOCUMENTS))
    for unpad in (False, True):
        model = tuned(adapter, fv.patch_model(new_model("llama"), "sdpa", unpad=unpad))
        assert not fv.is_patched(model)
        by_position = DataCollatorWithFlattening()([{"input_ids": each} for each in DOCUMENTS])
        padded = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
        batches = [by_position, fv.PackedCollator()(DOCUMENTS), padded]
        for batch in batches:
            with refused:
                model(**batch)
        with refused:
            fv.verify_isolation(model, batches[0])
        arguments = TrainingArguments("unused", report_to=[], use_cpu=True)
        state, control = TrainerState(is_world_process_zero=True), TrainerControl()
        with refused:
            IsolationCallback(batch=batches[0]).on_train_begin(
                arguments, state, control, model=model, train_dataloader=None
            )


def test_a_row_adapter_beside_another_one():
    """Added to the adapters of a patched model, and deleted again."""
    model = fv.patch_model(tuned(config("LORA")), "sdpa")
    batch = fv.PackedCollator()(DOCUMENTS)
    before = model(**batch).logits
    model.add_adapter("invoked", config("LORA", alora_invocation_tokens=[7, 8]))
    assert not fv.is_patched(model)
    with pytest.raises(NotImplementedError, match="got LoraConfig with alora_invocation_tokens"):
        model(**batch)
    model.delete_adapter("invoked")
    assert fv.is_patched(model)
    assert torch.equal(model(**batch).logits, before)


@torch.no_grad()
def test_prompt_learning_without_a_patch_is_left_alone():
    model = tuned(config("PROMPT_TUNING"))
    assert model(input_ids=IDS[:1]).logits.shape[1] == 12
    patched = tuned(config("PROMPT_TUNING"), fv.patch_model(new_model("llama"), "sdpa"))
    with pytest.raises(NotImplementedError, match="got PromptTuningConfig"):
        patched.generate(input_ids=IDS[:1], max_new_tokens=1)
    fv.unpatch_model(patched)
    assert patched(input_ids=IDS[:1]).logits.shape[1] == 12
