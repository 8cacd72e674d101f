"""What cannot be patched is refused in a sentence; names of attention that users try work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertForPreTraining,
    BertLMHeadModel,
    InternVLForConditionalGeneration,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
)

import flexvarlen as fv
from flexvarlen.patches import why_not
from tests.sentences import failed_refusals, refused
from tests.tiny_models import config_of, new_model, one_row

# ---- models that are right elsewhere ----


def made(kind, *, of_config=None, **changes):
    """A function that makes a model with `changes`, and then sets what `of_config` has."""

    def make():
        model = new_model(kind, **changes)
        for name, value in (of_config or {}).items():
            setattr(model.config, name, value)
        return model

    return make


def without_parts(**of_config):
    """Whose type is refused before its parts are looked for: the heads of its layers are broken."""

    def make():
        with torch.device("meta"):
            model = made("qwen3", of_config=of_config)()
        for layer in model.model.layers:
            layer.self_attn.num_key_value_groups = "unknown"
        return model

    return make


def of_a_repository():
    """Its model_type is a verified one, its code is not transformers'."""
    own = type("LlamaForCausalLM", (PreTrainedModel,), {"__module__": "transformers_modules.x"})
    model = own.__new__(own)
    vars(model).update(vars(new_model("llama")))
    return model


def not_causal():
    """And with layers that have no index."""
    model = made("qwen3", of_config={"model_type": "not_there"})()
    for layer in model.model.layers:
        del layer.self_attn.layer_idx
        layer.self_attn.is_causal = False
    return model


def with_kernels_of_the_hub():
    model = new_model("lfm2")
    model._use_kernels = True
    return model


def window_both_ways():
    return new_model("gemma4_text", use_bidirectional_attention="all").model


