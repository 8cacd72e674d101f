"""Attention over trees, and over the same samples repeated: checked and timed by one engine.

The reference is every sample alone in fp64. A token's output has one gradient, of which each of its
samples has an equal share: then the samples' gradients sum to those of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.bench.suites.attention.engine import measure_attention
from flexvarlen.bench.suites.attention.inputs import Inputs, serial
from flexvarlen.bench.suites.attention.packed import packed_calls
from flexvarlen.bench.suites.model.tree_cases import REPEATED, TreeCase
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.reference.acceptance import Error
from flexvarlen.reference.attention import Results, Sample, spans_of
from flexvarlen.runner.suite import Finding, Options, choose


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
