"""Packed batches for Hugging Face models: many documents in one row, none seeing another.

Importing this registers the `flexvarlen_*` attention implementations with transformers. Kernel
packages are imported on first use.
"""

from typing import TYPE_CHECKING, Any

from flexvarlen.attention.api import packed_attention
from flexvarlen.attention.backends.registry import BACKENDS, available_backends, why_not
from flexvarlen.attention.explain import Explanation, explain
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.block_mask import document_block_mask
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.patches import patch_model, patched, register, unpatch_model

if TYPE_CHECKING:
    from flexvarlen.equivalence.compare import compare
    from flexvarlen.equivalence.isolation import IsolationError, IsolationReport, verify_isolation
    from flexvarlen.packing import BalancedSampler, PackedCollator, StreamPacker, pack, split_long
    from flexvarlen.parallel import shard_row

register()

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "BalancedSampler",
    "DocumentMask",
    "Explanation",
    "IsolationError",
    "IsolationReport",
    "PackedCollator",
    "PackedLayout",
    "StreamPacker",
    "available_backends",
    "compare",
    "document_block_mask",
    "explain",
    "pack",
    "packed_attention",
    "patch_model",
    "patched",
    "shard_row",
    "split_long",
    "unpatch_model",
    "verify_isolation",
    "why_not",
]


def __getattr__(name: str) -> Any:
    """`compare` and its kin, imported when first used: they bring plotting and tables along."""
    if name == "compare":
        from flexvarlen.equivalence.compare import compare

        return compare
    if name in {"IsolationError", "IsolationReport", "verify_isolation"}:
        from flexvarlen.equivalence import isolation

        return getattr(isolation, name)
    if name in {"BalancedSampler", "PackedCollator", "StreamPacker", "pack", "split_long"}:
        from flexvarlen import packing

        return getattr(packing, name)
    if name == "shard_row":
        from flexvarlen.parallel import shard_row

        return shard_row
    raise AttributeError(f"module 'flexvarlen' has no attribute {name!r}")
