"""Does a bit of one document reach another? By replacing documents, and looking at all the others.

To test every ordered pair of N documents, 2·ceil(log2 N) forwards are enough: for each binary digit
of a document's number, the documents with that digit 1 are replaced while those with 0 are watched,
and the other way round. Any two documents differ in some digit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flexvarlen.equivalence.batch import PackedBatch, layout_of, real_documents
from flexvarlen.equivalence.variants import Variant, counted_labels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Span = tuple[int, int]


class IsolationError(RuntimeError):
    """Information of one document reached another.

    Attributes:
        layer: the first decoder layer whose output shows it, from 0.
        source, target: the documents, by their place in the batch, from 0.
    """

    def __init__(self, message: str, *, layer: int, source: int, target: int) -> None:
        super().__init__(message)
        self.layer, self.source, self.target = layer, source, target


def halves(num_docs: int) -> list[tuple[list[int], list[int]]]:
    """Pairs (replaced, watched) of documents, such that each ordered pair is separated somewhere.

    >>> halves(3)
    [([1], [0, 2]), ([0, 2], [1]), ([2], [0, 1]), ([0, 1], [2])]
    """
    pairs = []
    for digit in range(max(num_docs - 1, 0).bit_length()):
        ones = [document for document in range(num_docs) if document >> digit & 1]
        zeros = [document for document in range(num_docs) if not document >> digit & 1]
        pairs += [(ones, zeros), (zeros, ones)]
    return pairs


def with_other_tokens(
    ids_T: Tensor, spans: list[Span], replaced: list[int], vocabulary: int, seed: int
) -> Tensor:
    """A copy of the tokens in which each token of the replaced documents is another one."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, vocabulary, ids_T.shape, generator=generator).to(ids_T.device)
    other = (ids_T + steps) % vocabulary
    changed = ids_T.clone()
    for document in replaced:
        start, end = spans[document]
        changed[start:end] = other[start:end]
    return changed


# ---- a variant of a comparison ----


@dataclass(frozen=True)
class Leak:
    """The documents that others' tokens reached.

    Attributes:
        outputs: whose logits changed, in any bit.
        gradients: whose token gradients changed in any bit, or were not zero where only other
            documents had a loss; None if the variant has no backward.
        backward_repeats: whether two backwards of the same batch gave the same bits. Where not
            (atomic additions), token gradients are only tested for being zero.
    """

    outputs: frozenset[int]
    gradients: frozenset[int] | None
    backward_repeats: bool | None

    @property
    def documents(self) -> frozenset[int]:
        """All of them."""
        return self.outputs | (self.gradients or frozenset())


def find_leak(
    variant: Variant, batch: PackedBatch, seed: int, progress: Callable[[], None] | None = None
) -> Leak:
    """Replace documents by halves; see whose logits, and whose token gradients, change.

    While documents are replaced, only the watched ones have a loss, divided by the same count as
    before. So the gradient of a watched token must keep its bits, and that of a replaced one be
    exactly zero, whatever the order of additions.
    """
    spans = batch.spans()
    vocabulary = variant.model.config.vocab_size
    counted = counted_labels(batch.labels())
    before = variant.step(batch, batch.labels(), counted, gradients=True)
    repeats = None
    if variant.train:
        again = variant.step(batch, batch.labels(), counted, gradients=True)
        repeats = _same_bits(before.embedding_gradients, again.embedding_gradients)
        del again
    outputs: set[int] = set()
    gradients: set[int] = set()
    for index, (replaced, watched) in enumerate(halves(len(spans))):
        ids = with_other_tokens(batch.input_ids[0], spans, replaced, vocabulary, seed + index)
        other = PackedBatch(ids[None], batch.lengths, batch.source)
        after = variant.step(other, other.labels(watched), counted, gradients=True)
        for document in watched:
            rows = slice(*spans[document])
            if not _same_bits(before.logits[rows], after.logits[rows]):
                outputs.add(document)
            if repeats and not _same_bits(
                before.embedding_gradients, after.embedding_gradients, rows
            ):
                gradients.add(document)
        if after.embedding_gradients is not None:
            gradients |= {
                document
                for document in replaced
                if not bool((after.embedding_gradients[slice(*spans[document])] == 0).all())
            }
        if progress is not None:
            progress()
    return Leak(frozenset(outputs), frozenset(gradients) if variant.train else None, repeats)


