"""Run the vision tower for text alone too, where other ranks run it for their images.

DDP waits for gradients of all trainable parameters, and each call of a sharded tower is a
collective: a rank whose batch holds text alone would keep the others waiting, or fail. It runs the
tower on the smallest image instead, of which nothing reaches the outputs: the gradients are zero.

No rank asks another, as some forwards run on one rank alone.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexvarlen.parallel.sharded_parameters import is_sharded
from flexvarlen.patches.batch.given import Inputs
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.state import Patch

# ---- the smallest image that a family's `get_image_features` takes, by keyword ----


def _merged_patches(base: Any) -> dict[str, Any]:
    """Qwen2-VL and similar: the patches of one token."""
    merge, weight = base.visual.spatial_merge_size, base.visual.patch_embed.proj.weight
    pixels = torch.ones(merge**2, math.prod(weight.shape[1:]))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, merge, merge]])}


def _pixels(side: Any, *before: int) -> Tensor:
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return torch.ones(*before, 3, height, width)


def _whole(base: Any) -> dict[str, Any]:
    return {"pixel_values": _pixels(base.config.vision_config.image_size, 1)}


def _row_of_images(base: Any) -> dict[str, Any]:
    return {"pixel_values": _pixels(base.config.vision_config.image_size, 1, 1)}


def _two_tokens(base: Any) -> dict[str, Any]:
    """Arguments of two tokens: of one, transformers 5.24 would drop a dimension."""
    side = base.config.vision_config.patch_size * base.config.spatial_merge_size
    sizes = torch.tensor([[side, 2 * side]])
    return {"pixel_values": _pixels([side, 2 * side], 1), "image_sizes": sizes}


def _tiles(base: Any) -> dict[str, Any]:
    side, kind = base.config.vision_config.image_size, base.config.model_type
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    tiles = modeling.image_size_to_num_patches([side, side], base.config.image_grid_pinpoints, side)
    return {"pixel_values": _pixels(side, 1, tiles), "image_sizes": torch.tensor([[side, side]])}


def _flat(base: Any, tokens: int) -> Tensor:
    """`[1, tokens, values]`: patches of one image."""
    return torch.ones(1, tokens, 3 * base.config.vision_config.patch_size**2)


def _with_shapes(base: Any) -> dict[str, Any]:
    side: int = base.config.downsample_factor
    return {
        "pixel_values": _flat(base, side**2),
        "spatial_shapes": torch.tensor([[side, side]]),
        "pixel_attention_mask": torch.ones(1, side**2, dtype=torch.long),
    }


def _with_positions(base: Any) -> dict[str, Any]:
    side = torch.arange(base.config.vision_config.pooling_kernel_size)
    positions = torch.cartesian_prod(side, side)[None]
    return {"pixel_values": _flat(base, len(side) ** 2), "image_position_ids": positions}


_IMAGES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "gemma3": _whole,
    "gemma4": _with_positions,
    "internvl": _whole,
    "lfm2_vl": _with_shapes,
    "llava_next": _tiles,
    "mistral3": _two_tokens,
    "smolvlm": _row_of_images,
}
"""By model type; models with a patched tower take `_merged_patches`."""

_CHOICES = ("vision_feature_layer", "vision_feature_select_strategy")
"""What the forwards of some models pass on from their config."""


def has_idle_tower(parts: ModelParts) -> bool:
    """Whether a base model has a tower that is run for text alone, where other ranks may wait."""
    return bool(parts.vision_name or (parts.text_name and parts.model_config.model_type in _IMAGES))


# ---- the stage of a base model's forward ----


def run_idle_tower(base: Any, patch: Patch, inputs: Inputs) -> None:
    """Run the tower of images, if the batch has none and other ranks may wait for it.

    They do if it is trained, or sharded. A sharded tower also runs once for videos, as it does in
    a batch of both. Not in a compiled graph, nor for tokens that follow a cache.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    cache = inputs.get("past_key_values")
    if torch.compiler.is_compiling() or (cache is not None and cache.get_seq_length()):
        return
    before_text = [part for part in base.children() if part is not patch.parts.text_tower(base)]
    sharded = any(map(is_sharded, before_text))
    trained = torch.is_grad_enabled() and any(
        parameter.requires_grad for part in before_text for parameter in part.parameters()
    )
    idle = [name for name in ("pixel_values", "pixel_values_videos") if inputs.get(name) is None]
    calls = _calls_for(base, idle, sharded) if sharded or trained else 0
    for _ in range(calls):
        _add_nothing(base, _features_of_image(base, patch))


def _calls_for(base: Any, idle: list[str], sharded: bool) -> int:
    """How often the tower runs for nothing."""
    if sharded and hasattr(base, "get_video_features"):
        return len(idle)
    return int("pixel_values" in idle and (sharded or len(idle) == 2))


def _features_of_image(base: Any, patch: Patch) -> list[Tensor]:
    """What an image gives to the text model."""
    make = _merged_patches if patch.parts.vision_name else _IMAGES[base.config.model_type]
    given = {
        name: x.to(base.device, base.dtype if x.is_floating_point() else None)
        for name, x in make(base).items()
    }
    given |= {name: getattr(base.config, name) for name in _CHOICES if hasattr(base.config, name)}
    found = base.get_image_features(**given)
    return [*_tensors(found.pooler_output), *_tensors(getattr(found, "deepstack_features", ()))]


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    else:
        for each in found or ():
            yield from _tensors(each)


def _add_nothing(base: Any, features: list[Tensor]) -> None:
    """Add a sum over no element of the features to the next embeddings of the base model."""

    def add(module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        hook.remove()
        nothing = torch.stack([x.flatten()[:0].sum() for x in features]).sum()
        return embedded + nothing.to(embedded.device, embedded.dtype)

    hook = base.get_input_embeddings().register_forward_hook(add)
