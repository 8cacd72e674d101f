"""The auxiliary loss of a mixture of experts counts each real token of a batch, and no padding.

A token of a tree counts for each sample that shares it. tests/patches/forward/test_unpad.py has
such a loss in the padded batches of every family that knows one.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy

import flexvarlen as fv
from flexvarlen.patches.forward import router
from flexvarlen.patches.models.families import FAMILIES
from tests import forms
from tests.contract_oracle import gradients_of
from tests.patches.forward.padded_runs import assert_gradients_close, losses_and_gradients
from tests.patches.forward.test_trees import LOOP, samples
from tests.tiny_models import (
    Batch,
    balances_experts,
    documents,
    new_model,
    one_row,
    padded_rows,
    two_rows,
)

KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
SHORT = padded_rows(left=False, packed=True)


def cut(batch: Batch, tokens: int) -> Batch:
    """The first row alone, with so many tokens."""
    of_first = len(batch.document_ids[0].unique()) - 1
    rows = (getattr(batch, x)[:1, :tokens] for x in ("ids", "position_ids", "document_ids"))
    return Batch(*rows, batch.cu_seqlens[: of_first + 1], batch.order[:of_first])


CUT = cut(SHORT, 90)
FORMS = {  # the rows, and how their documents are given; the layout of CUT ends before its row does
    "no_mask": (one_row(), "position_ids"),
    "ones": (two_rows(), "position_ids", "ones"),
    "document_ids": (two_rows(), "document_ids"),
    "cu_seq_lens": (one_row(), "cu_seq_lens"),
    "padding": (padded_rows(left=True), "padding_mask"),
    "padding_and_document_ids": (SHORT, "document_ids"),
    "padding_behind_a_layout": (CUT, "packed_layout"),
}


def given_in(form: str):
    """The batch of a form and its keyword arguments."""
    batch, way, *beside = FORMS[form]
    return batch, forms.given(way, batch, *beside)


TRACED = {"mixtral": {"num_hidden_layers": 1}, "gpt_oss": {}}  # which needs both kinds of layers


def model_of(kind: str, **changes):
    """In fp64, so that what is left is a difference in meaning; its auxiliary loss counts a lot."""
    return new_model(kind, router_aux_loss_coef=0.5, **changes).double()


def apart(kind: str, batch: Batch, **changes):
    """Loss, auxiliary loss and gradients of the unpatched model, each document by itself."""
    model = model_of(kind, **changes)
    losses, gates, labels = [], [], 0
    for index, _ in batch.order:
        ids = documents()[index][None]
        out = model(ids, use_cache=False, output_router_logits=True)
        losses.append(cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="sum"))
        gates.append(out.router_logits)
        labels += ids.numel() - 1
    balance = sys.modules[type(model).__module__].load_balancing_loss_func
    together = tuple(torch.cat(layer) for layer in zip(*gates, strict=True))
    aux = balance(together, model.num_experts, model.num_experts_per_tok)
    loss = torch.stack(losses).sum() / labels + model.router_aux_loss_coef * aux
    loss.backward()
    return loss.detach(), aux.detach(), {name: p.grad for name, p in model.named_parameters()}


def check(model, out, expected):
    """Equal but for the rounding of transformers' losses, which are in fp32."""
    loss, aux, gradients = expected
    out.loss.backward()
    torch.testing.assert_close(out.aux_loss.double(), aux.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(out.loss.double(), loss.double(), rtol=1e-6, atol=0)
    assert_gradients_close(gradients_of(model), gradients, 1e-5, 1e-9)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("mixtral", form) for form in FORMS),
        *((kind, "padding_and_document_ids") for kind in KINDS[1:]),
    ],
)
def test_loss_and_gradients_are_those_of_the_documents(kind, form):
    batch, inputs = given_in(form)
    model = fv.patch_model(model_of(kind), "reference").train()
    out = model(batch.ids, labels=batch.ids, output_router_logits=True, **inputs)
    check(model, out, apart(kind, batch))


