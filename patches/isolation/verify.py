"""Does a bit of one document reach another? By replacing documents, and looking at all the others.

Cost, for N documents: 2 runs of the batch as it is, then 2·ceil(log2 N) with documents replaced by
halves; a run is a forward, and a backward if gradients are tested. A leak takes some
2·ceil(log2 N) + 6 more, to name documents, layer and module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.isolation.blame import Blame, layers_of
from flexvarlen.patches.isolation.model_run import IsolationRun, NoGradients, RunResult
from flexvarlen.patches.isolation.report import IsolationError, IsolationReport
from flexvarlen.patches.isolation.tokens import halves_of, sample_of
from flexvarlen.patches.isolation.trace import Trace, changed_tokens

if TYPE_CHECKING:
    from flexvarlen.verify.batch import PackedBatch


def verify_isolation(
    model: nn.Module,
    batch: PackedBatch | Mapping[str, Any],
    *,
    gradients: bool | None = None,
    documents: int | Sequence[int] | None = None,
    layout: PackedLayout | None = None,
    seed: int = 0,
) -> IsolationReport:
    """Raise if the model, called with this batch, lets a document see another.

    Runs the model as it is (patched or not, train or eval), with other tokens in some documents. A
    bit that changes elsewhere is a leak: in the output of any layer, in the logits, or in the
    gradient of the input embeddings. Losses are not looked at: they, and the auxiliary loss of a
    mixture of experts, are over the batch by design. Where routing or normalisation reaches over
    the batch by design, that is a leak.

    Of N documents it takes 2 + 2·ceil(log2 N) forwards, each with a backward if gradients are
    tested, and memory for a copy of all layers' outputs. A leak takes some more.

    Afterwards modes, buffers and random generators are as before; no parameter gets a gradient.

    Args:
        model: any model of transformers with one stack of layers (decoders, encoders, hybrids), or
            a wrapper of one. A compiled graph hides its layers: only outputs are tested there.
        batch: keyword arguments of its forward, with integer `input_ids` `[B, S]`; passed on as
            they are, but for the tokens, labels, and a cache (copied). Moved to the model's device.
            The documents are found by the contract of `patch_model`, or in `seq_idx` `[B, S]`;
            padding is none. A `PackedBatch` is passed as input_ids and position_ids.
        gradients: test them; None: if the model can. The forwards then run with gradients on.
        documents: how many (chosen by `seed`), or which, to replace: all others are watched. None:
            all, in 2·ceil(log2 N) forwards.
        layout: the documents over all B·S tokens, if the batch does not contain the boundaries (a
            4D mask).
        seed: of the other tokens, the sample, and the loss that is differentiated.

    Returns:
        What was tested.

    Raises:
        IsolationError: naming layer, module, its kind, the documents, and the direction.
        NotImplementedError: `gradients=True`, and the model gives none.
        ValueError: fewer than two documents; no outputs by token; outputs or gradients that are not
            finite; outputs that do not change with the tokens, or that differ between two runs of
            the same batch.

    >>> from flexvarlen.verify.batch import PackedBatch
    >>> from flexvarlen.verify.models import build_model
    >>> import flexvarlen as fv
    >>> model = fv.patch_model(build_model("llama")[0].eval(), "sdpa")
    >>> report = verify_isolation(model, PackedBatch(torch.arange(12)[None], (5, 7)))
    >>> print(report.sentence())
    No bit of 2 documents reached another in 2 layers and the outputs (4 forwards, eval mode); \
