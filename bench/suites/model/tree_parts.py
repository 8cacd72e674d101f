"""What the suite "trees" measures of trees in parts: time and peak memory of a training step.

A step is the loss of all samples' tokens, by chunks of them, and its backward, on a model with
random weights and a vocabulary of 32,000. Variants: "whole" is one forward of the tree,
"checkpointed" the same with every layer recomputed, "repeated:auto" the samples without sharing in
packed rows, recomputed too, and "parts:N" parts of at most N tokens, which "checkpointed:parts:N"
recomputes. The gradients of two weights are compared with those of the first variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import flexvarlen as fv
from flexvarlen.bench.suites.model import tables
from flexvarlen.bench.suites.model.tree_cases import REPEATED, TreeCase
from flexvarlen.packing.prefixes import SharedPrefixes
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.report.figure import chart, lines, save
from flexvarlen.report.records import Record, provenance
from flexvarlen.runner.suite import Finding, Options, require_known
from flexvarlen.verify.experiment.measure import CheckedVariant, Measures, measure_variants

CHECKPOINTED, PARTS = "checkpointed:", "parts:"
"""What names of variants begin with: of recomputed layers, and of parts of at most N tokens."""
VOCABULARY = 32_000
MOST_DIFFERENCE = 0.1
"""Of the gradients of two variants in bf16, over their norm; two kernels differ by 0.04."""


LINES = {
    "checkpointed": ("reference", "whole tree, recomputed"),
    "parts:16384": ("flex", "parts of 16,384"),
    "checkpointed:parts:16384": ("fa2", "parts of 16,384, recomputed"),
}
"""The style and label of each line of the figure, by variant."""


def memory_figure(records: Sequence[Record], folder: Path) -> Sequence[Path]:
    """The peak memory of a step by the size of the tree; none of fewer than three sizes."""
    own = [r for r in records if r.status == "ok" and r.case["variant"] in LINES]
    series: dict[str, dict[float, float]] = {}
    for record in own:
        tokens, gib = record.measures["tree_tokens"], record.measures["peak_mib"] / 1024
        series.setdefault(LINES[record.case["variant"]][0], {})[tokens] = gib
    if len(set().union(*series.values())) < 3:
        return []
    parts = series["flex"]
    figure, (axes,) = chart(
        f"In parts, a tree of {max(parts) / 1e6:.1f} million tokens trains in "
        f"{parts[max(parts)]:.0f} GiB",
        f"Peak of a training step, weights included; {tables.model_title(own[0])}, "
        f"{own[0].case['dtype']}, loss by chunks. {provenance(own)}",
    )
    lines(
        axes,
        series,
        x_label="tokens of the tree",
        y_label="GiB",
        log_x=False,
        labels=dict(LINES.values()),
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return [save(figure, folder / "tree-parts.png")]


def require_known_parts(names: Sequence[str]) -> None:
    """As `require_known`, of the names of any parts too."""
    tokens = [name.rpartition(PARTS)[2] for name in names if name.rpartition(PARTS)[1]]
    parts = [f"{way}{PARTS}{x}" for way in ("", CHECKPOINTED) for x in tokens if x.isdecimal()]
    require_known(names, ["whole", "checkpointed", f"{REPEATED}auto", *parts])


def measure_parts(case: TreeCase, variants: Sequence[str], options: Options) -> list[Finding]:
    require_known_parts(variants)
    return measure_variants(variants, PartsStep(case, variants[0], options).check, options)


class PartsStep:
    """A case's model, and the samples of its tree; gradients are compared with those of `first`."""

    def __init__(self, case: TreeCase, first: str, options: Options) -> None:
        self.case, self.first, self.device = case, first, options.device
        self.model = case.new_model(AutoModelForCausalLM, options.device, vocab_size=VOCABULARY)
        fv.patch_model(self.model, "auto")
        tree, generator = case.tree(), torch.Generator().manual_seed(case.seed)
        ids = torch.randint(3, VOCABULARY, (sum(tree.lengths),), generator=generator)
        self.samples = [ids[path].tolist() for path in tree.paths()]
        self.shared: SharedPrefixes = fv.share_prefixes(self.samples, device=options.device)
        self.expected: dict[str, Tensor] = {}  # still empty if the first has no memory

    def check(self, name: str) -> CheckedVariant:
        """Run a variant once, and compare its gradients."""
        call = self.call(name)
        tokens = call()
        found = self.gradients()
        if name == self.first:
            self.expected = found
        differences = [
            float((found[x] - expected).norm() / expected.norm())
            for x, expected in self.expected.items()
        ]
        difference = max(differences, default=None)
        measures: Measures = {
            "gradient_difference": difference,
            "tokens_of_forwards": tokens,
            "sample_tokens": sum(map(len, self.samples)),
            "tree_tokens": self.shared.layout.total_tokens,
        }
        wrong = None
        if difference is not None and not difference <= MOST_DIFFERENCE:
            wrong = f"its gradients differ by {difference:.2g} of their norm"
        return CheckedVariant(call, measures, wrong)

    def call(self, name: str) -> Callable[[], list[int]]:
        """A step; it returns the tokens of each forward that has a backward."""

        def run() -> list[int]:
            self.model.zero_grad()
            self.model.gradient_checkpointing_disable()
            if name.startswith((REPEATED, CHECKPOINTED.rstrip(":"))):
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
            return [self.backward(row) for row in self.rows(name)]

        return run

    def rows(self, name: str) -> Iterable[Mapping[str, Any]]:
        """What the forwards of a step take: parts, packed rows, or the row of the tree."""
        if PARTS in name:
            return self.shared.parts(self.model.get_decoder(), int(name.rpartition(PARTS)[2]))
        return self.repeated() if name.startswith(REPEATED) else [self.shared.batch()]

    def repeated(self) -> Iterator[Mapping[str, Any]]:
        """Packed rows of the samples, each with its whole path."""
        for row in self.case.rows([torch.tensor(x) for x in self.samples]):
            layout = fv.PackedLayout.from_lengths(list(map(len, row)), device=self.device)
            ids = torch.cat(list(row))[None].to(self.device)
            labels = ids.roll(-1, 1)
            labels[0, layout.cu_seqlens[1:].long() - 1] = IGNORE_INDEX
            counts = torch.ones_like(ids)
            of_row = {"input_ids": ids, "packed_layout": layout}
            yield of_row | {"shift_labels": labels, "label_counts": counts}

    def backward(self, row: Mapping[str, Any]) -> int:
        """Add the gradients of a row's loss, by chunks of tokens; return its number of tokens."""
        inputs = {name: row[name] for name in ("input_ids", "packed_layout")}
        hidden = self.model.get_decoder()(**inputs, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        logprobs = fv.token_logprobs(hidden, row["shift_labels"], head=head)
        labels = sum(len(sample) - 1 for sample in self.samples)
        (-(logprobs * row["label_counts"]).sum() / labels).backward()
        return int(row["input_ids"].numel())

    def gradients(self) -> dict[str, Tensor]:
        """Of a weight of the first and one of the last layer, on the host."""
        names = [x for x, p in self.model.named_parameters() if p.ndim == 2 and ".layers." in x]
        found = {name: self.model.get_parameter(name).grad for name in (names[0], names[-1])}
        return {name: x.float().cpu() for name, x in found.items() if x is not None}