def test_as_the_config_asks_too():
    batch, inputs = given_in("padding_and_document_ids")
    model = fv.patch_model(model_of("mixtral", output_router_logits=True), "sdpa")
    aux = model(batch.ids, **inputs).aux_loss.item()
    assert aux == pytest.approx(apart("mixtral", batch)[1].item(), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("mixtral", "padding_behind_a_layout"),
        ("gpt_oss", "padding_behind_a_layout"),
        ("mixtral", "no_mask"),
        ("gpt_oss", "padding_and_document_ids"),
    ],
)
@pytest.mark.sampled(1)
def test_in_one_graph(kind, form):
    torch._dynamo.reset()
    batch, inputs = given_in(form)
    model = fv.patch_model(model_of(kind, **TRACED[kind]), "reference").train()
    model.set_experts_implementation("batched_mm")  # eager loops over experts, on the host
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    model(batch.ids[:, :4], output_router_logits=True)  # installs transformers' hooks, by a lock
    others = {"packed_layout": fv.PackedLayout.from_lengths([20, 16, 4], total_tokens=90)}
    if "packed_layout" not in inputs:
        others = {name: x.roll(3, dims=1) for name, x in inputs.items()}
    compiled(batch.ids, labels=batch.ids, output_router_logits=True, **others)
    out = compiled(batch.ids, labels=batch.ids, output_router_logits=True, **inputs)
    check(model, out, apart(kind, batch, **TRACED[kind]))
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_generates_as_before(kind):
    ids = documents()[1][None, :12]
    models = [new_model(kind, output_router_logits=True) for _ in range(2)]
    fv.patch_model(models[1], "reference")
    for mask in (None, torch.ones_like(ids), (torch.arange(12) >= 5).long()[None]):
        plain, ours = (
            model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
            for model in models
        )
        assert torch.equal(plain, ours)


# ---- trees ----


BALANCED = [each.model_type for each in FAMILIES if balances_experts(each.model_type)]
TREES = {"trees": (0, 1, 2, 3, 4, 5), "twins": (1, 5, 4)}  # twins are one document, no tree


def padded_run(model, texts):
    """Outputs and gradients of the unpatched model on the samples as rows of a padded batch."""
    rows = [torch.tensor(text) for text in texts]
    ids, mask, labels = (
        torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=value)
        for each, value in ((rows, 0), ([torch.ones_like(x) for x in rows], 0), (rows, -100))
    )
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return losses_and_gradients(model, {**batch, "output_router_logits": True})


def balanced_model(family, **changes):
    return new_model(family, router_aux_loss_coef=0.5, **changes).train()


def tree_of(texts, **sizes):
    return {**fv.share_prefixes(texts, **sizes).batch(), "output_router_logits": True}


@pytest.mark.filterwarnings(LOOP)
@pytest.mark.parametrize(
    ("family", "chosen", "checkpointing"),
    [
        *((family, "trees", False) for family in BALANCED),
        ("mixtral", "twins", False),
        ("mixtral", "trees", True),
    ],
)
def test_each_sample_of_a_tree_counts(family, chosen, checkpointing):
    texts = [samples()[index] for index in TREES[chosen]]
    expected, gradients = padded_run(balanced_model(family), texts)
    model = fv.patch_model(balanced_model(family), "reference")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = tree_of(texts, total_tokens=160)
    batch["sample_counts"].clamp_(min=1)  # what padding has must not count
    assert (batch["packed_layout"].segments is None) == (chosen == "twins")
    out, found = losses_and_gradients(model, batch)
    for name in ("loss", "aux_loss"):
        torch.testing.assert_close(out[name], expected[name], rtol=1e-5, atol=0)
    assert_gradients_close(found, gradients, 1e-5)


def test_a_tree_without_counts():
    batch = tree_of(samples())
    inputs = {name: batch[name] for name in ("input_ids", "packed_layout")}
    model = fv.patch_model(balanced_model("mixtral"), "sdpa")
    with pytest.raises(ValueError, match="sample_counts must give the samples that share each"):
        model(**inputs, output_router_logits=True)
    assert model(**inputs).aux_loss is None
    twins = tree_of([samples()[1]] * 2)
    del twins["sample_counts"]
    with pytest.raises(ValueError, match="sample_counts must give the samples that share each"):
        model(**twins)


def test_a_tree_in_a_model_that_is_not_verified(monkeypatch):
    """Doge's loss counts a token once, whatever its mask holds."""
    monkeypatch.setattr(router, "is_verified", lambda *_: False)
    model = fv.patch_model(balanced_model("mixtral"), "sdpa")
    with pytest.raises(NotImplementedError, match="output_router_logits must be False for trees"):
        model(**tree_of(samples()))
