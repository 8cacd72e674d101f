"""`DriftRun`: what one run of a model gives for a batch of documents, in whatever form.

The same documents run as one packed row, each alone, or as padded rows; what comes out is put in
one order, token after token of document after document, so that runs can be compared.

Shapes: T tokens of all documents; N documents; V = vocabulary; B rows of S tokens in one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flexvarlen.patches.api import patched
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.verify.drift.model.hidden_states import Recorder
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.variant import THEIRS, Sizes, Variant


class Piece(NamedTuple):
    """One call of the model, for documents that follow one another in the batch.

    Attributes:
        documents: the first, and the one past the last.
        inputs: the call's keyword arguments.
        tokens: int64, where in the flattened `[B * S]` the documents' tokens are; None if all are.
    """

    documents: tuple[int, int]
    inputs: dict[str, Any]
    tokens: Tensor | None = None


@dataclass(frozen=True)
class DriftRun:
    """What a model gave.

    Attributes:
        logits: `[T, V]`.
        hidden: `[T, hidden]` each: the embeddings, then what each block put out.
        loss: mean over the counted labels, from losses in fp32 (fp64 of an fp64 model).
        gradients: of every parameter, by name, of the loss; None for a forward alone. Of several
            calls they are summed in at least fp32, so that their rounding is the dtype's alone.
    """

    logits: Tensor
    hidden: tuple[Tensor, ...]
    loss: float
    gradients: dict[str, Tensor] | None = field(default=None, repr=False)


def run_packed(
    variant: Variant, batch: PackedBatch, *, call: Callable[..., Any] | None = None
) -> DriftRun:
    """All documents in one row.

    Args:
        variant: the model, and whether it trains.
        batch: the documents, on the model's device.
        call: the compiled model, if not the model itself is called.
    """
    inputs = {"input_ids": batch.input_ids, **variant.boundaries(batch)}
    return run_pieces(variant, batch, [Piece((0, len(batch.lengths)), inputs)], call=call)


def run_unpacked(variant: Variant, batch: PackedBatch) -> DriftRun:
    """Each document in a row of its own, one after another."""
    return run_pieces(variant, batch, _pieces_alone(variant, batch))


def run_padded(variant: Variant, batch: PackedBatch) -> DriftRun:
    """One document per row, padded at the right, with an attention_mask.

    Documents that follow one another share a call as long as it has at most T tokens.
    """
    pieces = (_padded_piece(batch, group) for group in padded_groups(batch.lengths))
    if variant.name.startswith(THEIRS):
        return run_pieces(variant, batch, pieces)
    # The sizes that the variant was patched with have no room for the runs of padding.
    with patched(variant.model, variant.name):
        return run_pieces(variant, batch, pieces)


def _pieces_alone(variant: Variant, batch: PackedBatch) -> Iterator[Piece]:
    for document, (start, end) in enumerate(batch.spans()):
        single = PackedBatch(batch.input_ids[:, start:end], (end - start,), batch.source)
        own = replace(variant, sizes=Sizes(capacity=1, max_seqlen_bound=single.total_tokens))
        inputs = {"input_ids": single.input_ids, **own.boundaries(single)}
        yield Piece((document, document + 1), inputs)


def padded_groups(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Which documents share a padded call: the first and the one past the last of each group.

    >>> padded_groups([4, 4, 2, 9, 1])
    [(0, 3), (3, 5)]
    """
    room, groups, first = sum(lengths), [], 0
    for document in range(1, len(lengths) + 1):
        ended = document == len(lengths)
        if ended or max(lengths[first : document + 1]) * (document + 1 - first) > room:
            groups.append((first, document))
            first = document
    return groups


def _padded_piece(batch: PackedBatch, documents: tuple[int, int]) -> Piece:
    device = batch.input_ids.device
    lengths = batch.lengths[slice(*documents)]
    offsets = torch.arange(max(lengths), device=device)
    real_BS = offsets < torch.tensor(lengths, device=device)[:, None]
    ids_BS = torch.zeros_like(real_BS, dtype=batch.input_ids.dtype)
    spans = batch.spans()
    ids_BS[real_BS] = batch.input_ids[0, spans[documents[0]][0] : spans[documents[1] - 1][1]]
    inputs = {"input_ids": ids_BS, "attention_mask": real_BS.long()}
    return Piece(documents, inputs, real_BS.flatten().nonzero()[:, 0])


