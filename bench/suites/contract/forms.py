"""`Forms`: the suites that ask which attention is right in which form of a packed batch.

Tiny models with random weights that have all that is special to their family. Packed logits, and
the gradients of all parameters, are compared with those of each document alone in fp64, by the rule
of `flexvarlen.reference`. A leak is a logit that changes, in any bit, with another document's
tokens.

A mixture of experts runs on `batched_mm`, whose rounding does not depend on the rest of the batch;
in half precision each token goes to every expert, as rounding alone may choose another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.suites import FrozenCase
from flexvarlen.bench.suites.contract.batch_forms import (
    FORMS,
    LENGTHS,
    Batch,
    Form,
    documents_of,
    padded_rows,
)
from flexvarlen.bench.suites.contract.tiny_configs import draw_weights, tiny_config
from flexvarlen.bench.suites.contract.tiny_images import IMAGES, with_images
from flexvarlen.patches.isolation.tokens import halves
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.patches.parts import ModelParts
from flexvarlen.reference.acceptance import Error, largest
from flexvarlen.reference.model import Float64, float64_model
from flexvarlen.reference.recurrences import plain_recurrences
from flexvarlen.report.records import Status, one_line
from flexvarlen.runner.each import measure_passes
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.suite import Finding, Findings, Options, Suite
from flexvarlen.verify.experiment.alone import Compared, why_one_is_wrong

QUICK_FORMS = (
    "position_ids, use_cache=False",
    "position_ids and an attention_mask of ones",
    "2D mask of document ids",
    "two packed rows",
    "left padding",
)
FIRST_POSITION = {"roberta": 2}
"""First positions of families that do not count from 0."""


@dataclass(frozen=True)
class FormsCase(FrozenCase):
    """One family's tiny model, in every form of a batch."""

    model: str
    dtype: str
    head_dim: int

    @property
    def name(self) -> str:
        return self.model


class Forms(Suite[FormsCase]):
    """What both suites do: they differ in models, variants and tables."""

    name: ClassVar[str]
    models: ClassVar[tuple[str, ...]]
    forms: ClassVar[Sequence[Form]] = FORMS
    gradients: ClassVar[bool]
    whole_on_cpu: ClassVar[bool] = True

    def cases(self, options: Options) -> Sequence[FormsCase]:
        shape = ("bfloat16", 64) if options.on_gpu else ("float32", 16)
        models = self.models[:2] if options.quick else self.models
        return [FormsCase(model, *shape) for model in models]

    def measure(self, case: FormsCase, variants: Sequence[str], options: Options) -> Findings:
        forms = [f for f in FORMS if f.name in QUICK_FORMS] if options.quick else self.forms
        models = TinyModels(case, options.device)
        passes = {form.name: partial(self.finding, models, form) for form in forms}
        return measure_passes(case.name, variants, passes, options.device)

    def finding(self, models: TinyModels, form: Form, variant: str) -> Finding:
        """One implementation in one form."""
        # FlexAttention has no backward on the CPU.
        trains = self.gradients and (models.on_gpu or not variant.endswith("flex"))
        try:
            with attending(models.packed, variant) as model:
                model.train(form.train)
                batch_of = partial(models.batch, form)
                found = models.answer(model, [batch_of(models.ids)], gradients=trains)
                leaks = count_leaks(model, batch_of, models.ids)
        except ValueError as error:  # that is how transformers refuses, and ours a cache
            if variant.startswith("transformers:") or form.cached:
                raise Unsupported(one_line(error)) from error
            raise
        finally:
            models.packed.eval()
        measures, wrong = models.compare(found, form)
        if leaks:
            wrong = f"{leaks} logits change with another document's tokens"
        status: Status = "ok" if wrong is None else "wrong"
        return Finding(variant, status, wrong, measures | {"leaks": leaks}, form.name)


@contextmanager
def attending(model: PreTrainedModel, variant: str) -> Iterator[PreTrainedModel]:
    """The model on one implementation: a backend of ours, or "transformers:" and theirs."""
    kind, _, name = variant.rpartition(":")
    if kind != "transformers":
        with fv.patched(model, name):
            yield model
        return
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


@dataclass(frozen=True)
class Answer:
    """Logits of each document, and the gradients of all parameters."""

    logits: list[Tensor]
    gradients: dict[str, Tensor]


