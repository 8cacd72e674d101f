"""What the suite "trees" measures: attention alone, and steps of a model.

Both run on rows of trees, and on the same samples repeated. The reference is every sample alone in
fp64. A token's output has one gradient, of which each of its samples has an equal share: then the
samples' gradients sum to those of the tree.

A step's loss is that of the answers: cross-entropy of each next token inside a segment below a
root. The first token of such a segment is not predicted: the segment above goes on in several ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.suites.attention.engine import measure_attention
from flexvarlen.bench.suites.attention.inputs import Inputs, serial
from flexvarlen.bench.suites.attention.packed import packed_calls
from flexvarlen.bench.suites.model.tree_cases import REPEATED, Tree, TreeCase
from flexvarlen.bench.suites.model.utilisation import attends
from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.reference.acceptance import Error
from flexvarlen.reference.attention import Results, Sample, spans_of
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.runner.suite import Finding, Options, choose
from flexvarlen.verify.experiment.alone import (
    Alone,
    from_gradient,
    gradients_of,
    probed_parameters,
)
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.experiment import run_others
from flexvarlen.verify.experiment.inputs import ModelInputs
from flexvarlen.verify.experiment.measure import CheckedVariant, Measures, first_run
from flexvarlen.verify.experiment.step import HeadLoss, base_step, next_token_loss
from flexvarlen.verify.experiment.tree_batch import Row, TreeBatch
from flexvarlen.verify.experiment.variant import (
    Sizes,
    Variant,
    make_variant,
    own_backend,
    require_known,
)

# --- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeInputs(Inputs):
    """A row of trees; `lengths` and `cu_seqlens` are those of the segments."""

    case: TreeCase

    @classmethod
    def of(cls, case: TreeCase, device: torch.device) -> TreeInputs:
        *heads, head_dim = case.heads
        dtype, lengths = case.torch_dtype, case.tree().lengths
        row = Inputs.random(lengths, (heads[0], heads[1]), head_dim, dtype, device, causal=True)
        return cls(**vars(row), case=case)

    def layout(self) -> fv.PackedLayout:
        tree = self.case.tree()
        return fv.PackedLayout.from_tree(tree.lengths, tree.parents, device=self.q.device)

    def repeated(self, paths: Sequence[Tensor]) -> Inputs:
        """A row of these samples, each a document."""
        at, counts = (x.to(self.q.device) for x in (torch.cat(list(paths)), self.counts()))
        lengths = [len(path) for path in paths]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(self.q.device, torch.int32)
        shares = self.grad_out / counts
        return Inputs(self.q[at], self.k[at], self.v[at], shares[at], lengths, cu_seqlens, True)

    def counts(self) -> Tensor:
        return self.case.tree().counts()[:, None, None]

    def documents(self) -> list[Inputs]:
        """The rows without sharing, which `serial` calls one after another."""
        return [self.repeated(paths) for paths in self.case.rows(self.case.tree())]

    def alone(self, dtype: torch.dtype) -> Results:
        return self.folded(self.repeated(self.case.tree().paths()).alone(dtype))

    def folded(self, found: Results) -> Results:
        """The samples' results as the tree's: outputs averaged, gradients summed."""
        at = torch.cat(self.case.tree().paths()).to(self.q.device)
        gradients = (x for x in (found.dq, found.dk, found.dv) if x is not None)

        def summed(x: Tensor) -> Tensor:
            wide = torch.promote_types(x.dtype, torch.float32)
            sums = x.new_zeros((len(self.q), *x.shape[1:]), dtype=wide)
            return sums.index_add_(0, at, x.to(wide))

        out = summed(found.out) / self.counts().to(self.q.device)
        return Results(out.to(found.out.dtype), None, *(summed(x).to(x.dtype) for x in gradients))

    def samples(self) -> list[Sample]:
        """All heads of every segment."""
        kv_heads, heads = slice(0, self.k.shape[1]), slice(0, self.q.shape[1])
        exact, baseline = (
            self.alone(dtype).documents(self.lengths) for dtype in (torch.float64, self.q.dtype)
        )
        found = []
        for span, own, plain in zip(spans_of(self.lengths), exact, baseline, strict=True):
            reference = own.named()
            errors = {name: Error.between(x, reference[name]) for name, x in plain.named().items()}
            found.append(Sample(slice(*span), kv_heads, heads, own, errors))
        return found


def measure_trees(
    case: TreeCase, variants: Sequence[str], baseline: str, options: Options
) -> list[Finding]:
    """Check and time the variants of a case.

    Args:
        baseline: the repeated variant that the trees are compared with.

    Returns:
        A finding for each variant: the measures of `measure_attention` behind "forward_" and
        "backward_"; of both together `ms_p50`, `tflop` of unmasked work and `tflops`, the rate; and
        `times_ideal`, the time over that of as much work at the baseline's rate.
    """
    inputs, calls = TreeInputs.of(case, options.device), packed_calls()
    known = calls | {REPEATED + name: serial(call) for name, call in calls.items()}
    found = measure_attention(inputs, choose(variants, known), options)
    layouts = {False: inputs.layout(), True: inputs.repeated(case.tree().paths()).layout()}
    heads, _, head_dim = case.heads
    tflop = {  # a backward counts as 2.5 forwards
        is_repeated: 3.5e-12 * DocumentMask.of(layout).flops(head_dim, heads)
        for is_repeated, layout in layouts.items()
    }
    each = {
        forward.variant: both_passes(forward, backward, tflop[forward.variant.startswith(REPEATED)])
        for forward, backward in zip(found[::2], found[1::2], strict=True)
    }
    ideal = each[baseline].measures.get("tflops") if baseline in each else None
    for finding in each.values():
        if ideal is not None and finding.status == "ok":
            assert isinstance(finding.measures, dict)
            finding.measures["times_ideal"] = ideal / finding.measures["tflops"]
    return list(each.values())


def both_passes(forward: Finding, backward: Finding, tflop: float) -> Finding:
    """One finding of both passes; if one is not "ok", that one's."""
    for finding in (forward, backward):
        if finding.status != "ok":
            return Finding(finding.variant, finding.status, finding.reason, finding.measures)
    passes = {"forward": forward.measures, "backward": backward.measures}
    measures = {
        f"{pass_}_{name}": value
        for pass_, own in passes.items()
        for name, value in own.items()
        if name != "tflops"  # of the tree's work
    }
    ms = sum(own["device_ms_p50"] for own in passes.values())
    measures |= {"ms_p50": ms, "tflop": tflop, "tflops": 1e3 * tflop / ms}
    return Finding(forward.variant, "ok", None, measures)


