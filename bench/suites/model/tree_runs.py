"""What the suite "trees" measures: attention alone, and steps of a model.

Both run on rows of trees, and on the same samples repeated. The reference is every sample alone in
fp64. A token's output has one gradient, of which each of its samples has an equal share: then the
samples' gradients sum to those of the tree.

Of a chain of segments, the segments too: each a document of its own, in a row of as many tokens
with the same labels, compared with each of them alone in fp64.

A step's loss is that of the answers: cross-entropy of each next token inside a segment below a
root, of agents inside a turn, of paths inside any segment. The first token of such a segment is not
predicted: the segment above goes on in several ways. `head_ms` is what the loss and its gradient
take of a step, and `prefixes_ms` what `share_prefixes` takes of the host to find the trees in lists
of token ids. Recurrent layers of the reference run in plain torch, in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.bench.suites.attention.engine import measure_attention
from flexvarlen.bench.suites.attention.inputs import Inputs, serial
from flexvarlen.bench.suites.attention.packed import packed_calls
from flexvarlen.bench.suites.model.attends import attends
from flexvarlen.bench.suites.model.tree_cases import REPEATED, SEGMENTS, Form, Tree, TreeCase
from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.measure.timing import wall_seconds
from flexvarlen.recurrent.fla_kernels import let_fla_run
from flexvarlen.reference.acceptance import Error
from flexvarlen.reference.attention import Results, Sample, spans_of
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.runner.suite import Finding, Options, choose
from flexvarlen.verify.experiment.batch import ModelInputs, PackedBatch
from flexvarlen.verify.experiment.experiment import Experiment
from flexvarlen.verify.experiment.inputs import positions_of
from flexvarlen.verify.experiment.measure import CheckedVariant, Measures
from flexvarlen.verify.experiment.step import HeadLoss, next_token_loss
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
        return [self.repeated(paths) for paths in self.case.rows(self.case.tree().paths())]

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


class TreeSteps(Experiment):
    """A case's model with random weights, and its trees.

    The last tree's samples are checked, as all in fp64 would take a minute: in a checked step only
    these have labels. `of_segments`: each segment is a document of its own, and all are checked.
    """

    def __init__(self, case: TreeCase, options: Options, *, of_segments: bool = False) -> None:
        self.case, model = case, case.new_causal_lm(options.device)
        ids = torch.randint(model.config.vocab_size, (1, case.tokens), device=options.device)
        loss_of = next_token_loss
        if case.compiler:
            loss_of = torch.compile(loss_of, backend=own_backend(case.compiler))
        super().__init__(
            model,
            [
                row_of(case.tree(index), ids, form=case.form, of_segments=of_segments)
                for index in range(1 + case.other_trees)
            ],
            documents=None if of_segments else case.checked,
            loss=partial(HeadLoss, labelled_alone=True, loss_of=loss_of),
        )

    def check(self, name: str) -> CheckedVariant:
        """Make a variant, compile it if asked, and compare its first step with the reference."""
        attention, batching = split_variant(name)
        let_fla_run()
        rows = [packed for row in self.rows for _, packed in self.packed_rows(row, batching)]
        variant = make_variant(attention, self.base, Sizes.of(*rows))
        took = attends(variant, rows[0], compiled=bool(self.case.compiler))
        if self.case.compiler:
            variant = variant.compiled(self.case.compiler, fullgraph=False)
        checked = self.checked(variant, batching)
        head_ms = self.head_ms(self.forwards(variant, batching, self.row))
        checked.measures |= {"attends": took, "head_ms": head_ms}
        if batching == "packed":
            checked.measures["prefixes_ms"] = prefixes_ms(self.row)
        checked.conclude = lambda ms: {"samples_per_s": self.case.samples / (ms / 1e3)}
        return checked

    def head_ms(self, forwards: Sequence[ModelInputs]) -> float:
        """Milliseconds of a step's losses and their gradients: the median of three runs."""
        assert self.loss is not None
        gradient, head = self.loss.gradient, self.loss.head
        outputs = [
            head.new_ones(*each.inputs["input_ids"].shape, head.shape[1]) for each in forwards
        ]

        def run() -> None:
            for output, each in zip(outputs, forwards, strict=True):
                gradient(output, each)

        run()
        return 1e3 * median(wall_seconds(run, head.device) for _ in range(3))

    def packed_rows(self, row: Row, batching: str) -> list[tuple[Tensor, Row]]:
        """The tokens of each forward, and their documents or trees."""
        if batching == "packed":
            return [(torch.arange(row.total_tokens, device=row.input_ids.device), row)]
        found: list[tuple[Tensor, Row]] = []
        for paths in self.case.rows(row.paths):
            at = torch.cat(list(paths))
            found.append((at, PackedBatch(row.input_ids[:, at], tuple(map(len, paths)))))
        return found

    def forwards(
        self, variant: Variant, batching: str, row: Row, documents: Sequence[int] | None = None
    ) -> list[ModelInputs]:
        """One row of trees, or their samples in packed rows; labels are those of the trees."""
        assert isinstance(row, TreeBatch)
        labels, found = row.labels(documents), []
        for at, packed in self.packed_rows(row, batching):
            inputs = {"input_ids": packed.input_ids, **variant.inputs(packed)}
            counts = row.label_counts if batching == "packed" else None
            found.append(ModelInputs(inputs, labels=labels[:, at], counts=counts))
        return found

    def about(self, forwards: Sequence[ModelInputs], compilation: Measures) -> Measures:
        """The rows of a step, and what was compiled where it was asked for."""
        row_tokens = positions_of(forwards) // len(forwards)
        return {
            "rows": len(forwards),
            "row_tokens": row_tokens,
            "token_ratio": int(self.case.tree().counts().sum()) / positions_of(forwards),
            "checked_samples": len(self.alone.documents),
            **(compilation if self.case.compiler else {}),
        }


