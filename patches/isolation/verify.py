"""Check whether any bit of one document reaches another, by replacing documents.

Cost, for N documents: 2 runs of the batch as it is, then 2·ceil(log2 N) with documents replaced by
halves; a run is a forward, and a backward if gradients are tested. A leak takes about
2·ceil(log2 N) + 6 more runs, to find documents, layer and module.

In trees each segment is a unit, like a document; segments below may see it, all others are watched.
Segments are replaced by halves of each depth. Since the loss of segments below is part of a
segment's gradient, gradients below the roots are compared with a separate run with the same losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.adapters import why_not_adapters
from flexvarlen.patches.isolation.blame import Blame, layers_of
from flexvarlen.patches.isolation.documents import why_not_whole
from flexvarlen.patches.isolation.model_run import IsolationRun, NoGradients, RunResult
from flexvarlen.patches.isolation.report import IsolationError, IsolationReport
from flexvarlen.patches.isolation.same_bits import compare_bits, patch_of
from flexvarlen.patches.isolation.tokens import chosen_documents, halves_of
from flexvarlen.patches.isolation.trace import Trace, changed_tokens

if TYPE_CHECKING:
    from flexvarlen.verify.experiment.batch import PackedBatch


def verify_isolation(
    model: nn.Module,
    batch: PackedBatch | Mapping[str, Any],
    *,
    gradients: bool | None = None,
    documents: int | Sequence[int] | None = None,
    layout: PackedLayout | None = None,
    seed: int = 0,
    same_bits: bool = False,
) -> IsolationReport:
    """Raise if the model, called with this batch, lets a document see another.

    Runs the model as it is (patched or not, train or eval), with other tokens in some documents. A
    bit that changes elsewhere is a leak: in the output of any layer, in the logits, or in the
    gradient of the input embeddings. Losses, including the auxiliary loss of a mixture of experts,
    are over the batch by design and not compared. Routing or normalisation over the batch counts as
    a leak.

    In a `packed_layout` of trees, the non-empty segments take the documents' place, numbered in the
    order of the row: other tokens in a segment may only change its outputs and those of segments
    below it.

    For N documents it takes 2 + 2·ceil(log2 N) forwards, each with a backward if gradients are
    tested, and memory for a copy of all layers' outputs; for trees, as many at each depth, and
    twice as many below the roots with gradients. A leak takes a few more.

    Modes, buffers and random generators are restored; no parameter gets a gradient.

    Args:
        model: any transformers model with one stack of layers (decoders, encoders, hybrids), or a
            wrapper of one. A compiled graph hides its layers: only its outputs are tested.
        batch: keyword arguments of its forward, with integer `input_ids` `[B, S]`; passed
            unchanged, except for the tokens, labels, and a cache (copied). Images of replaced
            documents are replaced too where each takes as many tokens, or each token as many
            patches. Moved to the model's device. The documents are found by the contract of
            `patch_model`, or in `seq_idx` `[B, S]`; padding is not a document. A `PackedBatch` is
            passed as input_ids and position_ids.
        gradients: whether to test gradients; None: if the model supports it. The forwards then run
            with gradients enabled.
        documents: the number of documents to replace (chosen by `seed`), or their indices; all
            others are watched. None: all, in 2·ceil(log2 N) forwards.
        layout: the documents over all B·S tokens, if the batch does not contain the boundaries (a
            4D mask).
        seed: random seed of the replaced tokens, the choice of documents, and the loss.
        same_bits: also check that each document's outputs have the same bits in other rows of the
            same size: in another order, beside other documents, and alone (under `same_bits` of
            `patch_model`, in a shorter row). The model must be patched; text only. Takes six
            forwards more, one fewer for a single document. With `gradients=True` input gradients
            must keep their bits too.

    Returns:
        A report of what was tested.

    Raises:
        SameBitsError: with `same_bits`, a document's bits depend on its row.
        IsolationError: a document reaches another; the message names layer, module, documents or
            segments, and the direction.
        NotImplementedError: with `gradients=True`, the model has no gradients; a PEFT adapter's
            effect depends on the row; ranks share the row.
        ValueError: there are fewer than two documents, or no outputs for each token; outputs or
            gradients are not finite; outputs do not change with the tokens, or differ between two
            runs of the same batch; with `same_bits`, the model is not patched, the batch has more
            than text and boundaries, or one document fills the row.

    >>> from flexvarlen.verify.experiment.batch import PackedBatch
    >>> from flexvarlen.verify.models import build_model
    >>> import flexvarlen as fv
    >>> model = fv.patch_model(build_model("llama")[0].eval(), "sdpa")
    >>> report = verify_isolation(model, PackedBatch(torch.arange(12)[None], (5, 7)))
    >>> print(report.sentence())
    No bit of 2 documents reached another in 2 layers and the outputs (4 forwards, eval mode); \
