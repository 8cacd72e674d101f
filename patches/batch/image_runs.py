"""Tokens of images that see one another both ways, on top of causal attention: Gemma 3 and 4.

Adjacent tokens of images are one run, also those of two images. Which layers have such runs is read
from the config; a window cuts a run on its left, and the mask cuts it at the end of a document.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexvarlen.mask.vectors import runs_of
from flexvarlen.packing.images import has_images
from flexvarlen.patches.batch.given import Given
from flexvarlen.patches.batch.row import ImageRuns
from flexvarlen.patches.models.layers import FULL, SLIDING
from flexvarlen.patches.parts import ModelParts


class _Rule(NamedTuple):
    """Where a family has runs.

    Attributes:
        types: the keyword with the type of each token.
        of_images: the types of tokens of images, or of videos.
        layers: (config of the text model) -> the layer types that have runs.
        before: whether the mask is known of releases without `create_masks_for_vision_model`, where
            no window cuts a run.
    """

    types: str
    of_images: tuple[int, ...]
    layers: Callable[[Any], tuple[str, ...]]
    before: bool = False


def _local_layers(config: Any) -> tuple[str, ...]:
    return (SLIDING,) if config.use_bidirectional_attention == "vision" else ()


RULES: dict[str, _Rule] = {
    "gemma3": _Rule("token_type_ids", (1,), lambda config: (FULL, SLIDING), before=True),
    "gemma4": _Rule("mm_token_type_ids", (1, 2), _local_layers),
}
"""By model type."""


def runs_finder(parts: ModelParts) -> Callable[[Given], ImageRuns | None] | None:
    """The function that finds the runs of a row's images; None for a model without any."""
    kind = parts.model_config.model_type
    rule = RULES.get(kind)
    if rule is None or not parts.causal or not rule.layers(parts.config):
        return None
    return find_runs if windows_cut_runs(kind) else find_runs_in_windows


def windows_cut_runs(model_type: str) -> bool:
    """Whether this release of transformers lets a window cut a run on its left."""
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    return hasattr(modeling, "create_masks_for_vision_model")


def find_runs(given: Given) -> ImageRuns | None:
    """The runs of a packed row's images; None for text alone.

    Args:
        given: of a model whose images have runs.

    Raises:
        ValueError: images without the types of the tokens.

    Reads the device only where token types come without pixels, to learn whether any is an image's;
    never in a compiled graph.
    """
    rule = RULES[given.parts.model_config.model_type]
    types, pixels = given.inputs.get(rule.types), has_images(given.inputs)
    if types is None:
        if pixels:
            raise ValueError(
                f"{rule.types} must come with the images of a {given.parts.model_config.model_type}"
                " model, whose tokens see one another both ways, got none; pass all that the "
                "processor returns."
            )
        return None
    if not isinstance(types, Tensor) or types.shape != given.shape:
        raise ValueError(
            f"{rule.types} must be an integer tensor {list(given.shape)}, one type for each token, "
            f"got {list(types.shape) if isinstance(types, Tensor) else type(types).__name__}; pass "
            "what the processor returns, joined as the input_ids are."
        )
    marked_T = torch.stack([types.flatten() == value for value in rule.of_images]).any(0)
    if not (pixels or torch.compiler.is_compiling()) and not bool(marked_T.any()):
        return None
    return ImageRuns(rule.layers(given.parts.config), runs_of(marked_T))


def find_runs_in_windows(given: Given) -> ImageRuns | None:
    """As `find_runs`, for releases of transformers in which no window cuts a run.

    Raises:
        NotImplementedError: a run that is longer than the window, a graph that is compiled, or a
            family whose mask is not known of these releases.

    Reads the device.
    """
    found = find_runs(given)
    if found is None:
        return None
    kind, window = given.parts.model_config.model_type, given.parts.config.sliding_window
    can_check = RULES[kind].before and not torch.compiler.is_compiling()
    if can_check and int((found.tokens[1] - found.tokens[0]).max()) <= window:
        return found
    raise NotImplementedError(
        f"images of a {kind} model need a release of transformers whose windows cut them, got one "
        "without create_masks_for_vision_model; upgrade transformers, or let no more than "
        f"{window} tokens of images follow one another in a gemma3 model, not compiled."
    )
