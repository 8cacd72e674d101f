"""Packed batches for Hugging Face models: many documents in one row, none seeing another.

Importing this registers the `flexvarlen_*` attention implementations with transformers. Kernel
packages are imported on first use.
"""

from flexvarlen.attention import packed_attention
from flexvarlen.backends import BACKENDS, available_backends, why_not
from flexvarlen.block_mask import document_block_mask
from flexvarlen.bounds import row_bounds
from flexvarlen.layout import PackedLayout
from flexvarlen.patches import patch_model, patched, register, unpatch_model

register()

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "PackedLayout",
    "available_backends",
    "document_block_mask",
    "packed_attention",
    "patch_model",
    "patched",
    "row_bounds",
    "unpatch_model",
    "why_not",
]
