"""Whether two BlockMasks list the same blocks, in any order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flexvarlen as fv
from flexvarlen.mask.table_shapes import DEFAULT_BLOCK_SIZE, Tables

BLOCK = (DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE)
TABLES = ("kv", "full_kv", "q", "full_q")


def expected_tables(layout: fv.PackedLayout, **options: Any) -> Tables:
    """The tables by plain torch on the CPU, moved to the layout's device."""
    on_cpu = {
        name: value.to("cpu") if hasattr(value, "to") else value for name, value in options.items()
    }
    tables = fv.DocumentMask.of(layout.to("cpu"), **on_cpu).tables(BLOCK, compact=True)
    return Tables(*(table.to(layout.device) for table in tables))


def difference(found: BlockMask | Tables, expected: Tables) -> str | None:
    """How the tables list other blocks than expected, in whatever order; None if they do not."""
    for name in TABLES:
        counts, indices = _table(found, name)
        right_counts, right_indices = _table(expected, name)
        if counts is None or indices is None:
            return f"the {name} tables are missing"
        if not torch.equal(counts, right_counts):
            wrong = int((counts != right_counts).sum())
            return f"{wrong} of {counts.numel()} rows of the {name} tables count other blocks"
        width = min(indices.shape[3], right_indices.shape[3])
        if int(counts.max()) > width:
            return f"the {name} tables have {width} columns for rows of {int(counts.max())} blocks"
        unequal = _sorted(counts, indices, width) != _sorted(counts, right_indices, width)
        if bool(unequal.any()):
            wrong = int(unequal.any(-1).sum())
            return f"{wrong} of {counts.numel()} rows of the {name} tables list other blocks"
    return None


def _table(tables: BlockMask | Tables, name: str) -> tuple[Any, Any]:
    return getattr(tables, f"{name}_num_blocks"), getattr(tables, f"{name}_indices")


def _sorted(counts: Tensor, indices: Tensor, width: int) -> Tensor:
    """`[1, 1, rows, width]`: what each row lists, ascending, the largest int32 behind."""
    listed = torch.arange(width, device=indices.device) < counts[..., None]
    behind = torch.iinfo(torch.int32).max
    return torch.where(listed, indices[..., :width].to(torch.int32), behind).sort(-1).values
