"""Detect token sharding by accelerate or torch, where attention would see only one shard."""

from __future__ import annotations

import sys

import torch

from flexvarlen.upstream import required, why_absent

_PURPOSE = "refusing rows whose tokens are sharded"


def refuse_context_parallel() -> None:
    """Raise if accelerate or torch shards the tokens of a row over ranks.

    Context parallelism, of accelerate or of torch itself, exchanges keys inside
    `scaled_dot_product_attention`; accelerate's sequence parallelism (DeepSpeed's) heads inside
    transformers' own attention functions. Our backends call neither, or call SDPA per document,
    so documents would silently be cut at shard boundaries. In a compiled graph checked while
    tracing.

    Raises:
        NotImplementedError: accelerate is configured for it, or torch's `context_parallel` is on;
            or accelerate does not say.
    """
    if _is_sharded_by_accelerate():
        raise NotImplementedError(
            "a patched model must not run under accelerate's context parallelism (cp_size above "
            "1) or sequence parallelism (sp_size above 1): documents would end at each rank's "
            "shard; set both to 1, and call fv.patch_trainer(trainer, context_parallel=), or in a "
            "loop of your own fv.patch_model(model, sequence_parallel_group=)."
        )
    if _is_sharded_by_torch():
        raise NotImplementedError(
            "a patched model must not run under torch's context_parallel: documents would end at "
            "each rank's shard; leave it, and pass sequence_parallel_group= to patch_model."
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_sharded_by_accelerate() -> bool:
    state = sys.modules.get("accelerate.state")  # if not imported, it cannot be sharding
    if state is None:
        return False
    made = state.AcceleratorState._shared_state  # empty where no Accelerator was made
    if made and "parallelism_config" not in made:
        raise NotImplementedError(
            why_absent(state.AcceleratorState, "parallelism_config", _PURPOSE)
        )
    config = made.get("parallelism_config")
    names = () if config is None else ("cp_enabled", "sp_enabled")
    return any([required(config, name, _PURPOSE) for name in names])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_sharded_by_torch() -> bool:
    # It replaces torch's builtin function by a Python function of its own.
    found = getattr(torch.nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    return found.startswith("torch.distributed.")