gradients kept their bits too.
    """
    why = why_not_adapters(*model.modules()) or why_not_whole(model, batch, layout)
    if why is not None:
        raise NotImplementedError(why)
    run = IsolationRun(model, batch, layout=layout, seed=seed)
    if len(run.units) < 2:
        raise ValueError(
            f"batch must hold at least two documents, got {len(run.units)}; pack several, and mark "
            "where they start (position_ids, packed_layout, ...) or pass layout=."
        )
    if same_bits:
        patch_of(run)
    chosen = chosen_documents(documents, len(run.units), seed)
    with run.as_before():
        report = _Search(run, chosen, gradients).report()
        if not same_bits:
            return report
        kept = compare_bits(run, require_gradients=bool(gradients))
    return replace(report, same_bits=kept, forwards=run.forwards)


class _Search:
    """The runs of one `verify_isolation`."""

    def __init__(self, run: IsolationRun, chosen: list[int], gradients: bool | None) -> None:
        self.run, self.chosen = run, chosen
        self.layers = layers_of(run.inner)
        self.why_no_gradients: str | None = None
        self.before, self.before_trace = self._first_run(gradients)
        self.repeats = self.compares_bits = self._check_first_run()

    def report(self) -> IsolationReport:
        """Replace documents, or segments, by halves.

        Raises:
            IsolationError: a leak, in the forward if there is one.
        """
        run, backward = self.run, None
        for replaced, watched in halves_of(self.chosen, run.units):
            trace = self._trace(against=self.before_trace)
            after = run(replaced, watched, trace)
            found = self._first_change(trace, after, watched)
            if found is not None:
                raise self._forward_error(replaced, found)
            self._check_effect(after, replaced)
            backward = backward or self._backward_change(after, replaced, watched)
        if backward is not None:
            raise self._backward_error(*backward)
        return IsolationReport(
            documents=tuple(self.chosen),
            num_docs=len(run.units),
            forwards=run.forwards,
            layers=len(self.before_trace.completed),
            gradients=None if not run.gradients else "bits" if self.repeats else "zeros",
            why_no_gradients=self.why_no_gradients,
            training=run.model.training,
            unit=run.word,
        )

    # ---- the batch as it is ----

    def _first_run(self, gradients: bool | None) -> tuple[RunResult, Trace]:
        run = self.run
        run.gradients = gradients is not False
        trace = self._trace()
        try:
            return run([], None, trace), trace
        except (NoGradients, NotImplementedError) as reason:
            if gradients is not None:
                if gradients:
                    raise NotImplementedError(
                        f"gradients cannot be tested: {reason}; pass gradients=False."
                    ) from reason
                raise
            self.why_no_gradients = str(reason).rstrip(".")
        run.gradients = False
        trace = self._trace()
        return run([], None, trace), trace

    def _check_first_run(self) -> bool:
        """Whether the gradients of two runs have the same bits; raises if the outputs differ."""
        run, before = self.run, self.before
        for what, found in (("outputs", before.outputs), ("gradients", before.gradient)):
            for number, unit in enumerate(run.units if found is not None else ()):
                if found is not None and not bool(found[unit.tokens].isfinite().all()):
                    raise ValueError(
                        f"the model's {what} must be finite, got infinities or NaN for "
                        f"{run.name(number)}, which would hide a leak; check weights and dtype."
                    )
        trace = self._trace(against=self.before_trace)
        again = run([], None, trace)
        change = self._first_change(trace, again, range(len(run.units)))
        if change is not None:
            where = f"layer {change[0]}" if change[0] is not None else "the outputs"
            raise ValueError(
                "the model must give the same bits for the same batch and random state, got "
                f"differences in {where}; disable atomic additions, or call "
                "torch.use_deterministic_algorithms(True)."
            )
        return before.gradient is not None and not _rows_changed(before, again).any()

    def _check_effect(self, after: RunResult, replaced: Sequence[int]) -> None:
        changed = changed_tokens(self.before.outputs, after.outputs)
        if not any(bool(changed[self.run.units[unit].tokens].any()) for unit in replaced):
            raise ValueError(
                f"the outputs of {self.run.word}s {list(replaced)[:8]} must change with their "
                "tokens, but have the same bits; pass a batch whose input_ids the model reads."
            )

    # ---- what changed ----

    def _trace(self, against: Trace | None = None) -> Trace:
        return Trace(self.layers, self.run.batch, self.run.row_tokens, against=against)

    def _first_change(
        self, trace: Trace, after: RunResult, watched: Sequence[int]
    ) -> tuple[int | None, int] | None:
        """The first layer (None: only the outputs), and the first watched unit, that changed."""
        flags: list[tuple[int | None, Tensor]] = []
        for number, call in enumerate(self.before_trace.completed):
            found = trace.outputs_changed(call)
            if found is not None:
                flags.append((number, found))
        flags.append((None, changed_tokens(self.before.outputs, after.outputs)))
        looked_at = self._tokens(watched)
        hits = [(flag & looked_at.to(flag.device)).any() for _, flag in flags]  # of any layer's GPU
        hit = torch.stack([each.to(looked_at.device) for each in hits]).tolist()
        if not any(hit):
            return None
        layer, flag = flags[hit.index(True)]
        return layer, self._reached(flag, watched)[0]

    def _backward_change(
        self, after: RunResult, replaced: Sequence[int], watched: Sequence[int]
    ) -> tuple[str, list[int], int] | None:
        """How gradients leak ("zeros" or "bits"), from which units, and into which."""
        if after.gradient is None:
            return None
        crossed = self._reached((after.gradient != 0).any(-1), replaced)
        if crossed:
            return "zeros", list(watched), crossed[0]
        if not self.compares_bits:
            return None
        # In the first run, units above the replaced ones received the gradients of their losses.
        losses = watched if self.run.units[replaced[0]].depth > 0 else None
        expected = self.before if losses is None else self.run([], losses)
        changed = _rows_changed(expected, after)
        if not self._reached(changed, watched):
            return None
        # Bits that differ between two backwards of one batch: atomic additions, no leak.
        noisy = _rows_changed(expected, self.run([], losses))
        noisy |= _rows_changed(after, self.run(replaced, watched))
        self.repeats &= not self._reached(noisy, watched)
        reached = self._reached(changed & ~noisy, watched)
        return ("bits", list(replaced), reached[0]) if reached else None

    def _reached(self, flags: Tensor, units: Sequence[int]) -> list[int]:
        """The units with a flagged token."""
        return [unit for unit in units if bool(flags[self.run.units[unit].tokens].any())]

    def _tokens(self, units: Sequence[int]) -> Tensor:
        """A mask of the tokens of some units, bool `[T]`."""
        flags = torch.zeros(self.run.ids.numel(), dtype=torch.bool, device="cpu")
        for unit in units:
            flags[self.run.units[unit].tokens] = True
        return flags.to(self.run.device)

    # ---- who it was ----

    def _forward_error(self, replaced: list[int], found: tuple[int | None, int]) -> IsolationError:
        layer, target = found

        def leak(sources: list[int]) -> tuple[int | None, int] | None:
            trace = self._trace(against=self.before_trace)
            # The losses do not matter here, but must be the same each time.
            return self._first_change(trace, self.run(sources, [target], trace), [target])

        source = one_of(replaced, lambda sources: leak(sources) is not None)
        alone = leak([source])
        if alone is not None:
            layer = alone[0]
        calls = self.before_trace.completed
        name = None if layer is None else calls[layer].name
        return Blame(self.run, list(self.layers), source, target).forward(layer, name)

    def _backward_error(self, how: str, sources: list[int], target: int) -> IsolationError:
        rows = self.run.units[target].tokens

        def crosses(some: list[int]) -> bool:
            gradient = self.run([], some).gradient
            return gradient is not None and bool((gradient[rows] != 0).any())

        def changes(some: list[int]) -> bool:
            losses = self.run.outside(some)
            return bool(_rows_changed(self.run([], losses), self.run(some, losses))[rows].any())

        if how == "bits":  # compared with the first run, where all documents had a loss
            others = self.run.outside([target])
            if crosses(others):
                how, sources = "zeros", others
        source = one_of(sources, crosses if how == "zeros" else changes)
        calls = [call.name for call in self.before_trace.completed]
        blame = Blame(self.run, list(self.layers), source, target)
        return blame.backward(calls, by_loss=how == "zeros")


def one_of(units: list[int], leak: Callable[[list[int]], bool]) -> int:
    """Find one unit that leaks among several that leak together."""
    while len(units) > 1:
        middle = len(units) // 2
        units = units[:middle] if leak(units[:middle]) else units[middle:]
    return units[0]


def _rows_changed(before: RunResult, after: RunResult) -> Tensor:
    """Tokens whose gradients have other bits, bool `[T]`."""
    assert before.gradient is not None
    assert after.gradient is not None
    return changed_tokens(before.gradient, after.gradient)
