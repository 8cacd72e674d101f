"""What families of models get, and what their documents give one by one, for test_families.py.

`Text` is what decoders get, `LabelledText` what encoders do, `Images` documents with images. The
oracle is the unpatched model in fp64, a document at a time; the baseline is the same in the packed
model's dtype, with transformers' eager attention.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForImageTextToText

from flexvarlen.bench.suites.contract.tiny_configs import draw_weights
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.reference.recurrences import plain_recurrences
from tests import forms as batch_forms
from tests.contract_oracle import gradients_of
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.patches.forward.test_packed_models import FORMS, Form, ready
from tests.patches.models import images, tower_images
from tests.tiny_models import (
    KINDS,
    LENGTHS,
    VOCABULARY,
    Batch,
    Outcome,
    config_of,
    documents,
    shared_model,
)

ENCODERS = [name for name, family in BY_TYPE.items() if family.task == "MaskedLM"]
FIRST = {"bert": 0, "roberta": 2, "modernbert": 0}
"""The position of a document's first token, in each encoder."""


def following(ids: Tensor) -> Tensor:
    """`[L]`: the next token, and no label for the last one."""
    return pad(ids[1:], (0, 1), value=-100)


@dataclass(frozen=True)
class Text:
    """A decoder's rows, each token labelled with the next one."""

    family: str

    # Without position_ids a row of one document counts its left padding, as in transformers:
    # Llama 4 scales queries by that position, so the document alone is another computation.
    forms: ClassVar[dict[str, Any]] = {
        **{name: form for name, form in FORMS.items() if name != "left_padding"},
        "all_at_once": Form(("document_ids",), "left_padding_packed", train=True, reentrant=False),
    }
    # A layer sees no form of a batch: rows, padding and boundaries without positions will do.
    sample: ClassVar[tuple[str, ...]] = ("all_at_once",)

    def model(self, **where: Any) -> Any:
        """The shared one, in a dtype, on a device, with a head_dim."""
        return shared_model(self.family, **where)

    def mode(self, form: str) -> Form:
        """Whether it trains, with checkpoints, on embeddings."""
        return self.forms[form]

    def batch(self, form: str) -> Batch:
        return batch_forms.ROWS[self.forms[form].rows]()

    def labels(self, batch: Batch) -> Tensor:
        return batch.ids

    def inputs(self, form: str) -> dict[str, Any]:
        """The keywords of a forward, labels too."""
        batch, (given, *beside) = self.batch(form), self.forms[form].given
        documents = batch_forms.given(given, batch, *beside)
        return {"input_ids": batch.ids, **documents, "labels": self.labels(batch)}

    def alone(self, form: str, **where: Any) -> tuple[Outcome, Outcome]:
        """What the documents of a form give one by one: exactly, and the baseline."""
        return _exact_and_baseline(self, self.batch(form).order, **where)

    def one_by_one(self, order: tuple[tuple[int, int], ...]) -> Iterator[dict[str, Any]]:
        """The inputs of each document, by index and first position; a label for each logit."""
        for index, first in order:
            ids = documents()[index][None]
            positions = torch.arange(first, first + ids.shape[1])[None]
            given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
            yield {**given, "labels": following(ids[0])}


@cache
def own_labels() -> tuple[Tensor, ...]:
    """Of each document, `[L]`, -100 at most tokens; each first token has one."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in LENGTHS:
        own = torch.randint(3, VOCABULARY, (length,), generator=generator)
        kept = torch.rand(length, generator=generator) < 0.4
        kept[0] = True
        made.append(own.masked_fill(~kept, -100))
    return tuple(made)


@dataclass(frozen=True)
class LabelledText(Text):
    """An encoder's rows, some tokens with a label of their own."""

    # No document of theirs goes on from another.
    forms: ClassVar[dict[str, Any]] = {
        name: form for name, form in Text.forms.items() if "at_position" not in name
    }
    sample = (*Text.sample, "mask_of_ones", "left_padding_packed", "two_packed_rows")

    def labels(self, batch: Batch) -> Tensor:
        labels = torch.full_like(batch.ids, -100)
        labels[batch.document_ids > 0] = torch.cat([own_labels()[i] for i, _ in batch.order])
        return labels

    def inputs(self, form: str) -> dict[str, Any]:
        inputs = super().inputs(form)
        if "position_ids" in inputs:
            inputs["position_ids"] = inputs["position_ids"] + FIRST[self.family]
        return inputs

    def one_by_one(self, order: tuple[tuple[int, int], ...]) -> Iterator[dict[str, Any]]:
        for index, _ in order:
            yield {"input_ids": documents()[index][None], "labels": own_labels()[index]}


@dataclass(frozen=True)
class Images(Text):
    """A row of text with images, each token labelled with the next one."""

    forms = images.FORMS
    sample = ("packed_layout",)

    def model(self, dtype: torch.dtype = torch.float32, device: str = "cpu", head_dim: int = 16):
        if device == "cpu":
            return shared_model(self.family, dtype)
        return with_wide_towers(self.family, head_dim)

    def mode(self, form: str) -> Form:
        return Form((), train=form == "packed_layout")

    def batch(self, form: str) -> Batch:
        return images.ROW

    def prompt(self) -> dict[str, Any]:
        """The inputs of the first document, which ends after its images."""
        return images.inputs_of(images.documents()[:1])

    def inputs(self, form: str) -> dict[str, Any]:
        inputs = images.inputs_of(images.documents())
        return {**inputs, **self.forms[form](self.family), "labels": inputs["input_ids"]}

    def one_by_one(self, order: tuple[tuple[int, int], ...]) -> Iterator[dict[str, Any]]:
        for document in images.documents():
            yield {**images.inputs_of([document]), "labels": following(document.ids)}


