"""What a patched model gives for a random case, and what its documents give alone, unpatched.

Shapes: B rows of S tokens; V is the vocabulary, the hidden size of a base model, or the labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, pad
from transformers import DynamicCache, StaticCache
from transformers.modeling_outputs import QuestionAnsweringModelOutput, SequenceClassifierOutput

import flexvarlen as fv
from tests import forms
from tests.cases import FLOATS, FORMS, HEADS, LABELS, REPLACED, Case
from tests.tiny_models import KINDS, Batch, new_model

Inputs = dict[str, Any]
Outcome = dict[str, Tensor]  # outputs [tokens or documents, V], loss and gradients, by name


class RefusedCase(Exception):
    """A sentence by which the case may be refused."""


def run(case: Case) -> tuple[Outcome, list[Outcome]]:
    """What the patched model gives; and what it should give, of which it must equal one.

    Cached calls give what the unpatched model gives in the same calls. Where these do not fit one
    another (a prompt without position_ids, whose padding counts, then steps with), a patched model
    may also give what the documents give one by one.

    Raises:
        RefusedCase: it may be refused, and was.
    """
    problem = case.labels if case.pools else None
    model = model_of(case.of.family, case.of.head, problem)
    batch = batch_of(model, case)
    autocast = torch.autocast("cpu", torch.bfloat16) if case.mode.autocast else nullcontext()
    with torch.set_grad_enabled(case.mode.gradients), autocast:
        if case.calls:
            expected = [_decode(model, case, batch), _decode_alone(model, case, batch)]
        else:
            expected = [_one_by_one(model, case, batch)]
        try:
            with _ready(model, case):
                found = (_decode if case.calls else _together)(model, case, batch)
        except (ValueError, NotImplementedError) as refusal:
            if any(sentence in str(refusal) for sentence in _may_refuse(case)):
                raise RefusedCase(str(refusal)) from refusal
            raise
    of_one_token = not (case.pools or case.predicts or case.task == "QuestionAnswering")
    if case.of.mode == "base alone" and not of_one_token:
        raise AssertionError("a head over a base model that is patched alone has run")
    if case.labels == "wrong" and len(case.rows.lengths) > 1:
        raise AssertionError("labels that are not those of the documents were accepted")
    return found, expected


def _may_refuse(case: Case) -> list[str]:
    sentences = []
    if case.of.mode == "base alone":
        sentences.append("a head around a patched base model must be patched too")
    if case.task == "QuestionAnswering" and FORMS[case.of.form].rows[:3] != "one":
        sentences.append("pools each row to one output, so a row must hold one document")
    if case.labels == "wrong":
        sentences.append("labels must be one for each of the")
    if case.pools and case.is_encoder and any(case.rows.left):
        sentences.append("attention_mask must not hide the first token of a row")
    if case.dtype in FLOATS:
        sentences += ["position_ids must be integers", "attention_mask must be 0 and 1 in"]
        sentences.append("seq_idx must be integers")
    return sentences


# ---- models ----


@cache
def model_of(family: str, head: str, problem: str | None) -> Any:
    """Shared, unpatched; a token goes to all experts, of which two almost equal ones could swap."""
    changes: Inputs = {} if family in KINDS else {"every_expert": True}
    if HEADS[head] in ("SequenceClassification", "TokenClassification"):
        changes["num_labels"] = 1 if problem == "regression" else LABELS
        changes["classifier_dropout"] = 0.0
    if problem == "several":
        changes["problem_type"] = "multi_label_classification"
    model = new_model(family, task=HEADS[head] or None, **changes)
    if head == "classifier that pools by the mask":
        model.__class__ = _pooling_by_mask(type(model))
    elif head == "questions by a forward of its own":
        model.__class__ = _own_questions(type(model))
    weight = model.get_input_embeddings().weight.data
    weight[model.config.pad_token_id] = weight[5].flip(0)  # as in a checkpoint: not 0
    return model


def _pooling_by_mask(parent: Any) -> Any:
    class PoolsByMask(parent):  # type: ignore[misc]
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            out = self.base_model(input_ids, attention_mask=attention_mask, **kwargs)
            hidden = out.last_hidden_state
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            pooled = hidden[torch.arange(len(hidden)), mask.long().sum(1) - 1]
            return SequenceClassifierOutput(logits=pooled[:, : self.config.num_labels])

    return PoolsByMask


def _own_questions(parent: Any) -> Any:
    class OwnQuestions(parent):  # type: ignore[misc]
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            out = self.base_model(input_ids, attention_mask=attention_mask, **kwargs)
            return QuestionAnsweringModelOutput(start_logits=(out[0][..., 0] / 10).softmax(-1))

    return OwnQuestions


def _base(model: Any) -> Any:
    """Of a multimodal model's text tower base_model is that tower with its head."""
    return model.model if model.base_model is model else model.base_model


