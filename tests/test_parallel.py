"""Ulysses: rows over ranks attend as one process does, forward and backward."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import torch.multiprocessing as mp

import flexvarlen as fv
from tests.ulysses_ranks import BATCH, CASES, TOKENS, run

RANKS = (2, 4)


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    """What each rank saved, by the number of ranks."""
    folder = tmp_path_factory.mktemp("ulysses")
    multiprocessing.set_forkserver_preload(["tests.ulysses_ranks"])  # imported once for all
    for ranks in RANKS:
        mp.start_processes(run, (ranks, str(folder)), nprocs=ranks, start_method="forkserver")
    return {
        ranks: [torch.load(folder / f"{ranks}-{rank}.pt") for rank in range(ranks)]
        for ranks in RANKS
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_give_what_one_process_gives(shares, case):
    qkv, cotangent, layout, sinks = case.inputs()
    leaves = [x.requires_grad_() for x in (*qkv, *([] if sinks is None else [sinks]))]
    expected = fv.packed_attention(*leaves[:3], layout, **case.keywords(sinks))
    gradients = torch.autograd.grad(expected, leaves, cotangent)
    own = [share[case.name] for share in shares[case.ranks]]
    torch.testing.assert_close(torch.cat([share["out"] for share in own]), expected)
    for index in range(3):
        together = torch.cat([share["gradients"][index] for share in own])
        torch.testing.assert_close(together, gradients[index])
    if sinks is not None:
        torch.testing.assert_close(sum(share["gradients"][3] for share in own), gradients[3])


@pytest.mark.parametrize("ranks", RANKS)
def test_a_row_is_dealt_with_the_labels_of_the_next_token(shares, ranks):
    own = [share["shard_row"] for share in shares[ranks]]
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.cat([share[name] for share in own], 1).equal(BATCH[name])
    labels = torch.cat([share["shift_labels"] for share in own], 1)[0]
    assert labels[:-1].equal(BATCH["labels"][0, 1:])
    assert labels[-1] == -100
    assert own[0]["input_ids"].shape == (1, TOKENS // ranks)


def test_mistakes_are_sentences(shares):
    words = [
        "layout must cover the 5 tokens of each of 4 ranks, got 128 tokens",
        "num_heads must be a multiple of the 4 ranks, got 3",
        "ulysses_attention has no return_lse",
        "input_ids must be one row, [1, 128], got [2, 64]",
        "total_tokens must be a multiple of the 4 ranks, got 129",
        "batch must be the same row on every rank of the group, got another on rank 1",
    ]
    said = shares[4][0]["errors"]
    assert [sentence.startswith(word) for sentence, word in zip(said, words, strict=True)] == (
        [True] * len(words)
    ), said