def with_another_text_model():
    """The type of the whole model says nothing about its text model."""
    text = {"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "n_head": 2, "vocab_size": 97}
    config = config_of("internvl")
    other = type(config)(**config.to_dict() | {"text_config": text})
    return InternVLForConditionalGeneration(other)


class Case(NamedTuple):
    """A model and settings that a reason speaks against, and the first words of its sentence."""

    reason: Callable[..., str | None]
    words: str
    make: Callable[[], PreTrainedModel]
    settings: Mapping[str, Any] | None = None


TWO_STAGES = {"distributed_config": SimpleNamespace(pp_size=2)}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
VERIFY, UNPAD, OVER_RANKS = {"verify": True}, {"unpad": True}, {"sequence_parallel_group": "ranks"}
ONE_STACK = "model must have one stack of layers, got "
OF_TEXT = "a model with sequence_parallel_group must take text alone"
OF_MLPS = "mlp_chunk_tokens is for decoder layers with an MLP, of verified families, got "
IN_CHUNKS = {"mlp_chunk_tokens": 64}
CASES = (
    Case(why_not.encoder_and_decoder, ONE_STACK, without_parts(is_encoder_decoder=True)),
    Case(why_not.encoder_and_decoder, ONE_STACK, without_parts(is_encoder_decoder=True), VERIFY),
    Case(
        why_not.model_type,
        "model_type must be of a verified family, got 'not_there'",
        without_parts(model_type="not_there"),
    ),
    Case(why_not.code_of_another, "model must be of a class of transformers", of_a_repository),
    Case(
        why_not.text_model_type,
        "text_config of model_type 'internvl' must be of a verified family, got 'gpt2'",
        with_another_text_model,
    ),
    Case(why_not.pipeline_parallel, "pp_size must be 1", made("qwen3", of_config=TWO_STAGES)),
    Case(why_not.not_verifiable, "verify=True is for causal models of text", not_causal, VERIFY),
    Case(
        why_not.encoder_as_decoder,
        "an encoder must not be a decoder, got a bert model",
        lambda: BertLMHeadModel(config_of("bert", is_decoder=True)),
    ),
    Case(
        why_not.unknown_head,
        "model must be a base model, or have a head ForMaskedLM, ",
        lambda: BertForPreTraining(config_of("bert")),
    ),
    Case(
        why_not.share_prefixes,
        "share_prefixes=True is not supported with rope_type 'longrope'",
        made("phi3"),
        UNPAD | {"share_prefixes": True},
    ),
    Case(why_not.unpad, "unpad=True must not be used with a", made("llama"), OVER_RANKS | UNPAD),
    Case(
        why_not.unknown_layers,
        "config.layer_types must name kinds of layers that are verified, got 'gated_conv'",
        made("llama", of_config={"layer_types": ["full_attention", "gated_conv"]}),
    ),
    Case(why_not.recurrent_layers, "use_kernels=True replaces recur", with_kernels_of_the_hub),
    Case(why_not.sequence_parallel, OF_TEXT, made("qwen2_vl"), OVER_RANKS),
    Case(why_not.sequence_parallel, OF_TEXT, made("phi3"), OVER_RANKS),
    Case(
        why_not.sequence_parallel,
        "batch_invariant must be False with a sequence_parallel_group",
        made("llama"),
        OVER_RANKS | {"batch_invariant": True},
    ),
    Case(
        why_not.same_bits,
        "same_bits is for whole rows of a causal language model, or a base model, of text",
        made("qwen2_vl"),
        {"same_bits": 64},
    ),
    Case(
        why_not.loss_in_chunks,
        "loss_chunk_tokens needs the language-model head of a verified family, with transformers' "
        "own forward",
        made("bert"),
        {"loss_chunk_tokens": 64},
    ),
    Case(
        why_not.mlp_in_chunks, f"{OF_MLPS}'mixtral', whose layers mix", made("mixtral"), IN_CHUNKS
    ),
    Case(why_not.mlp_in_chunks, f"{OF_MLPS}'bert', an encoder", made("bert"), IN_CHUNKS),
    Case(why_not.mlp_in_chunks, f"{OF_MLPS}'mamba2', whose layers have", made("mamba2"), IN_CHUNKS),
    Case(
        why_not.mlp_in_chunks,
        f"{OF_MLPS}Qwen3ForCausalLM, whose layers are not known",
        made("qwen3", of_config={"model_type": "not_there"}),
        VERIFY | IN_CHUNKS,
    ),
    Case(why_not.windows_both_ways, "use_bidirectional_attention must not be", window_both_ways),
    Case(
        why_not.dynamic_rope,
        "rope_type must be one whose frequencies are the same for all documents, got dynamic",
        made("llama", rope_parameters=DYNAMIC),
    ),
)


def patch(given):
    """Patch a new model, which an error leaves as it was."""
    make, settings = given
    model = make()
    before = model.config._attn_implementation
    try:
        fv.patch_model(model, **settings)
    finally:
        assert "forward" not in vars(model)
        assert model.config._attn_implementation == before


def test_a_model_that_cannot_be_packed_is_patched():
    """Each reason of the runtime's tables has a case."""
    cases = [(case.words, (case.make, case.settings or {})) for case in CASES]
    assert failed_refusals(cases, patch, NotImplementedError) == []
    assert {case.reason for case in CASES} == {*why_not.WHY_NOT_CLASS, *why_not.WHY_NOT}


def test_stages_of_transformers_are_counted():
    """Their config has the `pp_size` that is refused; a model of one stage is patched."""
    distributed = pytest.importorskip("transformers.distributed.configuration_utils")
    stages = distributed.DistributedConfig(tp_size=1)
    if not hasattr(stages, "pp_size"):
        pytest.skip("transformers before 5.24")
    stages.pp_size = 1
    fv.patch_model(made("qwen3", of_config={"distributed_config": stages})())


def test_the_name_alone_of_a_type_that_is_not_verified():
    model = new_model("llama", implementation="flexvarlen_doc")
    model.config.model_type = "not_there"
    words = "^model_type must be of a verified family, got 'not_there'"
    batch = {"input_ids": one_row().ids, "position_ids": one_row().position_ids}
    refused(NotImplementedError, words, "call patch_model", lambda: model(**batch))


# ---- wrong arguments ----


class WithoutKeywords(LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, labels=None):
        return super().forward(input_ids=input_ids, position_ids=position_ids, labels=labels)


class BaseWithoutKeywords(LlamaModel):
    def forward(self, input_ids=None, position_ids=None):
        return super().forward(input_ids=input_ids, position_ids=position_ids)


def test_wrong_arguments_patch_a_model():
    llama = made("llama")
    cases = [
        ("capacity must be an integer that fits in int32", (llama, {"capacity": "8"})),
        ("max_seqlen_bound must be an integer that fits", (llama, {"max_seqlen_bound": 2.5})),
        ("sequence_parallel_group must be a torch.distributed ProcessGroup", (llama, OVER_RANKS)),
        *(
            (f"{each.__name__}.forward must take **kwargs", (partial(each, config_of("llama")), {}))
            for each in (WithoutKeywords, BaseWithoutKeywords)
        ),
    ]
    assert failed_refusals(cases, patch) == []


@pytest.mark.parametrize("call", [fv.patch_model, fv.unpatch_model, fv.is_patched, fv.compare])
def test_what_is_no_model(call):
    for given, name in (("Qwen/Qwen3", "'Qwen/Qwen3'"), (nn.Linear(2, 2), "Linear")):
        words = f"^model must be.* a transformers PreTrainedModel, got {name}"
        refused(ValueError, words, "load it with AutoModel", lambda given=given: call(given))


class Distilled(nn.Module):
    """A teacher and its student, of one kind or of two."""

    def __init__(self, teacher, student):
        super().__init__()
        self.teacher, self.student = teacher, student


@pytest.mark.parametrize("student", ["llama", "qwen3"])
def test_a_second_model(student):
    """The first alone would be patched, and the other leak."""
    pair = Distilled(new_model("llama"), nn.ModuleDict({"inner": new_model(student)}))
    words = r"^model must contain one .* as 'teacher' and .* as 'student\.inner'"
    for call in (fv.patch_model, fv.unpatch_model):
        refused(ValueError, words, "patch each one separately", lambda call=call: call(pair))
    assert pair.teacher.config._attn_implementation == "sdpa"
    for model in (pair.teacher, pair.student):
        fv.unpatch_model(fv.patch_model(model, "sdpa"))


def test_one_model_in_two_places():
    model = new_model("llama")
    assert fv.patch_model(Distilled(model, model.model), "sdpa").teacher is model
    assert fv.patch_model(Distilled(model.model, model), "sdpa").student is model
    assert "forward" in vars(model.model)


# ---- names of attention ----


@pytest.mark.parametrize("name", ["flexvarlen_doc", "flexvarlen_sdpa"])
def test_both_names_of_sdpa_load_a_model_that_keeps_documents_apart(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("llama"), attn_implementation=name).eval()
    layout = fv.PackedLayout.from_lengths([5, 7])
    ids = torch.arange(12)[None]
    batch = {"input_ids": ids, "position_ids": layout.position_ids()[None], "use_cache": False}
    fv.patch_model(model, "sdpa")
    expected = model(**batch).logits
    fv.verify_isolation(model, batch)
    fv.unpatch_model(model)
    torch.testing.assert_close(model(**batch).logits, expected)
