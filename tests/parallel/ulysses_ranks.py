"""What a rank of test_ulysses.py does: its share of outputs and gradients, shards, refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import flexvarlen as fv
from flexvarlen.parallel import ulysses
from flexvarlen.parallel.shard import shard_row
from flexvarlen.parallel.ulysses import ulysses_attention
from tests.parallel.failed_refusals import failed_refusals

LENGTHS = (37, 1, 50, 22)
TOKENS = 128


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    heads: int = 8
    kv_heads: int = 8
    v_dim: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False

    def inputs(self):
        """q, k, v of the whole row, the cotangent, the layout, sinks or None."""
        generator = torch.Generator().manual_seed(0)
        shapes = [(self.heads, 16), (self.kv_heads, 16), (self.kv_heads, self.v_dim)]
        shapes.append((self.heads, self.v_dim))
        q, k, v, cotangent = (
            torch.randn(TOKENS, *shape, generator=generator, dtype=torch.float64)
            for shape in shapes
        )
        sinks = None
        if self.options.get("sinks"):
            sinks = torch.randn(self.heads, generator=generator, dtype=torch.float64)
        return [q, k, v], cotangent, layout_of_row(), sinks

    def keywords(self, sinks):
        return self.options | ({} if sinks is None else {"sinks": sinks})

    def share(self) -> dict[str, Any]:
        """This rank's part of outputs and gradients."""
        rank = dist.get_rank()
        qkv, cotangent, layout, sinks = self.inputs()
        here = slice(rank * TOKENS // self.ranks, (rank + 1) * TOKENS // self.ranks)
        leaves = [x[here].clone().requires_grad_() for x in qkv]
        shared = [] if sinks is None else [sinks.requires_grad_()]

        def call(*leaves):
            return ulysses_attention(*leaves, layout, **self.keywords(sinks))

        if self.compiled:
            torch._dynamo.reset()
            call = torch.compile(call, fullgraph=True, backend="aot_eager")
        out = call(*leaves)
        gradients = torch.autograd.grad(out, [*leaves, *shared], cotangent[here])
        return {"out": out.detach(), "gradients": gradients}


REFERENCE = {"backend": "reference"}
CASES = (
    Case("plain", 2, options=REFERENCE),
    Case("sdpa", 4, options={"backend": "sdpa"}),
    Case("grouped", 2, kv_heads=4, options=REFERENCE),
    Case("one_kv_head_a_rank", 4, kv_heads=4, options=REFERENCE),
    Case("fewer_kv_heads_than_ranks", 4, kv_heads=2, options=REFERENCE),
    Case("one_kv_head", 4, kv_heads=1, options=REFERENCE),
    Case("kv_heads_that_ranks_do_not_divide", 4, heads=12, kv_heads=3, options=REFERENCE),
    Case("kv_heads_that_two_ranks_do_not_divide", 2, heads=6, kv_heads=3, options=REFERENCE),
    Case("window", 2, kv_heads=2, options=REFERENCE | {"window": 9, "softcap": 5.0}),
    Case("bidirectional", 4, options=REFERENCE | {"causal": False}),
    Case("sinks", 4, kv_heads=2, options=REFERENCE | {"sinks": True}),
    Case("other_v", 2, v_dim=8, options=REFERENCE),
    Case("eight_ranks", 8, kv_heads=2, options=REFERENCE),
    Case("compiled", 2, kv_heads=1, options=REFERENCE, compiled=True),
)
BATCH = {
    "input_ids": torch.arange(TOKENS)[None],
    "labels": torch.arange(TOKENS)[None] + 1000,
    "position_ids": torch.arange(TOKENS)[None] % 7,
}


def layout_of_row() -> fv.PackedLayout:
    return fv.PackedLayout.from_lengths(LENGTHS, total_tokens=TOKENS)


def sharded(**changes: Any) -> dict[str, Any]:
    """This rank's shard of BATCH, without its layout."""
    batch = {**BATCH, "packed_layout": layout_of_row(), "extra": 3, "rate": 0.5}
    own = shard_row(batch | changes, method="ulysses")
    return {name: x for name, x in own.items() if name != "packed_layout"}


def sharded_after_shifting_and_counting() -> dict[str, Any]:
    return sharded(shift_labels=BATCH["labels"] + 5, num_items_in_batch=torch.tensor(999))


def tensor_types() -> set[type]:
    """Of what a backend is called with, and of what comes back."""
    seen: set[type] = set()
    layout = layout_of_row()

    def spy(*qkv, **options):
        seen.update(type(x) for x in qkv[:3])
        return fv.packed_attention(*qkv, **options)

    ulysses.packed_attention = spy
    qkv = [torch.randn(TOKENS // dist.get_world_size(), 8, 16)] * 3
    seen.add(type(ulysses_attention(*qkv, layout, **REFERENCE)))
    ulysses.packed_attention = fv.packed_attention
    return seen


def refusals() -> dict[str, str]:
    """Of `ulysses_attention` and `shard_row`: on every rank, so that none hangs."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout = layout_of_row()
    row = BATCH | {"packed_layout": layout}
    others = fv.PackedLayout.from_lengths([60 + rank, 68 - rank])
    weights = torch.full((1, TOKENS), rank).bfloat16()
    same, other = "batch must be the same row on every rank of the group", 0 if rank else 1
    another_row = f"{same}, got another on rank {other}"

    def attend(tokens: int, heads: int = 8, **options: Any) -> None:
        ulysses_attention(*[torch.randn(tokens, heads, 16)] * 3, layout, **options)

    calls = {
        "other tokens": (
            f"layout must cover the 5 tokens of each of {ranks} ranks, got 128 tokens",
            lambda: attend(5),
        ),
        "heads": (
            f"num_heads must be a multiple of the {ranks} ranks, got 3",
            lambda: attend(TOKENS // ranks, heads=3),
        ),
        "lse": (
            "ulysses_attention has no return_lse",
            lambda: attend(TOKENS // ranks, return_lse=True),
        ),
        "no layout on a rank": (
            "batch must have its documents as packed_layout, a PackedLayout, got NoneType",
            lambda: shard_row(row if rank else BATCH),
        ),
        "other tokens on a rank": (
            another_row,
            lambda: shard_row(row | {"input_ids": BATCH["input_ids"] + rank}),
        ),
        "other documents on a rank": (
            another_row,
            lambda: shard_row(BATCH | {"packed_layout": others}),
        ),
        "other weights on a rank": (another_row, lambda: shard_row(row | {"weights": weights})),
        "another count on a rank": (
            another_row,
            lambda: shard_row(row | {"num_items_in_batch": rank}),
        ),
        "other options on a rank": (
            "the options must be the same on every rank of the group, {'method': 'documents', ",
            lambda: shard_row(row, causal=rank > 0),
        ),
        "a group of others": (
            "group must be one that this process is in",
            lambda: shard_row(row, dist.GroupMember.NON_GROUP_MEMBER),
        ),
    }
    return failed_refusals(calls)
