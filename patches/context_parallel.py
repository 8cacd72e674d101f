"""accelerate's sharding of tokens, under which a patched model would attend to a shard alone."""

from __future__ import annotations

import sys

import torch


def refuse_context_parallel() -> None:
    """Raise where accelerate shards the tokens of a row over ranks.

    Its context parallelism exchanges keys inside `scaled_dot_product_attention`, its sequence
    parallelism (DeepSpeed's) heads inside transformers' own attention functions. Our backends call
    neither: each rank's documents would end at its shard, in silence. In a compiled graph asked
    while tracing.

    Raises:
        NotImplementedError: accelerate was configured so.
    """
    if _is_sharded_by_accelerate():
        raise NotImplementedError(
            "a patched model must not run under accelerate's context parallelism (cp_size above "
            "1) or sequence parallelism (sp_size above 1): documents would end at each rank's "
            "shard; set both to 1, and pass sequence_parallel_group= to patch_model."
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_sharded_by_accelerate() -> bool:
    state = sys.modules.get("accelerate.state")  # not imported: then it shards nothing
    if state is None:
        return False
    config = state.AcceleratorState._shared_state.get("parallelism_config")
    return any(getattr(config, name, False) for name in ("cp_enabled", "sp_enabled"))
