"""`Experiment`: the first steps of variants of one model, checked; `measure.py` times them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from flexvarlen.measure import watch_compilation
from flexvarlen.report.records import one_line
from flexvarlen.verify.experiment.alone import Alone, from_gradient, gradients_of
from flexvarlen.verify.experiment.batch import ModelInputs
from flexvarlen.verify.experiment.inputs import forwards_of, in_order, positions_of
from flexvarlen.verify.experiment.measure import CheckedVariant, Measures, first_run
from flexvarlen.verify.experiment.step import HeadLoss, base_step
from flexvarlen.verify.experiment.tree_batch import Row
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
        documents: those that are checked, of `Row.samples`; None: all.
        loss: makes the loss of the LM head from its weight and the number of labels.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        *,
        grad_output: Tensor | None = None,
        documents: Sequence[int] | None = None,
        loss: Callable[[Tensor, int], HeadLoss] = HeadLoss,
    ) -> None:
        self.model, self.base, self.rows = model, model.base_model, rows
        self.row, self.grad_output, self.documents = rows[0], grad_output, documents
        self.sizes = Sizes.of(*rows)
        self.loss: HeadLoss | None = None
        if grad_output is None:
            counted = int(self.row.counted(self.row.labels()))
            self.loss = loss(model.get_output_embeddings().weight, counted)
            labels = self.row.next_tokens()[0]
            alone = from_gradient(self.loss.alone([labels[path] for path in self.row.paths]))
        else:
            starts: Sequence[Tensor] = grad_output.split(list(self.row.samples.lengths))
            alone = from_gradient(lambda document, _: starts[document])
        reference = partial(Alone.of, self.base, documents=documents)
        self.alone = reference(self.row, loss=alone, parameters=probed_parameters(self.base))
        self.last = reference(rows[-1]) if len(rows) > 1 else None

    def variant(self, name: str) -> Variant:
        """A variant of the base model."""
        return make_variant(name, self.base, self.sizes)

    def checked(
        self, variant: Variant, batching: str = "packed", run: Run | None = None
    ) -> CheckedVariant:
        """Compare a variant's first step with the reference.

        Args:
            variant: not called yet.
            batching: as in `forwards`.
            run: what runs a step; default: `self.step`.
        """
        run = self.step if run is None else run
        forwards = self.forwards(variant, batching, self.row)
        step = partial(self.checked_step, variant, batching, run)
        outputs, compilation = first_run(partial(step, self.row))
        is_packed = batching == "packed"
        alone = self.alone if is_packed else self.alone.of_samples()
        errors, wrong = alone.check(outputs, gradients_of(self.base))
        measures = self.about(forwards, compilation) | errors
        checked = CheckedVariant(partial(run, variant, forwards), measures, wrong)
        if self.last is not None:
            last = self.last if is_packed else self.last.of_samples()
            checked.afterwards = partial(run_others, step, self.rows[1:], last)
        return checked

    def forwards(
        self, variant: Variant, batching: str, row: Row, documents: Sequence[int] | None = None
    ) -> list[ModelInputs]:
        """The forwards of a step.

        Args:
            batching: one of `BATCHINGS`.
            documents: those that have labels, where a suite labels them itself; None: all.
        """
        return forwards_of(batching, row.samples, variant.inputs, self.grad_output)

    def about(self, forwards: Sequence[ModelInputs], compilation: Measures) -> Measures:
        """What a record says of a variant's step, and of its compilation."""
        lengths = self.row.samples.lengths
        return {
            "documents": len(lengths),
            "longest_document": max(lengths),
            "forwards": len(forwards),
            "positions": positions_of(forwards),
            **compilation,
        }

    def step(
        self, variant: Variant, forwards: Sequence[ModelInputs], *, keep: bool = False
    ) -> list[Tensor]:
        """Forward and backward; outputs as `base_step` keeps them."""
        gradient = None if self.loss is None else self.loss.gradient
        return base_step(variant, forwards, gradient, parameters_of=self.model, keep=keep)

    def checked_step(self, variant: Variant, batching: str, run: Run, row: Row) -> Tensor:
        """A step on a row, of the documents that are checked; outputs `[T, hidden]` in order."""
        forwards = self.forwards(variant, batching, row, self.documents)
        return in_order(row.samples, torch.cat(run(variant, forwards, keep=True)), batching)


def probed_parameters(model: nn.Module) -> list[str]:
    """Parameters in the first, middle and last layer of a base model, whose gradients are checked.

    A layer has those of attention, or those of the gated delta rule.
    """
    layers = len(model.layers)  # type: ignore[arg-type]
    delta_rule = tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_a", "conv1d"))
    probes = (
        (0, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", *delta_rule)),
        (layers // 2, ("self_attn.k_proj", "mlp.down_proj", *delta_rule)),
        (layers - 1, ("self_attn.v_proj", "self_attn.o_proj")),
    )
    names = [f"layers.{layer}.{name}.weight" for layer, parts in probes for name in parts]
    there = dict(model.named_parameters())
    return [name for name in dict.fromkeys(names) if name in there]


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
