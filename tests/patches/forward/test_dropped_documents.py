"""Models that keep the documents from their layers are refused: their documents would mix."""

from __future__ import annotations

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import compile_regions
from torch._dynamo.exc import Unsupported
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaForCausalLM, LlamaModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

import flexvarlen as fv
from tests import forms
from tests.tiny_models import config_of, new_model, one_row

ROW = one_row()
LAYOUT = forms.given("packed_layout", ROW)


def patched(model_class, **changes):
    config = config_of("llama", **changes)
    config._attn_implementation = "sdpa"
    return fv.patch_model(model_class(config).eval(), "sdpa")


def compiled_whole(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", fullgraph=True)


class Named(LlamaForCausalLM):
    """A user's."""


def test_a_subclass_by_any_name():
    """Its head is that of the class that it extends."""
    plain, model = fv.patch_model(new_model("llama"), "sdpa"), patched(Named)
    model.load_state_dict(plain.state_dict())
    inputs = {"input_ids": ROW.ids, "position_ids": ROW.position_ids, "labels": ROW.ids}
    with torch.no_grad():
        outs = [each(**inputs) for each in (plain, model)]
    assert torch.equal(outs[0].logits, outs[1].logits)
    assert torch.equal(outs[0].loss, outs[1].loss)


# ---- heads ----


class Head(LlamaForCausalLM):
    """A head with a `hidden` of its own: (self, ids, documents) -> hidden states."""

    def forward(self, input_ids=None, **documents):
        names = ("labels", "num_items_in_batch")
        labels = {name: documents.pop(name) for name in names if name in documents}
        logits = self.lm_head(self.hidden(input_ids, documents))
        loss = ForCausalLMLoss(logits, vocab_size=logits.shape[-1], **labels) if labels else None
        return CausalLMOutputWithPast(loss, logits)

    def base(self, ids, **documents):
        return self.model(ids, **documents | {"use_cache": False}).last_hidden_state

    def layer(self, hidden, **documents):
        tables = self.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        return self.model.layers[0](hidden, position_embeddings=tables, **documents)


def drops_documents(head, ids, documents):
    return head.base(ids)


def drops_them_once(head, ids, documents):
    return head.base(ids, **documents) + head.base(ids)


def gives_them_to_one_layer(head, ids, documents):
    return head.layer(head.base(ids), **documents)


def keywords_for_loss_alone(head, ids, documents):
    return head.base(
        ids, **{name: documents.get(name) for name in ("attention_mask", "position_ids")}
    )


def second_batch(head, ids, documents):
    return head.base(ids, **documents) + head.base(ids[:, :100]).sum()


def runs_layers(head, ids, documents):
    return head.model.norm(head.layer(head.model.embed_tokens(ids)))


def makes_a_mask(head, ids, documents):
    tokens = ids.shape[1]
    return head.base(ids, attention_mask=torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril())


def explicit_second_batch(head, ids, documents):
    one = fv.PackedLayout.from_lengths([ids.shape[1]])
    return head.base(ids, **documents) + head.base(ids, packed_layout=one).sum()


def head_with(hidden):
    return patched(type("HeadForCausalLM", (Head,), {"hidden": hidden}), num_hidden_layers=1)


def base_compiled(model):
    torch._dynamo.reset()
    model.model.compile(backend="eager")
    return model


def base_checkpointed(model):
    model.model = checkpoint_wrapper(model.model)
    return model


def base_hooked(model):
    add_hook_to_module(model.model, ModelHook())
    return model


def with_regions(model):
    """A second module of the same layers, which are not traced here."""
    regions = compile_regions(model, backend="eager")
    return torch.compiler.set_stance("force_eager")(regions.forward)


LOST = r"must pass its \*\*kwargs|must get its documents"


@pytest.mark.parametrize(
    ("hidden", "wrap"),
    [
        *((drops_documents, wrap) for wrap in (base_checkpointed, base_hooked, with_regions)),
        *((drops_documents, wrap) for wrap in (base_compiled, compiled_whole)),
        *(
            (hidden, None)
            for hidden in (
                *(drops_them_once, gives_them_to_one_layer, keywords_for_loss_alone),
                *(second_batch, runs_layers, makes_a_mask),
            )
        ),
        # By default these run without a graph, and others in one.
        pytest.param(runs_layers, compiled_whole, marks=pytest.mark.slow),
        pytest.param(makes_a_mask, compiled_whole, marks=pytest.mark.slow),
    ],
)
def test_a_head_that_does_not_give_its_base_model_the_documents(hidden, wrap):
    """Also one whose base model would find the same ones by itself; a graph cannot ask."""
    model = head_with(hidden)
    call = model if wrap is None else wrap(model)
    for _ in range(2 if wrap is None else 1):  # what a failed call leaves behind changes nothing
        with torch.no_grad(), pytest.raises((ValueError, Unsupported), match=LOST):
            call(input_ids=ROW.ids, labels=ROW.ids, **LAYOUT)


def test_documents_that_a_head_drops_in_any_form():
    model = head_with(drops_documents)
    for form in ("packed_layout", "position_ids", "document_ids"):
        for _ in range(2):
            with torch.no_grad(), pytest.raises(ValueError, match=LOST):
                model(input_ids=ROW.ids, labels=ROW.ids, **forms.given(form, ROW))
    model.model(input_ids=ROW.ids)  # on its own it may take the row for one document
    model(input_ids=ROW.ids)


def test_a_head_that_tells_its_base_model_of_other_documents():
    with torch.no_grad():
        out = head_with(explicit_second_batch)(input_ids=ROW.ids, **LAYOUT)
    assert out.logits.isfinite().all()


# ---- base models and layers ----


class BaseWithoutDocuments(LlamaModel):
    keeps_mask = True

    def forward(self, input_ids=None, attention_mask=None, **documents):
        mask = attention_mask if self.keeps_mask else None
        return super().forward(input_ids=input_ids, attention_mask=mask)


def layer_without_documents(layer, keeps_mask):
    def forward(x, attention_mask=None, position_embeddings=None, **documents):
        mask = attention_mask if keeps_mask else None
        return inner(x, attention_mask=mask, position_embeddings=position_embeddings)

    inner, layer.forward = layer.forward, forward


@pytest.mark.parametrize(
    ("where", "keeps_mask", "compiled"),
    [
        *((where, mask, False) for where in ("layer", "base") for mask in (True, False)),
        ("layer", True, True),
        pytest.param("base", True, True, marks=pytest.mark.slow),  # as the layer's
    ],
)
def test_documents_that_do_not_come_to_attention(where, keeps_mask, compiled):
    """Neither a mask that stands in for them nor none would keep documents apart."""
    if where == "layer":
        model = patched(LlamaModel, num_hidden_layers=1)
        layer_without_documents(model.layers[0], keeps_mask)
    else:
        model = patched(BaseWithoutDocuments, num_hidden_layers=1)
        model.keeps_mask = keeps_mask
    call = compiled_whole(model) if compiled else model
    words = r"must get its documents from the model's own forward.*pass \*\*kwargs on"
    packed, one_document = ROW.position_ids, torch.arange(256)[None]
    for positions in (packed,) if compiled else (packed, one_document):
        with torch.no_grad(), pytest.raises((ValueError, Unsupported), match=words):
            call(input_ids=ROW.ids, position_ids=positions)
