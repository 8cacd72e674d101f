"""Steps of the suite "trees": a model's forward and backward on a row of trees, or on documents.

The loss is that of the answers: cross-entropy of each next token inside a segment below a root. The
first token of such a segment is not predicted: the segment above goes on in several ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.bench.suites.model.tree_cases import REPEATED, Tree, TreeCase
from flexvarlen.bench.suites.model.utilisation import attends
from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.runner.suite import Finding, Options
from flexvarlen.verify.experiment.alone import (
    Alone,
    from_gradient,
    gradients_of,
    probed_parameters,
)
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.experiment import run_others
from flexvarlen.verify.experiment.inputs import ModelInputs
from flexvarlen.verify.experiment.measure import (
    CheckedVariant,
    Measures,
    first_run,
    measure_variants,
)
from flexvarlen.verify.experiment.step import HeadLoss, base_step, next_token_loss
from flexvarlen.verify.experiment.tree_batch import Row, TreeBatch
from flexvarlen.verify.experiment.variant import (
    Sizes,
    Variant,
    make_variant,
    own_backend,
    require_known,
)

SLOW_S = 6.0
"""A step that takes longer is timed once; of repeated samples one takes about two seconds."""


class TreeSteps:
    """A case's model with random weights, its trees, and the references of the first and the last.

    The references are those of the last group's samples, as all in fp64 would take a minute: in a
    checked step only these have labels.
    """

    def __init__(self, case: TreeCase, options: Options) -> None:
        self.case, self.options = case, options
        self.lm = case.new_causal_lm(options.device)
        self.ids = torch.randint(self.lm.config.vocab_size, (case.tokens,), device=options.device)
        self.trees = [case.tree(index) for index in range(1 + case.other_trees)]
        self.counts = case.tree().counts().to(options.device)  # the same in all trees
        self.loss = HeadLoss(
            self.lm.get_output_embeddings().weight,
            int(self.counts[self.labels(case.tree()) != IGNORE_INDEX].sum()),
            labelled_alone=True,
            loss_of=torch.compile(next_token_loss, backend=own_backend(case.compiler))
            if case.compiler
            else next_token_loss,
        )
        self.first = self.alone(self.trees[0], gradients=True)
        self.last = self.alone(self.trees[-1], gradients=False) if case.other_trees else None

    def measure(self, variants: Sequence[str]) -> list[Finding]:
        return measure_variants(variants, self.check, self.options, slow_s=SLOW_S)

    # --- samples ---------------------------------------------------------------------------------

    def labels(self, tree: Tree) -> Tensor:
        """int64 `[T]`, the label of each token's next token."""
        labels = PackedBatch(self.ids[None], tree.lengths).next_tokens()[0]
        is_root = torch.tensor(tree.parents) < 0
        labels[is_root.repeat_interleave(torch.tensor(tree.lengths))] = IGNORE_INDEX
        return labels

    def last_group(self, tree: Tree) -> list[Tensor]:
        """The paths of its samples."""
        return tree.paths()[-(self.case.samples // self.case.groups) :]

    def repeated(self, paths: Sequence[Tensor]) -> PackedBatch:
        """These samples, each a document."""
        return PackedBatch(self.ids[torch.cat(list(paths))][None], tuple(map(len, paths)))

    def alone(self, tree: Tree, *, gradients: bool) -> Alone:
        """The reference of the last group's samples."""
        paths, labels = self.last_group(tree), self.labels(tree)
        loss = from_gradient(self.loss.alone([labels[path] for path in paths]))
        base = self.lm.base_model
        return Alone.of(
            base,
            self.repeated(paths),
            loss=loss if gradients else None,
            parameters=probed_parameters(base),
        )

    def rows(self, tree: Tree, repeated: bool) -> list[tuple[Tensor, Row]]:
        """The tokens of each forward, and their documents or trees."""
        if repeated:
            each = self.case.rows(tree)
            return [(torch.cat(list(paths)), self.repeated(paths)) for paths in each]
        layout = fv.PackedLayout.from_tree(
            tree.lengths,
            tree.parents,
            device=self.ids.device,
            capacity=round_up_to_power_of_two(len(tree.lengths)),
            max_seqlen_bound=min(
                round_up_to_power_of_two(self.case.tokens // self.case.groups), self.case.tokens
            ),
        )
        row = TreeBatch(self.ids[None], layout, self.labels(tree)[None], self.counts[None])
        return [(torch.arange(self.case.tokens), row)]

    def forwards(
        self, variant: Variant, tree: Tree, repeated: bool, labels: Tensor
    ) -> list[ModelInputs]:
        """The rows as a variant gets them, with these labels `[T]` of the tree's tokens."""
        found = []
        for at, row in self.rows(tree, repeated):
            at = at[None].to(labels.device)
            inputs = {"input_ids": row.input_ids, **variant.inputs(row)}
            counts = torch.ones_like(at) if repeated else self.counts[at]
            found.append(ModelInputs(inputs, labels=labels[at], counts=counts))
        return found

    # --- steps -----------------------------------------------------------------------------------

    def check(self, name: str) -> CheckedVariant:
        """Make a variant, compile it if asked, and compare its first step with the reference."""
        attention, repeated = split_variant(name)
        case, tree = self.case, self.trees[0]
        rows = [row for _, row in self.rows(tree, repeated)]
        every = [row for each in self.trees for _, row in self.rows(each, repeated)]
        variant = make_variant(attention, self.lm.base_model, Sizes.of(*every))
        took = attends(variant, rows[0], compiled=bool(case.compiler))
        if case.compiler:
            variant = variant.compiled(case.compiler, fullgraph=False)
        check = partial(self.checked_step, variant, repeated)
        outputs, compilation = first_run(partial(check, tree))
        errors, wrong = self.first.check(outputs, gradients_of(self.lm.base_model))
        row_tokens = rows[0].total_tokens
        measures: Measures = {
            "attends": took,
            "rows": len(rows),
            "row_tokens": row_tokens,
            "token_ratio": case.samples * case.sample_tokens / (len(rows) * row_tokens),
            "checked_samples": len(self.last_group(tree)),
            **(compilation if case.compiler else {}),
        }
        forwards = self.forwards(variant, tree, repeated, self.labels(tree))
        step = partial(self.step, variant, forwards)
        checked = CheckedVariant(step, measures | errors, wrong, self.throughput)
        if self.last is not None:
            checked.afterwards = partial(run_others, check, self.trees[1:], self.last)
        return checked

    def checked_step(self, variant: Variant, repeated: bool, tree: Tree) -> Tensor:
        """A step in which the last group alone has labels; the outputs of its samples."""
        labels = self.labels(tree)
        labels[: -(self.case.tokens // self.case.groups)] = IGNORE_INDEX
        forwards = self.forwards(variant, tree, repeated, labels)
        outputs = torch.cat(self.step(variant, forwards, keep=True))
        at = torch.cat(self.last_group(tree)).to(outputs.device)
        return outputs[-len(at) :] if repeated else outputs[at]

    def step(
        self, variant: Variant, forwards: Sequence[ModelInputs], *, keep: bool = False
    ) -> list[Tensor]:
        """What is timed: forward, loss and backward."""
        return base_step(variant, forwards, self.loss.gradient, parameters_of=self.lm, keep=keep)

    def throughput(self, ms: float) -> Measures:
        return {"samples_per_s": self.case.samples / (ms / 1e3)}


def split_variant(name: str) -> tuple[str, bool]:
    """The attention, and whether samples are repeated.

    Raises:
        UnknownVariant: there is no such attention.
    """
    attention = name.removeprefix(REPEATED)
    require_known(attention)
    return attention, attention != name
