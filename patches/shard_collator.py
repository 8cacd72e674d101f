"""The collator of ranks that share a row: it packs the row, and keeps the shard of one rank.

Shapes: P = ranks of a group, T = tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from flexvarlen.layout.labels import IGNORE_INDEX, LABEL_COUNTS
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.routed_experts import OWN_CHOICE, ROUTED_EXPERTS
from flexvarlen.packing.collator import PackedCollator
from flexvarlen.parallel.shard import checksum, shard_batch
from flexvarlen.patches.trainer_callback import below_trainers
from flexvarlen.recurrent.tree_parts import REACH

CHECKSUM = "row_checksum"
"""The column of the whole row's checksum, by which the ranks compare their rows."""


@dataclass
class ShardCollator:
    """Collate a batch into one packed row, and return one rank's shard of it.

    Attributes:
        collate: the trainer's collator; it makes one row, with a layout or without.
        rank: the rank of the shard.
        ranks: number of ranks that share the row, P.
        pad_token_id: token that pads the row to a multiple of P.
        options: keyword arguments that `shard_row` needs for the model.
    """

    collate: Callable[[Any], dict[str, Any]]
    rank: int
    ranks: int
    pad_token_id: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def data_collator(self) -> Any:
        """The inner collator, under the name that Trainer's wrappers use."""
        return below_trainers(self.collate)

    def __call__(self, features: Any) -> dict[str, Any]:
        """The shard, and the checksum of the row, an int.

        Raises:
            ValueError: the batch is not one packed row with labels.
            NotImplementedError: a batch of `TreeCollator`.
        """
        row = self.packed_row(self.collate(features))
        found = checksum(row["input_ids"], row["labels"], row["packed_layout"].cu_seqlens)
        shard = shard_batch(row, self.rank, self.ranks, **self.options)
        return shard | {CHECKSUM: found}

    def packed_row(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch as one row with a layout, long enough for a convolution on each rank."""
        tokens, layout = batch["input_ids"], batch.get("packed_layout")
        if layout is not None and (layout.segments is not None or LABEL_COUNTS in batch):
            raise NotImplementedError(
                "context_parallel does not support trees, got a TreeCollator's batch; use "
                "PackedCollator, or fv.shard_row in a loop of your own."
            )
        if len(tokens) != 1 or "labels" not in batch:
            raise ValueError(
                "a batch that processes share must be one packed row with labels, got "
                f"input_ids {list(tokens.shape)}{'' if 'labels' in batch else ' without labels'}; "
                "use PackedCollator, DataCollatorWithFlattening, or SFTConfig(packing=True)."
            )
        total = max(-(-tokens.numel() // self.ranks), REACH) * self.ranks
        if layout is None:
            collator = PackedCollator(
                total_tokens=total, pad_token_id=self.pad_token_id, next_token_labels=True
            )
            return collator(batch)
        return padded_row(batch, total, self.pad_token_id)


def padded_row(batch: dict[str, Any], total_tokens: int, pad_token_id: int) -> dict[str, Any]:
    """A packed row with padding up to `total_tokens`."""
    layout: PackedLayout = batch["packed_layout"]
    more = total_tokens - layout.total_tokens
    if more == 0 or layout.padding is not None:  # a new layout would lose padding inside the row
        return batch
    fills = {"input_ids": pad_token_id, "labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}
    columns = {
        name: pad(x, (0, more), value=fills.get(name, 0))
        for name, x in batch.items()
        if isinstance(x, Tensor) and x.ndim == 2
    }
    if (routes := batch.get(ROUTED_EXPERTS)) is not None:  # [1, T, M, K]
        columns[ROUTED_EXPERTS] = pad(routes, (0, 0, 0, 0, 0, more), value=OWN_CHOICE)
    longer = PackedLayout.from_cu_seqlens(
        layout.cu_seqlens,
        total_tokens=total_tokens,
        max_seqlen_bound=layout.max_seqlen_bound,
    )
    return batch | columns | {"packed_layout": longer}
