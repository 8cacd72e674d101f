"""Llama 4: layers without RoPE scale queries by the token's position, past 8,192 tokens.

In a row of several documents this must be the position in the document, not in the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flexvarlen.patches.batch.positions import default_positions

if TYPE_CHECKING:
    from flexvarlen.patches.attention.packed_forward import PackedForward


def own_temperature(
    layer: nn.Module, q_THD: Tensor, context: PackedForward, row_tokens: int
) -> Tensor:
    """Rescale queries from the scale of their position in the row to that in their document.

    Unchanged in short rows and in layers with RoPE.
    """
    layout = context.layout
    floor_scale: Any = layer.floor_scale
    if layer.use_rope or layout.shard.position_bound(row_tokens) < floor_scale:
        return q_THD
    in_row = torch.arange(q_THD.shape[0], device=q_THD.device) % row_tokens
    padded = context.row.padded
    if padded is None:
        shape = (q_THD.shape[0] // row_tokens, row_tokens)
        position_T = default_positions(layout, shape).flatten()
    else:
        position_T = padded.offsets_in_rows()[0]

    def scale(position_T: Tensor) -> Tensor:
        steps = torch.floor((position_T.float() + 1.0) / floor_scale)
        return torch.log1p(steps) * layer.attn_scale + 1.0  # type: ignore[operator]

    ratio_T = scale(position_T) / scale(in_row)
    return (q_THD * ratio_T[:, None, None]).to(q_THD.dtype)
