"""Packed batches for Hugging Face models: many documents in one row, none seeing another.

Importing this imports neither torch's compiler nor transformers nor a kernel: public names are
looked up when they are first used, and the `flexvarlen_*` attention implementations are registered
with transformers as soon as its modeling code is there.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flexvarlen._version import __version__
from flexvarlen.import_hook import after_import

if TYPE_CHECKING:
    from flexvarlen.attention.api import packed_attention
    from flexvarlen.attention.backends.registry import BACKENDS, available_backends, why_not
    from flexvarlen.attention.explain import BackendReport, explain
    from flexvarlen.layout.logprobs import (
        DocumentLogprobs,
        document_logprobs,
        token_logprobs,
        tree_loss,
    )
    from flexvarlen.layout.packed_layout import PackedLayout
    from flexvarlen.layout.per_document import pool
    from flexvarlen.layout.routed_experts import engine_routes
    from flexvarlen.layout.sampling import sampling_masks
    from flexvarlen.mask.block_mask import document_block_mask
    from flexvarlen.mask.document_mask import DocumentMask
    from flexvarlen.packing import (
        BalancedSampler,
        PackedCollator,
        PackedDataset,
        RowCost,
        StreamPacker,
        conversation_samples,
        pack,
        split_long,
        tokenize_chat,
    )
    from flexvarlen.packing.prefixes import SharedPrefixes, share_prefixes
    from flexvarlen.packing.tree_collator import TreeCollator
    from flexvarlen.parallel.shard import shard_batch, shard_row
    from flexvarlen.patches.api import (
        is_patched,
        patch_model,
        patched,
        shard_options,
        unpatch_model,
    )
    from flexvarlen.patches.embed import embed
    from flexvarlen.patches.isolation.report import IsolationError, IsolationReport, SameBitsError
    from flexvarlen.patches.isolation.verify import verify_isolation
    from flexvarlen.patches.lm_head import lm_head
    from flexvarlen.patches.row_cost import row_cost
    from flexvarlen.patches.trainers import patch_trainer
    from flexvarlen.patches.tree_logprobs import tree_logprobs
    from flexvarlen.verify.compare.compare import compare
    from flexvarlen.verify.isolation.callback import IsolationCallback

__all__ = [
    "BACKENDS",
    "BackendReport",
    "BalancedSampler",
    "DocumentLogprobs",
    "DocumentMask",
    "IsolationCallback",
    "IsolationError",
    "IsolationReport",
    "PackedCollator",
    "PackedDataset",
    "PackedLayout",
    "RowCost",
    "SameBitsError",
    "SharedPrefixes",
    "StreamPacker",
    "TreeCollator",
    "__version__",
    "available_backends",
    "compare",
    "conversation_samples",
    "document_block_mask",
    "document_logprobs",
    "embed",
    "engine_routes",
    "explain",
    "is_patched",
    "lm_head",
    "pack",
    "packed_attention",
    "patch_model",
    "patch_trainer",
    "patched",
    "pool",
    "row_cost",
    "sampling_masks",
    "shard_batch",
    "shard_options",
    "shard_row",
    "share_prefixes",
    "split_long",
    "token_logprobs",
    "tokenize_chat",
    "tree_logprobs",
    "tree_loss",
    "unpatch_model",
    "verify_isolation",
    "why_not",
]

_HOMES = {
    "attention.api": ("packed_attention",),
    "attention.backends.registry": ("BACKENDS", "available_backends", "why_not"),
    "attention.explain": ("BackendReport", "explain"),
    "verify.compare.compare": ("compare",),
    "verify.isolation.callback": ("IsolationCallback",),
    "layout.logprobs": ("DocumentLogprobs", "document_logprobs", "token_logprobs", "tree_loss"),
    "layout.per_document": ("pool",),
    "layout.routed_experts": ("engine_routes",),
    "layout.packed_layout": ("PackedLayout",),
    "layout.sampling": ("sampling_masks",),
    "mask.block_mask": ("document_block_mask",),
    "mask.document_mask": ("DocumentMask",),
    "packing": (
        "BalancedSampler",
        "PackedCollator",
        "PackedDataset",
        "RowCost",
        "StreamPacker",
        "conversation_samples",
        "pack",
        "split_long",
        "tokenize_chat",
    ),
    "packing.prefixes": ("SharedPrefixes", "share_prefixes"),
    "packing.tree_collator": ("TreeCollator",),
    "parallel.shard": ("shard_batch", "shard_row"),
    "patches.embed": ("embed",),
    "patches.isolation.report": ("IsolationError", "IsolationReport", "SameBitsError"),
    "patches.isolation.verify": ("verify_isolation",),
    "patches.lm_head": ("lm_head",),
    "patches.row_cost": ("row_cost",),
    "patches.trainers": ("patch_trainer",),
    "patches.tree_logprobs": ("tree_logprobs",),
    "patches.api": ("is_patched", "patch_model", "patched", "shard_options", "unpatch_model"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def _register_attention(_: ModuleType) -> None:
    """The `flexvarlen_*` attention implementations, with transformers."""
    from flexvarlen.patches.attention.functions import register

    register()


def _register_callback(_: ModuleType) -> None:
    """What every Trainer checks of our collators' batches."""
    from flexvarlen.patches.trainer_callback import register_callback

    register_callback()


after_import("transformers.modeling_utils", _register_attention)
after_import("transformers.trainer", _register_callback)


def __getattr__(name: str) -> Any:
    """A public name, from the module that it is defined in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'flexvarlen' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"flexvarlen.{_HOME_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names alone, so that completion offers no others."""
    return sorted(__all__)
