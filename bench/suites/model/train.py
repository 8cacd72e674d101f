"""Training steps of the suite "model": forward, next-token loss, backward, optimizer.

The base model is compiled without its loss, which is the same code in every variant. The learning
rate is 0: AdamW does all its work, and each variant meets the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flexvarlen.bench.suites.model.cases import ModelCase, split_variant
from flexvarlen.bench.suites.model.geometries import new_causal_lm
from flexvarlen.bench.suites.model.utilisation import attends, utilised
from flexvarlen.runner.suite import Finding, Options
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
    positions_of,
    shapes_of,
)
from flexvarlen.verify.experiment.measure import (
    CheckedVariant,
    Measures,
    first_run,
    measure_variants,
)
from flexvarlen.verify.experiment.step import HeadLoss, base_step, checkpoint_layers, free
from flexvarlen.verify.experiment.variant import Sizes, Variant, make_variant


class Training:
    """A training case: shared weights, one optimizer, one reference."""

    def __init__(self, case: ModelCase, options: Options) -> None:
        self.case, self.device = case, options.device
        self.options = options
        torch.manual_seed(case.seed)
        dtype: torch.dtype = getattr(torch, case.dtype)
        self.lm = new_causal_lm(case.geometry, case.layers, dtype, self.device).train()
        self.base = self.lm.base_model
        ids = torch.randint(self.lm.config.vocab_size, (1, case.tokens), device=self.device)
        self.row = PackedBatch(ids, tuple(case.lengths(options.text)))
        self.sizes = Sizes.of(self.row)
        self.head: Tensor = self.lm.get_output_embeddings().weight
        self.loss = HeadLoss(self.head, int(self.row.counted(self.row.labels())))
        labels = self.row.next_tokens()[0].split(list(self.row.lengths))
        self.alone = Alone.of(
            self.base,
            self.row,
            loss=from_gradient(self.loss.alone(labels)),
            parameters=probed_parameters(self.base),
        )
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

    def check(self, name: str) -> CheckedVariant:
        """Make a variant, compile it if asked, and compare its first step with the reference."""
        batching, attention = split_variant(name)
        variant = make_variant(attention, self.base, self.sizes)
        took = None
        if batching == "packed" or variant.attention != "auto":
            took = attends(variant, self.row, compiled=self.case.mode == "compiled")
        forwards = forwards_of(batching, self.row, variant.inputs)
        if self.case.mode == "compiled":
            variant = self.compiled(variant, batching, forwards)
        step = partial(self.forward_backward, variant, forwards)
        outputs, compilation = first_run(lambda: torch.cat(step(keep=True)))
        outputs = in_order(self.row, outputs, batching)
        errors, wrong = self.alone.check(outputs, gradients_of(self.base))
        measures: Measures = {
            "attends": took,
            "documents": len(self.row.lengths),
            "longest_document": max(self.row.lengths),
            "forwards": len(forwards),
            "positions": positions_of(forwards),
            **compilation,
        }
        timed = partial(self.step, variant, forwards)
        return CheckedVariant(timed, measures | errors, wrong, self.conclude)

    def compiled(self, variant: Variant, batching: str, forwards: Sequence[ModelInputs]) -> Variant:
        """The variant compiled, for any shape where there are several."""
        return variant.compiled(
            "inductor" if self.options.on_gpu else "aot_eager",
            fullgraph=not variant.theirs and batching == "packed",
            dynamic=True if shapes_of(forwards) > 1 else None,
        )

    def step(self, variant: Variant, forwards: Sequence[ModelInputs]) -> None:
        """What is timed."""
        self.forward_backward(variant, forwards)
        self.optimizer.step()

    def forward_backward(
        self, variant: Variant, forwards: Sequence[ModelInputs], *, keep: bool = False
    ) -> list[Tensor]:
        return base_step(variant, forwards, self.loss.gradient, parameters_of=self.lm, keep=keep)

    def conclude(self, ms: float) -> Measures:
        """Throughput of the documents' own tokens, and MFU."""
        found = utilised(self.base, self.row.lengths, ms, self.case.dtype, head=self.head.numel())
        return {"tokens_per_s": self.case.tokens / (ms / 1e3), **found}