def _same_bits(first: Tensor | None, second: Tensor | None, rows: slice | None = None) -> bool:
    assert first is not None
    assert second is not None
    if rows is not None:
        first, second = first[rows], second[rows]
    # Zeros may differ in sign: x * 0 has x's. NaN is equal to itself only as bits.
    return torch.equal(first, second) or torch.equal(
        first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)
    )


# ---- any model, any batch ----


def verify_isolation(
    model: PreTrainedModel, batch: PackedBatch | Mapping[str, Any], *, seed: int = 0
) -> None:
    """Raise if the model, called with this batch, lets a document see another.

    Runs the model as it is (patched or not, train or eval) without gradients. One output bit of any
    decoder layer that changes as another document's tokens change is a leak. Where a model's
    routing or normalisation reaches over the batch by design, that is one too.

    Args:
        model: a transformers model with decoder layers.
        batch: keyword arguments of its forward, with `input_ids` `[B, S]`; passed on as they are,
            but for the tokens. The documents are found by the contract of `patch_model`, padding
            left out. A `PackedBatch` is passed as input_ids and position_ids.
        seed: of the other tokens.

    Raises:
        IsolationError: naming the first layer, and the documents.
        ValueError: no decoder layers, or no boundaries to be found.

    >>> from flexvarlen.equivalence.models import build_model
    >>> import flexvarlen as fv
    >>> model = fv.patch_model(build_model("llama")[0], "sdpa")
    >>> verify_isolation(model, PackedBatch(torch.arange(12)[None], (5, 7)))
    """
    layers = [module for module in model.modules() if hasattr(module, "self_attn")]
    if not layers:
        raise ValueError(
            "model must have decoder layers with a self_attn, got "
            f"{type(model).__name__}; pass a Llama, Qwen2 or Qwen3 model."
        )
    inputs = dict(batch.inputs() if isinstance(batch, PackedBatch) else batch)
    device = model.device
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    probe = _Probe(model, layers, inputs, real_documents(layout_of(inputs)), seed)
    before = probe.states([])
    for replaced, watched in halves(len(probe.spans)):
        found = probe.first_change(before, probe.states(replaced), watched)
        if found is None:
            continue
        layer, target = found
        for source in replaced:  # which of them it was
            alone = probe.first_change(before, probe.states([source]), [target])
            if alone is not None:
                raise probe.error(alone[0], source, target)
        raise probe.error(layer, replaced[0], target)


class _Probe:
    """The states after each decoder layer, for one batch with some documents replaced."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: list[nn.Module],
        inputs: dict[str, Any],
        spans: list[Span],
        seed: int,
    ) -> None:
        self.model, self.layers, self.inputs = model, layers, inputs
        self.spans, self.seed = spans, seed

    def states(self, replaced: list[int]) -> list[Tensor]:
        """`[B·S, hidden]` after each layer."""
        ids = self.inputs["input_ids"]
        changed = with_other_tokens(
            ids.reshape(-1), self.spans, replaced, self.model.config.vocab_size, self.seed
        )
        states: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            states.append(hidden.reshape(-1, hidden.shape[-1]).clone())

        handles = [layer.register_forward_hook(keep) for layer in self.layers]
        try:
            with torch.no_grad():
                self.model(**{**self.inputs, "input_ids": changed.view(ids.shape)})
        finally:
            for handle in handles:
                handle.remove()
        return states

    def first_change(
        self, before: list[Tensor], after: list[Tensor], watched: list[int]
    ) -> tuple[int, int] | None:
        """The first layer, and the first of the watched documents, that changed there."""
        for layer, (old, new) in enumerate(zip(before, after, strict=True)):
            for document in watched:
                rows = slice(*self.spans[document])
                if not _same_bits(old[rows], new[rows]):
                    return layer, document
        return None

    def error(self, layer: int, source: int, target: int) -> IsolationError:
        """The sentence."""
        name = type(self.layers[layer]).__name__

        def tokens(document: int) -> str:
            start, end = self.spans[document]
            return f"document {document} (tokens {start} to {end - 1})"

        return IsolationError(
            f"{tokens(source)} leaks into {tokens(target)}, first seen in the output of layer "
            f"{layer} ({name}): with other tokens in document {source}, document {target} changes; "
            "call flexvarlen.patch_model(model), or hand over the boundaries in a form its "
            "docstring names.",
            layer=layer,
            source=source,
            target=target,
        )