@dataclass(frozen=True)
class TowerImages(Images):
    """As `Images`, where images replace tokens before the text model."""

    forms: ClassVar[dict[str, Any]] = {
        "packed_layout": ("packed_layout",),
        "cu_seq_lens": ("cu_seq_lens", "cu_seq_lens_k"),
        "positions": ("position_ids",),
        "document_id_mask": ("document_ids",),
    }

    def model(self, **where: Any) -> Any:
        return Text.model(self, **where)

    def prompt(self) -> dict[str, Any]:
        return tower_images.inputs_of(self.family, tower_images.documents(self.family)[:1])

    def batch(self, form: str) -> Batch:
        return batch_forms.row_of(tower_images.lengths(self.family))

    def inputs(self, form: str) -> dict[str, Any]:
        inputs = tower_images.inputs_of(self.family, tower_images.documents(self.family))
        given, *beside = self.forms[form]
        documents = batch_forms.given(given, self.batch(form), *beside)
        return {**inputs, **documents, "labels": inputs["input_ids"]}

    def one_by_one(self, order: tuple[tuple[int, int], ...]) -> Iterator[dict[str, Any]]:
        for document in tower_images.documents(self.family):
            inputs = tower_images.inputs_of(self.family, [document])
            yield {**inputs, "labels": following(document.ids)}


DECODERS = [name for name in BY_TYPE if name not in (*ENCODERS, *KINDS)]
CASES: dict[str, Text] = {
    **{name: Text(name) for name in DECODERS},
    **{name: LabelledText(name) for name in ENCODERS},
    **{f"{name}, images": Images(name) for name in images.KINDS},
    **{f"{name}, images": TowerImages(name) for name in tower_images.PROCESSORS},
}


@cache
def with_wide_towers(family: str, head_dim: int) -> Any:
    """A tiny model in bf16 on the GPU, with vision heads as wide as a kernel serves."""
    config = config_of(family, head_dim=64, every_expert=True)
    config._experts_implementation = "eager"  # the others have no fp64
    vision, text_width = config.vision_config, config.text_config.hidden_size
    if family == "qwen2_vl":
        vision.embed_dim, vision.hidden_size = 2 * head_dim, text_width
    else:
        vision.hidden_size, vision.out_hidden_size = 2 * head_dim, text_width
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    return draw_weights(model).eval().to("cuda", torch.bfloat16)


def forget_positions(model: nn.Module) -> None:
    """Those of the images of the forward before."""
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None


def moved(inputs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The inputs on the model's device, floating ones in its dtype."""

    def move(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.to(model.device, model.dtype)
        return x.to(model.device) if hasattr(x, "to") else x

    return {name: move(x) for name, x in inputs.items()}


@cache
def _exact_and_baseline(
    case: Text, order: tuple[Any, ...], **where: Any
) -> tuple[Outcome, Outcome]:
    model = copy.deepcopy(case.model(**where))
    model.set_attn_implementation("eager")
    with plain_recurrences(model):
        baseline = _outcome(model, case.one_by_one(order))
        return _outcome(model.double(), case.one_by_one(order)), baseline


def _outcome(model: nn.Module, one_by_one: Iterator[dict[str, Any]]) -> Outcome:
    """Each document in a forward of its own; the loss is the mean over all labels."""
    logits, losses, count = [], [], 0
    for document in one_by_one:
        forget_positions(model)
        inputs = moved(document, model)
        labels = inputs.pop("labels")
        own = model(**inputs).logits[0]
        wide = own if own.dtype == torch.float64 else own.float()
        losses.append(cross_entropy(wide, labels, reduction="sum"))
        logits.append(own.detach())
        count += int((labels != -100).sum())
    loss = torch.stack(losses).sum() / count
    loss.backward()
    gradients = gradients_of(model)
    model.zero_grad()
    return Outcome(torch.cat(logits), loss.detach(), gradients)


def check(case: Text, backend: str, form: str, **where: Any) -> None:
    """Packed equals one by one: logits, loss, every gradient."""
    model, mode = case.model(**where), case.mode(form)
    exact, baseline = case.alone(form, **where)
    inputs = moved(case.inputs(form), model)
    if mode.embedded:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    forget_positions(model)
    with ready(model, backend, mode):
        out = model(**inputs)
        out.loss.backward()
        gradients = gradients_of(model)
    logits = case.batch(form).of_documents(out.logits.detach())
    assert_as_accurate(logits, exact.logits, baseline.logits, 2, "logits")
    # A token's loss moves at most twice as far as its logits.
    apart = 2 * (logits.double() - exact.logits).abs().max().item()
    assert abs(out.loss.item() - exact.loss.item()) <= apart + 1e-6 * exact.loss.item()
    assert_gradients_as_accurate(gradients, exact.gradients, baseline.gradients)
