"""Training steps of the suite "model": forward, next-token loss, backward, optimizer.

The base model is compiled without its loss, which is the same code in every variant. The learning
rate is 0: AdamW does all its work, and each variant meets the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexvarlen.bench.suites.model.alone import Alone
from flexvarlen.bench.suites.model.batches import Collection, positions_of, shapes_of
from flexvarlen.bench.suites.model.cases import SORTED, ModelCase, split_variant
from flexvarlen.bench.suites.model.geometries import new_causal_lm
from flexvarlen.bench.suites.model.measure import CheckedVariant, Measures, measure_variants
from flexvarlen.bench.suites.model.step import (
    Batch,
    checkpoint_layers,
    forward_backward,
    free,
    next_token_gradient,
)
from flexvarlen.bench.suites.model.utilisation import peak_tflops, step_tflop, utilisation
from flexvarlen.bench.suites.model.variants import Sizes, Variant, make_variant
from flexvarlen.measure import environment, watch_compilation
from flexvarlen.runner.suite import Finding, Options


class Training:
    """A training case: shared weights, one optimizer, one reference."""

    def __init__(self, case: ModelCase, options: Options) -> None:
        self.case, self.device = case, options.device
        self.options = options
        torch.manual_seed(case.seed)
        dtype: torch.dtype = getattr(torch, case.dtype)
        self.lm = new_causal_lm(case.geometry, case.layers, dtype, self.device).train()
        self.base = self.lm.base_model
        self.head: Tensor = self.lm.get_output_embeddings().weight
        lengths = case.lengths(options.text)
        ids = torch.randint(self.lm.config.vocab_size, (1, case.tokens), device=self.device)
        self.collection = Collection(ids, tuple(lengths))
        self.sizes = Sizes.of(case.tokens, lengths)
        self.alone = Alone(self.base, ids, lengths, gradient=self.gradient_alone)
        if case.checkpointing:
            checkpoint_layers(self.base)
        self.optimizer = torch.optim.AdamW(
            self.lm.parameters(), lr=0.0, weight_decay=0.0, fused=True
        )
        # Its state is there before any step, so that all steps' peaks hold it.
        for parameter in self.lm.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        free(self.device, self.lm)

    def measure(self, variants: Sequence[str]) -> list[Finding]:
        return measure_variants(variants, self.check, self.options)

    def check(self, variant: str) -> CheckedVariant:
        """Make a variant, compile it if asked, and compare its first step with the reference."""
        batching, attention = split_variant(variant)
        made = make_variant(attention, self.base, self.sizes)
        lengths = self.collection.lengths
        compiled = self.case.mode == "compiled"
        attends = made.attends(lengths, compiled=compiled) if batching == "packed" else None
        batches = self.batches(batching, made)
        call = self.call(made, batching, batches)
        begin = time.perf_counter()
        with watch_compilation() as stats:
            outputs = torch.cat(self.forward_backward(call, batches, keep=True))
        first_step_s = time.perf_counter() - begin
        if batching == SORTED:
            outputs = self.collection.in_order(outputs, self.collection.by_length())
        errors, wrong = self.alone.check(outputs, self.alone.packed_gradients())
        named = made.attention if not made.theirs and made.attention != "auto" else None
        measures: Measures = {
            "attends": attends or named,
            "documents": len(lengths),
            "longest_document": max(lengths),
            "forwards": len(batches),
            "positions": positions_of(batches),
            "first_step_s": first_step_s,
            "compile_s": stats.compile_s,
            "graphs": stats.compilations,
            "graph_breaks": stats.graph_breaks,
        }
        step = partial(self.step, call, batches)
        return CheckedVariant(step, measures | errors, wrong, self.conclude)

    def batches(self, batching: str, variant: Variant) -> list[Batch]:
        """The documents as a variant gets them."""
        if batching == "packed":
            return self.collection.packed(variant.inputs(self.collection.lengths))
        if batching == "serial":
            return self.collection.serial()
        order = self.collection.by_length() if batching == SORTED else None
        return self.collection.padded(self.case.tokens, order)

    def call(self, variant: Variant, batching: str, batches: Sequence[Batch]) -> Callable[..., Any]:
        """The model as it is called; compiled for any shape where there are several."""
        if self.case.mode == "eager":
            eager: Callable[..., Any] = variant.model
            return eager
        return variant.compiled(
            "inductor" if self.options.on_gpu else "aot_eager",
            fullgraph=not variant.theirs and batching == "packed",
            dynamic=True if shapes_of(batches) > 1 else None,
        )

    def step(self, call: Callable[..., Any], batches: Sequence[Batch]) -> None:
        """What is timed."""
        self.forward_backward(call, batches)
        self.optimizer.step()

    def forward_backward(
        self, call: Callable[..., Any], batches: Sequence[Batch], *, keep: bool = False
    ) -> list[Tensor]:
        return forward_backward(self.lm, call, batches, self.gradient, keep=keep)

    def gradient(self, outputs: Tensor, batch: Batch) -> Tensor:
        assert batch.labels is not None
        return next_token_gradient(outputs, self.head, batch.labels, self.collection.counted)

    def gradient_alone(self, document: int, states: Tensor) -> Tensor:
        """The same of one document alone; the head gets no gradient."""
        labels = self.collection.documents()[document][1]
        head = self.head.detach().to(states.dtype)
        return next_token_gradient(states, head, labels, self.collection.counted)

    def conclude(self, ms: float) -> Measures:
        """Throughput of the documents' own tokens, and MFU."""
        tflop = step_tflop(self.base, self.collection.lengths, head=self.head.numel())
        peak = peak_tflops(environment(self.device)["gpu"], self.case.dtype)
        return {
            "tokens_per_s": self.case.tokens / (ms / 1e3),
            "model_tflop": tflop,
            "peak_tflops": peak,
            "mfu": utilisation(tflop, ms, peak),
        }