def run_pieces(
    variant: Variant,
    batch: PackedBatch,
    pieces: Sequence[Piece] | Iterator[Piece],
    *,
    call: Callable[..., Any] | None = None,
) -> DriftRun:
    """Run the calls one after another, each with its backward if the variant trains.

    Args:
        variant: the model, and whether it trains.
        batch: the documents.
        pieces: together all documents, in order.
        call: what is called in place of the model.
    """
    model, spans, targets = variant.model, batch.spans(), targets_of(batch)
    called = model if call is None else call
    counted = max(1, int((targets != IGNORE_INDEX).sum()))
    gathered = _Gathered(batch.total_tokens)
    sums = _GradientSums(model)
    of_documents: list[float] = []
    model.zero_grad(set_to_none=True)
    with Recorder(model) as recorder, torch.set_grad_enabled(variant.train):
        for piece in pieces:
            start, end = spans[piece.documents[0]][0], spans[piece.documents[1] - 1][1]
            recorder.clear()
            logits = called(**piece.inputs).logits
            rows = _rows(logits, piece.tokens)
            lengths = batch.lengths[slice(*piece.documents)]
            losses = document_losses(rows, targets[start:end], lengths)
            of_documents += losses.tolist()
            if variant.train:
                (losses.sum() / counted).backward()
                sums.add()
            states = [_rows(x, piece.tokens) for x in recorder.states]
            gathered.put(start, end, rows.detach(), states)
            del logits, rows, losses, states
    recorder.clear()
    gradients = sums.taken() if variant.train else None
    # document by document, so that how they are batched does not decide how they are summed
    loss = math.fsum(of_documents) / counted
    return DriftRun(gathered.rows[0], tuple(gathered.rows[1:]), loss, gradients)


def targets_of(batch: PackedBatch) -> Tensor:
    """int64 `[T]`: what each token predicts; -100 at the last of each document."""
    labels = batch.labels()[0]
    return torch.cat([labels[1:], labels.new_full((1,), IGNORE_INDEX)])


def document_losses(logits_TV: Tensor, targets_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """`[N]`: the sum of each document's cross entropies, in at least fp32.

    Each document's logits are copied first, so that neither the shape nor the address of
    what the kernels get depends on the other documents.

    Args:
        logits_TV: logits of the documents' tokens.
        targets_T: int64, as `targets_of`.
        lengths: tokens of each document.
    """
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    sums = [
        cross_entropy(
            logits.to(wide, copy=True), targets, reduction="none", ignore_index=IGNORE_INDEX
        ).sum()
        for logits, targets in zip(
            logits_TV.split(list(lengths)), targets_T.split(list(lengths)), strict=True
        )
    ]
    return torch.stack(sums)


def _rows(x_BSN: Tensor, tokens: Tensor | None) -> Tensor:
    flat = x_BSN.reshape(-1, x_BSN.shape[-1])
    return flat if tokens is None else flat[tokens]


class _Gathered:
    """Rows of several tensors, `[T, ...]` each, put together of what the calls gave."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.rows: list[Tensor] = []

    def put(self, start: int, end: int, logits: Tensor, states: Sequence[Tensor]) -> None:
        """One call's rows: kept as they are if they are all, else copied to their offset."""
        given = [logits, *states]
        if end - start == self.tokens:
            self.rows = given
            return
        if not self.rows:
            self.rows = [x.new_empty(self.tokens, x.shape[-1]) for x in given]
        for rows, x in zip(self.rows, given, strict=True):
            rows[start:end] = x


class _GradientSums:
    """The parameters' gradients of several backwards, taken off the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.named = dict(model.named_parameters())
        self.sums: dict[str, Tensor] = {}
        self.calls = 0

    def add(self) -> None:
        """Take what the last backward left; from the second call on, sum in at least fp32."""
        self.calls += 1
        for name, parameter in self.named.items():
            found, parameter.grad = parameter.grad, None
            if found is None:
                continue
            if name not in self.sums:
                self.sums[name] = found
                continue
            total = self.sums[name]
            if self.calls > 1 and total.dtype.itemsize < 4:
                total = total.float()
            self.sums[name] = total.add_(found)

    def taken(self) -> dict[str, Tensor]:
        """By name, zeros where none came."""
        return {
            name: self.sums[name] if name in self.sums else torch.zeros_like(parameter)
            for name, parameter in self.named.items()
        }


@contextmanager
def compiled(model: nn.Module, backend: str) -> Iterator[Callable[..., Any]]:
    """The model under torch.compile, graph breaks allowed.

    Dynamo keeps compiled code by code object, which all models of a class share: a compiler object
    of its own serves nobody else's graphs, and none of theirs.

    Args:
        model: with all its hooks in place.
        backend: torch.compile's, e.g. "inductor" or "aot_eager".
    """
    from torch._dynamo.backends.registry import lookup_backend

    compiler: Callable[..., Any] = lookup_backend(backend)

    def own(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compiler(graph, inputs)

    with torch._dynamo.config.patch(recompile_limit=256):  # type: ignore[attr-defined]
        yield torch.compile(model, backend=own)
