"""Whether the ranks of a group share a model, and which ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are sharded over processes: by FSDP, ZeRO-3 or tensor parallelism."""
    return gathers_parameters(model) or any(True for _ in _meshes_of(model))


def gathers_parameters(model: nn.Module) -> bool:
    """Whether ranks with other rows exchange parameters in a forward: by FSDP or ZeRO-3."""
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(
        is_fsdp2(module) or isinstance(module, FullyShardedDataParallel)
        for module in model.modules()
    ) or any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def is_fsdp2(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module as a unit, of its own or with others."""
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def splits_tied_embeddings(model: Any) -> bool:
    """Whether FSDP2 shards a model's embeddings in a unit, but not the head that is tied to them.

    transformers' `DistributedConfig` does so (5.17 to 5.24): an optimizer then changes the
    embeddings, and the head goes on with a copy of those that were loaded.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    tied = weight is not None and weight is getattr(embeddings, "weight", None)
    return tied and is_fsdp2(embeddings) and not is_fsdp2(head)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether ranks with the same rows share layers: FSDP2's meshes have no dimension "tp"."""
    names = [mesh.mesh_dim_names or () for mesh in _meshes_of(model)]
    return any("tp" in each for each in names) or (bool(names) and not gathers_parameters(model))


def _meshes_of(model: nn.Module) -> Iterator[DeviceMesh]:
    """The device mesh of each parameter that is a DTensor."""
    if dist.is_available():
        from torch.distributed.tensor import DTensor

        yield from (x.device_mesh for x in model.parameters() if isinstance(x, DTensor))


def mesh_of_fsdp2(model: nn.Module) -> DeviceMesh | None:
    """The ranks over which FSDP2 (`fully_shard`) shards a model, or None."""
    sharded: list[Any] = [module for module in model.modules() if is_fsdp2(module)]
    if not sharded:
        return None
    mesh = next(_meshes_of(model), None)
    if mesh is None:  # all are gathered, with `reshard_after_forward=False`
        for module in sharded:
            module.reshard()
        mesh = next(_meshes_of(model), None)
    return mesh


def gather_over(mesh: DeviceMesh, mine: Any) -> list[Any]:
    """What each rank of a mesh has, in one order on all; a small object. Syncs under NCCL."""
    every = [mine]
    for dimension in range(mesh.ndim):
        group = mesh.get_group(dimension)
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, every, group=group)
        every = [each for of_rank in found for each in of_rank]
    return every


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP that wraps a model, if it is that or contains it."""
    if not dist.is_available():
        return None
    from torch.nn.parallel import DistributedDataParallel

    return next((x for x in model.modules() if isinstance(x, DistributedDataParallel)), None)


def runs_ddp() -> bool:
    """Whether the forward of a DDP runs now."""
    if not dist.is_available():
        return False
    from torch.nn.parallel import DistributedDataParallel

    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
