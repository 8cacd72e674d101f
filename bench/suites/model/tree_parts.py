"""What the suite "trees" measures of trees in parts: time and peak memory of a training step.

A step is the loss of all samples' tokens, and its backward, on a model with random weights and a
vocabulary of 32,000, whose logits are a small part of the memory. Variants: "whole" is one forward
of the tree, "checkpointed" the same with every layer recomputed, "repeated:auto" the samples
without sharing in packed rows, and "parts:N" parts of at most N tokens. The gradients of two
weights are compared with those of the first variant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import flexvarlen as fv
from flexvarlen.bench.suites.model.tree_cases import REPEATED, TreeCase
from flexvarlen.packing.prefixes import SharedPrefixes
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.runner.suite import Finding, Options
from flexvarlen.verify.experiment.measure import CheckedVariant, Measures, measure_variants

PARTS = "parts:"
"""Begins a variant that runs in parts; the most tokens of a part follow."""
VOCABULARY = 32_000
MOST_DIFFERENCE = 0.1
"""Of the gradients of two variants in bf16, over their norm; two kernels differ by 0.04."""


def measure_parts(
    case: TreeCase, variants: Sequence[str], options: Options, slow_s: float
) -> list[Finding]:
    """Check and time the variants of a case."""
    step = PartsStep(case, options)
    return measure_variants(variants, step.check, options, slow_s=slow_s)


class PartsStep:
    """A case's model, and the samples of its tree."""

    def __init__(self, case: TreeCase, options: Options) -> None:
        self.case, self.device = case, options.device
        self.model = case.new_model(AutoModelForCausalLM, options.device, vocab_size=VOCABULARY)
        fv.patch_model(self.model, "auto")
        tree, generator = case.tree(), torch.Generator().manual_seed(case.seed)
        ids = torch.randint(3, VOCABULARY, (sum(tree.lengths),), generator=generator)
        self.samples = [ids[path].tolist() for path in tree.paths()]
        self.shared: SharedPrefixes = fv.share_prefixes(self.samples, device=options.device)
        self.expected: dict[str, Tensor] | None = None

    def check(self, name: str) -> CheckedVariant:
        """Run a variant once, and compare its gradients."""
        call = self.call(name)
        tokens = call()
        found = self.gradients()
        self.expected = self.expected or found
        difference = max(
            float((found[x] - expected).norm() / expected.norm())
            for x, expected in self.expected.items()
        )
        measures: Measures = {
            "gradient_difference": difference,
            "tokens_of_forwards": tokens,
            "sample_tokens": sum(map(len, self.samples)),
            "tree_tokens": self.shared.layout.total_tokens,
        }
        wrong = None
        if not difference <= MOST_DIFFERENCE:
            wrong = f"its gradients differ by {difference:.2g} of their norm"
        return CheckedVariant(call, measures, wrong)

    def call(self, name: str) -> Callable[[], list[int]]:
        """A step; it returns the tokens of each forward that has a backward."""
        step: Callable[[], list[int]] = self.whole
        if name.startswith(PARTS):
            step = partial(self.in_parts, int(name.removeprefix(PARTS)))
        elif name.startswith(REPEATED):
            step = self.repeated

        def run() -> list[int]:
            self.model.zero_grad()
            self.model.gradient_checkpointing_disable()
            if not name.startswith(PARTS) and name != "whole":
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
            return step()

        return run

    def in_parts(self, max_tokens: int) -> list[int]:
        """In parts, one after another."""
        tokens = []
        for part in self.shared.parts(self.model, max_tokens):
            self.model(**part).loss.backward()
            tokens.append(part.tokens.numel())
        return tokens

    def whole(self) -> list[int]:
        """The row of the tree."""
        self.model(**self.shared.batch()).loss.backward()
        return [self.shared.layout.total_tokens]

    def repeated(self) -> list[int]:
        """Packed rows of the samples, each with its whole path."""
        labels = sum(len(sample) - 1 for sample in self.samples)
        tokens = []
        for row in self.case.rows([torch.tensor(x) for x in self.samples]):
            layout = fv.PackedLayout.from_lengths(list(map(len, row)), device=self.device)
            ids = torch.cat(list(row))[None].to(self.device)
            targets = ids.clone()
            targets[0, layout.cu_seqlens[:-1].long()] = IGNORE_INDEX
            of_row = {"input_ids": ids, "labels": targets, "packed_layout": layout}
            self.model(**of_row, num_items_in_batch=labels).loss.backward()
            tokens.append(ids.shape[1])
        return tokens

    def gradients(self) -> dict[str, Tensor]:
        """Of a weight of the first and one of the last layer, on the host."""
        names = [x for x, p in self.model.named_parameters() if p.ndim == 2 and ".layers." in x]
        found = {name: self.model.get_parameter(name).grad for name in (names[0], names[-1])}
        return {name: x.float().cpu() for name, x in found.items() if x is not None}
