"""Patch the vision towers of Qwen2-VL and similar: each frame of an image or video is a document.

The tower gets all patches in one row and `grid_thw`, the frames, height and width of each image.
These are read once, and all that the tower derives from them (boundaries, windows, positions) is
computed on the host and passed as the keywords that transformers' vision_utils reads, so the
tower itself does not sync. Each layer calls attention once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, vision_utils

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.attention.packed_forward import PackedVision
from flexvarlen.patches.forward.make_row import make_packed_forward
from flexvarlen.patches.forward.stages import choose_stages
from flexvarlen.patches.forward.wrapper import Steps, unwrap_forward, wrap_forward
from flexvarlen.patches.models.layers import VISION, attention_layers
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.state import ATTRIBUTE, CONTEXT, VISION_IMPLEMENTATION, Patch

_LAYER_TYPE = "layer_type"  # the attribute that `layer_type_of` reads


def patch_tower(tower: PreTrainedModel, patch: Patch) -> None:
    """Make a tower's layers call our attention function, once per layer.

    Args:
        patch: of the whole model.
    """
    wrap_forward(tower, TOWER_STEPS)
    before: Any = patch.implementation_before  # by tower; the config's may already be ours
    parts = replace(ModelParts.of(tower), kinds=patch.parts.vision_kinds)
    own = replace(
        patch,
        parts=parts,
        stages=choose_stages(parts, patch),
        implementation_before=before["vision_config"],
    )
    setattr(tower, ATTRIBUTE, own)
    for layer in attention_layers(tower):
        layer.__dict__[_LAYER_TYPE] = VISION
    # Not set_attn_implementation: transformers would look for a FlashAttention package.
    tower.config._attn_implementation_internal = VISION_IMPLEMENTATION


def unpatch_tower(tower: PreTrainedModel) -> None:
    """Undo `patch_tower`."""
    patch: Patch = tower.__dict__.pop(ATTRIBUTE)
    unwrap_forward(tower)
    tower.config._attn_implementation_internal = patch.implementation_before
    for layer in attention_layers(tower):
        layer.__dict__.pop(_LAYER_TYPE, None)


def _before_forward(tower: Any, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """Add to a tower's keyword arguments everything that it would compute from `grid_thw`.

    Reads the device once.
    """
    patch: Patch | None = tower.__dict__.get(ATTRIBUTE)
    if patch is None:
        return None
    grid_thw: Tensor = inputs["grid_thw"]
    device = grid_thw.device
    sizes: list[list[int]] = grid_thw.tolist()
    grid, merge = torch.tensor(sizes, device="cpu").view(-1, 3), tower.spatial_merge_size
    lengths = [height * width for frames, height, width in sizes for _ in range(frames)]
    frames = PackedLayout.from_lengths(lengths, device=device)
    made: dict[str, Any] = {
        "cu_seqlens": frames.cu_seqlens,
        "max_seqlen": frames.max_seqlen,
        "position_ids": vision_utils.get_vision_position_ids(grid, merge).to(device),
    }
    windows = None
    if hasattr(tower, "window_size"):  # Qwen2.5-VL
        index, cu_windows = vision_utils.get_vision_window_index(
            grid,
            spatial_merge_size=merge,
            window_size=tower.window_size,
            patch_size=tower.patch_size,
        )
        layout = PackedLayout.from_lengths(cu_windows.diff().tolist(), device=device)
        windows = make_packed_forward(tower, patch, layout)
        made["window_index"] = index.to(device)
        made["cu_window_seqlens"] = layout.cu_seqlens
        made["max_window_seqlen"] = layout.max_seqlen
    if hasattr(tower, "num_grid_per_side"):  # Qwen3-VL
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        made["interp_indices"], made["interp_weights"] = indices.to(device), weights.to(device)
    made[CONTEXT] = PackedVision(make_packed_forward(tower, patch, frames), windows)
    return {**inputs, **made}  # `made` overrides the text's keywords, which the model passes on


TOWER_STEPS = Steps(_before_forward)
