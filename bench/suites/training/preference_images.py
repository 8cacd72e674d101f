"""Batches of text and images for the suite "preference", and the time of the towers alone.

A token of an image stands for 2 × 2 patches. An image's features come before the text's layers, so
that packing saves text alone: `text_samples_per_s` is of a step without the tower's two passes.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.suites.model.geometries import GEOMETRIES
from flexvarlen.measure.timing import wall_seconds

Document = dict[str, Tensor]
REPEATS = 5


def document(draws: Any, text: int, images: int) -> Document:
    """What a processor returns for images and the text after them; `[L]`, patches and grids."""
    case, rng = draws.case, draws.rng
    config = GEOMETRIES[case.geometry](case.layers)
    vision, ids, grids = config.vision_config, [], []
    for _ in range(images):
        tokens = rng.randint(case.smallest_image, case.largest_image)
        height = round((tokens * rng.uniform(0.5, 2)) ** 0.5)
        grids.append((1, 2 * height, 2 * round(tokens / height)))
        run = [config.image_token_id] * (height * round(tokens / height))
        ids += [config.vision_start_token_id, *run, config.vision_end_token_id]
    input_ids = torch.tensor(ids + draws.tokens(text))
    found = {"input_ids": input_ids, "mm_token_type_ids": (input_ids == config.image_token_id) + 0}
    if not images:
        return found
    grid = torch.tensor(grids)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    pixels = torch.randn(int(grid.prod(-1).sum()), width, generator=generator)
    return found | {"image_grid_thw": grid, "pixel_values": pixels}


def _documents(draws: Any) -> list[Document]:
    case, rng = draws.case, draws.rng
    return [
        document(draws, rng.randint(case.shortest, case.longest), rng.randint(0, case.images))
        for _ in range(case.samples)
    ]


def _images_of(documents: Sequence[Document]) -> Document:
    names = ("pixel_values", "image_grid_thw")
    return {name: torch.cat([x[name] for x in documents if name in x]) for name in names}


def padded(trainer: Any, draws: Any) -> Document:
    """A batch of documents padded on the right; tokens of images have no labels."""
    documents = _documents(draws)
    tokens = [x["input_ids"] for x in documents]
    types = [x["mm_token_type_ids"] for x in documents]
    labels = [x.where(kind == 0, -100) for x, kind in zip(tokens, types, strict=True)]
    return _images_of(documents) | {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "mm_token_type_ids": pad_sequence(types, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in tokens], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def packed(trainer: Any, draws: Any) -> dict[str, Any]:
    """The same documents in one row, with positions made on the host."""
    return fv.PackedCollator(model=trainer.model)(_documents(draws))


def prompts(draws: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of GRPO with images before its prompts' text, as TRL repeats them for each answer."""
    case, made = draws.case, []
    for _ in range(case.samples // case.group):
        made += [document(draws, case.prompt, case.images)] * case.group
    answers = torch.zeros_like(batch["completion_ids"])

    def left(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_side="left")

    types = left([x["mm_token_type_ids"] for x in made])
    return (batch | _images_of(made)) | {
        "prompt_ids": left([x["input_ids"] for x in made]),
        "prompt_mask": left([torch.ones_like(x["input_ids"]) for x in made]),
        "mm_token_type_ids": torch.cat([types, answers], dim=1),
        "num_images": [case.images] * len(made),
    }


# ---- what is measured beside a step ----


def layers_of(model: PreTrainedModel) -> Sequence[nn.Module]:
    base: Any = model.base_model
    found: Sequence[nn.Module] = getattr(base, "language_model", base).layers
    return found


def tower_ms(model: PreTrainedModel, step: Callable[[], object], device: torch.device) -> float:
    """Forward and backward of the tower on what a step gives it, the median."""
    given: list[Any] = []
    tower = model.base_model.visual
    hook = tower.register_forward_pre_hook(lambda *inputs: given.append(inputs), with_kwargs=True)
    step()
    hook.remove()
    _, args, kwargs = given[0]

    def alone() -> None:
        found = [x for x in tree_leaves(tower(*args, **kwargs)) if isinstance(x, Tensor)]
        torch.autograd.backward(found, [torch.ones_like(x) for x in found])

    alone()
    return 1e3 * statistics.median(wall_seconds(alone, device) for _ in range(REPEATS))


def syncs_in_layers(model: PreTrainedModel, step: Callable[[], object]) -> int:
    """Times that a step's host waits for the device within the layers of the text.

    On CUDA alone, as it reads torch's warnings of syncs.
    """

    def switch(mode: str) -> Callable[..., None]:
        return lambda *_: torch.cuda.set_sync_debug_mode(mode)

    hooks = [layer.register_forward_pre_hook(switch("warn")) for layer in layers_of(model)]
    # always_call: a checkpoint ends a recomputation with an exception.
    hooks += [
        layer.register_forward_hook(switch("default"), always_call=True)
        for layer in layers_of(model)
    ]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step()
    for hook in hooks:
        hook.remove()
    return sum("synchroniz" in str(x.message) for x in found)
