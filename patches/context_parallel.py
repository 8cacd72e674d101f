"""accelerate's context parallelism, under which a patched model would attend to a shard alone."""

from __future__ import annotations

import sys

import torch


def refuse_context_parallel() -> None:
    """Raise where accelerate shards the tokens of a row over ranks.

    It exchanges keys inside `scaled_dot_product_attention`, which our backends do not call: each
    rank's documents would end at its shard, in silence. In a compiled graph asked while tracing.

    Raises:
        NotImplementedError: accelerate was configured so.
    """
    if _is_sharded_by_accelerate():
        raise NotImplementedError(
            "a patched model must not run under accelerate's context parallelism (cp_size above "
            "1): documents would end at each rank's shard; call unpatch_model, or set cp_size to 1."
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_sharded_by_accelerate() -> bool:
    state = sys.modules.get("accelerate.state")  # not imported: then it shards nothing
    if state is None:
        return False
    config = state.AcceleratorState._shared_state.get("parallelism_config")
    return bool(config is not None and getattr(config, "cp_enabled", False))
