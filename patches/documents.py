"""The documents of a forward, found in the arguments that a transformers model is called with.

Order: an explicit `packed_layout`; else `cu_seq_lens_q`; else the union of restarts in
`position_ids` and changes of value in a 2D `attention_mask`, so that a mask of ones changes
nothing; else one document a row.

Shapes: B rows of S tokens, packed one after another: T = B·S.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from flexvarlen.backends import get_backend
from flexvarlen.boundaries import default_capacity, document_starts
from flexvarlen.bounds import MaskSpec
from flexvarlen.layout import PackedLayout
from flexvarlen.mask import DocumentMask

EXPLICIT = ("packed_layout", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The keywords of a forward that give its documents outright."""


@dataclass
class PackedForward:
    """What every layer of one forward shares.

    The documents, and what the kernel derived from them, by mask.
    """

    layout: PackedLayout
    backend: str
    plans: dict[MaskSpec, Any] = field(default_factory=dict)
    several_a_row: bool = False  # documents, as the host knows, of a forward that may fill a cache
    one_a_row: Tensor | None = None  # bool 0-dim, the same as a graph knows it

    def plan(self, mask: MaskSpec) -> Any:
        """The backend's plan for the mask: made before the first layer, or where it is first asked.

        What is made inside a compiled graph is not kept: it lives in that graph.
        """
        if mask in self.plans:
            return self.plans[mask]
        plan = make_plan(self.backend, self.layout, mask)
        if not torch.compiler.is_compiling():
            self.plans[mask] = plan
        return plan


def make_plan(backend: str, layout: PackedLayout, spec: MaskSpec) -> Any:
    """The backend's plan for self-attention inside these documents. No sync; traces."""
    window = (spec.left, spec.right)
    mask = DocumentMask.of(layout, causal=spec.causal, window=window, chunk=spec.chunk or None)
    return get_backend(backend).plan(mask)


class Unpacked(Enum):
    """What a patched model hands its layers in place of a `PackedForward` where it packs nothing.

    Its rows were found to hold one document each, also by what no layer sees.
    """

    CHECKED = "checked"


