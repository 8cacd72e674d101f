"""What `shard_batch`, and so `shard_row`, deals out, and what it refuses on every rank alike."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import flexvarlen as fv
from flexvarlen.parallel.shard import shard_batch
from tests.parallel.documents_rows import ROWS, TOKENS, TREES, batch_of, tree_samples

ROW = batch_of(ROWS["long"])


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
        (
            ROW,
            {"method": "tokens"},
            "method must be one of 'documents', 'contiguous', got 'tokens'",
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


# ---- the labels of next tokens ----

LENGTHS, TOKENS_OF_ROW = (37, 1, 50, 22), 128
PLAIN = {
    "packed_layout": fv.PackedLayout.from_lengths(LENGTHS, total_tokens=TOKENS_OF_ROW),
    "input_ids": torch.arange(TOKENS_OF_ROW)[None],
    "labels": torch.arange(TOKENS_OF_ROW)[None] + 1000,
    "position_ids": torch.arange(TOKENS_OF_ROW)[None] % 7,
}


def dealt(ranks, **changes):
    """The shards of a row, and its columns put together again."""
    own = [shard_batch(PLAIN | changes, r, ranks, method="contiguous") for r in range(ranks)]
    columns = [name for name, x in own[0].items() if isinstance(x, torch.Tensor) and x.ndim == 2]
    return own, {name: torch.cat([shard[name] for shard in own], 1) for name in columns}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_row_is_dealt_with_the_labels_of_the_next_token(ranks):
    own, row = dealt(ranks, extra=3, rate=0.5)
    for name in ("input_ids", "position_ids", "labels"):
        assert row[name].equal(PLAIN[name])
    expected = PLAIN["labels"].roll(-1)
    for end in torch.tensor(LENGTHS).cumsum(0):  # no last token of a document foresees the next
        expected[:, end - 1] = -100
    expected[:, sum(LENGTHS) :] = -100
    assert row["shift_labels"].equal(expected)
    for shard in own:
        assert shard["num_items_in_batch"] == (expected != -100).sum()
        assert (shard["extra"], shard["rate"]) == (3, 0.5)
        assert shard["input_ids"].shape == (1, TOKENS_OF_ROW // ranks)


def test_labels_shifted_and_counted_before_are_kept():
    shifted = PLAIN["labels"] + 5
    own, row = dealt(2, shift_labels=shifted, num_items_in_batch=torch.tensor(999))
    assert [int(shard["num_items_in_batch"]) for shard in own] == [999] * 2
    in_no_loss = dealt(2)[1]["shift_labels"] == -100
    assert row["shift_labels"].equal(shifted.masked_fill(in_no_loss, -100))


def test_labels_shifted_before_and_given_alone_are_masked_and_counted():
    """As `fv.token_logprobs` takes them."""
    tokens, step = torch.arange(8)[None], np.int64(7)
    row = {**layout_of(3, 5), "shift_labels": tokens.roll(-1), "step": step}
    own = [shard_batch(row, rank, 2, method="contiguous") for rank in range(2)]
    labels = torch.cat([shard["shift_labels"] for shard in own], 1)
    assert labels.tolist() == [[1, 2, -100, 4, 5, 6, 7, -100]]
    assert [(int(shard["num_items_in_batch"]), shard["step"]) for shard in own] == [(6, 7)] * 2