def row_of(
    tree: Tree, ids: Tensor, *, form: Form = "equal", of_segments: bool = False
) -> TreeBatch:
    """A row of trees; in segments with labels, each token's label is the next token.

    `of_segments`: no segment continues another, with the same labels.
    """
    laid_out = Tree(tree.lengths, (-1,) * len(tree.parents)) if of_segments else tree
    layout = fv.PackedLayout.from_tree(
        laid_out.lengths,
        laid_out.parents,
        device=ids.device,
        capacity=round_up_to_power_of_two(len(tree.lengths)),
        max_seqlen_bound=min(round_up_to_power_of_two(laid_out.longest()), ids.shape[1]),
    )
    labels = PackedBatch(ids, tree.lengths).next_tokens()
    is_labelled = torch.tensor(tree.labelled(form)).repeat_interleave(torch.tensor(tree.lengths))
    labels[0, ~is_labelled] = IGNORE_INDEX
    return TreeBatch(ids, layout, labels, laid_out.counts()[None].to(ids.device))


def prefixes_ms(row: Row) -> float:
    """Milliseconds of `share_prefixes` on the samples of a row as lists, the least of five."""
    ids, labels = row.input_ids[0], row.next_tokens()[0]
    samples = [
        {"input_ids": ids[path].tolist(), "labels": [IGNORE_INDEX, *labels[path[:-1]].tolist()]}
        for path in row.paths
    ]
    share = partial(fv.share_prefixes, samples)
    return 1e3 * min(wall_seconds(share, torch.device("cpu")) for _ in range(5))


def split_variant(name: str) -> tuple[str, str]:
    """The attention, and whether trees, or their segments, are "packed" or samples "repeated".

    Raises:
        UnknownVariant: there is no such attention.
    """
    attention = name.removeprefix(REPEATED).removeprefix(SEGMENTS)
    require_known(attention)
    return attention, "repeated" if name.startswith(REPEATED) else "packed"
