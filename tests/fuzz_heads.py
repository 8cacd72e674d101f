"""One random case of `tests.fuzz` about heads: what pools, what labels mean, dtypes of the inputs.

A head's outputs for packed or padded documents must be those of each document alone, by the
unpatched model, or the case is refused by a sentence of `_may_refuse`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers.modeling_outputs import (
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
)

import flexvarlen as fv
from tests.tiny_models import VOCABULARY, config_of

Outcome = dict[str, Tensor]

ENCODERS = ("bert", "roberta", "modernbert")
FAMILIES = ("llama", "qwen3", "mamba2", *ENCODERS)
OWN = "questions by a forward of its own", "classifier that pools by the mask"
HEADS = {
    "classifier": "SequenceClassification",
    "classifier that pools by the mask": "SequenceClassification",
    "questions": "QuestionAnswering",
    "questions by a forward of its own": "QuestionAnswering",
    "tokens": "TokenClassification",
    "masked": "MaskedLM",
    "causal": "CausalLM",
}
FORMS = (
    *("packed_layout", "cu_seq_lens_q", "position_ids", "attention_mask", "seq_idx"),
    *("collator", "padded left", "padded right"),
)
PACKED = FORMS[:-2]
TYPED = ("position_ids", "attention_mask", "seq_idx", "padded left", "padded right")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LABELS = 3


@dataclass(frozen=True)
class HeadCase:
    """Documents, and the head that runs on them.

    Attributes:
        head, form: of `HEADS` and `FORMS`.
        labels: "classes", "several" (of one document) or "regression" of a classifier; "wrong" are
            one label for all documents, or none for some; None: no labels.
        lengths: tokens of each document.
        dtype: of positions, masks and document numbers.
        pads: documents may hold the padding token, or nothing else.
        unpad: `patch_model(unpad=True)`.
        base_alone: the base model is patched, its head is not.
        by_position: labels are given by position.
    """

    seed: int
    family: str
    head: str
    form: str
    labels: str | None
    lengths: tuple[int, ...]
    dtype: torch.dtype
    pads: bool
    unpad: bool
    base_alone: bool
    by_position: bool
    autocast: bool = False


def draw(seed: int, families: tuple[str, ...] = FAMILIES) -> HeadCase:
    """The case of a seed; it is another one for other `families`."""
    rng = random.Random(seed)
    family = rng.choice([name for name in FAMILIES if name in families])
    heads = [
        name
        for name, task in HEADS.items()
        if type(config_of(family)) in getattr(transformers, f"AutoModelFor{task}")._model_mapping
        and not (family in ENCODERS and task == "CausalLM")
    ]
    head = rng.choice(heads)
    form = rng.choice(PACKED if head in OWN else FORMS)  # padding on the left is not for these
    many = rng.random() < 0.1
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 6))]
    if many:  # past the integers of small dtypes
        lengths = rng.choice([[2] * 300, [256, 4], [257, 3], [255, 2, 300]])
    if family == "mamba2" or form.startswith("padded"):
        lengths = lengths[:4]
    # Under `unpad` BERT's positions count padding on the left, as transformers' do.
    unpads = form.startswith("padded") and (family, form) != ("bert", "padded left")
    kinds = ("classes", "several", "regression", "wrong", None)
    return HeadCase(
        seed,
        family,
        head,
        form,
        rng.choice(kinds) if "classifier" in head else rng.choice(["tokens", None]),
        tuple(lengths),
        rng.choice(INTEGERS + FLOATS) if form in TYPED and rng.random() < 0.5 else torch.int64,
        # Left of them transformers' head reads padding, and RoBERTa's positions skip that token.
        pads=rng.random() < 0.3 and form != "padded left" and family != "roberta",
        unpad=unpads and rng.random() < 0.5,
        base_alone=rng.random() < 0.15 and head not in OWN,  # these know nothing of documents
        by_position=rng.random() < 0.3,
    )


class RefusedCase(Exception):
    """A sentence by which the case may be refused."""


# ---- models ----


@cache
def model_of(family: str, head: str, labels: str | None) -> Any:
    """Shared, unpatched, in fp64."""
    torch.manual_seed(0)
    changes: dict[str, Any] = {}
    if "classifier" in head or head == "tokens":
        changes["num_labels"] = 1 if labels == "regression" else LABELS
    if labels == "several":
        changes["problem_type"] = "multi_label_classification"
    auto: Any = getattr(transformers, f"AutoModelFor{HEADS[head]}")
    model_class: Any = auto._model_mapping[type(config_of(family))]
    if head == "classifier that pools by the mask":
        model_class = _pooling_by_mask(model_class)
    elif head == "questions by a forward of its own":
        model_class = _own_questions(model_class)
    model = model_class(config_of(family, **changes)).double().eval()
    model.get_input_embeddings().weight.data.normal_()  # as in a checkpoint: not 0 at padding
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
            return QuestionAnsweringModelOutput(start_logits=out[0][..., 0].softmax(-1))

    return OwnQuestions


# ---- run ----


def run(case: HeadCase) -> tuple[Outcome, list[Outcome]]:
    """What the patched model gives, and what the documents give alone.

    Raises:
        RefusedCase: it may be refused, and was.
    """
    model = model_of(case.family, case.head, case.labels)
    generator = torch.Generator().manual_seed(case.seed)
    texts = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in case.lengths]
    if case.pads:
        pad = model.config.pad_token_id
        texts = [x if i % 2 else x.index_fill(0, torch.arange(len(x) // 2, len(x)), pad)
                 for i, x in enumerate(texts)]  # fmt: skip
        texts = [torch.full_like(x, pad) if i % 3 == 0 else x for i, x in enumerate(texts)]
    labels = _labels(case, texts, generator)
    with torch.no_grad():
        expected = _alone(model, case, texts, labels)
        try:
            patched = model.base_model if case.base_alone else model
            with fv.patched(patched, "sdpa", unpad=case.unpad):
                found = _together(model, case, texts, labels)
        except (ValueError, NotImplementedError) as refusal:
            if any(sentence in str(refusal) for sentence in _may_refuse(case)):
                raise RefusedCase(str(refusal)) from refusal
            raise
    if case.base_alone and case.head not in ("tokens", "masked"):
        raise AssertionError("a head over a base model that is patched alone has run")
    if case.labels == "wrong" and len(texts) > 1:
        raise AssertionError("labels that are not those of the documents were accepted")
    return found, [expected]


def _may_refuse(case: HeadCase) -> list[str]:
    sentences = []
    if case.base_alone:
        sentences.append("a head around a patched base model must be patched too")
    if "questions" in case.head and case.form in PACKED:
        sentences.append("pools each row to one output, so a row must hold one document")
    if case.labels == "wrong":
        sentences.append("labels must be one for each of the")
    if case.head == "classifier" and case.form == "padded left" and case.family in ENCODERS:
        sentences.append("attention_mask must not hide the first token of a row")
    if case.dtype in FLOATS:
        sentences += ["position_ids must be integers", "attention_mask must be 0 and 1 in"]
        sentences.append("seq_idx must be integers")
    return sentences


def _labels(case: HeadCase, texts: list[Tensor], generator: torch.Generator) -> Any:
    """A classifier's `[num_docs, ...]`; of other heads those of each document's tokens."""
    count = len(texts)
    if case.labels is None:
        return None
    if case.labels == "tokens":
        highest = {"tokens": LABELS}.get(case.head, VOCABULARY)
        return [torch.randint(highest, x.shape, generator=generator) for x in texts]
    if case.labels == "several":
        return torch.randint(2, (count, LABELS), generator=generator).double()
    if case.labels == "regression":
        return torch.rand(count, generator=generator).double()
    return torch.randint(LABELS, (1 if case.labels == "wrong" else count,), generator=generator)


def _output(case: HeadCase, out: Any) -> Tensor:
    return out.start_logits if "questions" in case.head else out.logits


def _alone(model: Any, case: HeadCase, texts: list[Tensor], labels: Any) -> Outcome:
    outs = [_output(case, model(x[None])) for x in texts]
    if "classifier" in case.head:
        logits = torch.cat(outs)
        loss = None if labels is None else _document_loss(case, logits, labels)
    else:
        logits = torch.cat([x[0] for x in outs])
        loss = None if labels is None else _token_loss(case, outs, labels)
    return {"outputs": logits} | ({} if loss is None else {"loss": loss})


def _document_loss(case: HeadCase, logits: Tensor, labels: Tensor) -> Tensor | None:
    if case.head != "classifier" or case.labels == "wrong":
        return None
    if case.labels == "several":
        return binary_cross_entropy_with_logits(logits, labels)
    if case.labels == "regression":
        return mse_loss(logits[:, 0], labels)
    return cross_entropy(logits, labels)


def _token_loss(case: HeadCase, outs: list[Tensor], labels: list[Tensor]) -> Tensor | None:
    if "questions" in case.head:
        return None
    causal = case.head == "causal"
    if causal and case.lengths == (1,) * len(case.lengths):
        return None  # the mean of no labels
    logits = torch.cat([x[0, :-1] if causal else x[0] for x in outs])
    return cross_entropy(logits, torch.cat([x[1:] if causal else x for x in labels]))


def _together(model: Any, case: HeadCase, texts: list[Tensor], labels: Any) -> Outcome:
    inputs, real = _inputs(case, model.config.pad_token_id, texts, labels)
    if labels is not None and "labels" not in inputs:
        of_tokens = isinstance(labels, list) and "questions" not in case.head
        if of_tokens:
            filled = torch.full(real.shape, -100)
            filled[real] = torch.cat(labels)
            inputs["labels"] = filled
        elif not isinstance(labels, list):
            inputs["labels"] = labels
    args: tuple[Any, ...] = ()
    if case.by_position and case.head == "causal" and case.family in ("llama", "qwen3"):
        names = ("input_ids", "attention_mask", "position_ids", "past_key_values")
        args = (*(inputs.pop(name, None) for name in (*names, "inputs_embeds", "labels")),)
    out = model(*args, **inputs)
    logits = _output(case, out)
    if "classifier" not in case.head:
        logits = logits[real]
    loss = out.get("loss")
    kept = loss is not None and "questions" not in case.head and case.labels != "wrong"
    if kept and case.head == "causal" and case.lengths == (1,) * len(case.lengths):
        kept = False
    return {"outputs": logits} | ({"loss": loss} if kept else {})


def _inputs(
    case: HeadCase, pad: int, texts: list[Tensor], labels: Any
) -> tuple[dict[str, Any], Tensor]:
    """The keyword arguments of a forward, and bool `[B, S]`, False at padding."""
    if case.form.startswith("padded"):
        longest = max(map(len, texts))
        ids = torch.full((len(texts), longest), pad)
        real = torch.zeros_like(ids, dtype=torch.bool)
        for row, text in enumerate(texts):
            start = longest - len(text) if case.form == "padded left" else 0
            ids[row, start : start + len(text)] = text
            real[row, start : start + len(text)] = True
        return {"input_ids": ids, "attention_mask": real.to(case.dtype)}, real
    ids = torch.cat(texts)[None]
    real = torch.ones_like(ids, dtype=torch.bool)
    lengths = torch.tensor(case.lengths)
    numbers = torch.repeat_interleave(torch.arange(len(texts)), lengths)[None]
    if case.form == "collator":
        examples = [{"input_ids": x.tolist()} for x in texts]
        if isinstance(labels, list) and "questions" not in case.head:
            for example, own in zip(examples, labels, strict=True):
                example["labels"] = own.tolist()
        batch = dict(fv.PackedCollator()(examples))
        batch.pop("use_cache", None)
        if not isinstance(labels, list) or "questions" in case.head:
            batch.pop("labels")
        return batch, real
    value: Any = {
        "packed_layout": lambda: fv.PackedLayout.from_lengths(case.lengths),
        "cu_seq_lens_q": lambda: torch.tensor([0, *accumulate(case.lengths)]).int(),
        "position_ids": lambda: torch.cat([torch.arange(n) for n in case.lengths])[None],
        "attention_mask": lambda: numbers + 1,
        "seq_idx": lambda: numbers,
    }[case.form]()
    if case.form in TYPED and (case.dtype in FLOATS or value.max() <= torch.iinfo(case.dtype).max):
        value = value.to(case.dtype)
    return {"input_ids": ids, case.form: value}, real