# --- steps ---------------------------------------------------------------------------------------


class TreeSteps:
    """A case's model with random weights, its trees, and the references of the first and the last.

    The references are those of the last group's samples, as all in fp64 would take a minute: in a
    checked step only these have labels.
    """

    def __init__(self, case: TreeCase, options: Options) -> None:
        self.case, self.model = case, case.new_causal_lm(options.device)
        self.base: PreTrainedModel = self.model.base_model
        vocabulary = self.model.config.vocab_size
        self.ids = torch.randint(vocabulary, (case.tokens,), device=options.device)
        self.trees = [case.tree(index) for index in range(1 + case.other_trees)]
        self.counts = case.tree().counts().to(options.device)  # the same in all trees
        self.loss = HeadLoss(
            self.model.get_output_embeddings().weight,
            int(self.counts[self.labels(case.tree()) != IGNORE_INDEX].sum()),
            labelled_alone=True,
            loss_of=torch.compile(next_token_loss, backend=own_backend(case.compiler))
            if case.compiler
            else next_token_loss,
        )
        self.alone = self.reference(self.trees[0], gradients=True)
        self.last = self.reference(self.trees[-1], gradients=False) if case.other_trees else None

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

    def reference(self, tree: Tree, *, gradients: bool) -> Alone:
        """The reference of the last group's samples."""
        paths, labels = self.last_group(tree), self.labels(tree)
        loss = from_gradient(self.loss.alone([labels[path] for path in paths]))
        return Alone.of(
            self.base,
            self.repeated(paths),
            loss=loss if gradients else None,
            parameters=probed_parameters(self.base),
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
        every = [[row for _, row in self.rows(each, repeated)] for each in self.trees]
        rows, sizes = every[0], Sizes.of(*chain(*every))
        variant = make_variant(attention, self.base, sizes)
        took = attends(variant, rows[0], compiled=bool(case.compiler))
        if case.compiler:
            variant = variant.compiled(case.compiler, fullgraph=False)
        check = partial(self.checked_step, variant, repeated)
        outputs, compilation = first_run(partial(check, tree))
        errors, wrong = self.alone.check(outputs, gradients_of(self.base))
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
        checked = CheckedVariant(step, measures | errors, wrong)
        checked.conclude = lambda ms: {"samples_per_s": case.samples / (ms / 1e3)}
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
        return base_step(variant, forwards, self.loss.gradient, parameters_of=self.model, keep=keep)


def split_variant(name: str) -> tuple[str, bool]:
    """The attention, and whether samples are repeated.

    Raises:
        UnknownVariant: there is no such attention.
    """
    attention = name.removeprefix(REPEATED)
    require_known(attention)
    return attention, attention != name
