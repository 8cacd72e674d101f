"""Patched models that share one config object share its attn_implementation."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from itertools import permutations

import pytest
import torch
import torch._dynamo.testing
from transformers import LlamaForCausalLM

import flexvarlen as fv
from tests.tiny_models import config_of, new_model

IDS = torch.arange(3, 15)[None]
POSITIONS = torch.tensor([[*range(5), *range(7)]])
BACKENDS = ("sdpa", "reference", "sdpa")


@pytest.fixture
def models():
    """Three models of one config, with the same weights."""
    config = config_of("llama", num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    made = [LlamaForCausalLM(config).eval() for _ in BACKENDS]
    for model in made:
        model.load_state_dict(made[0].state_dict())
        assert model.config is config
    return made


@pytest.fixture
def right(models):
    """What checks that packed logits are those of the documents one by one."""
    with torch.no_grad():
        expected = torch.cat([models[0](ids).logits for ids in IDS.split([5, 7], dim=1)], dim=1)

    def check(model):
        mask = torch.tensor([[1] * 5 + [2] * 7])  # what the plugin name alone does not see
        for given in ({"position_ids": POSITIONS}, {"attention_mask": mask}):
            with torch.no_grad():
                logits = model(IDS, **given).logits
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)

    return check


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_any_order_of_exits(models, right, order):
    config = models[0].config
    with torch.no_grad():
        before = models[0](IDS).logits
    contexts = []
    for model, backend in zip(models, BACKENDS, strict=True):
        contexts.append(ExitStack())
        contexts[-1].enter_context(fv.patched(model, backend))
    inside = set(range(3))
    for number in order:
        for i in inside:
            right(models[i])
        contexts[number].close()
        inside.remove(number)
        if inside:
            assert config._attn_implementation in {
                {"sdpa": "flexvarlen_doc", "reference": "flexvarlen_reference"}[BACKENDS[i]]
                for i in inside
            }
    assert config._attn_implementation == "sdpa"
    for model in models:
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, before)
        assert "flexvarlen" not in str(vars(model)) + str(vars(model.model))


def test_a_foreign_name_set_since_is_still_refused(models, right):
    first, second, _ = models
    fv.patch_model(first, "sdpa")
    fv.patch_model(second, "reference")
    for name in ("eager", "flexvarlen_flex"):
        first.set_attn_implementation(name)
        for model in (first, second):
            with pytest.raises(ValueError, match="set since"):
                model(IDS)
    right(fv.patch_model(first, "sdpa"))
    first.set_attn_implementation("eager")
    fv.unpatch_model(first)
    with pytest.raises(ValueError, match="set since"):
        second(IDS)
    fv.unpatch_model(second)
    assert second.config._attn_implementation == "sdpa"


def test_compiled_models_compile_once_while_others_come_and_go(models, right):
    torch._dynamo.reset()
    first, second, _ = models
    counter = torch._dynamo.testing.CompileCounter()
    with fv.patched(first, "sdpa"):
        compiled = torch.compile(first, fullgraph=True, backend=counter)
        right(compiled)
        compiled_so_far = counter.frame_count
        with fv.patched(second, "reference"):
            right(second)
        right(compiled)
    assert counter.frame_count == compiled_so_far


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text", "phi3"])
def test_one_of_two_is_patched_and_the_other_cannot_do_without(kind):
    """The advice must hold for the model that was called, not for the one that was patched."""
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8}
    longrope |= {"long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    changes = {"rope_parameters": longrope} if kind == "phi3" else {}
    first = new_model(kind, **changes)
    second = type(first)(first.config).eval()
    fv.patch_model(first, "sdpa")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"shares the config object.* this model too"):
            second(IDS)
        first(IDS)
    third = type(first)(copy.deepcopy(first.config)).eval()
    third.set_attn_implementation("eager")
    third(IDS)
    first(IDS)
    fv.patch_model(second, "sdpa")
    with torch.no_grad():
        packed = second(IDS, position_ids=POSITIONS).logits[0, 5:]
        torch.testing.assert_close(packed, second(IDS[:, 5:]).logits[0], rtol=0, atol=1e-4)
