"""What `shard_batch`, and so `shard_row`, refuses on every rank alike."""

from __future__ import annotations

import re

import pytest
import torch

import flexvarlen as fv
from flexvarlen.parallel.shard import shard_batch
from tests.parallel.documents_rows import ROWS, TOKENS, TREES, batch_of, tree_samples

ROW = batch_of(ROWS["long"])
TREE = fv.PackedLayout.from_tree([60, 30, 30], parents=[-1, 0, 0])


def layout_of(*lengths):
    return {"packed_layout": fv.PackedLayout.from_lengths(lengths)}


@pytest.mark.parametrize(
    ("batch", "options", "beginning"),
    [
        (None, {}, "batch must be a mapping with packed_layout on every rank, got NoneType"),
        (
            {"input_ids": ROW["input_ids"]},
            {},
            "batch must have its documents as packed_layout, a PackedLayout, got NoneType",
        ),
        (layout_of(), {}, "total_tokens must be a positive multiple of the 2 ranks, got 0"),
        (layout_of(129), {}, "total_tokens must be a positive multiple of the 2 ranks, got 129"),
        (
            ROW | {"input_ids": torch.zeros(2, TOKENS // 2)},
            {},
            "input_ids must be one row, [1, 120], got [2, 60]; remove it",
        ),
        (
            shard_batch(ROW, 1, 2),
            {},
            "packed_layout must be that of a whole row, got the shard of rank 1 of 2",
        ),
        (ROW | {"ignore_index": -1}, {}, "ignore_index must be -100, "),
        (TREES(tree_samples(0)) | {"ignore_index": 0}, {}, "ignore_index must be -100, "),
        (ROW | {"labels": -ROW["labels"]}, {}, "labels must be at least 0, or -100 where the loss"),
        (ROW | {"labels": 3}, {}, "labels must be one row, [1, 120], got int; "),
        (
            ROW | {"shift_labels": ROW["labels"] - 1000},
            {},
            "shift_labels must be at least 0, or -100 where the loss ignores them, got -",
        ),
        (ROW, {"rank": 2}, "rank must be that of one of the 2 ranks that share the row, got 2"),
        (ROW, {"window": 0}, "window must be an integer of at least 1, got 0"),
        (ROW, {"method": "tokens"}, "method must be one of 'documents', 'contiguous', 'ulysses'"),
        (TREES(tree_samples(0)), {"method": "ulysses"}, "shard_row does not cut trees"),
        (
            {"packed_layout": TREE},
            {},
            "each tree must lie whole on one of the 2 ranks, of 60 tokens each, got one",
        ),
    ],
)
def test_refused_batches(batch, options, beginning):
    with pytest.raises((ValueError, NotImplementedError), match="^" + re.escape(beginning)):
        shard_batch(batch, **{"rank": 0, "ranks": 2} | options)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16])
@pytest.mark.parametrize("causal", [True, False])
def test_labels_of_a_dtype_without_minus_100(dtype, causal):
    labels = ROW["labels"].clamp(min=0)
    expected, found = (
        shard_batch(ROW | {"labels": each}, 1, 2, causal=causal)
        for each in (labels, labels.to(dtype))
    )
    for name in ("labels", "shift_labels", "num_items_in_batch"):
        assert (name in found) == (name in expected)
        torch.testing.assert_close(found.get(name), expected.get(name))