@contextmanager
def _ready(model: Any, case: Case) -> Iterator[None]:
    """The model patched and in the case's mode; then as before."""
    model.train(case.mode.train)
    if case.mode.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case.mode.reentrant})
    patched = _base(model) if case.mode.patch == "base" else model
    try:
        with fv.patched(patched, case.of.backend, **case.mode.options):
            yield
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
        model.zero_grad()


# ---- batches and labels ----


def batch_of(model: Any, case: Case) -> Batch:
    token = model.config.pad_token_id
    batch = case.rows.batch(case.seed, token if case.pools else None)
    if case.pads:
        texts = [x.clone() for x in texts_of(batch)]
        for number, text in enumerate(texts):
            if case.pools and number % 3 == 0:  # else equal tokens, which may have no gradient
                text[:] = token
            elif number % 2 == 0:
                text[len(text) // 2 + 1 :] = token
        batch.ids[batch.document_ids > 0] = torch.cat(texts)
    return batch


def texts_of(batch: Batch) -> tuple[Tensor, ...]:
    """Token ids of each document that is not empty."""
    lengths = [n for n in batch.cu_seqlens.diff().tolist() if n]
    return batch.of_documents(batch.ids).split(lengths)


def labels_of(case: Case, batch: Batch) -> Tensor | None:
    """As a forward takes them: of tokens `[B, S]`, -100 where none is, or of each document."""
    count = len(case.rows.lengths)
    if case.labels is None or case.task == "QuestionAnswering":
        return None
    if not case.pools:
        ids = batch.ids % LABELS if case.of.head == "TokenClassification" else batch.ids
        labels = ids.masked_fill((batch.ids % 4 == 0) | (batch.document_ids == 0), -100)
        # The mean over no labels has no value.
        return labels if (labels[_counted(case, batch)] >= 0).any() else None
    generator = torch.Generator().manual_seed(case.seed)
    if case.labels == "several":
        return torch.randint(2, (count, LABELS), generator=generator).float()
    if case.labels == "regression":
        return torch.rand(count, generator=generator)
    return torch.randint(LABELS, (1 if case.labels == "wrong" else count,), generator=generator)


def _counted(case: Case, batch: Batch) -> Tensor:
    """bool `[B, S]`: tokens whose labels count: a causal model does not predict the first."""
    counted = batch.document_ids > 0
    if case.predicts:
        firsts = torch.zeros(int(counted.sum()), dtype=torch.bool)
        firsts[[0, *accumulate(case.rows.lengths)][:-1]] = True
        counted[counted.clone()] = ~firsts
    return counted


def _loss(case: Case, batch: Batch, outputs: Tensor, labels: Tensor | None) -> Tensor | None:
    """The mean over all labels of the documents, or None where the head makes none."""
    if labels is None or case.labels == "wrong" or case.of.head in REPLACED:
        return None
    if case.labels == "several":
        return binary_cross_entropy_with_logits(outputs.float(), labels)
    if case.labels == "regression":
        return mse_loss(outputs[:, 0].float(), labels)
    if not case.pools:
        labels = batch.of_documents(labels.masked_fill(~_counted(case, batch), -100))
        if case.predicts:
            outputs = pad(outputs, (0, 0, 1, 0))[:-1]
    return cross_entropy(outputs.float(), labels)


# ---- forwards ----


def _together(model: Any, case: Case, batch: Batch) -> Outcome:
    """The whole batch at once."""
    labels = labels_of(case, batch)
    if case.of.form == "collator":
        inputs = _collated(case, batch, labels)
    else:
        inputs = _tokens(model, case, batch.ids)
        inputs |= forms.given(case.of.form, batch, *case.beside)
        inputs |= {name: _in_dtype(case, inputs[name]) for name in TYPED if name in inputs}
    if case.use_cache is not None:
        inputs["use_cache"] = case.use_cache
    if labels is not None:
        inputs.setdefault("labels", labels)
    names = (*BY_POSITION, "labels") if case.by_position else ()
    by_position = [inputs.pop(name, None) for name in names]
    out = _call(model, case, *by_position, **inputs)
    outputs = out[_output(case)]
    outputs = outputs if case.pools else batch.of_documents(outputs)
    loss = None if labels is None or case.labels == "wrong" else out.get("loss")
    found = _outcome(model, case, outputs, loss)
    if case.mode.gradients and case.embeddings:
        found["gradient of inputs_embeds"] = batch.of_documents(inputs["inputs_embeds"].grad)
    return found


TYPED = ("position_ids", "attention_mask", "seq_idx")
BY_POSITION = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds")


def _in_dtype(case: Case, x: Tensor) -> Tensor:
    """The values in the case's dtype, if they fit."""
    if case.dtype is None or (case.dtype not in FLOATS and x.max() > torch.iinfo(case.dtype).max):
        return x
    return x.to(case.dtype)


def _collated(case: Case, batch: Batch, labels: Tensor | None) -> Inputs:
    """What PackedCollator makes of the documents."""
    examples: list[Inputs] = [{"input_ids": x.tolist()} for x in texts_of(batch)]
    of_tokens = labels is not None and not case.pools
    if of_tokens:
        split = batch.of_documents(labels).split(case.rows.lengths)
        for example, own in zip(examples, split, strict=True):
            example["labels"] = own.tolist()
    unwanted = {"use_cache"} if of_tokens else {"use_cache", "labels"}
    collator = fv.PackedCollator(next_token_labels=case.predicts)
    return {x: y for x, y in collator(examples).items() if x not in unwanted}


def _one_by_one(model: Any, case: Case, batch: Batch) -> Outcome:
    """A document in each forward."""
    inputs = [_tokens(model, case, ids[None]) for ids in texts_of(batch)]
    if case.rows.first:
        positions = torch.arange(len(texts_of(batch)[0])) + case.rows.first
        inputs[0]["position_ids"] = positions[None]
    caches = {} if case.is_encoder else {"use_cache": False}
    outs = [_call(model, case, **x, **caches)[_output(case)] for x in inputs]
    outputs = torch.cat(outs if case.pools else [out[0] for out in outs])
    found = _outcome(model, case, outputs, _loss(case, batch, outputs, labels_of(case, batch)))
    if case.mode.gradients and case.embeddings:
        found["gradient of inputs_embeds"] = torch.cat([x["inputs_embeds"].grad[0] for x in inputs])
    return found


def _call(model: Any, case: Case, *args: Any, **inputs: Any) -> Any:
    return (_base(model) if case.of.head == "none" else model)(*args, **inputs)


def _output(case: Case) -> str:
    if case.task == "QuestionAnswering":
        return "start_logits"
    return "last_hidden_state" if case.of.head == "none" else "logits"


def _tokens(model: Any, case: Case, ids: Tensor) -> Inputs:
    if not case.embeddings:
        return {"input_ids": ids}
    embedded = model.get_input_embeddings()(ids).detach()
    return {"inputs_embeds": embedded.requires_grad_(case.mode.gradients)}


def _outcome(model: Any, case: Case, outputs: Tensor, loss: Tensor | None) -> Outcome:
    """With the gradients of the loss, or of some function of the outputs; resets them."""
    found = {"outputs": outputs.detach()}
    if loss is not None:
        found["loss"] = loss.detach()
    if case.mode.gradients:
        if loss is None:
            weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs)
            loss = (outputs.float() * weights).sum() / len(outputs)
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
        model.zero_grad()
    return found


