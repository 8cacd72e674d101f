"""Sharding of tokens by accelerate or torch, under which attention would see one shard alone."""

from __future__ import annotations

import sys

import torch


def refuse_context_parallel() -> None:
    """Raise where the tokens of a row are sharded over ranks by somebody else.

    Context parallelism, of accelerate or of torch itself, exchanges keys inside
    `scaled_dot_product_attention`; accelerate's sequence parallelism (DeepSpeed's) heads inside
    transformers' own attention functions. Our backends call neither, or call it a document at a
    time: each rank's documents would end at its shard, in silence. In a compiled graph asked while
    tracing.

    Raises:
        NotImplementedError: accelerate was configured so, or torch's `context_parallel` is around.
    """
    if _is_sharded_by_accelerate():
        raise NotImplementedError(
            "a patched model must not run under accelerate's context parallelism (cp_size above "
            "1) or sequence parallelism (sp_size above 1): documents would end at each rank's "
            "shard; set both to 1, and pass sequence_parallel_group= to patch_model."
        )
    if _is_sharded_by_torch():
        raise NotImplementedError(
            "a patched model must not run under torch's context_parallel: documents would end at "
            "each rank's shard; leave it, and pass sequence_parallel_group= to patch_model."
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_sharded_by_accelerate() -> bool:
    state = sys.modules.get("accelerate.state")  # not imported: then it shards nothing
    if state is None:
        return False
    config = state.AcceleratorState._shared_state.get("parallelism_config")
    return any(getattr(config, name, False) for name in ("cp_enabled", "sp_enabled"))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_sharded_by_torch() -> bool:
    # It puts a function of its own in the place of torch's, which is no Python function.
    found = getattr(torch.nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    return found.startswith("torch.distributed.")