class TinyModels:
    """A family's tiny model in the run's dtype and, document by document, the reference's answers.

    Attributes:
        packed: that every implementation runs.
        ids: int64 `[T]`, the documents' tokens.
        recurrent: whether the model has recurrent layers.
    """

    def __init__(self, case: FormsCase, device: torch.device) -> None:
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.first_position = FIRST_POSITION.get(case.model, 0)
        self.on_gpu = device.type == "cuda"
        low = {"every_expert": self.dtype != torch.float32}
        self.packed = new_model(case, "batched_mm", **low).to(device, self.dtype)
        base = new_model(case, "eager", **low).to(device)
        self.reference, self.baseline = float64_model(base), base.to(self.dtype)
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, 97, (sum(LENGTHS),), generator=generator).to(device)
        self.recurrent = ModelParts.of(self.packed).recurrent
        self.images = IMAGES.get(case.model)
        shape = (sum(LENGTHS), self.packed.config.get_text_config().vocab_size)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device)
        self.grad_outputs = [x.double() for x in noise.split(list(LENGTHS))]
        self._alone: dict[tuple[int, ...] | None, tuple[Answer, list[Answer]]] = {}

    def batch(self, form: Form, ids: Tensor) -> Batch:
        """The documents in a form; a cache of recurrent layers is made for the config."""
        batch = with_images(self.images, form.batch(ids))
        if self.recurrent and form.cached:
            cache = DynamicCache(config=self.packed.config)
            return replace(batch, inputs=batch.inputs | {"past_key_values": cache})
        return batch

    def answer(self, model: nn.Module, batches: Sequence[Batch], *, gradients: bool) -> Answer:
        """The results of a model for the documents of all batches, one after another."""
        model.zero_grad()
        found: list[Tensor] = []
        left = list(self.grad_outputs)
        with torch.set_grad_enabled(gradients):
            for batch in batches:
                logits = model(**batch.inputs).logits
                parts = [logits[row, tokens] for row, tokens in batch.slices]
                if gradients:
                    own, left = left[: len(parts)], left[len(parts) :]
                    torch.autograd.backward([part.double() for part in parts], own)
                found += [part.detach().double() for part in parts]
        named = model.named_parameters()
        return Answer(found, {n: p.grad.double() for n, p in named if p.grad is not None})

    def compare(self, found: Answer, form: Form) -> tuple[dict[str, Any], str | None]:
        """Errors as measures, and the sentence that says which is too large, or None."""
        given = "position_ids" in form.batch(self.ids).inputs
        reference, plain = self.alone(tuple(form.starts) if given else None)
        error = Error.of_pieces(zip(found.logits, reference.logits, strict=True))
        allowed = _largest_error(
            Error.of_pieces(zip(x.logits, reference.logits, strict=True)) for x in plain
        )
        measures: dict[str, Any] = {
            "error": error.max_abs,
            "baseline_error": allowed.max_abs,
        }
        compared = [Compared("logits", error, allowed)]
        for name, expected in reference.gradients.items() if found.gradients else ():
            there = name in found.gradients
            own = Error.between(found.gradients[name], expected) if there else Error.missing()
            plain_error = _largest_error(Error.between(x.gradients[name], expected) for x in plain)
            compared.append(Compared(f"gradient of {name}", own, plain_error, gradient=True))
        if found.gradients:
            measures["grad_error"] = largest(x.error.relative for x in compared[1:])
            measures["baseline_grad_error"] = largest(x.baseline.relative for x in compared[1:])
        return measures, why_one_is_wrong(compared, self.dtype)

    def alone(self, starts: tuple[int, ...] | None) -> tuple[Answer, list[Answer]]:
        """Each document in a forward of its own, in fp64, and the low-precision baselines.

        Without `starts` the model makes the positions.

        A recurrent model has a second baseline, whose documents are rows padded on the right: its
        sums over tokens round by the number of rows, and the larger error counts.
        """
        if starts not in self._alone:
            batches = []
            for number, document in enumerate(documents_of(self.ids)):
                inputs = {"input_ids": document[None]}
                if starts is not None:
                    positions = self.first(starts)[number] + torch.arange(len(document))
                    inputs["position_ids"] = positions.to(document.device)[None]
                batch = Batch(inputs, [(0, slice(0, len(document)))])
                batches.append(with_images(self.images, batch, number))
            with plain_recurrences(self.baseline):
                with Float64():
                    reference = self.answer(self.reference, batches, gradients=True)
                plain = [self.answer(self.baseline, batches, gradients=True)]
                if self.recurrent:
                    padded = self.padded(starts)
                    plain.append(self.answer(self.baseline, [padded], gradients=True))
            self._alone[starts] = reference, plain
        return self._alone[starts]

    def padded(self, starts: Sequence[int] | None) -> Batch:
        """A document a row, padded on the right, with these first positions."""
        rows = with_images(self.images, padded_rows(self.ids, left=False))
        if starts is None:
            return rows
        columns = torch.arange(rows.inputs["input_ids"].shape[1])
        positions = columns + torch.tensor(self.first(starts))[:, None]
        inputs = rows.inputs | {"position_ids": positions.to(self.ids.device)}
        return replace(rows, inputs=inputs)

    def first(self, starts: Sequence[int]) -> list[int]:
        """Each document's first position, as the family counts."""
        return [start + (self.first_position if starts[0] == 0 else 0) for start in starts]


def _largest_error(errors: Iterable[Error]) -> Error:
    return reduce(Error.or_larger, errors)


def new_model(case: FormsCase, experts: str, *, every_expert: bool) -> PreTrainedModel:
    """A family's tiny model, always with the same weights, in fp32 and eval mode."""
    config = tiny_config(case.model, head_dim=case.head_dim, every_expert=every_expert)
    config._experts_implementation = experts
    maker = getattr(transformers, f"AutoModelFor{BY_TYPE[case.model].task}")
    torch.manual_seed(0)
    model: PreTrainedModel = maker.from_config(config, attn_implementation="eager")
    return draw_weights(model).eval()


def count_leaks(model: nn.Module, batch_of: Callable[[Tensor], Batch], ids: Tensor) -> int:
    """Logits that change, in any bit, with the tokens of other documents."""

    def logits(tokens: Tensor) -> list[Tensor]:
        batch = batch_of(tokens)
        with torch.no_grad():
            found = model(**batch.inputs).logits
        return [found[row, tokens] for row, tokens in batch.slices]

    before, count = logits(ids), 0
    for changed, watched in halves(len(LENGTHS)):
        documents = documents_of(ids)
        other = [3 + (x - 3 + 1) % 94 if i in changed else x for i, x in enumerate(documents)]
        after = logits(torch.cat(other))
        count += sum(int((before[i] != after[i]).sum()) for i in watched)
    return count
