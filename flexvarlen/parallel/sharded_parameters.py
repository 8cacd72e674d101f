"""Whether a model's parameters are sharded over ranks.

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
