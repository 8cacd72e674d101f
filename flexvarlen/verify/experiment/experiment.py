"""`Experiment`: the first steps of variants of one model, checked; `measure.py` times them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from flexvarlen.measure import watch_compilation
from flexvarlen.report.records import one_line
from flexvarlen.verify.experiment.alone import (
    Alone,
    from_gradient,
    gradients_of,
    probed_parameters,
)
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.inputs import (
    ModelInputs,
    forwards_of,
    in_order,
    packed,
    positions_of,
)
from flexvarlen.verify.experiment.measure import CheckedVariant, Measures, first_run
from flexvarlen.verify.experiment.step import HeadLoss, base_step
from flexvarlen.verify.experiment.variant import Sizes, Variant, make_variant

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKINGS_S = 120.0
"""No other packing of a variant begins later, in seconds: some compile anew for each."""

T = TypeVar("T")
Run = Callable[..., list[Tensor]]
"""A variant, the forwards of a step, and whether to keep their outputs: as `Experiment.step`."""


class Experiment:
    """A model, packed rows, and each document alone; variants share the model's parameters.

    Args:
        model: unpatched. With an LM head, its next-token loss is differentiated; the variants are
            those of its base model.
        rows: of equally many tokens. Steps are those of the first; the others follow a compiled
            step, and the last of them is checked too.
        grad_output: `[T, hidden]`, where the backward of a base model starts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[PackedBatch],
        *,
        grad_output: Tensor | None = None,
    ) -> None:
        self.model, self.base, self.rows = model, model.base_model, rows
        self.row, self.grad_output = rows[0], grad_output
        self.sizes = Sizes.of(*rows)
        self.loss: HeadLoss | None = None
        lengths = list(self.row.lengths)
        if grad_output is None:
            counted = int(self.row.counted(self.row.labels()))
            self.loss = HeadLoss(model.get_output_embeddings().weight, counted)
            loss = from_gradient(self.loss.alone(self.row.next_tokens()[0].split(lengths)))
        else:
            starts: Sequence[Tensor] = grad_output.split(lengths)
            loss = from_gradient(lambda document, _: starts[document])
        probes = probed_parameters(self.base)
        self.alone = Alone.of(self.base, self.row, loss=loss, parameters=probes)
        self.last = Alone.of(self.base, rows[-1]) if len(rows) > 1 else None

    def variant(self, name: str) -> Variant:
        """A variant of the base model."""
        return make_variant(name, self.base, self.sizes)

    def checked(
        self, variant: Variant, batching: str = "packed", run: Run | None = None
    ) -> CheckedVariant:
        """Compare a variant's first step with the reference.

        Args:
            variant: not called yet.
            batching: one of `BATCHINGS`.
            run: what runs a step; default: `self.step`.
        """
        run = self.step if run is None else run
        forwards = forwards_of(batching, self.row, variant.inputs, self.grad_output)
        step = partial(run, variant, forwards)
        outputs, compilation = first_run(lambda: torch.cat(step(keep=True)))
        outputs = in_order(self.row, outputs, batching)
        errors, wrong = self.alone.check(outputs, gradients_of(self.base))
        measures: Measures = {
            "documents": len(self.row.lengths),
            "longest_document": max(self.row.lengths),
            "forwards": len(forwards),
            "positions": positions_of(forwards),
            **compilation,
        }
        checked = CheckedVariant(step, measures | errors, wrong)
        if self.last is not None:
            other = partial(self.other, variant, run)
            checked.afterwards = partial(run_others, other, self.rows[1:], self.last)
        return checked

    def step(
        self, variant: Variant, forwards: Sequence[ModelInputs], *, keep: bool = False
    ) -> list[Tensor]:
        """Forward and backward; outputs as `base_step` keeps them."""
        gradient = None if self.loss is None else self.loss.gradient
        return base_step(variant, forwards, gradient, parameters_of=self.model, keep=keep)

    def other(self, variant: Variant, run: Run, row: PackedBatch) -> Tensor:
        """A step on another row; its outputs `[T, hidden]`."""
        (outputs,) = run(variant, packed(row, variant.inputs(row), self.grad_output), keep=True)
        return outputs


def run_others(
    step: Callable[[T], Tensor], packings: Sequence[T], last: Alone
) -> tuple[Measures, str | None]:
    """Run other packings of a compiled step.

    Args:
        step: a packing -> outputs `[T, hidden]`.
        packings: the other ones.
        last: the reference of the last of them.

    Returns:
        What they compiled, and why one of them is wrong, or None.
    """
    done, wrong, measures, begin = 0, None, {}, time.perf_counter()
    outputs = None
    with watch_compilation() as stats:
        for packing in packings:
            if time.perf_counter() - begin > PACKINGS_S:
                break
            try:
                outputs = step(packing)
            except Exception as error:  # kernels and compilers raise types of their own
                wrong = f"raised on another packing: {one_line(error)}"
                break
            done += 1
    if outputs is not None and done == len(packings):
        errors, wrong = last.check(outputs)
        measures["error_last_packing"] = errors["error"]
    measures |= {
        "other_packings": done,
        "recompilations": stats.recompilations,
        "recompile_s": stats.compile_s,
        "recompile_reasons": stats.first_reasons(),
    }
    return measures, wrong