gradients kept their bits too.
    """
    run = IsolationRun(model, batch, layout=layout, seed=seed)
    if len(run.spans) < 2:
        raise ValueError(
            f"batch must hold at least two documents, got {len(run.spans)}; pack several, and mark "
            "where they start (position_ids, packed_layout, ...) or pass layout=."
        )
    sample = sample_of(documents, len(run.spans), seed)
    with run.as_before():
        return _Search(run, sample, gradients).report()


class _Search:
    """The runs of one `verify_isolation`."""

    def __init__(self, run: IsolationRun, sample: list[int], gradients: bool | None) -> None:
        self.run, self.sample = run, sample
        self.layers = layers_of(run.inner)
        self.why_no_gradients: str | None = None
        self.before, self.before_trace = self._first_run(gradients)
        self.repeats = self._check_first_run()

    def report(self) -> IsolationReport:
        """Replace documents by halves.

        Raises:
            IsolationError: a leak; one in the forward, if there is any.
        """
        run, backward = self.run, None
        for replaced, watched in halves_of(self.sample, len(run.spans)):
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
            documents=tuple(self.sample),
            num_docs=len(run.spans),
            forwards=run.forwards,
            layers=len(self.before_trace.completed),
            gradients=None if not run.gradients else "bits" if self.repeats else "zeros",
            why_no_gradients=self.why_no_gradients,
            training=run.model.training,
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
                        f"gradients must be such as the model gives, but {reason}; pass "
                        "gradients=False."
                    ) from reason
                raise
            self.why_no_gradients = str(reason).rstrip(".")
        run.gradients = False
        trace = self._trace()
        return run([], None, trace), trace

    def _check_first_run(self) -> bool:
        """Whether the gradients of two runs have the same bits; outputs must."""
        run, before = self.run, self.before
        for what, found in (("outputs", before.outputs), ("gradients", before.gradient)):
            for document, span in enumerate(run.spans if found is not None else ()):
                if found is not None and not bool(found[slice(*span)].isfinite().all()):
                    raise ValueError(
                        f"the model's {what} must be finite, got others for document {document}, "
                        "in which a leak would not show; check weights and dtype."
                    )
        trace = self._trace(against=self.before_trace)
        again = run([], None, trace)
        change = self._first_change(trace, again, range(len(run.spans)))
        if change is not None:
            where = f"layer {change[0]}" if change[0] is not None else "the outputs"
            raise ValueError(
                "the model must give the same bits for the same batch and random state, got others "
                f"in {where}; turn off what adds in any order (atomics), or "
                "torch.use_deterministic_algorithms(True)."
            )
        return before.gradient is not None and not self._rows_changed(again).any()

    def _check_effect(self, after: RunResult, replaced: Sequence[int]) -> None:
        changed = changed_tokens(self.before.outputs, after.outputs)
        if not any(bool(changed[slice(*self.run.spans[d])].any()) for d in replaced):
            raise ValueError(
                f"the outputs of documents {list(replaced)[:8]} must change with their tokens, got "
                "the same bits; pass a batch whose input_ids the model reads."
            )

    # ---- what changed ----

    def _trace(self, against: Trace | None = None) -> Trace:
        return Trace(self.layers, self.run.batch, self.run.row_tokens, against=against)

    def _first_change(
        self, trace: Trace, after: RunResult, watched: Sequence[int]
    ) -> tuple[int | None, int] | None:
        """The first layer (None: only the outputs), and the first document, that changed."""
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
        return layer, next(d for d in watched if bool(flag[slice(*self.run.spans[d])].any()))

    def _backward_change(
        self, after: RunResult, replaced: Sequence[int], watched: Sequence[int]
    ) -> tuple[str, list[int], int] | None:
        """How gradients leak ("zeros", "bits"), from which documents, into which."""
        if after.gradient is None:
            return None
        not_zero = (after.gradient != 0).any(-1)
        for target in replaced:
            if bool(not_zero[slice(*self.run.spans[target])].any()):
                return "zeros", list(watched), target
        changed = self._rows_changed(after)
        for target in watched if self.repeats else ():
            if bool(changed[slice(*self.run.spans[target])].any()):
                return "bits", list(replaced), target
        return None

    def _rows_changed(self, after: RunResult) -> Tensor:
        assert self.before.gradient is not None
        assert after.gradient is not None
        return changed_tokens(self.before.gradient, after.gradient)

    def _tokens(self, documents: Sequence[int]) -> Tensor:
        """bool `[T]`: those of some documents."""
        flags = torch.zeros(self.run.ids.numel(), dtype=torch.bool, device="cpu")
        for document in documents:
            flags[slice(*self.run.spans[document])] = True
        return flags.to(self.run.device)

    # ---- who it was ----

    def _forward_error(self, replaced: list[int], found: tuple[int | None, int]) -> IsolationError:
        layer, target = found

        def leak(sources: list[int]) -> tuple[int | None, int] | None:
            trace = self._trace(against=self.before_trace)
            # The same losses each time, though they do not matter here.
            return self._first_change(trace, self.run(sources, [target], trace), [target])

        source = one_of(replaced, lambda sources: leak(sources) is not None)
        alone = leak([source])
        if alone is not None:
            layer = alone[0]
        calls = self.before_trace.completed
        name = None if layer is None else calls[layer].name
        return Blame(self.run, list(self.layers), source, target).forward(layer, name)

    def _backward_error(self, how: str, sources: list[int], target: int) -> IsolationError:
        rows = slice(*self.run.spans[target])

        def crosses(some: list[int]) -> bool:
            gradient = self.run([], some).gradient
            return gradient is not None and bool((gradient[rows] != 0).any())

        def changes(some: list[int]) -> bool:
            old, new = self.run([], [target]).gradient, self.run(some, [target]).gradient
            assert old is not None
            assert new is not None
            return bool(changed_tokens(old[rows], new[rows]).any())

        if how == "bits":  # of the first run, where all documents had a loss
            others = [d for d in range(len(self.run.spans)) if d != target]
            if crosses(others):
                how, sources = "zeros", others
        source = one_of(sources, crosses if how == "zeros" else changes)
        calls = [call.name for call in self.before_trace.completed]
        blame = Blame(self.run, list(self.layers), source, target)
        return blame.backward(calls, by_loss=how == "zeros")


def one_of(documents: list[int], leak: Callable[[list[int]], bool]) -> int:
    """One document that leaks, of several that leak together."""
    while len(documents) > 1:
        middle = len(documents) // 2
        documents = documents[:middle] if leak(documents[:middle]) else documents[middle:]
    return documents[0]
