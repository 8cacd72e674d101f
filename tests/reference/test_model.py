"""The model's reference is fp64 throughout, in every family, and each document is alone in it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexvarlen.reference import model as reference_model
from flexvarlen.reference.acceptance import Error
from flexvarlen.reference.model import (
    Float64,
    baseline_model,
    float64_model,
    next_token_loss,
    run_alone,
)
from tests.tiny_models import new_model

LENGTHS = (9, 1, 14)
FAMILIES = pytest.mark.parametrize(
    "family",
    ["gemma2", "gemma3_text", "gpt_oss", "llama", "mixtral", "qwen3", "qwen3_5_text", "qwen3_moe"],
)
CHANGES = {
    "gemma2": {"attn_logit_softcapping": 2.0},
    # Unlike the width of RoPE's tables.
    "qwen3_5_text": {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
}


def build(family, dtype=torch.bfloat16):
    model = new_model(family, **CHANGES.get(family, {}))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def ids():
    return torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(1))


def results(model):
    return run_alone(
        model, ids(), LENGTHS, loss=next_token_loss(model, ids(), LENGTHS, range(len(LENGTHS)))
    )


class NarrowOperators(TorchDispatchMode):
    """Notes the operators that return a tensor of a narrower float than fp64."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            # RoPE's tables, [1, L, D] or half or a quarter of D (of three axes: [3, 1, L, D]), and
            # positions alone may be narrower.
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64:
                is_table = (x.ndim, x.shape[0]) in ((3, 1), (4, 3))
                if is_table and x.shape[-1] in (0, 1, 2, 4, 8, 16):
                    continue
                self.found.add((str(func), tuple(x.shape)))
        return out


@FAMILIES
def test_everything_but_rope_tables_is_fp64(family):
    model = float64_model(build(family))
    with NarrowOperators() as narrow:
        found = results(model)
    assert not narrow.found
    assert all(gradient.dtype == torch.float64 for gradient in found.gradients.values())


def test_without_the_mode_norms_are_fp32():
    model = float64_model(build("llama"))
    with NarrowOperators() as narrow, torch.no_grad():
        model(ids())
    assert narrow.found


@FAMILIES
def test_baseline_is_the_reference_but_for_rounding(family):
    base = build(family, torch.float32)
    exact, baseline = results(float64_model(base)), results(baseline_model(base))
    assert baseline.loss == pytest.approx(exact.loss, rel=1e-5)
    for found, expected in zip(baseline.logits(), exact.logits(), strict=True):
        assert Error.between(found[2], expected[2]).relative < 1e-4
    for name, gradient in exact.gradients.items():
        assert Error.between(baseline.gradients[name], gradient).relative < 1e-3, name


def test_blocks_of_queries_change_nothing(monkeypatch):
    """Long documents: blocks of queries, whose scores the backward computes again."""
    for family in ("llama", "gemma3"):
        base = build(family)
        whole = results(float64_model(base))
        monkeypatch.setattr(reference_model, "PIECE_ELEMENTS", 4 * 14 * 3)
        pieces = results(float64_model(base))
        monkeypatch.undo()
        for name, gradient in whole.gradients.items():
            torch.testing.assert_close(pieces.gradients[name], gradient, rtol=1e-9, atol=1e-12)


def test_each_document_is_alone_and_the_base_is_untouched():
    base = build("qwen3")
    before = {name: x.clone() for name, x in base.state_dict().items()}
    everything = results(float64_model(base))
    model = float64_model(base)
    last = run_alone(model, ids(), LENGTHS, documents=[2])
    assert last.documents == (2,)
    assert not last.gradients
    assert torch.equal(last.hidden[0], everything.hidden[2])
    with Float64(), torch.no_grad():
        alone = model.base_model(ids()[:, 10:]).last_hidden_state[0]
    assert torch.equal(alone, everything.hidden[2])
    assert base.dtype == torch.bfloat16
    assert all(torch.equal(x, before[name]) for name, x in base.state_dict().items())


def test_gradients_of_chosen_parameters():
    model = float64_model(build("qwen3"))
    name = "model.layers.1.self_attn.k_proj.weight"
    loss = next_token_loss(model, ids(), LENGTHS, range(3))
    chosen = run_alone(model, ids(), LENGTHS, loss=loss, parameters=[name])
    assert list(chosen.gradients) == [name]
    assert torch.equal(chosen.gradients[name], results(model).gradients[name])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("cohere2", {"logit_scale": 0.25}),
        ("gemma2", {"final_logit_softcapping": 0.5}),
        ("granite", {"logits_scaling": 8.0}),
    ],
)
def test_logits_and_loss_are_the_whole_models(family, changes):
    base = new_model(family, **changes).double()
    document = ids()[:, -LENGTHS[2] :]
    expected = base(document, labels=document)
    found = run_alone(
        base, ids(), LENGTHS, documents=[2], loss=next_token_loss(base, ids(), LENGTHS, [2])
    )
    ((_, _, logits),) = found.logits()
    torch.testing.assert_close(logits, expected.logits[0].double(), rtol=1e-5, atol=1e-5)
    assert found.loss == pytest.approx(expected.loss.item(), rel=1e-5)


def test_pieces_of_the_loss_change_nothing():
    model = float64_model(build("gemma2"))
    loss = next_token_loss(model, ids(), LENGTHS, range(3), piece_tokens=4)
    pieces, whole = run_alone(model, ids(), LENGTHS, loss=loss), results(model)
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-12)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(pieces.gradients[name], gradient, rtol=1e-9, atol=1e-12)
