"""Arguments that all functions of fla take, and the outputs of fake implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.recurrent.documents import CHUNK


def documents(cu_seqlens: Tensor, chunks: Tensor) -> dict[str, Tensor]:
    """The boundaries and chunks of `RecurrentDocuments`, by fla's names."""
    return {"cu_seqlens": cu_seqlens, "chunk_indices": chunks}


def real_chunks(cu_seqlens: Tensor, chunks: Tensor) -> dict[str, Tensor]:
    """Without the chunks of the empty slot, for which these kernels allocate no states."""
    from fla.ops.utils.index import prepare_chunk_offsets

    real = int(prepare_chunk_offsets(cu_seqlens, CHUNK)[-1])
    return documents(cu_seqlens, chunks[:real])


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of this shape, for a fake output."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
