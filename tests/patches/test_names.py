"""A name that a release of transformers renamed: a sentence that holds it, never a wrong number."""

from __future__ import annotations

import re
import sys
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTuner
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import PreTrainedModel
from transformers.integrations.neftune import activate_neftune
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.trainer_utils import RemoveColumnsCollator

import flexvarlen as fv
from flexvarlen.packing import loader_pass
from flexvarlen.patches.attention.other_sharding import why_not_sharded
from flexvarlen.patches.forward.refusals import refuse_reentrant_checkpoints
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.patches.models.layers import recurrent_layers
from flexvarlen.patches.names import INTERFACES, NEEDS, check_interfaces
from flexvarlen.patches.trainer_callback import below_trainers
from tests.private_names import NAMES
from tests.renamed import Case, outcomes
from tests.tiny_models import new_model, shared_model


def kinds_of(need):
    """The families that have a name, sorted."""
    return [x for x in sorted(need.families) if x in BY_TYPE]


OWN = ("padding_idx", "rope_parameters", "num_attention_heads", "text_config", "rope_type")
"""Without these a model of transformers cannot be made."""


def cases_of(need, kinds):
    name = need.dotted.rpartition(".")[2].partition("|")[0]
    return [Case(kind, name, "made" if name in OWN else "model") for kind in kinds]


def not_refused(found):
    """Those that did not end in a sentence with the name."""
    needed = r"^NotImplementedError: transformers \S+ has no \S*\b{}\b.* needs for "
    return {case: x for case, x in found.items() if not re.search(needed.format(case.name), x)}


NEEDED = {case for need in NEEDS for case in cases_of(need, kinds_of(need)[:1])}
KEYWORDS = {
    Case("gpt_oss", "s_aux"),
    Case("gemma2", "softcap"),
    Case("gemma4_text", "scaling"),
    Case("mixtral", "labels"),
}


@cache
def found():
    """By one process, which imports transformers once."""
    return outcomes(NEEDED | KEYWORDS)


def test_every_name_is_refused_when_it_is_renamed():
    assert not_refused({case: found()[case] for case in NEEDED}) == {}


def silent(cases):
    return {case: x for case, x in outcomes(cases).items() if x.startswith(("wrong", "died"))}


def test_a_keyword_of_attention_is_missed():
    """What a layer passes is compared with what it has."""
    assert [x for x in KEYWORDS if not found()[x].startswith("NotImplementedError")] == []


