"""Whether a document's outputs have the same bits at other offsets, beside other documents.

Shapes: T tokens of the row; n of its documents. A tree is one document here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.batch.given_documents import BOUNDARIES
from flexvarlen.patches.isolation.model_run import IsolationRun, RunResult
from flexvarlen.patches.isolation.report import SameBitsError
from flexvarlen.patches.isolation.tokens import Unit
from flexvarlen.patches.isolation.trace import changed_tokens
from flexvarlen.patches.state import ATTRIBUTE, Patch

_FOLLOW_THE_DOCUMENTS = (*BOUNDARIES, "position_ids", "attention_mask", "input_ids")


class Row(NamedTuple):
    """A rearrangement of the batch's documents.

    Attributes:
        name: what is different, in words.
        documents: their indices in the batch, in order; -1: other documents, which fill the row.
        fills: whether the row is as long as the batch's; else the patched model lengthens it.
    """

    name: str
    documents: tuple[int, ...]
    fills: bool = True


def rows_of(count: int) -> list[Row]:
    """The rows in which n documents are run: each document has other neighbours and offsets.

    >>> [row.documents for row in rows_of(3)]
    [(2, 1, 0), (1, 2, 0), (0, 2, -1), (-1, 1), (0,), (1,)]
    """
    every = tuple(range(count))
    rows = [
        Row("in reverse order", every[::-1]),
        Row("after the first one moved to the end", (*every[1:], 0)),
        Row("before other documents", (*every[::2], -1)),
        Row("after other documents", (-1, *every[1::2])),
    ]
    alone = [Row("alone, before padding", (document,), fills=False) for document in every[:2]]
    return [*rows, *alone]


class _Batch(NamedTuple):
    """A batch's documents, and the sizes that all its rows have."""

    run: IsolationRun
    documents: list[list[Unit]]
    capacity: int
    longest: int
    max_depth: int

    @classmethod
    def of(cls, run: IsolationRun) -> _Batch:
        documents: list[list[Unit]] = []
        for unit in run.units:
            if unit.depth == 0:
                documents.append([])
            documents[-1].append(unit)
        lengths = [_length(document) for document in documents]
        longest = max(lengths)
        tokens = run.ids.numel()
        spare = -(-tokens // longest)
        return cls(
            run,
            documents,
            round_up_to_power_of_two(len(run.units) + spare),
            longest,
            max(unit.depth for unit in run.units) + 1,
        )

    def inputs(self, row: Row, *, lengthens: bool) -> dict[str, object]:
        """The arguments of a forward on this row.

        Args:
            lengthens: whether the model lengthens rows by itself.
        """
        ids = self.run.ids.reshape(-1)
        known = [self.documents[i] for i in row.documents if i >= 0]
        free = len(ids) - sum(map(_length, known))
        other = (ids.flip(0) + 1) % self.run.vocabulary
        pieces, lengths, parents = [], [], []
        for index in row.documents:
            if index < 0:
                full, rest = divmod(free, self.longest)
                sizes = [*[self.longest] * full, *([rest] if rest else [])]
                pieces.append(other[:free])
                parents += [-1] * len(sizes)
                lengths += sizes
                continue
            path: list[int] = []
            for unit in self.documents[index]:
                del path[unit.depth :]
                parents.append(path[-1] if path else -1)
                path.append(len(lengths))
                pieces.append(ids[unit.tokens])
                lengths.append(unit.end - unit.start)
        total = len(ids) if row.fills or not lengthens else sum(lengths)
        joined = torch.cat(pieces)
        layout = PackedLayout.from_tree(
            lengths,
            parents,
            total_tokens=total,
            device=ids.device,
            capacity=self.capacity,
            max_seqlen_bound=self.longest,
            max_depth=self.max_depth,
        )
        padded = torch.nn.functional.pad(joined, (0, total - len(joined)))
        return {"input_ids": padded[None], "packed_layout": layout}


def patch_of(run: IsolationRun) -> Patch:
    """The patch of a model whose documents can be rearranged.

    Raises:
        ValueError: the model is not patched, or the batch holds more than text and boundaries.
    """
    patch: Patch | None = run.inner.__dict__.get(ATTRIBUTE)
    if patch is None:
        raise ValueError(
            "same_bits=True needs a patched model, as it passes packed_layout, got "
            f"{type(run.inner).__name__}; call patch_model first."
        )
    others = [
        name
        for name, x in run.inputs.items()
        if isinstance(x, Tensor) and name not in _FOLLOW_THE_DOCUMENTS
    ]
    if others:
        raise ValueError(
            "same_bits=True rearranges documents of text, got a batch that also has "
            f"{', '.join(others)}; remove them."
        )
    return patch


def compare_bits(run: IsolationRun, *, require_gradients: bool = False) -> str:
    """Run a batch's documents in other rows, and compare their outputs bit by bit.

    Args:
        run: of a patched model; with `gradients`, those of the inputs are compared too.
        require_gradients: raise if they differ.

    Returns:
        What kept its bits: "outputs", or "outputs and input gradients".

    Raises:
        SameBitsError: a document's outputs, or gradients that must not, have other bits.
        ValueError: as `patch_of`.
    """
    patch = patch_of(run)
    batch, keep = _Batch.of(run), run.gradients
    if len(batch.documents) == 1 and _length(batch.documents[0]) >= (
        patch.same_bits or run.ids.numel()
    ):
        raise ValueError(
            "same_bits=True needs at least two documents, or a row with room for others, got one "
            "that fills it; pass more documents."
        )
    inputs = {k: x for k, x in run.inputs.items() if k not in _FOLLOW_THE_DOCUMENTS}
    first = Row("as it is", tuple(range(len(batch.documents))))
    # The gradients of a row that the model lengthens are those of other embeddings.
    lengthens = patch.same_bits is not None and not run.gradients

    def of_row(row: Row) -> RunResult:
        other = IsolationRun(
            run.model,
            inputs | batch.inputs(row, lengthens=lengthens),
            layout=None,
            seed=run.seed,
        )
        other.gradients = run.gradients
        run.forwards += 1
        return other([])

    before = of_row(first)
    for row in rows_of(len(batch.documents)):
        after = of_row(row)
        for document, old, new in _pairs(batch, first, row):
            change = _difference(before.outputs[old], after.outputs[new])
            if change is not None:
                raise _error(run, patch, document, row, change)
            if before.gradient is None or after.gradient is None:
                continue
            change = _difference(before.gradient[old], after.gradient[new])
            if change is not None and require_gradients:
                raise _error(run, patch, document, row, change, "input gradients")
            keep &= change is None
    return "outputs and input gradients" if keep else "outputs"


def _pairs(batch: _Batch, first: Row, second: Row) -> Iterator[tuple[int, slice, slice]]:
    """Each document that both rows hold, and its tokens in the one and in the other."""
    before = dict(_places(batch, first))
    for document, tokens in _places(batch, second):
        yield document, before[document], tokens


def _places(batch: _Batch, row: Row) -> Iterator[tuple[int, slice]]:
    known = sum(_length(batch.documents[i]) for i in row.documents if i >= 0)
    start = 0
    for document in row.documents:
        if document < 0:
            start += batch.run.ids.numel() - known
            continue
        end = start + _length(batch.documents[document])
        yield document, slice(start, end)
        start = end


def _length(document: Sequence[Unit]) -> int:
    return document[-1].end - document[0].start


def _difference(old: Tensor, new: Tensor) -> float | None:
    """The largest absolute difference, if any bit differs."""
    if not bool(changed_tokens(old, new).any()):
        return None
    return float((old.double() - new.double()).abs().max())


def _error(
    run: IsolationRun,
    patch: Patch,
    document: int,
    row: Row,
    change: float,
    what: str = "outputs",
) -> SameBitsError:
    backend = patch.backend if isinstance(patch.backend, str) else dict(patch.backend)
    size = patch.same_bits or run.ids.numel()
    of_outputs = what == "outputs"
    advice = (
        "name another backend, another dtype or number of tokens, or remove same_bits"
        if of_outputs
        else "pass deterministic=True to patch_model, or no gradients=True, as outputs are equal"
    )
    return SameBitsError(
        f"document {document} must have {what} of the same bits in every row of {size} tokens, "
        f"got a difference of {change:.2g} {row.name} (backend {backend!r}, {run.inner.dtype}, "
        f"{run.device}); {advice}.",
        document=document,
        row=row.name,
        change=change,
        gradients=not of_outputs,
    )
