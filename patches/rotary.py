"""Rotary tables: of each document as if it were alone, and computed once a compiled forward.

`longrope` takes other frequencies for a row that is longer than the model was first trained on: the
longest document would choose them for all. Here each document gets its own. `dynamic` recomputes
them from the longest position seen so far, and is refused.

Inductor would fuse `cos` and `sin` into every layer's rotation, forward and backward: the same
trigonometry for each head, again and again. An operator it cannot see into keeps the tables. In
short rows, whose time is that of launches, reading them takes longer than computing them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.launch import SHORT_ROW
from flexvarlen.layout import PackedLayout
from flexvarlen.patches.documents import check


@torch.library.custom_op("flexvarlen::materialize", mutates_args=())
def materialize(x: Tensor) -> Tensor:
    """A copy of `x` that inductor keeps in memory instead of computing it at each use."""
    return x.clone()


@materialize.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def refuse_unpatched_longrope(config: Any) -> None:
    """Refuse longrope by a plugin name alone: the rotary tables are made before any layer asks.

    Raises:
        NotImplementedError: the frequencies would be those of the longest document for all.
    """
    if has_longrope(config):
        raise NotImplementedError(
            "rope_type 'longrope' takes its frequencies from the longest position in the batch; "
            "call flexvarlen.patch_model on the model, which gives each document its own."
        )


def refuse_dynamic_rope(config: Any) -> None:
    """Refuse rotary embeddings whose frequencies no document could have for itself.

    Raises:
        NotImplementedError: `dynamic`, or `longrope` by layer type.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    by_type = [x for x in parameters.values() if isinstance(x, dict)]
    types = [x.get("rope_type") for x in by_type or [parameters]]
    if "dynamic" in types or (by_type and "longrope" in types):
        raise NotImplementedError(
            f"rope_type must be one whose frequencies are the same for all documents, got "
            f"{'dynamic' if 'dynamic' in types else 'longrope by layer type'}, which takes them "
            "from the longest position in the batch; choose 'yarn', 'linear' or 'llama3' in "
            "config.rope_parameters."
        )


def has_longrope(config: Any) -> bool:
    """Whether frequencies depend on how long a document is."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters.get("rope_type") == "longrope"


def check_restarts(layout: PackedLayout, positions_BS: Tensor, row_tokens: int) -> None:
    """Refuse a document whose positions go on from those of the one before it, under longrope.

    Raises:
        ValueError: the rotary tables would take both for one. Inside a compiled graph the device
            asserts it.
    """
    positions_T = positions_BS.expand(layout.total_tokens // row_tokens, -1).reshape(-1)
    begin = layout.cu_seqlens[:-1].long()
    inside = (begin % row_tokens != 0) & (begin < layout.cu_seqlens[-1])
    begin = begin.clamp(1, max(layout.total_tokens - 1, 1))
    goes_on = positions_T[begin] == positions_T[begin - 1] + 1
    check(
        ~(goes_on & inside).any(),
        "position_ids must not go on from one document to the next under rope_type 'longrope', "
        "whose frequencies depend on how long a document is; let each begin at 0, or leave "
        "position_ids out.",
    )


def own_tables(base: nn.Module) -> None:
    """From now on compute what `base.rotary_emb` returns by document, once a compiled forward."""
    shared_tables(base)
    rotary = getattr(base, "rotary_emb", None)
    if rotary is None:
        return
    if getattr(rotary, "rope_type", None) == "longrope":
        # It keeps its long frequencies from the first call on: a graph would be made anew for them.
        device = rotary.inv_freq.device
        rotary(torch.zeros(1, device=device), torch.zeros(1, 1, dtype=torch.long, device=device))
        rotary.register_forward_hook(_by_document, with_kwargs=True)
    rotary.register_forward_hook(_materialize_outputs)


def shared_tables(base: nn.Module) -> None:
    """Undo `own_tables`."""
    rotary = getattr(base, "rotary_emb", None)
    if rotary is not None:
        for hooks in (rotary._forward_hooks, rotary._forward_hooks_with_kwargs):
            for key in [key for key, hook in hooks.items() if hook in _OURS]:
                del hooks[key]


def _by_document(
    rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> tuple[Tensor, ...]:
    """cos and sin `[B, S, head_dim]` of longrope, by how long the token's own document is.

    A document is a run of positions that go on by 1. Positions that stay below the length of the
    short frequencies make `rotary` take these; all other documents are long.
    """
    x = args[0] if args else kwargs["x"]
    positions_BS: Tensor = kwargs["position_ids"] if len(args) < 2 else args[1]
    parameters: dict[str, Any] = rotary.config.rope_parameters  # type: ignore[union-attr, assignment]
    short_length: int = parameters["original_max_position_embeddings"]
    begins_BS = torch.nn.functional.pad(positions_BS.diff(dim=1) != 1, (1, 0))
    run_BS = begins_BS.cumsum(1)
    last_BR = torch.zeros_like(positions_BS).scatter_reduce(1, run_BS, positions_BS, "amax")
    is_long_BS = last_BR.gather(1, run_BS) >= short_length
    short = rotary.forward(x, positions_BS.clamp(max=short_length - 1))
    return tuple(
        torch.where(is_long_BS[..., None], a, b) for a, b in zip(output, short, strict=True)
    )


def _materialize_outputs(rotary: nn.Module, args: Any, output: Any) -> Any:
    """`output`: cos and sin `[B, S, head_dim]`, or one table for both.

    A graph of any S guards whether B·S is short.
    """
    if not torch.compiler.is_compiling():
        return output
    table = output if isinstance(output, Tensor) else output[0]
    if table.shape[0] * table.shape[1] <= SHORT_ROW:
        return output
    return materialize(output) if output is table else tuple(map(materialize, output))


_OURS = (_by_document, _materialize_outputs)