def listed():
    """The names of `tests/private_names/`: in models of their module, or in all of transformers."""
    kinds = {model_type_to_module_name(kind): kind for kind in BY_TYPE}
    for name in NAMES:
        for dotted in name.dotted.split(" | "):
            path = dotted.split(".")
            if path[0] != "transformers":
                continue
            if path[1] == "models" and path[2] in kinds:
                yield Case(kinds[path[2]], path[-1])
            elif path[1] != "models":
                yield from (Case(kind, path[-1], "everywhere") for kind in ("qwen2", "roberta"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_name_of_the_list_is_missed_in_silence():
    assert silent(set(listed())) == {}


OTHERWISE = {
    Case("nemotron_h", "is_causal"): "NotImplementedError: an attention layer must compute",
    Case("gemma4_text", "layer_types"): "broken: ",  # its own layers read it when they are made
}
"""What becomes of the others."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_name_is_refused_in_every_family():
    cases = {case for need in NEEDS for case in cases_of(need, kinds_of(need)[1:])}
    others = not_refused(outcomes(cases))
    assert {c: x for c, x in others.items() if not x.startswith(OTHERWISE.get(c, "?"))} == {}


@pytest.mark.parametrize(
    ("need", "parameter"),
    [(need, parameter) for need in INTERFACES for parameter in need.parameters],
)
def test_every_parameter_is_looked_up(monkeypatch, need, parameter):
    """By a function of that name without it: none other of transformers is imported by it."""
    module, _, name = need.dotted.rpartition(".")
    others = ", ".join(x for x in need.parameters if x != parameter)
    renamed = eval(f"lambda {others}: None")
    renamed.__module__, renamed.__name__ = module, name
    monkeypatch.setattr(need.dotted, renamed)
    expected = rf"transformers \S+ has no {name}.{parameter}=, which flexvarlen needs for "
    with pytest.raises(NotImplementedError, match=expected):
        check_interfaces.__wrapped__()


# ---- of other packages, and where a model is not patched anew ----


def accelerates_config(patch):
    patch.setattr(AcceleratorState, "_shared_state", {"device": "cpu"})
    raise NotImplementedError(why_not_sharded())


def accelerates_flag(name, patch):
    config = SimpleNamespace(**{x: False for x in ("cp_enabled", "sp_enabled") if x != name})
    patch.setattr(AcceleratorState, "_shared_state", {"parallelism_config": config})
    why_not_sharded()


def users_loss(patch):
    patch.setattr(PreTrainedModel, "loss_function", property(lambda _: None, lambda *_: None))
    check_interfaces.__wrapped__()


def noise(patch):
    model = fv.patch_model(new_model("llama"), "sdpa").train()
    activate_neftune(model, 5.0)
    del model.get_input_embeddings().neftune_noise_alpha
    model(input_ids=torch.arange(3, 20)[None], packed_layout=fv.PackedLayout.from_lengths([9, 8]))


def checkpoints(patch):
    tower = new_model("llama").model.train()
    tower.gradient_checkpointing = True
    refuse_reentrant_checkpoints(tower)


def unused_columns(patch):
    collator = RemoveColumnsCollator(print, [])
    del collator.data_collator
    below_trainers(collator)


def adapters(patch):
    model = get_peft_model(new_model("llama"), LoraConfig(target_modules=["q_proj"]))
    assert any(isinstance(module, BaseTuner) for module in model.modules())
    for module in model.modules():  # the tuner, and the model inside, which it asks too
        vars(module).pop("peft_config", None)
    fv.patch_model(model, "sdpa")


def invoked_adapters(patch):
    model = get_peft_model(new_model("llama"), LoraConfig(target_modules=["q_proj"]))
    patch.delattr(model.peft_config["default"], "alora_invocation_tokens")
    patch.delattr(LoraConfig, "alora_invocation_tokens", raising=False)
    fv.patch_model(model, "sdpa")


def loader(name, patch):
    sampler = SequentialSampler(range(8))
    made = DataLoaderShard(range(8), batch_sampler=BatchSampler(sampler, 2, False))
    made.begin()
    try:
        if name == "iteration":
            del made.iteration
        else:
            patch.delattr(sys.modules["accelerate.data_loader"], name)
        loader_pass.current_pass(sampler)
    finally:
        made.end()


RENAMED = {
    "AcceleratorState.parallelism_config": accelerates_config,
    "SimpleNamespace.cp_enabled": partial(accelerates_flag, "cp_enabled"),
    "SimpleNamespace.sp_enabled": partial(accelerates_flag, "sp_enabled"),
    "PreTrainedModel._loss_function": users_loss,
    "Embedding.neftune_noise_alpha": noise,
    "LlamaModel._gradient_checkpointing_func": checkpoints,
    "RemoveColumnsCollator.data_collator": unused_columns,
    "LoraModel.peft_config": adapters,
    "LoraConfig.alora_invocation_tokens": invoked_adapters,
    "DataLoaderShard.iteration": partial(loader, "iteration"),
    **{
        f"accelerate.data_loader.{x}": partial(loader, x)
        for x in ("DataLoaderDispatcher", "BatchSamplerShard", "SkipBatchSampler")
    },
}


@pytest.mark.parametrize("name", RENAMED)
def test_a_name_of_another_object(monkeypatch, name):
    with pytest.raises(NotImplementedError, match=f"has no {name}, which flexvarlen needs for "):
        RENAMED[name](monkeypatch)


def test_accelerate_has_the_flags_that_are_looked_up():
    assert not ParallelismConfig().cp_enabled
    assert not ParallelismConfig().sp_enabled


@pytest.mark.parametrize(
    ("kind", "scan"),
    [
        ("qwen3_5_text", "torch_chunk_gated_delta_rule"),
        ("kimi_linear", "chunk_kimi_delta_attention"),
        ("mamba2", "mamba2_chunk_scan"),
    ],
)
def test_a_scan_that_would_not_be_replaced(monkeypatch, kind, scan):
    """It would run over all documents of the row."""
    model = shared_model(kind)
    monkeypatch.delattr(sys.modules[type(recurrent_layers(model)[0]).__module__], scan)
    with pytest.raises(NotImplementedError, match=rf"must call transformers' .*{scan}.*, got a "):
        fv.patch_model(model, "sdpa")


def test_a_keyword_that_attention_does_not_get():
    """`softcap=` by another name would be dropped, where the layer still has its attribute."""
    model = fv.patch_model(new_model("gemma2"), "reference")
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None  # what is passed on
    layout = fv.PackedLayout.from_lengths([9, 8])
    with pytest.raises(NotImplementedError, match="must compute what its config and its attribu"):
        model(input_ids=torch.arange(3, 20)[None], packed_layout=layout)
