"""Detect token sharding by accelerate or torch, where attention would see only one shard."""

from __future__ import annotations

import sys

import torch

from flexvarlen.upstream import required, why_absent

_PURPOSE = "refusing rows whose tokens are sharded"


# In a compiled graph this is evaluated while tracing.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def why_not_sharded() -> str | None:
    """Why a forward must not run where accelerate or torch shards the tokens of a row; or None.

    Context parallelism, of accelerate or of torch itself, exchanges keys inside
    `scaled_dot_product_attention`; accelerate's sequence parallelism (DeepSpeed's) heads inside
    transformers' own attention functions. Our backends call neither, or call SDPA per document,
    so documents would silently be cut at shard boundaries.
    """
    # torch's context parallelism replaces the builtin function by a Python function.
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if (getattr(sdpa, "__module__", None) or "").startswith("torch.distributed."):
        return (
            "a patched model must not run under torch's context_parallel: documents would end at "
            "each rank's shard; exit that context, and pass sequence_parallel_group= to "
            "patch_model."
        )
    state = sys.modules.get("accelerate.state")  # if not imported, it cannot be sharding
    made = {} if state is None else state.AcceleratorState._shared_state
    if not made:  # no Accelerator
        return None
    if "parallelism_config" not in made:
        return why_absent(state.AcceleratorState, "parallelism_config", _PURPOSE)  # type: ignore[union-attr]
    config = made["parallelism_config"]
    names = () if config is None else ("cp_enabled", "sp_enabled")
    if not any([required(config, name, _PURPOSE) for name in names]):
        return None
    return (
        "a patched model must not run under accelerate's context parallelism (cp_size above "
        "1) or sequence parallelism (sp_size above 1): documents would end at each rank's "
        "shard; set both to 1, and call fv.patch_trainer(trainer, context_parallel=), or in your "
        "own loop fv.patch_model(model, sequence_parallel_group=)."
    )
