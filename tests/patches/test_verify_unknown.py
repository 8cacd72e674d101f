"""`patch_model(verify=True)`: models of any type, checked before they are used."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import flexvarlen as fv
from flexvarlen.patches import apply, verification
from flexvarlen.patches.api import current_patch
from flexvarlen.patches.models.families import BY_TYPE
from tests.sentences import refused
from tests.tiny_models import config_of

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
ALONE = "one document per row"


@pytest.fixture(autouse=True)
def _nothing_has_passed(monkeypatch):
    monkeypatch.setattr(verification, "_passed", set())


def unlisted(model_type, auto_class=AutoModelForCausalLM, **changes):
    sizes = {**SIZES, **changes}
    if model_type in ("codegen", "gptj"):
        del sizes["num_key_value_heads"]
        sizes |= {"rotary_dim": 8, "num_attention_heads": 4, "max_position_embeddings": 512}
    torch.manual_seed(0)
    return auto_class.from_config(AutoConfig.for_model(model_type, **sizes)).eval()


class MeanLayer(LlamaDecoderLayer):
    """Adds the mean over the row so far."""

    def forward(self, hidden_states, *args, **kwargs):
        out = super().forward(hidden_states, *args, **kwargs)
        counts = torch.arange(1, out.shape[1] + 1, device=out.device)[:, None]
        return out + out.cumsum(1) / counts


class MeanForCausalLM(LlamaForCausalLM):
    """A Llama whose second layer leaks, and a buffer that each forward writes to."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1] = MeanLayer(config, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, *args, **kwargs):
        self.calls.add_(torch.rand(()))
        return super().forward(*args, **kwargs)


class LateLeakForCausalLM(MeanForCausalLM):
    """Leaks in training only."""

    def __init__(self, config):
        super().__init__(config)
        layer = self.model.layers[1]
        layer.forward = lambda *args, **kwargs: (
            MeanLayer if layer.training else LlamaDecoderLayer
        ).forward(layer, *args, **kwargs)


def of_class(model_class, model_type="llama"):
    torch.manual_seed(0)
    model = model_class(config_of("llama")).eval()
    model.config.model_type = model_type
    return model


@pytest.fixture
def runs(monkeypatch):
    """The calls of `verify_isolation`."""
    seen = []
    real = verification.verify_isolation
    monkeypatch.setattr(
        verification,
        "verify_isolation",
        lambda model, *args, **options: seen.append(model) or real(model, *args, **options),
    )
    return seen


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((name, {}) for name in ("persimmon", "phi", "gpt_neox", "gpt2", "codegen", "gptj")),
        ("granitemoe", EXPERTS),
    ],
)
def test_a_type_that_is_right_runs_packed(model_type, changes):
    model = unlisted(model_type, **changes)
    if not model._supports_attention_backend:  # codegen and gptj before transformers 5.24
        refused(NotImplementedError, "attention interface", ALONE, verified(model))
        return
    fv.patch_model(model, "sdpa", verify=True)
    ids = torch.arange(3, 15)[None]
    layout = fv.PackedLayout.from_lengths([5, 7])
    packed = model(input_ids=ids, packed_layout=layout).logits
    fv.unpatch_model(model)
    alone = torch.cat([model(input_ids=part).logits for part in ids.split([5, 7], 1)], 1)
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("positions", [4, 256])
def test_a_model_with_fewer_positions_than_the_checks_documents(positions):
    config = AutoConfig.for_model(
        "gpt_bigcode", vocab_size=97, n_embd=48, n_layer=1, n_head=3, n_positions=positions
    )
    for model in (AutoModelForCausalLM.from_config(config), AutoModel.from_config(config)):
        fv.patch_model(model.eval(), "sdpa", verify=True)
        assert fv.is_patched(model)
    encoder = config_of("roberta", max_position_embeddings=32)
    assert fv.is_patched(fv.patch_model(AutoModel.from_config(encoder), "sdpa", verify=True))


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForSequenceClassification])
def test_base_models_and_classifiers_are_checked_too(auto_class, runs):
    model = fv.patch_model(unlisted("phi", auto_class), "sdpa", verify=True)
    assert fv.is_patched(model)
    assert runs == [model.base_model] * 2


