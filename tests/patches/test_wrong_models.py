"""What is no model is refused in a sentence; names of attention that users try work."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM

import flexvarlen as fv
from tests.sentences import refused
from tests.tiny_models import config_of


@pytest.mark.parametrize("call", [fv.patch_model, fv.unpatch_model, fv.is_patched, fv.compare])
def test_a_name_is_no_model(call):
    refused(ValueError, "PreTrainedModel, got 'Qwen", "from_pretrained", lambda: call("Qwen/Qwen3"))


def test_another_module_is_no_transformers_model():
    linear = torch.nn.Linear(2, 2)
    refused(ValueError, "got Linear", "AutoModel", lambda: fv.patch_model(linear))


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "not_there"}, "of a verified family, got 'not_there'"),
        ({"is_encoder_decoder": True}, "an encoder with a decoder"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_refused_type_may_have_any_parts(changes, words, device):
    """Its parts need not be found: here the layers' heads cannot be read."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of("qwen3"))
    for name, value in changes.items():
        setattr(model.config, name, value)
    for layer in model.model.layers:
        layer.self_attn.num_key_value_groups = "unknown"
    refused(NotImplementedError, words, "use", lambda: fv.patch_model(model))
    if "model_type" not in changes:
        refused(NotImplementedError, words, "use", lambda: fv.patch_model(model, verify=True))


def test_layers_without_an_index_are_refused_in_a_sentence():
    model = AutoModelForCausalLM.from_config(config_of("qwen3"))
    model.config.model_type = "not_there"
    for layer in model.model.layers:
        del layer.self_attn.layer_idx
        layer.self_attn.is_causal = False
    words = "has attention layers that are not causal"
    refused(NotImplementedError, words, "use", lambda: fv.patch_model(model, verify=True))


def test_pipeline_parallelism_is_named():
    """transformers' stages pass on neither **kwargs nor documents; it said a head must."""
    distributed = pytest.importorskip("transformers.distributed.configuration_utils")
    if "pp_size" not in inspect.signature(distributed.DistributedConfig).parameters:
        pytest.skip("transformers before 5.24")
    model = AutoModelForCausalLM.from_config(config_of("qwen3"))
    model.config.distributed_config = distributed.DistributedConfig(tp_size=1, pp_size=1)
    assert fv.is_patched(fv.unpatch_model(fv.patch_model(model))) is False
    model.config.distributed_config.pp_size = 2
    refused(NotImplementedError, "pp_size .*got 2", "tp_size", lambda: fv.patch_model(model))
    assert not fv.is_patched(model)
