"""The steps of fla's scans that pass a state from chunk to chunk, over documents and trees.

A segment starts from the final state of its parent. So these steps are launched once for each level
of a tree, all segments of a level together; backward from the deepest level on, where the gradient
of a state is the sum over the segments that start from it, in their order. fla's other steps treat
each chunk alone, and run for all levels at once.

Shapes: T = total_tokens; M chunks; H, HV = heads of queries and keys, and of values; K, V = their
head_dim; q, k `[1, T, H, K]`, w `[1, T, HV, K]`, u, do, dv `[1, T, HV, V]`; states `[M, HV, K, V]`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexvarlen.recurrent.documents import CHUNK, RecurrentDocuments


class Boundaries(NamedTuple):
    """What operators take of `RecurrentDocuments`; the last two are None of plain documents."""

    cu_seqlens: Tensor
    chunk_indices: Tensor
    parents: Tensor | None
    levels: Tensor | None

    @classmethod
    def of(cls, documents: RecurrentDocuments) -> Boundaries:
        """Those of a row's documents."""
        branches = documents.branches
        of_trees = (None, None) if branches is None else (branches.parents, branches.levels)
        return cls(documents.cu_seqlens, documents.chunk_indices, *of_trees)

    def kwargs(self) -> dict[str, Tensor]:
        """By fla's names."""
        return {"cu_seqlens": self.cu_seqlens, "chunk_indices": self.chunk_indices}


class Level(NamedTuple):
    """Slots that a kernel runs for in one launch: those of one level, or all plain documents.

    Attributes:
        cu_seqlens, chunk_offsets: `[n + 1]`, into the tokens and the chunks of the row.
        parents: int64 `[n]`, the slots of the level above that they start from; None of roots.
    """

    cu_seqlens: Tensor
    chunk_offsets: Tensor
    parents: Tensor | None = None

    @property
    def slots(self) -> int:
        """n."""
        return len(self.cu_seqlens) - 1


Run = Callable[[Level, Tensor | None, Tensor | None], None]
"""Launches a kernel for a level. It reads states, or their gradients, and writes the next; fp32
`[n, HV, K, V]`, None of plain documents."""


def _levels(boundaries: Boundaries) -> tuple[list[Level], Level]:
    """The levels from the roots on, none of plain documents; and all other slots.

    Raises:
        NotImplementedError: a CUDA graph of trees is captured.
    """
    from fla.ops.utils.index import prepare_chunk_offsets

    cu_seqlens, _, parents, levels = boundaries
    chunks = prepare_chunk_offsets(cu_seqlens, CHUNK)
    if parents is None or levels is None:
        return [], Level(cu_seqlens, chunks)
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "recurrent layers run trees level by level, and a CUDA graph would repeat the levels "
            "of these for other trees; capture none, and compile without mode='reduce-overhead'."
        )
    bounds: list[int] = levels.tolist()
    last, above, found = bounds[-1], 0, []
    for start, end in pairwise(bounds[: bounds.index(last) + 1]):
        of_level = parents[start:end].long() - above if start else None
        found.append(Level(cu_seqlens[start : end + 1], chunks[start : end + 1], of_level))
        above = start
    return found, Level(cu_seqlens[last:], chunks[last:])


def _from_roots(boundaries: Boundaries, like: Tensor, run: Run) -> None:
    """Run a kernel that reads the initial states of a level, and writes the final ones."""
    levels, others = _levels(boundaries)
    final = like.new_empty(0)
    for level in levels:
        initial = _zeros(level, like) if level.parents is None else final[level.parents]
        final = torch.empty_like(initial)
        run(level, initial, final)
    _run_others(boundaries, others, like, run)


def _from_leaves(boundaries: Boundaries, like: Tensor, run: Run) -> None:
    """Run a kernel that reads gradients of the final states, and writes those of the initial."""
    levels, others = _levels(boundaries)
    grads, parents = like.new_empty(0), None
    for level in reversed(levels):
        final = _zeros(level, like) if parents is None else _summed(grads, parents, level.slots)
        grads, parents = torch.empty_like(final), level.parents
        run(level, final, grads)
    _run_others(boundaries, others, like, run)


def _run_others(boundaries: Boundaries, others: Level, like: Tensor, run: Run) -> None:
    """Run a kernel for plain documents, or for spare slots and padding beside trees.

    The latter come last, as Triton tunes a kernel at its first launch, and most of them are empty.
    They get states as all levels do, as Triton would tune the kernel once more without.
    """
    if boundaries.parents is None:
        run(others, None, None)
    else:
        zeros = _zeros(others, like)
        run(others, zeros, torch.empty_like(zeros))


def _zeros(level: Level, like: Tensor) -> Tensor:
    return like.new_zeros(level.slots, *like.shape[2:], dtype=torch.float32)


def _summed(grads: Tensor, parents: Tensor, slots: int) -> Tensor:
    """Gradients of the final states of `slots` slots, from those of the states of their children.

    The children of a segment follow one another, so each sum runs in their order.
    """
    offsets = torch.searchsorted(parents, torch.arange(slots + 1, device=grads.device))
    return torch.segment_reduce(grads, "sum", offsets=offsets, axis=0, initial=0)


# ---- delta rules ----


