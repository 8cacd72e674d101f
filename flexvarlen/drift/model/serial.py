"""Operations of a packed row done document by document, in the shapes of a document alone.

Each is a context manager that puts everything back, also after an exception.

Shape legend: T = tokens of the row, L = of one document, H = num_heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from flexvarlen.attention.backends import registry as backends
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.attention.call import AttentionCall, Backend
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.document_mask import DocumentMask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLASSES = ("attention", "matmuls", "norms")
"""The operations whose bits may depend on what else is in the row; all others are elementwise."""


@contextmanager
def serial(
    model: PreTrainedModel, backend: str, lengths: Sequence[int], classes: Iterable[str]
) -> Iterator[None]:
    """Some classes of a patched model's operations document by document, eagerly.

    Args:
        model: patched with `backend`; one packed row of such documents is all it may be called on.
        backend: its name.
        lengths: tokens of each document; no padding.
        classes: of `CLASSES`.

    Raises:
        NotImplementedError: the model has operations of none of the classes (experts).
    """
    check_covered(model)
    wanted = set(classes)
    with ExitStack() as stack:
        if "attention" in wanted:
            stack.enter_context(serial_attention(backend))
        for name, modules in (("matmuls", matmuls_of(model)), ("norms", norms_of(model))):
            if name in wanted:
                forwards = [(m, _by_document(m.forward, lengths)) for m in modules]
                stack.enter_context(own_forwards(forwards))
        yield


# ---- modules ----


def matmuls_of(model: nn.Module) -> list[nn.Module]:
    """Every linear layer, the head included."""
    return [m for m in model.modules() if isinstance(m, nn.Linear) or _is(m, "Conv1D")]


def norms_of(model: nn.Module) -> list[nn.Module]:
    """Every RMSNorm and LayerNorm, those of queries and keys included."""
    return [m for m in model.modules() if type(m).__name__.endswith("Norm")]


def embeddings_of(model: nn.Module) -> list[nn.Module]:
    """Every embedding: its gradient sums over tokens."""
    return [m for m in model.modules() if isinstance(m, nn.Embedding)]


def _is(module: nn.Module, name: str) -> bool:
    return type(module).__name__ == name


def check_covered(model: nn.Module) -> None:
    """Refuse a model with parameters outside linear layers, norms, embeddings and attention.

    Raises:
        NotImplementedError: it has some (experts, convolutions).
    """
    from flexvarlen.patches.models.layers import attention_layers

    known = {id(m) for m in (*matmuls_of(model), *norms_of(model), *embeddings_of(model))}
    known |= {id(m) for m in attention_layers(model)}
    for name, module in model.named_modules():
        if id(module) not in known and next(module.parameters(recurse=False), None) is not None:
            raise NotImplementedError(
                "attribution needs a model whose parameters are all in linear layers, norms and "
                f"embeddings, got {type(module).__name__} ({name}); use a dense model."
            )


Forward = Callable[..., Any]


@contextmanager
def own_forwards(forwards: Sequence[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Modules with other forwards for the length of a block."""
    before = [(module, module.__dict__.get("forward")) for module, _ in forwards]
    try:
        for module, forward in forwards:
            module.forward = forward
        yield
    finally:
        for module, had in before:
            if had is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = had


def token_dim(x: Tensor, tokens: int) -> int:
    """Which dimension of what a module gets is that of the row's tokens.

    Raises:
        NotImplementedError: none is (experts get some of the tokens).
    """
    if x.ndim >= 2 and x.shape[0] == 1 and x.shape[1] == tokens:
        return 1
    if x.shape[0] == tokens:
        return 0
    raise NotImplementedError(
        f"attribution needs modules that get all {tokens} tokens of the row, got a tensor of shape "
        f"{tuple(x.shape)}; use a dense model and one packed row."
    )


def _by_document(forward: Forward, lengths: Sequence[int]) -> Forward:
    def by_document(x: Tensor) -> Tensor:
        dim = token_dim(x, sum(lengths))
        # copied: a kernel may look at where in memory its input begins
        return torch.cat([forward(part.clone()) for part in x.split(list(lengths), dim)], dim)

    return by_document


# ---- attention ----


class Part(NamedTuple):
    """One document of a serial plan: its rows, its own mask and the backend's own plan."""

    rows: slice
    mask: DocumentMask
    plan: Any


class SerialBackend:
    """A backend that calls another for each document, with a layout of that document alone.

    Args:
        wrapped: what it calls.
    """

    def __init__(self, wrapped: Backend) -> None:
        self.name, self.wrapped = wrapped.name, wrapped

    def why_not(self, call: AttentionCall) -> str | None:
        """What the other says."""
        return self.wrapped.why_not(call)

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> list[Part]:
        """A plan a document. Needs documents that the host knows, without padding."""
        layout, spec = mask.layout, mask.spec
        lengths = layout.lengths
        if lengths is None or sum(lengths) != layout.total_tokens or layout.padding is not None:
            raise ValueError(
                "layout must be of documents that the host knows and that fill the row, got "
                f"{layout}; make it with PackedLayout.from_lengths()."
            )
        if spec.cross or spec.prefix:
            raise NotImplementedError(
                "attention by document has neither prefixes nor layout_k; leave them out."
            )
        parts, start = [], 0
        for length in lengths:
            if length:
                alone = PackedLayout.from_lengths(
                    [length], device=layout.device, capacity=1, max_seqlen_bound=length
                )
                own = DocumentMask(alone, spec)
                plan = self.wrapped.plan(own, batch_invariant=batch_invariant)
                parts.append(Part(slice(start, start + length), own, plan))
            start += length
        return parts

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        call: AttentionCall,
        mask: DocumentMask,
        plan: list[Part],
    ) -> tuple[Tensor, Tensor | None]:
        """One call a document."""
        found = [
            self.wrapped.attend(
                q_THD[part.rows].clone(),
                k_THD[part.rows].clone(),
                v_THD[part.rows].clone(),
                sinks_H,
                call,
                part.mask,
                part.plan,
            )
            for part in plan
        ]
        out_THD = torch.cat([out for out, _ in found])
        lse = [x for _, x in found if x is not None]
        return out_THD, torch.cat(lse, dim=1) if lse else None


@contextmanager
def serial_attention(backend: str) -> Iterator[None]:
    """All calls of a backend, by its name, document by document for the length of a block.

    In this whole process, so not beside other threads that attend.
    """
    wrapped = get_backend(backend)
    registry = backends._REGISTRY
    try:
        registry[backend] = SerialBackend(wrapped)
        yield
    finally:
        registry[backend] = wrapped
