"""What each of two processes runs for test_distributed_images.py: in each step one of them has
images, the other text alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

import flexvarlen as fv
from tests.contract_training import forget_accelerate, settings
from tests.patches.distributed_ranks import (
    WORLD,
    checkpointing,
    ddp,
    learned,
    patch,
)
from tests.patches.models import images, tower_images
from tests.tiny_models import lora, new_model

QWEN = "qwen3_vl"
DOCS = ((0, 1), (4, 2))  # of each rank, one a step


def fsdp2(model: Any) -> Any:
    """Each layer of all towers, and the rest."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    lists = [x for x in inner.modules() if isinstance(x, nn.ModuleList)]
    layers = [x for own in lists for x in own if isinstance(x, GradientCheckpointingLayer)]
    assert len(layers) > len(inner.model.get_decoder().layers), "of the vision tower too"
    mesh = init_device_mesh("cpu", (WORLD,))
    for module in (*layers, inner):
        fully_shard(module, mesh=mesh)
    return model


def frozen(model: Any) -> Any:
    model.model.visual.requires_grad_(False)
    return model


CASES: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "ddp": (patch, ddp),
    "ddp patched after": (ddp, patch),
    "ddp, checkpointing": (patch, checkpointing, ddp),
    "ddp, frozen tower": (frozen, patch, ddp),
    "ddp, LoRA": (patch, lora, ddp),
    "ddp, unpad": (partial(patch, unpad=True), ddp),
    "fsdp2": (patch, fsdp2),
    "fsdp2, checkpointing": (patch, checkpointing, fsdp2),
    "fsdp2, frozen tower": (frozen, patch, fsdp2),
    "fsdp2, LoRA": (patch, lora, fsdp2),
}


def inputs_of(family: str, number: int) -> dict[str, Tensor]:
    """A document as a processor gives it, its floats in fp64."""
    if family == QWEN:
        inputs = images.inputs_of(images.documents()[number : number + 1])
    else:
        one = tower_images.documents(family)[number : number + 1]
        inputs = tower_images.inputs_of(family, one)
    inputs["labels"] = inputs["input_ids"]
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def new(family: str) -> nn.Module:
    return new_model(family).double().train()


def two_steps(family: str, case: str) -> dict[str, Any]:
    """The gradients of two steps together."""
    model = new(family)
    for change in CASES[case]:
        model = change(model)
    for number in DOCS[dist.get_rank()]:
        loss = model(**inputs_of(family, number)).loss
        loss.backward()
    return learned(model, loss)


def alone(family: str, case: str) -> dict[str, Tensor]:
    """What the plain model learns in one process, one document after the other."""
    model = new(family)
    for change in CASES[case]:
        model = change(model) if change in (frozen, lora) else model
    for number in sum(DOCS, ()):
        (model(**inputs_of(family, number)).loss / WORLD).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def with_a_video(number: int) -> dict[str, Tensor]:
    """A document of images, and one of the images as a video of one frame on the second rank."""
    inputs = inputs_of(QWEN, number)
    types, ids = inputs["mm_token_type_ids"].clone(), inputs["input_ids"].clone()
    first = types.cumsum(-1) <= int(inputs["image_grid_thw"][0].prod()) // 4
    ids[(types == 1) & first], types[(types == 1) & first] = images.IMAGE + 1, 2
    grid, pixels = inputs["image_grid_thw"], inputs["pixel_values"]
    patches = int(grid[0].prod())
    return inputs | {
        "input_ids": ids,
        "labels": ids,
        "mm_token_type_ids": types,
        "video_grid_thw": grid[:1],
        "pixel_values_videos": pixels[:patches],
        "image_grid_thw": grid[1:],
        "pixel_values": pixels[patches:],
    }


def beside_videos() -> dict[str, Any]:
    """One rank has images alone, the other images and a video."""
    model = fsdp2(patch(new(QWEN)))
    make = with_a_video if dist.get_rank() else partial(inputs_of, QWEN)
    loss = model(**make(2)).loss
    loss.backward()
    return learned(model, loss)


def videos_alone() -> dict[str, Tensor]:
    model = new(QWEN)
    for inputs in (inputs_of(QWEN, 2), with_a_video(2)):
        (model(**inputs).loss / WORLD).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def evaluated(of_rank_1: int) -> Tensor:
    """Logits of a sharded model in eval mode: rank 0 has images."""
    model = fsdp2(patch(new(QWEN))).eval()
    inputs = inputs_of(QWEN, of_rank_1 if dist.get_rank() else 0)
    with torch.no_grad():
        found: Tensor = model(**inputs).logits
    return found


# ---- trainers ----

# The ranks take turns.
ONE_BY_ONE = {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential"}


def trained(patched: bool) -> dict[str, Tensor]:
    """The weights after two steps of Trainer, on rows of a `PackedCollator` or on single documents.

    A rank has images in one step, text alone in the other. Without a patch DDP looks for parameters
    that are not used, which Trainer turns off where layers are checkpointed.
    """
    forget_accelerate()
    model = new_model(QWEN)
    if patched:
        fv.patch_model(model, "sdpa")
    dataset = [
        {
            "input_ids": x.ids,
            "mm_token_type_ids": x.types,
            **({"pixel_values": x.patches, "image_grid_thw": x.grid} if len(x.grid) else {}),
        }
        for x in (images.documents()[i] for i in (0, 4, 1, 2))
    ]
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(**settings(folder, **ONE_BY_ONE, gradient_checkpointing=patched)),
            train_dataset=dataset,
            data_collator=fv.PackedCollator(model=model) if patched else _single,
        )
        trainer.train()
    return {name: x.detach() for name, x in model.named_parameters()}


def _single(features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    (one,) = features
    row = {name: one[name][None] for name in ("input_ids", "mm_token_type_ids")}
    labels = row["input_ids"].masked_fill(row["mm_token_type_ids"] != 0, -100)
    return one | row | {"labels": labels}


def trained_by_trl(patched: bool) -> dict[str, Tensor]:
    """The weights after a run of SFTTrainer, with some batches of text alone."""
    from tests.patches.padded_trainers import PLAIN, WHOLE, datasets, trl
    from tests.patches.test_trainers_images import chats, processor

    forget_accelerate()
    sizes = ONE_BY_ONE | {"ddp_find_unused_parameters": not patched}
    with TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=new_model(QWEN),
            args=trl.SFTConfig(**settings(folder, **(PLAIN | WHOLE | sizes))),
            train_dataset=datasets.Dataset.from_dict(chats()),
            processing_class=processor(QWEN),
        )
        if patched:
            fv.patch_trainer(trainer, "sdpa")
        trainer.train()
    return {name: x.detach() for name, x in trainer.model.named_parameters()}
