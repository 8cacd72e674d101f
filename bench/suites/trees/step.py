"""Steps of the suite "trees": a model's forward and backward on a row of trees, or on documents.

The loss is that of the answers: cross-entropy of each next token inside a segment below a root. The
first token of such a segment is not predicted: the segment above goes on in several ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexvarlen.bench.suites.model.alone import Alone
from flexvarlen.bench.suites.model.batches import Collection
from flexvarlen.bench.suites.model.geometries import new_causal_lm
from flexvarlen.bench.suites.model.measure import CheckedVariant, Measures, measure_variants
from flexvarlen.bench.suites.model.packings import run_others
from flexvarlen.bench.suites.model.step import (
    Batch,
    forward_backward,
    next_token_gradient,
    next_token_loss,
)
from flexvarlen.bench.suites.model.variants import (
    Sizes,
    Variant,
    make_variant,
    own_backend,
    require_known,
)
from flexvarlen.bench.suites.trees.cases import REPEATED, Tree, TreeCase
from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.measure import watch_compilation
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.runner.suite import Finding, Options

SLOW_S = 6.0
"""A step that takes longer is timed once; of repeated samples one takes about two seconds."""


class TreeSteps:
    """A case's model with random weights, its trees, and the references of the first and the last.

    The references are those of the last group's samples, as all in fp64 would take a minute: in a
    checked step only these have labels.
    """

    def __init__(self, case: TreeCase, options: Options) -> None:
        self.case, self.options = case, options
        torch.manual_seed(case.seed)
        dtype: torch.dtype = getattr(torch, case.dtype)
        self.lm = new_causal_lm(case.geometry, case.layers, dtype, options.device).train()
        self.head: Tensor = self.lm.get_output_embeddings().weight
        self.loss: Callable[..., Tensor] = next_token_loss
        if case.compiler:
            self.loss = torch.compile(next_token_loss, backend=own_backend(case.compiler))
        self.ids = torch.randint(self.lm.config.vocab_size, (case.tokens,), device=options.device)
        self.trees = [case.tree(index) for index in range(1 + case.other_trees)]
        self.counts = case.tree().counts().to(options.device)  # the same in all trees
        rows = [lengths for tree in self.trees for _, lengths, _ in self.rows(tree, True)]
        segments, group = len(case.tree().lengths), case.tokens // case.groups
        bound = min(round_up_to_power_of_two(group), case.tokens)
        self.sizes = {
            False: Sizes(case.tokens, round_up_to_power_of_two(segments), bound),
            True: Sizes.of(sum(rows[0]), *rows),
        }
        self.counted = int(self.counts[self.labels(case.tree()) != IGNORE_INDEX].sum())
        self.first = self.alone(self.trees[0], gradients=True)
        self.last = self.alone(self.trees[-1], gradients=False) if case.other_trees else None

    def measure(self, variants: Sequence[str]) -> list[Finding]:
        return measure_variants(variants, self.check, self.options, slow_s=SLOW_S)

    # --- samples ---------------------------------------------------------------------------------

    def labels(self, tree: Tree) -> Tensor:
        """int64 `[T]`, the label of each token's next token."""
        labels = Collection(self.ids[None], tree.lengths).labels[0]
        is_root = torch.tensor(tree.parents) < 0
        labels[is_root.repeat_interleave(torch.tensor(tree.lengths))] = IGNORE_INDEX
        return labels

    def last_group(self, tree: Tree) -> list[Tensor]:
        """The paths of its samples."""
        return tree.paths()[-(self.case.samples // self.case.groups) :]

    def alone(self, tree: Tree, *, gradients: bool) -> Alone:
        """The reference of the last group's samples."""
        paths, labels = self.last_group(tree), self.labels(tree)

        def gradient(sample: int, states: Tensor) -> Tensor:
            head = self.head.detach().to(states.dtype)
            return answers_gradient(states, head, labels[paths[sample]], self.counted)

        ids, lengths = self.ids[torch.cat(paths)][None], [len(path) for path in paths]
        start = gradient if gradients else None
        return Alone(self.lm.base_model, ids, lengths, gradient=start)

    def rows(self, tree: Tree, repeated: bool) -> list[tuple[Tensor, Sequence[int], Any]]:
        """The tokens of each forward, with the lengths and parents that a variant is given."""
        if not repeated:
            return [(torch.arange(self.case.tokens), tree.lengths, tree.parents)]
        return [
            (torch.cat(list(paths)), [len(path) for path in paths], None)
            for paths in self.case.rows(tree)
        ]

    def batches(
        self, variant: Variant, tree: Tree, repeated: bool, labels: Tensor
    ) -> list[tuple[Batch, Tensor]]:
        """The forwards, and how many samples each of their tokens stands for."""
        found = []
        for at, lengths, parents in self.rows(tree, repeated):
            at = at[None].to(labels.device)
            inputs = {"input_ids": self.ids[at], **variant.inputs(lengths, parents)}
            counts = torch.ones_like(at) if repeated else self.counts[at]
            found.append((Batch(inputs, None, labels[at]), counts))
        return found

    # --- steps -----------------------------------------------------------------------------------

    def check(self, name: str) -> CheckedVariant:
        """Make a variant, compile it if asked, and compare its first step with the reference."""
        attention, repeated = split_variant(name)
        case, tree = self.case, self.trees[0]
        variant = make_variant(attention, self.lm.base_model, self.sizes[repeated])
        rows = self.rows(tree, repeated)
        attends = variant.attends(*rows[0][1:], compiled=bool(case.compiler))
        call: Callable[..., Any] = variant.model
        if case.compiler:
            call = variant.compiled(case.compiler, fullgraph=False)
        check = partial(self.checked_step, variant, call, repeated)
        with watch_compilation() as stats:
            outputs = check(tree.lengths)
        errors, wrong = self.first.check(outputs, self.first.packed_gradients())
        row_tokens = self.sizes[repeated].tokens
        measures: Measures = {
            "attends": attends,
            "rows": len(rows),
            "row_tokens": row_tokens,
            "token_ratio": case.samples * case.sample_tokens / (len(rows) * row_tokens),
            "checked_samples": len(self.last_group(tree)),
        }
        if case.compiler:
            measures["graph_breaks"] = stats.graph_breaks
        batches = self.batches(variant, tree, repeated, self.labels(tree))
        step = partial(self.step, call, batches)
        checked = CheckedVariant(step, measures | errors, wrong, self.throughput)
        if self.last is not None:
            others = [each.lengths for each in self.trees[1:]]
            checked.afterwards = partial(run_others, check, others, self.last)
        return checked

    def checked_step(
        self, variant: Variant, call: Callable[..., Any], repeated: bool, lengths: Sequence[int]
    ) -> Tensor:
        """A step in which the last group alone has labels; the outputs of its samples."""
        tree = Tree(tuple(lengths), self.trees[0].parents)
        labels = self.labels(tree)
        labels[: -(self.case.tokens // self.case.groups)] = IGNORE_INDEX
        outputs = torch.cat(
            self.step(call, self.batches(variant, tree, repeated, labels), keep=True)
        )
        at = torch.cat(self.last_group(tree)).to(outputs.device)
        return outputs[-len(at) :] if repeated else outputs[at]

    def step(
        self,
        call: Callable[..., Any],
        batches: Sequence[tuple[Batch, Tensor]],
        *,
        keep: bool = False,
    ) -> list[Tensor]:
        """What is timed: forward, loss and backward."""
        counts = iter([each for _, each in batches])

        def gradient(outputs: Tensor, batch: Batch) -> Tensor:
            assert batch.labels is not None
            given = (outputs, self.head, batch.labels, self.counted, next(counts))
            return answers_gradient(*given, loss_of=self.loss)

        return forward_backward(self.lm, call, [x for x, _ in batches], gradient, keep=keep)

    def throughput(self, ms: float) -> Measures:
        return {"samples_per_s": self.case.samples / (ms / 1e3)}


def answers_gradient(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    counted: int,
    counts: Tensor | None = None,
    loss_of: Callable[..., Tensor] = next_token_loss,
) -> Tensor:
    """`next_token_gradient`, with logits of the tokens that have a label alone."""
    hidden, has_label = hidden.detach(), labels != IGNORE_INDEX
    own = None if counts is None else counts[has_label]
    found = torch.zeros_like(hidden)
    given = (hidden[has_label], head, labels[has_label], counted, own)
    found[has_label] = next_token_gradient(*given, loss_of=loss_of)
    return found


def split_variant(name: str) -> tuple[str, bool]:
    """The attention, and whether samples are repeated.

    Raises:
        UnknownVariant: there is no such attention.
    """
    attention = name.removeprefix(REPEATED)
    require_known(attention)
    return attention, attention != name