def delta_states(
    k: Tensor, w: Tensor, u: Tensor, gates: dict[str, Tensor], boundaries: Boundaries
) -> tuple[Tensor, Tensor]:
    """The state before each chunk, in the dtype of k, and what is written to it: `[1, T, HV, V]`.

    Args:
        gates: the decay as fla's `g`, for each head, or `gk`, for each channel of the keys.
    """
    from fla.ops.common import chunk_delta_h

    shapes = _shapes(k, u)
    h = k.new_empty(1, len(boundaries.chunk_indices), *_state(shapes))
    v_new = torch.empty_like(u)
    kernel = chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64
    tensors = {"k": k, "v": u, "w": w, "v_new": v_new, "h": h, "g": None, "gk": None} | gates

    def run(level: Level, initial: Tensor | None, final: Tensor | None) -> None:
        kernel[_grid(level, shapes)](**tensors, h0=initial, ht=final, **_constants(level, shapes))

    _from_roots(boundaries, h, run)
    return h, v_new


def delta_state_gradients(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    do: Tensor,
    dv: Tensor,
    gates: dict[str, Tensor],
    scale: float,
    boundaries: Boundaries,
) -> tuple[Tensor, Tensor]:
    """Gradients of the state after each chunk, in the dtype of q, and of what is written to it.

    Args:
        dv: the latter's part from the outputs of the same chunk.
    """
    from fla.ops.common import chunk_delta_h

    shapes = _shapes(q, do)
    dh = q.new_empty(1, len(boundaries.chunk_indices), *_state(shapes))
    dv_new = torch.empty_like(dv)
    kernel = chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64
    tensors = {"q": q, "k": k, "w": w, "do": do, "dh": dh, "dv": dv, "dv2": dv_new}
    no_gates = {"g": None, "gk": None}

    def run(level: Level, final: Tensor | None, initial: Tensor | None) -> None:
        kernel[_grid(level, shapes)](
            **tensors,
            **(no_gates | gates),
            dht=final,
            dh0=initial,
            scale=scale,
            **_constants(level, shapes),
        )

    _from_leaves(boundaries, dh, run)
    return dh, dv_new


# ---- linear attention with a decay for each head; H = HV ----


def decayed_states(
    k: Tensor, v: Tensor, g: Tensor, boundaries: Boundaries, dtype: torch.dtype
) -> Tensor:
    """The state before each chunk."""
    from fla.ops.common.chunk_h import chunk_fwd_kernel_h

    shapes = _shapes(k, v)
    h = k.new_empty(1, len(boundaries.chunk_indices), *_state(shapes), dtype=dtype)
    tensors = {"k": k, "v": v, "h": h, "g": g}

    def run(level: Level, initial: Tensor | None, final: Tensor | None) -> None:
        constants = _constants_of_splits(level, shapes)
        chunk_fwd_kernel_h[_grid_of_splits(level, shapes)](
            **tensors, h0=initial, ht=final, **constants
        )

    _from_roots(boundaries, h, run)
    return h


def decayed_state_gradients(
    q: Tensor, do: Tensor, g: Tensor, boundaries: Boundaries, dtype: torch.dtype
) -> Tensor:
    """Gradients of the state after each chunk."""
    from fla.ops.common.chunk_h import chunk_bwd_kernel_dh

    shapes = _shapes(q, do)
    dh = q.new_empty(1, len(boundaries.chunk_indices), *_state(shapes), dtype=dtype)
    tensors = {"q": q, "g": g, "do": do, "dh": dh}

    def run(level: Level, final: Tensor | None, initial: Tensor | None) -> None:
        constants = _constants_of_splits(level, shapes) | {"HQ": shapes["H"], "NG": 1}
        chunk_bwd_kernel_dh[_grid_of_splits(level, shapes)](
            **tensors, dht=final, dh0=initial, scale=1.0, **constants
        )

    _from_leaves(boundaries, dh, run)
    return dh


# ---- arguments of the kernels ----


def _shapes(k: Tensor, v: Tensor) -> dict[str, int]:
    return {"T": k.shape[1], "H": k.shape[2], "HV": v.shape[2], "K": k.shape[3], "V": v.shape[3]}


def _state(shapes: dict[str, int]) -> tuple[int, int, int]:
    return shapes["HV"], shapes["K"], shapes["V"]


def _grid(level: Level, shapes: dict[str, int]) -> Callable[[dict[str, int]], tuple[int]]:
    return lambda meta: (-(-shapes["V"] // meta["BV"]) * level.slots * shapes["HV"],)


def _constants(level: Level, shapes: dict[str, int]) -> dict[str, Any]:
    cu_seqlens, chunk_offsets, _ = level
    found = {"cu_seqlens": cu_seqlens, "chunk_offsets": chunk_offsets, "BT": CHUNK}
    return found | shapes | {"STATE_V_FIRST": False}


def _grid_of_splits(level: Level, shapes: dict[str, int]) -> Callable[[dict[str, int]], tuple[int]]:
    blocks = _grid(level, shapes)
    return lambda meta: (-(-shapes["K"] // meta["BK"]) * blocks(meta)[0],)


def _constants_of_splits(level: Level, shapes: dict[str, int]) -> dict[str, Any]:
    """Those of kernels that can keep fewer states than chunks; here a state for each chunk."""
    found = _constants(level, shapes)
    found |= {"split_offsets": found.pop("chunk_offsets"), "BS": CHUNK}
    del found["HV"]
    unused = dict.fromkeys(("g_gamma", "gk", "gv"))
    uses = {f"USE_{name}": name == "G" for name in ("G", "G_GAMMA", "GK", "GV")}
    return found | unused | uses
