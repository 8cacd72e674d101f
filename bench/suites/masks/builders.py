"""What builds the mask of a row: ours, and create_block_mask as its users call it; its check."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexvarlen as fv
from flexvarlen.bench.suites import FrozenCase
from flexvarlen.bench.suites.model.geometries import log_normal_lengths
from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.mask.table_shapes import DEFAULT_BLOCK_SIZE, Tables
from flexvarlen.runner.failures import Unsupported

SIGMA, SEED = 1.0, 0

Build = Callable[[], BlockMask]


@dataclass(frozen=True)
class MaskCase(FrozenCase):
    """A packed row: causal documents by every builder ("build"), or other masks by ours.

    "trees" has equal segments of `mean_doc` tokens, `TREE_SEGMENTS` a tree.
    """

    part: str
    tokens: int
    mean_doc: int
    sigma: float = SIGMA
    seed: int = SEED
    block_size: int = DEFAULT_BLOCK_SIZE

    @property
    def name(self) -> str:
        return f"{self.part}-t{self.tokens}-mean{self.mean_doc}"

    def lengths(self) -> list[int]:
        if self.part == "trees":
            return [self.mean_doc] * (self.tokens // self.mean_doc)
        return log_normal_lengths(self.tokens, self.mean_doc, self.sigma, self.seed)


def layout_of(case: MaskCase, name: str, device: torch.device) -> fv.PackedLayout:
    """The documents of a variant; of trees the first of each `TREE_SEGMENTS` is the prompt."""
    lengths = case.lengths()
    if case.part != "trees" or name == DOCUMENTS:
        return fv.PackedLayout.from_lengths(lengths, device=device)
    parents = [i - i % TREE_SEGMENTS if i % TREE_SEGMENTS else -1 for i in range(len(lengths))]
    return fv.PackedLayout.from_tree(lengths, parents, device=device)


def ours(case: MaskCase, device: torch.device) -> Build:
    layout = fv.PackedLayout.from_lengths(case.lengths(), device=device)
    return lambda: fv.document_block_mask(layout)


def ours_from_cu_seqlens(case: MaskCase, device: torch.device) -> Build:
    """From boundaries on the device, which are never read back."""
    cu_seqlens = cu_seqlens_of(case, device)
    bound = min(round_up_to_power_of_two(max(case.lengths())), case.tokens)

    def build() -> BlockMask:
        layout = fv.PackedLayout(
            cu_seqlens,
            cu_seqlens_host=None,
            total_tokens=case.tokens,
            max_seqlen_bound=bound,
            num_docs=None,
            max_seqlen=None,
        )
        return fv.document_block_mask(layout)

    return build


def theirs(how: str, case: MaskCase, device: torch.device) -> Build:
    """Causal documents as users of create_block_mask write them, from boundaries on the device.

    Args:
        how: "eager", "compiled", or "_compile": with the flag that transformers sets wherever torch
            still has it, compiled in each call.
    """
    create: Callable[..., BlockMask] = create_block_mask
    if how != "eager" and device.type == "cpu":
        raise Unsupported("compiled create_block_mask is measured on CUDA only")
    if how == "compiled":
        create = torch.compile(create_block_mask, dynamic=False)
    elif how == "_compile":
        if "_compile" not in inspect.signature(create_block_mask).parameters:
            raise Unsupported("this torch's create_block_mask has no _compile")
        create = partial(create_block_mask, _compile=True)
    cu_seqlens, tokens = cu_seqlens_of(case, device), case.tokens

    def build() -> BlockMask:
        index = torch.arange(tokens, device=device, dtype=torch.int32)
        document = torch.searchsorted(cu_seqlens[1:], index, right=True, out_int32=True)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (document[q] == document[kv]) & (q >= kv)

        return create(
            mask_mod, None, None, tokens, tokens, device=device, BLOCK_SIZE=case.block_size
        )

    return build


def cu_seqlens_of(case: MaskCase, device: torch.device) -> Tensor:
    """int32 `[num_docs + 1]`."""
    ends = torch.tensor([0, *case.lengths()]).cumsum(0)
    return ends.to(device, torch.int32)


COMPARED = "flexvarlen from cu_seqlens"
"""Ours that starts from what create_block_mask starts from."""
BASELINES = {
    "create_block_mask compiled": "× compiled create_block_mask",
    "create_block_mask(_compile=True)": "× _compile=True",
}
BUILDERS: dict[str, Callable[[MaskCase, torch.device], Build]] = {
    "flexvarlen": ours,
    COMPARED: ours_from_cu_seqlens,
    "create_block_mask eager": partial(theirs, "eager"),
    "create_block_mask compiled": partial(theirs, "compiled"),
    "create_block_mask(_compile=True)": partial(theirs, "_compile"),
}
KINDS = (
    "bidirectional",
    "window=1024",
    "two-sided window=1024",
    "chunk=8192",
    "prefix=64",
    "cross",
)
"""The kinds of mask beside causal."""

DOCUMENTS, TREE_SEGMENTS = "documents", 16
TREES: dict[str, dict[str, Any]] = {DOCUMENTS: {}, "trees": {}, "trees, window": {"window": 1024}}
"""The masks of segments, as documents and as trees, with their options."""


def options_of_kind(kind: str, case: MaskCase, layout: fv.PackedLayout) -> dict[str, Any]:
    """The arguments of `document_block_mask` for one of `KINDS`."""
    prefix = torch.full((layout.capacity,), 64, dtype=torch.int32, device=layout.device)
    keys = fv.PackedLayout.from_lengths(case.lengths()[::-1], device=layout.device)
    options: dict[str, dict[str, Any]] = {
        "bidirectional": {"causal": False},
        "window=1024": {"window": 1024},
        "two-sided window=1024": {"causal": False, "window": 1024},
        "chunk=8192": {"chunk": 8192},
        "prefix=64": {"prefix": prefix},
        "cross": {"layout_k": keys},
    }
    return options[kind]


# --- whether two BlockMasks list the same blocks, in any order -----------------------------------

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
    """Which tables list other blocks than expected, in whatever order; None if none do."""
    wrong = [x for x in TABLES if not torch.equal(_listed(found, x), _listed(expected, x))]
    return f"tables list other blocks: {', '.join(wrong)}" if wrong else None


def _listed(tables: BlockMask | Tables, name: str) -> Tensor:
    """`[1, 1, rows, 1 + width]`: how many blocks each row lists, and those, ascending."""
    counts, indices = getattr(tables, f"{name}_num_blocks"), getattr(tables, f"{name}_indices")
    listed = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
    behind = torch.iinfo(torch.int32).max
    ordered = torch.where(listed, indices.to(torch.int32), behind).sort(-1).values
    return torch.cat([counts[..., None], ordered[..., : int(counts.max())]], dim=-1)