@pytest.mark.parametrize(
    ("model_type", "option"),
    [
        ("llama", "attention_dropout"),
        ("bert", "attention_probs_dropout_prob"),
        ("gpt2", "attn_pdrop"),
    ],
)
def test_attention_dropout_by_its_name_in_the_config(model_type, option):
    def model_with(dropout):
        changes = {"hidden_dropout_prob": 0.1, "resid_pdrop": 0.1, option: dropout}
        model = unlisted(model_type, AutoModel, max_position_embeddings=512, **changes)
        return fv.patch_model(model, "sdpa", verify=model_type not in BY_TYPE).train()

    row = {"packed_layout": fv.PackedLayout.from_lengths([5, 7]), "use_cache": False}
    row["input_ids"] = torch.arange(3, 15)[None]
    drops = model_with(0.1)
    with pytest.raises(NotImplementedError, match=rf"config\.{option}=0\.0 .* takes {option}=0\.0"):
        drops(**row)
    drops.eval()(**row)
    model_with(0.0)(**row)


def test_without_verify_the_refusal_names_it():
    model = unlisted("phi")
    refused(NotImplementedError, "'phi'", "verify=True", lambda: fv.patch_model(model, "sdpa"))


def verified(model):
    return lambda: fv.patch_model(model, "sdpa", verify=True)


def narrow(name):
    def change(model):
        setattr(model.model.layers[1].mlp, name, torch.nn.Linear(1, 1))

    return change


def in_place(model):
    """As CTRL scales its embeddings, which fails where gradients of these are asked for."""
    model.model.embed_dropout = torch.nn.ReLU(inplace=True)


def own_attention(model):
    """Of one layer; it leaks nothing, as nothing of it reaches the outputs."""
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)


def count_through_the_row(model):
    """Positions depend on no other document's tokens, so nothing leaks; but outputs are others."""
    rotary = model.model.rotary_emb
    real = rotary.forward
    rotary.forward = lambda x, position_ids: real(x, torch.arange(x.shape[1])[None] ** 2)


def quantized(model):
    model.hf_quantizer = SimpleNamespace(is_trainable=False)


def detached(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output.detach())


def phi(change, model_type="phi"):
    """A model that is right but for a change."""
    model = unlisted(model_type)
    change(model)
    return model


def on_meta():
    with torch.device("meta"):
        return unlisted("phi")


REFUSED = {
    "bloom": (lambda: unlisted("bloom"), "attention interface"),
    # stablelm's layers get no **kwargs; OPT's head calls another module than its base model.
    "stablelm": (lambda: unlisted("stablelm"), r"pass \*\*kwargs.*got StableLmForCausalLM, which"),
    "opt": (lambda: unlisted("opt"), r"pass \*\*kwargs.*got OPTForCausalLM, which does not"),
    "electra": (lambda: unlisted("electra", AutoModel), "not causal"),
    "t5": (lambda: unlisted("t5", AutoModel), "an encoder with a decoder"),
    "mamba": (lambda: unlisted("mamba", AutoModel), "state-space scan"),
    "own attention": (lambda: phi(own_attention), r"attention layer.*model\.layers\.1"),
    "positions of the row": (lambda: phi(count_through_the_row), "gives alone"),
    "fails alone": (lambda: phi(narrow("fc1")), "on input_ids alone, .* RuntimeError .* 'mat1 and"),
    "fails packed": (
        lambda: phi(narrow("gate_proj"), "llama"),
        "on packed documents, .* RuntimeError .* 'mat1 and mat2",
    ),
    "in place": (lambda: phi(in_place), "on packed documents, .* RuntimeError .* in-place"),
    "no weights": (on_meta, "meta device", "load them"),
    "quantized": (lambda: phi(quantized), "differentiable", "before it is quantized"),
    "no gradients": (lambda: phi(detached), "gradients", "backward"),
}
"""How a model is made, what the sentence says of it, and what to do instead of `ALONE`."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_checked_is_refused_and_keeps_its_attention(case):
    make, contract, *remedy = REFUSED[case]
    model = make()
    before = model.config._attn_implementation
    refused(NotImplementedError, contract, *(remedy or [ALONE]), verified(model))
    assert not fv.is_patched(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("model_class", [MeanForCausalLM, LateLeakForCausalLM])
def test_a_leak_is_named(model_class):
    model = of_class(model_class, "unlisted")
    with pytest.raises(fv.IsolationError, match=r"document \d .* leaks into document \d") as caught:
        fv.patch_model(model, "sdpa", verify=True)
    assert (caught.value.layer, caught.value.module) == (1, "model.layers.1")
    assert not fv.is_patched(model)


def test_an_earlier_patch_is_put_back_after_a_leak():
    model = fv.patch_model(of_class(MeanForCausalLM), "flex", capacity=8)
    before = current_patch(model).arguments()
    with pytest.raises(fv.IsolationError):
        verified(model)()
    assert current_patch(model).arguments() == before


def everything_of(model):
    """Tensors and random states by their values, and all else that a check could leave changed."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = (
        {name: (id(x), x.requires_grad, id(x.grad)) for name, x in tensors.items()},
        [(module.training, dict(module._forward_hooks)) for module in model.modules()],
        (model.config.to_dict(), model.config._attn_implementation),
        model.get_experts_implementation(),
        ALL_ATTENTION_FUNCTIONS["flexvarlen_doc"],
        (np.random.get_state()[1].tolist(), random.getstate()),
    )
    values = {name: x.detach().clone() for name, x in tensors.items()}
    return {**values, "torch's random state": torch.get_rng_state()}, others


