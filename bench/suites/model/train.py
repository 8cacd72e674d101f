"""Training steps of the suite "model": forward, next-token loss, backward, optimizer.

The base model is compiled without its loss, which is the same code in every variant. The learning
rate is 0: AdamW does all its work, and each variant meets the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from flexvarlen.bench.suites.model.cases import ModelCase, split_variant
from flexvarlen.bench.suites.model.geometries import new_causal_lm
from flexvarlen.bench.suites.model.utilisation import attends, utilised
from flexvarlen.runner.suite import Finding, Options
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.experiment import Experiment
from flexvarlen.verify.experiment.inputs import forwards_of, shapes_of
from flexvarlen.verify.experiment.measure import CheckedVariant, Measures, measure_variants
from flexvarlen.verify.experiment.step import checkpoint_layers, free


class Training(Experiment):
    """A training case: shared weights, one optimizer, one reference."""

    def __init__(self, case: ModelCase, options: Options) -> None:
        self.case, self.options = case, options
        torch.manual_seed(case.seed)
        dtype: torch.dtype = getattr(torch, case.dtype)
        lm = new_causal_lm(case.geometry, case.layers, dtype, options.device).train()
        ids = torch.randint(lm.config.vocab_size, (1, case.tokens), device=options.device)
        super().__init__(lm, [PackedBatch(ids, tuple(case.lengths(options.text)))])
        if case.checkpointing:
            checkpoint_layers(self.base)
        self.optimizer = torch.optim.AdamW(lm.parameters(), lr=0.0, weight_decay=0.0, fused=True)
        # Its state is there before any step, so that all steps' peaks hold it.
        for parameter in lm.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        free(options.device, lm)

    def measure(self, variants: Sequence[str]) -> list[Finding]:
        return measure_variants(variants, self.check_named, self.options)

    def check_named(self, name: str) -> CheckedVariant:
        """Make a variant, compile it if asked, and compare its first step with the reference."""
        batching, attention = split_variant(name)
        variant, compiled = self.variant(attention), self.case.mode == "compiled"
        took = attends(variant, self.row, packed=batching == "packed", compiled=compiled)
        if compiled:
            forwards = forwards_of(batching, self.row, variant.inputs)
            variant = variant.compiled(
                "inductor" if self.options.on_gpu else "aot_eager",
                fullgraph=not variant.theirs and batching == "packed",
                dynamic=True if shapes_of(forwards) > 1 else None,
            )
        checked = self.check(variant, batching)
        checked.measures["attends"] = took
        checked.call = partial(self.train, checked.call)
        checked.conclude = self.conclude
        return checked

    def train(self, forward_backward: Callable[[], object]) -> None:
        """What is timed."""
        forward_backward()
        self.optimizer.step()

    def conclude(self, ms: float) -> Measures:
        """Throughput of the documents' own tokens, and MFU."""
        head = self.model.get_output_embeddings().weight.numel()
        found = utilised(self.base, self.row.lengths, ms, self.case.dtype, head=head)
        return {"tokens_per_s": self.case.tokens / (ms / 1e3), **found}
