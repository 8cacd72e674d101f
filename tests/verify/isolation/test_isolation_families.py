"""`verify_isolation` on models of all kinds, none patched: a leak is blamed on the right module.

Packed rows with positions that restart, which most models do not honour; rows of one document each,
and masks of the documents, which all honour.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertForMaskedLM,
    BertForSequenceClassification,
    T5Config,
    T5Model,
)

import flexvarlen as fv
from flexvarlen import PackedLayout
from flexvarlen.patches.isolation.blame import kind_of, layers_of
from flexvarlen.patches.isolation.report import IsolationError
from flexvarlen.patches.isolation.verify import verify_isolation
from tests import forms
from tests.patches.forward.test_trees_of_images import SAMPLES
from tests.patches.models import images
from tests.tiny_models import VOCABULARY, config_of, new_model

LENGTHS = (5, 11, 1, 8, 7)
TOKENS = sum(LENGTHS)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
UNLISTED = {"gpt2": {}, "albert": {"intermediate_size": 64}, "mamba": {"state_size": 8}}
MODELS = ("llama", "mixtral", "bert", "modernbert", "qwen3_next", "lfm2", *UNLISTED)
ENCODERS = ("bert", "albert", "modernbert")
RECURRENT = ("mamba", "qwen3_next", "lfm2")


@cache
def model_of(name):
    if name in UNLISTED:
        torch.manual_seed(0)
        auto = AutoModelForMaskedLM if name in ENCODERS else AutoModelForCausalLM
        return auto.from_config(AutoConfig.for_model(name, **SIZES, **UNLISTED[name])).eval()
    model = new_model(name, implementation="sdpa")
    if name in ("mixtral", "qwen3_next"):
        # Experts whose kernel sees how many tokens each got round by that: grouped_mm and eager do.
        model.set_experts_implementation("batched_mm")
    return model


def ids(shape=(1, TOKENS)):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def packed():
    return {"input_ids": ids(), **forms.given("position_ids", forms.row_of(LENGTHS))}


def mask_of_documents(causal):
    (numbers,) = forms.row_of(LENGTHS).document_ids
    seen = numbers[:, None] == numbers[None, :]
    if causal:
        seen = seen.tril()
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("llama", "model.layers.0.self_attn", "attention"),
        ("gpt2", "transformer.h.0.attn", "attention"),
        ("mixtral", "model.layers.0.self_attn", "attention"),
        ("bert", "bert.encoder.layer.0.attention.self", "attention"),
        (
            "albert",
            "albert.encoder.albert_layer_groups.0.albert_layers.0.attention",
            "attention",
        ),
        ("modernbert", "model.layers.0.attn", "attention"),
        ("mamba", "backbone.layers.0.mixer", "state space"),
        ("qwen3_next", "model.layers.0.linear_attn", "linear attention"),
        ("lfm2", "model.layers.0.conv", "convolution"),
    ],
)
def test_packed_row_leaks_with_default_use_cache(name, module, kind):
    with pytest.raises(IsolationError) as caught:
        verify_isolation(model_of(name), packed())
    error = caught.value
    assert (error.direction, error.layer, error.module, error.kind) == ("forward", 0, module, kind)
    assert name in ENCODERS or error.source < error.target
    assert type(model_of(name).get_submodule(module)).__name__ in str(error)
    assert "call flexvarlen.patch_model" in str(error)
    assert ("both cu_seq_lens_q, for scans, and seq_idx" in str(error)) == (name in RECURRENT)


@pytest.mark.parametrize("name", RECURRENT)
def test_state_runs_over_the_row_also_without_a_cache(name):
    """Also where the batch numbers its documents in seq_idx, which no plain kernel reads."""
    seq_idx = forms.given("seq_idx", forms.row_of(LENGTHS))
    for inputs in (packed() | {"use_cache": False}, {"input_ids": ids(), **seq_idx}):
        # transformers' own refusal; 5.17 has none, and leaks
        with pytest.raises((ValueError, IsolationError), match=r"causal_conv1d|leaks into"):
            verify_isolation(model_of(name), inputs, gradients=False)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_one_document_pass(name):
    report = verify_isolation(model_of(name), {"input_ids": ids((3, 8))})
    assert (report.num_docs, report.gradients) == (3, "bits")
    assert report.layers == model_of(name).config.num_hidden_layers


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "modernbert"])
def test_4d_mask_passes_and_a_wrong_one_leaks(name):
    layout = PackedLayout.from_lengths(LENGTHS)
    mask = mask_of_documents(causal=name not in ENCODERS)
    inputs = packed() | {"attention_mask": mask}
    assert verify_isolation(model_of(name), inputs).num_docs == 5
    del inputs["position_ids"]
    assert verify_isolation(model_of(name), inputs, layout=layout).num_docs == 5
    wrong = mask.clone()
    wrong[..., 16, 15] = 0.0  # the first token of document 2 sees the last of document 1
    with pytest.raises(IsolationError) as caught:
        verify_isolation(model_of(name), inputs | {"attention_mask": wrong}, layout=layout)
    assert (caught.value.source, caught.value.target) == (1, 2)


@pytest.mark.parametrize("train", [False, True])
def test_dropout_drops_the_same_in_each_run(train):
    torch.manual_seed(0)
    model = BertForMaskedLM(config_of("bert", hidden_dropout_prob=0.5))
    report = verify_isolation(model.train(train), {"input_ids": ids((3, 8))})
    assert (report.training, report.gradients) == (train, "bits")


def test_classifier_and_encoder_with_decoder_are_refused_in_a_sentence():
    classifier = BertForSequenceClassification(config_of("bert")).eval()
    with pytest.raises(ValueError, match=r"vector for each of the 2 x 16 tokens.*base_model"):
        verify_isolation(classifier, {"input_ids": ids((2, 16))})
    assert verify_isolation(classifier.base_model, {"input_ids": ids((2, 16))}).layers == 2
    config = T5Config(
        vocab_size=VOCABULARY, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4
    )
    both = T5Model(config).eval()
    with pytest.raises(ValueError, match=r"get_encoder\(\)"):
        verify_isolation(both, packed())
    rows = {"input_ids": ids((2, 16))}
    assert verify_isolation(both.get_encoder(), rows).layers == 2


def test_list_of_plain_projections_is_no_list_of_layers():
    layer = nn.Sequential(nn.Linear(2, 2))
    model = nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(2, 2)]), "h": nn.ModuleList([layer])})
    assert list(layers_of(model)) == ["h.0"]


@pytest.mark.parametrize(
    ("name", "path", "kind"),
    [
        ("llama", "model.rotary_emb", "rotary embedding"),
        ("llama", "model.layers.0", "layer"),
        ("gpt2", "transformer.h.0.mlp.c_fc", "linear"),
        ("gpt2", "transformer.wte", "embeddings"),
        ("mixtral", "model.layers.0.mlp.gate", "MoE router"),
        ("mixtral", "model.layers.0.mlp", "MoE experts"),
        ("qwen3_next", "model.layers.0.linear_attn.norm", "norm"),
        ("bert", "bert.encoder.layer.0.intermediate", "MLP"),
    ],
)
def test_kinds_of_modules(name, path, kind):
    assert kind_of(model_of(name).get_submodule(path), path) == kind


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", images.KINDS)
def test_images_are_replaced_too(family):
    """Images that reach other documents by the vision tower alone, whose tokens stay."""
    model = fv.patch_model(new_model(family), "sdpa")
    batch = {**images.inputs_of(images.documents()), "position_ids": images.four_rows(family)}
    trees = fv.share_prefixes(SAMPLES, model=model).batch()
    assert verify_isolation(model, batch).documents == tuple(range(len(images.TEXT)))
    verify_isolation(model, trees)
    hook = model.model.visual.merger.register_forward_hook(lambda _, __, x: x + x.mean(0))
    for given in (batch, trees):
        with pytest.raises(IsolationError, match="leaks into"):
            verify_isolation(model, given)
    hook.remove()
