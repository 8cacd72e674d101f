"""Steps of the suite "hybrid": a model with recurrent layers on packed and padded documents."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flexvarlen.bench.suites.model.alone import Alone
from flexvarlen.bench.suites.model.batches import Collection, positions_of
from flexvarlen.bench.suites.model.documents import drawn_lengths, text_lengths
from flexvarlen.bench.suites.model.geometries import new_base_model
from flexvarlen.bench.suites.model.measure import CheckedVariant, Measures, measure_variants
from flexvarlen.bench.suites.model.packings import run_others
from flexvarlen.bench.suites.model.recurrences import (
    convolution_of_fla,
    kernels_of,
    refusals,
    untraced,
)
from flexvarlen.bench.suites.model.step import Batch, checkpoint_layers, forward_backward
from flexvarlen.bench.suites.model.variants import Sizes, Variant, make_variant, require_known
from flexvarlen.measure import watch_compilation
from flexvarlen.recurrent.fla_kernels import let_fla_run
from flexvarlen.reference.recurrences import CONVOLUTION, DELTA_RULE, Replacements, replaced
from flexvarlen.runner.suite import Finding, Options, UnknownVariant

Kind = Literal["eager", "compiled", "padded", "packings"]

PADDED, SORTED = "padded", "padded-sorted"
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
    batching = next((x for x in (PADDED, SORTED) if variant.startswith(f"{x}:")), "packed")
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
        self.packings = [case.lengths(i, options.text) for i in range(1 + case.other_packings)]
        self.collection = Collection(ids, tuple(self.packings[0]))
        self.sizes = Sizes.of(case.tokens, *self.packings)
        starts = self.grad_output.split(self.packings[0])
        self.first = Alone(
            self.base, ids, self.packings[0], gradient=lambda document, _: starts[document]
        )
        self.last = Alone(self.base, ids, self.packings[-1]) if case.other_packings else None
        if case.checkpointing:
            checkpoint_layers(self.base)

    def measure(self, variants: Sequence[str]) -> list[Finding]:
        return measure_variants(variants, self.check, self.options, slow_s=SLOW_S)

    def check(self, name: str) -> CheckedVariant:
        """Make a variant, compile it if asked, and compare its first step with the reference."""
        batching, attention, fla_convolution = split_variant(name)
        let_fla_run()  # transformers' layers too, where fla refuses its own backward
        variant = make_variant(attention, self.base, self.sizes)
        functions: Replacements = {DELTA_RULE: untraced} if variant.theirs else {}
        if fla_convolution:
            convolve = convolution_of_fla(self.base)
            functions[CONVOLUTION] = lambda _: convolve
        lengths = self.packings[0]
        compiled = bool(self.case.compiler)
        named = None if variant.theirs or variant.attention == "auto" else variant.attention
        packed = batching == "packed"
        attends = variant.attends(lengths, compiled=compiled) if packed else named
        call: Callable[..., Any] = variant.model
        if self.case.kind == "compiled":
            variant.compile_layers(self.case.compiler)
        elif compiled:
            call = variant.compiled(self.case.compiler, fullgraph=False)
        batches, starts = self.batches(batching, variant)
        step = partial(self.step, call, batches, starts, functions)
        begin = time.perf_counter()
        with watch_compilation() as stats, refusals():
            outputs = torch.cat(step(keep=True))
        measures: Measures = {
            "attends": attends,
            **kernels_of(self.base, theirs=variant.theirs, fla_convolution=fla_convolution),
            "documents": len(lengths),
            "longest_document": max(lengths),
            "forwards": len(batches),
            "positions_per_token": positions_of(batches) / self.case.tokens,
            "first_step_s": time.perf_counter() - begin,
            "compile_s": stats.compile_s,
            "graphs": stats.compilations,
            "graph_breaks": stats.graph_breaks,
        }
        if batching == SORTED:
            outputs = self.collection.in_order(outputs, self.collection.by_length())
        errors, wrong = self.first.check(outputs, self.first.packed_gradients())
        checked = CheckedVariant(step, measures | errors, wrong, self.throughput)
        if self.last is not None:
            other = partial(self.other_packing, variant, call, functions)
            checked.afterwards = partial(run_others, other, self.packings[1:], self.last)
        return checked

    def batches(self, batching: str, variant: Variant) -> tuple[list[Batch], list[Tensor]]:
        """The documents as a variant gets them, and where the backward of each batch starts."""
        if batching == "packed":
            inputs = variant.inputs(self.collection.lengths)
            return self.collection.packed(inputs), [self.grad_output[None]]
        order = list(range(len(self.collection.lengths)))
        if batching == SORTED:
            order = self.collection.by_length()
        batches = self.collection.padded(self.case.tokens, order)
        own = self.grad_output.split(list(self.collection.lengths))
        rows = torch.cat([own[index] for index in order])
        starts = []
        for batch in batches:
            assert batch.real is not None
            start = rows.new_zeros(*batch.real.shape, rows.shape[-1])
            count = int(batch.real.sum())
            start[batch.real], rows = rows[:count], rows[count:]
            starts.append(start)
        return batches, starts

    def step(
        self,
        call: Callable[..., Any],
        batches: Sequence[Batch],
        starts: Sequence[Tensor],
        functions: Replacements,
        *,
        keep: bool = False,
    ) -> list[Tensor]:
        """What is timed."""
        left = iter(starts)
        with replaced(self.base, functions):
            return forward_backward(self.base, call, batches, lambda *_: next(left), keep=keep)

    def other_packing(
        self,
        variant: Variant,
        call: Callable[..., Any],
        functions: Replacements,
        lengths: Sequence[int],
    ) -> Tensor:
        """A step on a packed row of these documents; its outputs."""
        batches = self.collection.packed(variant.inputs(lengths))
        (outputs,) = self.step(call, batches, [self.grad_output[None]], functions, keep=True)
        return outputs

    def throughput(self, ms: float) -> Measures:
        """Of the documents' own tokens."""
        return {"tokens_per_s": self.case.tokens / (ms / 1e3)}
