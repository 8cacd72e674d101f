"""Steps of the suite "hybrid": a model with recurrent layers on packed and padded documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flexvarlen.bench.suites.model.documents import drawn_lengths, text_lengths
from flexvarlen.bench.suites.model.geometries import new_base_model
from flexvarlen.bench.suites.model.packings import run_others
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
from flexvarlen.verify.experiment.alone import (
    Alone,
    from_gradient,
    gradients_of,
    probed_parameters,
)
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.inputs import (
    SORTED,
    ModelInputs,
    forwards_of,
    in_order,
    packed,
    positions_of,
)
from flexvarlen.verify.experiment.measure import (
    CheckedVariant,
    Measures,
    first_run,
    measure_variants,
)
from flexvarlen.verify.experiment.step import base_step, checkpoint_layers
from flexvarlen.verify.experiment.variant import Sizes, Variant, make_variant, require_known

Kind = Literal["eager", "compiled", "padded", "packings"]

FLA_CONVOLUTION = "+fla-conv"
SLOW_S = 6.0
"""A step that takes longer is timed once; one of 24 layers takes one or two seconds."""


@dataclass(frozen=True)
class HybridCase:
    """One hybrid model on one set of documents.

    Attributes:
        kind: "eager" or "compiled" (layer by layer), on a packed row; "padded", eager, on padded
            batches too; "packings", compiled as a whole, on one packing after another.
        geometry, layers: as in `ModelCase`.
        tokens: of all documents, padding not counted.
        source: which texts the lengths come from; "" where they are log-normal.
        mean_doc: mean tokens of a log-normal document; None for texts.
        longest_doc: tokens at which a text is cut; None where there are none.
        other_packings: that follow the one that is timed.
        checkpointing: whether the backward computes the layers' insides again.
        dtype: of weights and activations.
        compiler: a backend of torch.compile; "" where nothing is compiled.
        seed: of weights, tokens, documents.
    """

    kind: Kind
    geometry: str
    layers: int
    tokens: int
    source: str
    mean_doc: int | None
    longest_doc: int | None
    other_packings: int
    checkpointing: bool
    dtype: str
    compiler: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.geometry}-{self.kind}"

    def data(self) -> dict[str, Any]:
        return asdict(self)

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


class HybridSteps:
    """A case's model with random weights, its packings, and the references of first and last.

    The reference, and the low-precision baseline, run transformers' functions in plain torch:
    fla's have no fp64.
    """

    def __init__(self, case: HybridCase, options: Options) -> None:
        self.case, self.options = case, options
        torch.manual_seed(case.seed)
        dtype: torch.dtype = getattr(torch, case.dtype)
        self.base = new_base_model(case.geometry, case.layers, dtype, options.device).train()
        config = self.base.config
        with options.device:
            ids = torch.randint(config.vocab_size, (1, case.tokens))
            self.grad_output = torch.randn(case.tokens, config.hidden_size, dtype=dtype)
        self.rows = [
            PackedBatch(ids, tuple(case.lengths(index, options.text)))
            for index in range(1 + case.other_packings)
        ]
        self.sizes = Sizes.of(*self.rows)
        starts = self.grad_output.split(list(self.rows[0].lengths))
        self.first = Alone.of(
            self.base,
            self.rows[0],
            loss=from_gradient(lambda document, _: starts[document]),
            parameters=probed_parameters(self.base),
        )
        self.last = Alone.of(self.base, self.rows[-1]) if case.other_packings else None
        if case.checkpointing:
            checkpoint_layers(self.base)

    def measure(self, variants: Sequence[str]) -> list[Finding]:
        return measure_variants(variants, self.check, self.options, slow_s=SLOW_S)

    def check(self, name: str) -> CheckedVariant:
        """Make a variant, compile it if asked, and compare its first step with the reference."""
        batching, attention, fla_convolution = split_variant(name)
        let_fla_run()  # transformers' layers too, where fla refuses its own backward
        variant, row = make_variant(attention, self.base, self.sizes), self.rows[0]
        functions: Replacements = {DELTA_RULE: untraced} if variant.theirs else {}
        if fla_convolution:
            convolve = convolution_of_fla(self.base)
            functions[CONVOLUTION] = lambda _: convolve
        took = None
        if batching == "packed" or variant.attention != "auto":
            took = attends(variant, row, compiled=bool(self.case.compiler))
        if self.case.kind == "compiled":
            variant.compile_layers(self.case.compiler)
        elif self.case.compiler:
            variant = variant.compiled(self.case.compiler, fullgraph=False)
        forwards = forwards_of(batching, row, variant.inputs, self.grad_output)
        step = partial(self.step, variant, functions, forwards)
        with refusals():
            outputs, compilation = first_run(lambda: torch.cat(step(keep=True)))
        errors, wrong = self.first.check(in_order(row, outputs, batching), gradients_of(self.base))
        measures: Measures = {
            "attends": took,
            **kernels_of(self.base, theirs=variant.theirs, fla_convolution=fla_convolution),
            "documents": len(row.lengths),
            "longest_document": max(row.lengths),
            "forwards": len(forwards),
            "positions_per_token": positions_of(forwards) / self.case.tokens,
            **compilation,
        }
        checked = CheckedVariant(step, measures | errors, wrong, self.throughput)
        if self.last is not None:
            other = partial(self.other_packing, variant, functions)
            checked.afterwards = partial(run_others, other, self.rows[1:], self.last)
        return checked

    def step(
        self,
        variant: Variant,
        functions: Replacements,
        forwards: Sequence[ModelInputs],
        *,
        keep: bool = False,
    ) -> list[Tensor]:
        """What is timed."""
        with replaced(self.base, functions):
            return base_step(variant, forwards, parameters_of=self.base, keep=keep)

    def other_packing(self, variant: Variant, functions: Replacements, row: PackedBatch) -> Tensor:
        """A step on a packed row of these documents; its outputs."""
        forwards = packed(row, variant.inputs(row), self.grad_output)
        (outputs,) = self.step(variant, functions, forwards, keep=True)
        return outputs

    def throughput(self, ms: float) -> Measures:
        """Of the documents' own tokens."""
        return {"tokens_per_s": self.case.tokens / (ms / 1e3)}
