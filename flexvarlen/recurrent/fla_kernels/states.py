"""The steps of fla's scans that pass a state from chunk to chunk.

They are launched for some of the slots at a time, as `levels.py` says. fla's other steps treat each
chunk alone, and run for all slots at once.

Shapes: T = total_tokens; M chunks; H, HV = heads of queries and keys, and of values; K, V = their
head_dim; q, k `[1, T, H, K]`, w `[1, T, HV, K]`, u, do, dv `[1, T, HV, V]`; states `[M, HV, K, V]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexvarlen.recurrent.documents import CHUNK
from flexvarlen.recurrent.fla_kernels.levels import (
    Boundaries,
    Level,
    run_levels_backward,
    run_levels_forward,
)

# ---- delta rules ----


def delta_states(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    gates: dict[str, Tensor],
    boundaries: Boundaries,
    received: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The state before each chunk, in the dtype of k, and the values written to it `[1, T, HV, V]`.

    Args:
        gates: the decay as fla's `g`, for each head, or `gk`, for each channel of the keys.
        received: as in `run_levels_forward`, whose result is returned last.
    """
    from fla.ops.common import chunk_delta_h

    shapes = _shapes(k, u)
    h = k.new_empty(1, len(boundaries.chunk_indices), *_state(shapes))
    v_new = torch.empty_like(u)
    kernel = chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64
    tensors = {"k": k, "v": u, "w": w, "v_new": v_new, "h": h, "g": None, "gk": None} | gates

    def launch(level: Level, initial: Tensor | None, final: Tensor | None) -> None:
        kernel[_grid(level, shapes)](**tensors, h0=initial, ht=final, **_constants(level, shapes))

    states = run_levels_forward(boundaries, h, launch, received)
    return h, v_new, states


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
    """Gradients of the state after each chunk, in the dtype of q, and of the values written to it.

    Args:
        dv: the part of the latter that comes from the outputs of the same chunk.
    """
    from fla.ops.common import chunk_delta_h

    shapes = _shapes(q, do)
    dh = q.new_empty(1, len(boundaries.chunk_indices), *_state(shapes))
    dv_new = torch.empty_like(dv)
    kernel = chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64
    tensors = {"q": q, "k": k, "w": w, "do": do, "dh": dh, "dv": dv, "dv2": dv_new}
    no_gates = {"g": None, "gk": None}

    def launch(level: Level, final: Tensor | None, initial: Tensor | None) -> None:
        kernel[_grid(level, shapes)](
            **tensors,
            **(no_gates | gates),
            dht=final,
            dh0=initial,
            scale=scale,
            **_constants(level, shapes),
        )

    run_levels_backward(boundaries, dh, launch)
    return dh, dv_new


# ---- linear attention with a decay for each head; H = HV ----


def decayed_states(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    boundaries: Boundaries,
    dtype: torch.dtype,
    received: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The state before each chunk, and the result of `run_levels_forward`."""
    from fla.ops.common.chunk_h import chunk_fwd_kernel_h

    shapes = _shapes(k, v)
    h = k.new_empty(1, len(boundaries.chunk_indices), *_state(shapes), dtype=dtype)
    tensors = {"k": k, "v": v, "h": h, "g": g}

    def launch(level: Level, initial: Tensor | None, final: Tensor | None) -> None:
        constants = _constants_of_splits(level, shapes)
        chunk_fwd_kernel_h[_grid_of_splits(level, shapes)](
            **tensors, h0=initial, ht=final, **constants
        )

    states = run_levels_forward(boundaries, h, launch, received)
    return h, states


def decayed_state_gradients(
    q: Tensor, do: Tensor, g: Tensor, boundaries: Boundaries, dtype: torch.dtype
) -> Tensor:
    """Gradients of the state after each chunk."""
    from fla.ops.common.chunk_h import chunk_bwd_kernel_dh

    shapes = _shapes(q, do)
    dh = q.new_empty(1, len(boundaries.chunk_indices), *_state(shapes), dtype=dtype)
    tensors = {"q": q, "g": g, "do": do, "dh": dh}

    def launch(level: Level, final: Tensor | None, initial: Tensor | None) -> None:
        constants = _constants_of_splits(level, shapes) | {"HQ": shapes["H"], "NG": 1}
        chunk_bwd_kernel_dh[_grid_of_splits(level, shapes)](
            **tensors, dht=final, dh0=initial, scale=1.0, **constants
        )

    run_levels_backward(boundaries, dh, launch)
    return dh


# ---- arguments of the kernels ----


def _shapes(k: Tensor, v: Tensor) -> dict[str, int]:
    return {"T": k.shape[1], "H": k.shape[2], "HV": v.shape[2], "K": k.shape[3], "V": v.shape[3]}


def _state(shapes: dict[str, int]) -> tuple[int, int, int]:
    return shapes["HV"], shapes["K"], shapes["V"]


def _grid(level: Level, shapes: dict[str, int]) -> Callable[[dict[str, int]], tuple[int]]:
    return lambda meta: (-(-shapes["V"] // meta["BV"]) * level.slots * shapes["HV"],)


def _constants(level: Level, shapes: dict[str, int]) -> dict[str, Any]:
    cu_seqlens, chunk_offsets, *_ = level
    found = {"cu_seqlens": cu_seqlens, "chunk_offsets": chunk_offsets, "BT": CHUNK}
    return found | shapes | {"STATE_V_FIRST": False}


def _grid_of_splits(level: Level, shapes: dict[str, int]) -> Callable[[dict[str, int]], tuple[int]]:
    blocks = _grid(level, shapes)
    return lambda meta: (-(-shapes["K"] // meta["BK"]) * blocks(meta)[0],)


def _constants_of_splits(level: Level, shapes: dict[str, int]) -> dict[str, Any]:
    """Constants of kernels that can keep fewer states than chunks; here one state per chunk."""
    found = _constants(level, shapes)
    found |= {"split_offsets": found.pop("chunk_offsets"), "BS": CHUNK}
    del found["HV"]
    unused = dict.fromkeys(("g_gamma", "gk", "gv"))
    uses = {f"USE_{name}": name == "G" for name in ("G", "G_GAMMA", "GK", "GV")}
    return found | unused | uses
