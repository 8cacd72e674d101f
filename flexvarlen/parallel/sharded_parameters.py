"""Whether the ranks of a group share a model.

Imports: torch. Never transformers.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are sharded over processes, by FSDP or DeepSpeed ZeRO-3."""
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules()) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")
        for parameter in model.parameters()
    )


def is_replicated(model: nn.Module) -> bool:
    """Whether DDP wraps the model, or runs its forward now."""
    if not dist.is_available():
        return False
    from torch.nn.parallel import DistributedDataParallel

    runs = getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
    return runs or any(isinstance(x, DistributedDataParallel) for x in model.modules())
