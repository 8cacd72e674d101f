"""Steps of the suite "hybrid": a model with recurrent layers on packed and padded documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from flexvarlen.bench.suites.model.documents import drawn_lengths, text_lengths
from flexvarlen.bench.suites.model.geometries import GeometryCase
from flexvarlen.bench.suites.model.recurrences import (
    convolution_of_fla,
    kernels_of,
    refusals,
    untraced,
)
from flexvarlen.bench.suites.model.utilisation import attends
from flexvarlen.recurrent.fla_kernels import let_fla_run
from flexvarlen.reference.recurrences import CONVOLUTION, DELTA_RULE, Replacements, replaced
from flexvarlen.runner.suite import Finding, Options, UnknownVariant
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.experiment import Experiment
from flexvarlen.verify.experiment.inputs import SORTED, ModelInputs
from flexvarlen.verify.experiment.measure import CheckedVariant, measure_variants
from flexvarlen.verify.experiment.step import checkpoint_layers
from flexvarlen.verify.experiment.variant import Variant, require_known

Kind = Literal["eager", "compiled", "padded", "packings"]

FLA_CONVOLUTION = "+fla-conv"
SLOW_S = 6.0
"""A step that takes longer is timed once; one of 24 layers takes one or two seconds."""


@dataclass(frozen=True)
class HybridCase(GeometryCase):
    """One hybrid model on one set of documents.

    Attributes:
        kind: "eager" or "compiled" (layer by layer), on a packed row; "padded", eager, on padded
            batches too; "packings", compiled as a whole, on one packing after another.
        tokens: of all documents, padding not counted.
        source: which texts the lengths come from; "" where they are log-normal.
        mean_doc: mean tokens of a log-normal document; None for texts.
        longest_doc: tokens at which a text is cut; None where there are none.
        other_packings: that follow the one that is timed.
        checkpointing: whether the backward computes the layers' insides again.
        compiler: a backend of torch.compile; "" where nothing is compiled.
    """

    kind: Kind
    tokens: int
    source: str
    mean_doc: int | None
    longest_doc: int | None
    other_packings: int
    checkpointing: bool
    compiler: str

    @property
    def name(self) -> str:
        return f"{self.geometry}-{self.kind}"

    def lengths(self, index: int, files: Sequence[Path] | None) -> list[int]:
        """Tokens of each document of one packing; their sum is `tokens`."""
        if self.mean_doc is None:
            return text_lengths(self.tokens, self.seed + index, files, self.longest_doc)
        return drawn_lengths(self.tokens, "log-normal", self.mean_doc, self.seed + index)


def split_variant(variant: str) -> tuple[str, str, bool]:
    """How a variant batches, its attention, and whether fla's convolution stands in.

    >>> split_variant("padded:transformers:flash_attention_3+fla-conv")
    ('padded', 'transformers:flash_attention_3', True)
    >>> split_variant("fa3")
    ('packed', 'fa3', False)

    Raises:
        UnknownVariant: the attention is unknown, or ours is to run fla's public convolution.
    """
    batching = next((x for x in ("padded", SORTED) if variant.startswith(f"{x}:")), "packed")
    rest = variant.removeprefix(f"{batching}:")
    attention = rest.removesuffix(FLA_CONVOLUTION)
    require_known(attention)
    if attention != rest and not attention.startswith("transformers:"):
        raise UnknownVariant(
            f"{FLA_CONVOLUTION} must follow an attention of transformers, got {variant!r}; leave "
            "it out."
        )
    return batching, attention, attention != rest


class HybridSteps(Experiment):
    """A case's model with random weights, its packings, and the references of first and last.

    The reference, and the low-precision baseline, run transformers' functions in plain torch:
    fla's have no fp64.
    """

    def __init__(self, case: HybridCase, options: Options) -> None:
        self.case, self.options = case, options
        base = case.new_base_model(options.device)
        with options.device:
            ids = torch.randint(base.config.vocab_size, (1, case.tokens))
            grad_output = torch.randn(case.tokens, base.config.hidden_size, dtype=base.dtype)
        packings = (case.lengths(i, options.text) for i in range(1 + case.other_packings))
        rows = [PackedBatch(ids, tuple(lengths)) for lengths in packings]
        super().__init__(base, rows, grad_output=grad_output)
        if case.checkpointing:
            checkpoint_layers(base)

    def measure(self, variants: Sequence[str]) -> list[Finding]:
        return measure_variants(variants, self.check, self.options, slow_s=SLOW_S)

    def check(self, name: str) -> CheckedVariant:
        """Make a variant, compile it if asked, and compare its first step with the reference."""
        batching, attention, fla_convolution = split_variant(name)
        let_fla_run()  # transformers' layers too, where fla refuses its own backward
        variant, compiler = self.variant(attention), self.case.compiler
        functions: Replacements = {DELTA_RULE: untraced} if variant.theirs else {}
        if fla_convolution:
            convolve = convolution_of_fla(self.base)
            functions[CONVOLUTION] = lambda _: convolve
        took = attends(variant, self.row, packed=batching == "packed", compiled=bool(compiler))
        if self.case.kind == "compiled":
            variant.compile_layers(compiler)
        elif compiler:
            variant = variant.compiled(compiler, fullgraph=False)
        with refusals():
            checked = self.checked(variant, batching, partial(self.step_with, functions))
        kernels = kernels_of(self.base, theirs=variant.theirs, fla_convolution=fla_convolution)
        ratio = checked.measures["positions"] / self.case.tokens
        checked.measures |= {"attends": took, **kernels, "positions_per_token": ratio}
        checked.conclude = lambda ms: {"tokens_per_s": self.case.tokens / (ms / 1e3)}
        return checked

    def step_with(
        self,
        functions: Replacements,
        variant: Variant,
        forwards: Sequence[ModelInputs],
        *,
        keep: bool = False,
    ) -> list[Tensor]:
        """A step in which the recurrent layers call these functions."""
        with replaced(self.base, functions):
            return self.step(variant, forwards, keep=keep)
