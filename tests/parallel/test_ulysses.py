"""Ulysses: rows over ranks attend as one process does, forward and backward."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import torch

import flexvarlen as fv
from tests.parallel import ulysses_models, ulysses_ranks
from tests.parallel.ulysses_models import MODELS
from tests.parallel.ulysses_ranks import BATCH, CASES, LENGTHS, TOKENS
from tests.ranks import Ranks

RANKS = (2, 4, 8)


@pytest.fixture(scope="module")
def ranks():
    """By their number."""
    with ExitStack() as stack:
        yield {count: stack.enter_context(Ranks(count)) for count in RANKS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_give_what_one_process_gives(ranks, case):
    qkv, cotangent, layout, sinks = case.inputs()
    leaves = [x.requires_grad_() for x in (*qkv, *([] if sinks is None else [sinks]))]
    expected = fv.packed_attention(*leaves[:3], layout, **case.keywords(sinks))
    gradients = torch.autograd.grad(expected, leaves, cotangent)
    own = ranks[case.ranks].run(case.share)
    torch.testing.assert_close(torch.cat([share["out"] for share in own]), expected)
    for index in range(3):
        together = torch.cat([share["gradients"][index] for share in own])
        torch.testing.assert_close(together, gradients[index])
    if sinks is not None:
        torch.testing.assert_close(sum(share["gradients"][3] for share in own), gradients[3])


@pytest.mark.parametrize("count", RANKS)
def test_a_row_is_dealt_with_the_labels_of_the_next_token(ranks, count):
    own = ranks[count].run(ulysses_ranks.sharded)
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.cat([share[name] for share in own], 1).equal(BATCH[name])
    expected = BATCH["labels"].roll(-1)
    for end in torch.tensor(LENGTHS).cumsum(0):  # no last token of a document foresees the next
        expected[:, end - 1] = -100
    expected[:, sum(LENGTHS) :] = -100
    assert torch.cat([share["shift_labels"] for share in own], 1).equal(expected)
    assert all(share["num_items_in_batch"] == (expected != -100).sum() for share in own)
    assert own[0]["extra"] == 3
    assert own[0]["rate"] == 0.5
    assert own[0]["input_ids"].shape == (1, TOKENS // count)


def test_labels_shifted_and_counted_before_are_kept(ranks):
    counted = ranks[2].run(ulysses_ranks.sharded_after_shifting_and_counting)
    assert all(share["num_items_in_batch"] == 999 for share in counted)
    dealt, without = (
        torch.cat([share["shift_labels"] for share in own], 1)
        for own in (counted, ranks[2].run(ulysses_ranks.sharded))
    )
    in_no_loss = without == -100
    assert dealt.equal((BATCH["labels"] + 5).masked_fill(in_no_loss, -100))


def test_labels_shifted_before_and_given_alone_are_masked_and_counted():
    """As `fv.token_logprobs` takes them."""
    tokens, step = torch.arange(8)[None], np.int64(7)
    layout = fv.PackedLayout.from_lengths([3, 5])
    row = {"packed_layout": layout, "shift_labels": tokens.roll(-1), "step": step}
    own = [fv.shard_batch(row, rank, 2, method="contiguous") for rank in range(2)]
    dealt = torch.cat([shard["shift_labels"] for shard in own], 1)
    assert dealt.tolist() == [[1, 2, -100, 4, 5, 6, 7, -100]]
    assert [(int(shard["num_items_in_batch"]), shard["step"]) for shard in own] == [(6, 7)] * 2


def test_no_backend_meets_a_tensor_that_is_on_its_way(ranks):
    """flex raises at an AsyncCollectiveTensor."""
    assert ranks[2].run(ulysses_ranks.tensor_types) == [{torch.Tensor}] * 2


@pytest.mark.parametrize("module", [ulysses_ranks, ulysses_models])
@pytest.mark.parametrize("count", RANKS)
def test_refused_calls(ranks, count, module):
    assert ranks[count].run(module.refusals) == [{}] * count


# ---- models ----


@pytest.mark.filterwarnings("ignore:num_items_in_batch counts")
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_a_model_on_shards_trains_as_on_whole_rows(ranks, case):
    """Logits, loss and all gradients; fp32, so relative to each tensor's largest number."""
    logits, loss, gradients = case.expected()
    own = ranks[case.ranks].run(case.share)
    _assert_near(torch.cat([share["logits"] for share in own]).view_as(logits), logits)
    _assert_near(sum(share["loss"] for share in own), loss)
    for name, gradient in gradients.items():
        parts = [share["gradients"][name] for share in own]
        for whole in parts if case.wrapper else [sum(parts)]:
            _assert_near(whole, gradient, name)


def _assert_near(actual, expected, name=""):
    # Sums over tokens in another order: 12 roundings (2 ** -24) were seen.
    error = (actual - expected).abs().max()
    assert error <= 5e-6 * expected.abs().max(), name


def test_a_copy_keeps_the_group_and_a_pickle_leaves_it_out(ranks):
    for said in ranks[2].run(ulysses_models.copies):
        assert said["copy"] == "same logits"
        assert "must get its documents from the model's own" in said["pickle"]
