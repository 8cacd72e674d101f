"""Padded batches, and what a patched model must give for them: what the unpatched one does."""

from __future__ import annotations

import copy

import torch
import transformers

import flexvarlen as fv
from flexvarlen.patches.models.families import FAMILIES
from tests.contract_oracle import gradients_of
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.tiny_models import balances_experts, config_of, documents

LENGTHS = (5, 70, 1, 30)
ROW = 75
TEXT = [each.model_type for each in FAMILIES if each.task in ("CausalLM", "MaskedLM")]
TEXT.remove("phi3")  # transformers gives all rows the longrope frequencies of the longest
SCANS = [each.model_type for each in FAMILIES if "start anew" in each.needs]
BALANCED = [kind for kind in TEXT if balances_experts(kind)]
ENCODERS = [each.model_type for each in FAMILIES if each.task == "MaskedLM"]


def unpadding(model):
    """A patched copy; some families have softcaps or sinks, which sdpa has not."""
    return fv.patch_model(copy.deepcopy(model), "auto", unpad=True)


def padded(side, pad=0):
    """Ids and mask `[4, 75]`; no token is the padding's."""
    ids = torch.full((len(LENGTHS), ROW), pad)
    mask = torch.zeros_like(ids)
    for row, (length, document) in enumerate(zip(LENGTHS, (0, 1, 3, 4), strict=True)):
        at = slice(0, length) if side == "right" else slice(ROW - length, ROW)
        ids[row, at] = documents()[document]
        mask[row, at] = 1
    return {"input_ids": ids, "attention_mask": mask}


def next_tokens(inputs):
    """Labels that no padding predicts: transformers' padded run would learn from that, too."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return ids.masked_fill((mask == 0) | (mask.cumsum(-1) == 1), -100)


def model_with(head, kind, **changes):
    """In train mode; where experts are to be balanced, the loss says so."""
    torch.manual_seed(0)
    config = config_of(kind, **changes)
    config._experts_implementation = "eager"
    model = getattr(transformers, f"AutoModelFor{head}").from_config(
        config, attn_implementation="eager"
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if kind == "gemma4_text":  # its scores are not scaled: too large for fp32 and these tolerances
        model.double().set_attn_implementation("sdpa")
    if kind in BALANCED:
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    return model.train()


def pair(head, kind, patch=None, **changes):
    """An unpatched model, a patched copy of it, and what `seen_tokens` gives of the copy."""
    plain = model_with(head, kind, **changes)
    ours = (patch or unpadding)(plain)
    return plain, ours, seen_tokens(ours)


def losses_and_gradients(model, inputs):
    out = model(**inputs)
    out.loss.backward()
    return out, gradients_of(model)


def assert_gradients_close(found, expected, share, rest=0.0):
    """Each is off by at most a share of its norm, and what rounding leaves where that is zero."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        off = (found[name] - gradient).norm()
        assert off <= share * gradient.norm() + rest, f"{name} is off by {off}"


def assert_same(plain, ours, inputs, atol=1e-6):
    """Loss and every gradient, within 1e-5 of the gradient's norm.

    Scans go by chunks of 64 tokens, which begin elsewhere in a padded row: three times as much.
    """
    close = 3e-5 if plain.config.model_type in SCANS else 1e-5
    (expected, gradients), (out, found) = (
        losses_and_gradients(model, inputs) for model in (plain, ours)
    )
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=atol)
    if expected.get("aux_loss") is not None:
        torch.testing.assert_close(out.aux_loss, expected.aux_loss, rtol=1e-5, atol=0)
        for found_of_layer, of_layer in zip(out.router_logits, expected.router_logits, strict=True):
            assert found_of_layer.shape == of_layer.shape
    whole = torch.cat([g.flatten() for g in gradients.values()]).norm()
    assert_gradients_close(found, gradients, close, 1e-6 * whole)
    return out, expected


def seen_tokens(model):
    """The shapes of what the first layer gets, one a forward."""
    shapes = []
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[:2])))
    return shapes


def assert_as_accurate_as_padded(kind, head, backend, inputs, **options):
    """Logits and every gradient against the padded run in fp64, beside the padded one in bf16.

    Returns what `seen_tokens` does.
    """
    baseline = model_with(head, kind, head_dim=64).to("cuda", torch.bfloat16)
    baseline.set_attn_implementation("sdpa")  # eager gives NaN for rows that begin with padding
    exact = copy.deepcopy(baseline).double()
    inputs = {name: x.cuda() for name, x in inputs.items()}
    ours = fv.patch_model(copy.deepcopy(baseline), backend, unpad=True, **options)
    shapes = seen_tokens(ours)
    out, gradients = losses_and_gradients(ours, inputs)
    (wanted, exact_gradients), (low, low_gradients) = (
        losses_and_gradients(model, inputs) for model in (exact, baseline)
    )
    real = inputs["attention_mask"] == 1
    own = [x.logits if head != "CausalLM" else x.logits[real] for x in (out, wanted, low)]
    assert_as_accurate(*own, 2)
    assert_gradients_as_accurate(gradients, exact_gradients, low_gradients)
    return shapes