# ---- calls that share a cache ----
def _decoded_tokens(case: Case, batch: Batch) -> tuple[Tensor, Tensor]:
    """Ids of prompt and new tokens, and which are no padding, `[B, tokens of all calls]`."""
    new = sum(case.calls) - batch.ids.shape[1]
    ids = torch.cat([batch.ids, batch.ids.flip(1).repeat(1, new)[:, :new]], dim=1)
    return ids, pad(batch.document_ids > 0, (0, new), value=True)


def _decode(model: Any, case: Case, batch: Batch) -> Outcome:
    """Calls that share a cache."""
    ids, real = _decoded_tokens(case, batch)
    positions = real.cumsum(1) - 1
    if case.rows.padding_position is not None:
        positions[~real] = case.rows.padding_position
    kept = {
        "own": lambda: None,
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=ids.shape[1]),
    }[case.cache]()
    logits = []
    bounds = pairwise([0, *accumulate(case.calls)])
    for with_positions, (start, end) in zip(case.positions, bounds, strict=True):
        inputs: Inputs = {"position_ids": positions[:, start:end]} if with_positions else {}
        if case.beside or not real.all():
            inputs["attention_mask"] = real[:, :end].long()
        out = model(ids[:, start:end], past_key_values=kept, use_cache=True, **inputs)
        kept = out.past_key_values
        logits.append(out.logits)
    return {"outputs": torch.cat(logits, dim=1)[real]}


def _decode_alone(model: Any, case: Case, batch: Batch) -> Outcome:
    """The same documents, each in one forward."""
    rows = zip(*_decoded_tokens(case, batch), strict=True)
    logits = [model(ids[real][None], use_cache=False).logits[0] for ids, real in rows]
    return {"outputs": torch.cat(logits)}