def right_model():
    model = of_class(MeanForCausalLM, "unlisted")
    model.model.layers[1] = LlamaDecoderLayer(model.config, 1)
    return model


@pytest.mark.parametrize(
    ("make", "leaks"),
    [
        (right_model, False),
        (lambda: of_class(MeanForCausalLM, "unlisted"), True),
        (lambda: unlisted("granitemoe", **EXPERTS), False),
    ],
    ids=["right", "leaks", "experts"],
)
def test_nothing_but_the_patch_changes(make, leaks):
    model = make()
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    model.model.norm.weight.grad = torch.ones(48)
    values, others = everything_of(model)
    if leaks:
        with pytest.raises(fv.IsolationError):
            verified(model)()
        assert not fv.is_patched(model)
    else:
        fv.unpatch_model(verified(model)())
    found, others_now = everything_of(model)
    assert others_now == others
    assert found.keys() == values.keys()
    assert all(torch.equal(x, values[name]) for name, x in found.items())


def test_a_kind_of_model_is_checked_once(runs):
    model = verified(unlisted("phi"))()
    assert len(runs) == 2  # evaluation and training
    verified(fv.unpatch_model(model))()
    verified(unlisted("phi"))()
    with fv.patched(model, "sdpa", verify=True, capacity=4):
        pass
    assert current_patch(model).capacity is None  # the arguments of before
    assert fv.is_patched(copy.deepcopy(model))
    assert len(runs) == 2
    verified(unlisted("phi", num_hidden_layers=1))()
    assert len(runs) == 4
    fv.patch_model(model, "reference", verify=True)
    assert len(runs) == 6


def test_a_listed_type_is_checked_if_asked_for(runs):
    verified(of_class(LlamaForCausalLM))()
    assert len(runs) == 2


def test_a_group_needs_a_model_that_has_passed(monkeypatch):
    model, group = unlisted("phi"), object()
    monkeypatch.setattr(apply, "check_group", lambda group: None)

    def sharded():
        return fv.patch_model(model, "sdpa", sequence_parallel_group=group, verify=True)

    refused(NotImplementedError, "sequence_parallel_group", "again with the group", sharded)
    verified(model)()
    assert current_patch(sharded()).sequence_parallel_group is group


def test_models_of_a_trainer_are_checked_too(runs, tmp_path):
    trainer = Trainer(unlisted("phi"), TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
    fv.patch_trainer(trainer, "sdpa", verify=True)
    assert fv.is_patched(trainer.model)
    assert len(runs) == 2