def find_layout(
    batch: int,
    row_tokens: int,
    device: torch.device,
    *,
    packed_layout: PackedLayout | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
) -> PackedLayout:
    """The layout of a forward's T = B·S tokens.

    Args:
        batch, row_tokens, device: B, S and where the tokens are.
        packed_layout: the documents of all T tokens.
        cu_seq_lens_q, cu_seq_lens_k: int32 `[num_docs + 1]`, cumulative over all T tokens; equal.
        max_length_q, max_length_k: tokens of the longest document, if the caller gave it; checked
            eagerly.
        position_ids: integer `[B, S]` or `[1, S]`.
        attention_mask: `[B, S]`, 0 at padding; other values may number documents.
        capacity, max_seqlen_bound: as in `PackedLayout.from_lengths`; default: those of
            `packed_layout`, more slots if a mask beside it makes more documents.

    Raises:
        ValueError: boundaries that break the contract, or contradict one another.

    Eagerly at most one read of the device; inside a compiled graph none, and the boundaries are
    asserted on the device.
    """
    total = batch * row_tokens
    sizes: dict[str, Any] = {"capacity": capacity, "max_seqlen_bound": max_seqlen_bound}
    if attention_mask is not None and attention_mask.shape != (batch, row_tokens):
        raise ValueError(
            f"attention_mask must have shape {(batch, row_tokens)}, as the tokens, got "
            f"{tuple(attention_mask.shape)}; give one value a token."
        )
    if packed_layout is not None:
        if packed_layout.total_tokens != total or packed_layout.device != device:
            raise ValueError(
                f"packed_layout must cover the batch's {total} tokens on {device}, got "
                f"{packed_layout.total_tokens} on {packed_layout.device}; pass total_tokens= and "
                "device= when you make it."
            )
        explicit = packed_layout
    elif cu_seq_lens_q is not None:
        _check_cu_seq_lens(cu_seq_lens_q, cu_seq_lens_k, device)
        explicit = PackedLayout.from_cu_seqlens(cu_seq_lens_q, total_tokens=total, **sizes)
        for longest in (max_length_q, max_length_k):
            if (
                longest is not None
                and explicit.max_seqlen is not None
                and longest < explicit.max_seqlen
            ):
                raise ValueError(
                    "max_length_q and max_length_k must be at least the longest document, "
                    f"{explicit.max_seqlen} tokens, got {longest}; pass the largest difference of "
                    "cu_seq_lens_q."
                )
    elif position_ids is None and attention_mask is None:
        return PackedLayout.from_lengths([row_tokens] * batch, device=device, **sizes)
    else:
        starts = document_starts(
            batch,
            row_tokens,
            device,
            position_ids_BT=position_ids,
            attention_mask_BT=attention_mask,
        )
        padding = None
        if attention_mask is not None:
            padding = (attention_mask == 0).reshape(-1)
            starts = _cut_padding(starts, padding, max_seqlen_bound)
        return PackedLayout.from_starts(starts, padding_T=padding, **sizes)
    if batch > 1:
        _check_row_starts(explicit, batch, row_tokens)
    if attention_mask is None:
        return explicit
    starts = document_starts(
        batch, row_tokens, device, cu_seqlens=explicit.cu_seqlens, attention_mask_BT=attention_mask
    )
    padding = (attention_mask == 0).reshape(-1) | ~explicit.real_tokens()
    bound = explicit.max_seqlen_bound if max_seqlen_bound is None else max_seqlen_bound
    starts = _cut_padding(starts, padding, bound)
    slots = capacity
    if capacity is None and torch.compiler.is_compiling():  # room for the runs of padding
        slots = max(explicit.capacity + -(-total // bound), default_capacity(total))
    layout = PackedLayout.from_starts(
        starts, padding_T=padding, capacity=slots, max_seqlen_bound=bound
    )
    if slots is not None or layout.lengths is None or len(layout.lengths) > explicit.capacity:
        return layout
    sized = PackedLayout.from_lengths(
        layout.lengths, device=device, capacity=explicit.capacity, max_seqlen_bound=bound
    )
    sized.padding, sized.has_padding = layout.padding, layout.has_padding
    return sized


def _cut_padding(starts: Tensor, padding: Tensor, bound: int | None) -> Tensor:
    """Starts at which no run of padding is longer than documents may be: it takes slots too."""
    if bound is None:
        return starts
    return starts | (padding & (torch.arange(len(starts), device=starts.device) % bound == 0))


def _check_cu_seq_lens(
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None, device: torch.device
) -> None:
    if cu_seq_lens_q.device != device:
        raise ValueError(
            f"cu_seq_lens_q must be on the tokens' device {device}, got {cu_seq_lens_q.device}; "
            "move it."
        )
    if cu_seq_lens_k is None or cu_seq_lens_k is cu_seq_lens_q:
        return
    message = (
        "cu_seq_lens_k must equal cu_seq_lens_q in self-attention; pass the same tensor for both."
    )
    if cu_seq_lens_k.shape != cu_seq_lens_q.shape:
        raise ValueError(message)
    check((cu_seq_lens_k == cu_seq_lens_q).all(), message)


def _check_row_starts(layout: PackedLayout, batch: int, row_tokens: int) -> None:
    boundaries = layout.cu_seqlens if layout.cu_seqlens_host is None else layout.cu_seqlens_host
    rows = torch.arange(1, batch, device=boundaries.device, dtype=torch.int32) * row_tokens
    inside_padding = rows >= boundaries[-1]
    check(
        (torch.isin(rows, boundaries) | inside_padding).all(),
        f"a document must not cross the border of two rows of {row_tokens} tokens; put a boundary "
        "at each row's start.",
    )


def check(holds: Tensor, message: str) -> None:
    """Raise eagerly; assert on the device inside a compiled graph."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds, f"flexvarlen: {message}")
    elif not bool(holds):
        raise ValueError(message)


def check_one_document(
    row_tokens: int,
    *,
    position_ids: Tensor | None,
    attention_mask: Any,
    with_what: str,
    seen: int | Tensor | None = None,
) -> None:
    """Refuse rows of several documents in a forward that makes no document mask.

    Args:
        row_tokens: S, the new tokens of a row.
        position_ids: integer `[B, S]` or `[1, S]`.
        attention_mask: as transformers lays it out: `[B, keys]`, one column for each token of the
            cache, then for each new one, then perhaps for the room left; or a bool `[B, H, S,
            keys]`, where nobody sees padding; or a dict of such by kind of layer. Anything else is
            taken to hide no token.
        with_what: what makes the forward so, for the sentence.
        seen: tokens that the cache holds; None if only a 4D mask tells.

    Raises:
        ValueError: positions that do not go on by 1 between two tokens that are no padding,
            padding between two such tokens, or a mask that numbers documents. Inside a compiled
            graph the device asserts it.

    Reads the device once, if there is anything to look at.
    """
    mask = attention_mask
    if isinstance(mask, dict):
        mask = next((x for x in mask.values() if isinstance(x, Tensor)), None)
    if not isinstance(mask, Tensor):
        mask = None
    wrong = []
    if mask is not None and mask.ndim == 2 and mask.dtype != torch.bool:
        wrong.append(((mask != 0) & (mask != mask.amax(dim=-1, keepdim=True))).any())
    real = None if mask is None or row_tokens == 1 else _real_tokens(mask, row_tokens, seen)
    if real is not None:
        runs = real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(dim=-1)
        wrong.append((runs > 1).any())
    if position_ids is not None and row_tokens > 1:
        jumps = position_ids.diff(dim=-1) != 1
        if real is not None:
            jumps = jumps & real[:, 1:] & real[:, :-1]
        wrong.append(jumps.any())
    if wrong:
        check(
            ~torch.stack(wrong).any(),
            f"a packed batch must not come with {with_what}, got position_ids that do not go on by "
            "1 in a row, or an attention_mask that numbers documents or has padding between "
            "tokens; pass an empty cache or use_cache=False, and no 4D attention_mask.",
        )


def _real_tokens(mask: Tensor, row_tokens: int, seen: int | Tensor | None) -> Tensor | None:
    """bool `[B, S]`: False at padding among the new tokens; None if the mask does not tell."""
    tokens = torch.arange(row_tokens, device=mask.device)
    if mask.ndim == 2:
        # a mask that ends before the new tokens hides them: transformers fills it up with zeros
        filled_up = torch.nn.functional.pad(mask != 0, (0, 1))
        columns = tokens if seen is None else tokens + seen
        return filled_up.index_select(1, columns.clamp(max=mask.shape[1]))
    most = mask.shape[-1] - row_tokens  # first column of the new tokens, if no room is left
    if mask.ndim != 4 or mask.dtype != torch.bool or most < 0:
        return None
    sees_BSK = mask.any(dim=1)
    seen_BK = sees_BSK.any(dim=1)
    if seen is not None:
        first = seen.clamp(max=most) if isinstance(seen, Tensor) else min(seen, most)
        return seen_BK.index_select(1, tokens + first)
    # Under a causal mask no token sees past its own column, and one that is no padding sees that.
    last = mask.shape[-1] - 1 - sees_BSK.flip(-1).to(torch.uint8).argmax(dim=-1)
    last = torch.where(sees_BSK.any(dim=-1), last, -1)
    first = (last - torch.arange(last.shape[1], device=mask.device)).amax().clamp(0, most)
    real = seen_BK.index_select(1, tokens + first)
    if last.shape[1] < row_tokens:
        return real
    # Padding never sees further than the tokens before it; if it does, the mask is another kind.
    further = last[:, 1:] > last.cummax(dim=-1).values[:, :-1]
    return real | torch.nn.functional.pad(further, (1, 0))


def first_tokens(layout: PackedLayout) -> Tensor:
    """bool `[T]`: True at each document's first token and at all padding.

    Labels there must not be learned.
    """
    flags = torch.zeros(layout.total_tokens + 1, dtype=torch.bool, device=layout.device)
    return flags.index_fill(0, layout.cu_seqlens.long(), True)[:-1] | ~layout.real_tokens()
