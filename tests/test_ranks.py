"""The runner of ranks: what one case does to the others, and what its error says."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks, RanksError


@pytest.fixture(scope="module")
def ranks():
    with Ranks() as ranks:
        yield ranks


numbers = itertools.count()  # a case with another argument is another case


def added(number):
    """The sum over the ranks, and the processes that made it."""
    total = torch.tensor(number + dist.get_rank())
    dist.all_reduce(total)
    return total, os.getpid()


def killed(signal_of_rank_1):
    print(f"rank {dist.get_rank()} of the case")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal_of_rank_1)
    return added(0)


def raising():
    if dist.get_rank() == 1:
        raise ValueError("no such case")
    return added(0)


def leaving():
    sys.exit(7)


def hanging():
    if dist.get_rank() == 1:
        waiting_for_nothing()


def waiting_for_nothing():
    time.sleep(1000)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            (killed, signal.SIGSEGV),
            ("rank 1 died of SIGSEGV", "in killed", "rank 0 of the case", "rank 1 of the case"),
        ),
        ((killed, signal.SIGKILL), ("rank 1 died of SIGKILL", "in killed")),
        ((raising,), ("rank 1 ended with status 1", "ValueError: no such case")),
        ((leaving,), ("rank 0 ended with status", "rank 1 ended with status")),
    ],
)
def test_a_case_that_ends_a_rank_fails_alone(ranks, case, expected):
    before = ranks.run(added, next(numbers))
    with pytest.raises(RanksError) as failed:
        ranks.run(*case)
    for part in expected:
        assert part in str(failed.value)
    after = ranks.run(added, next(numbers))
    assert {pid for _, pid in before}.isdisjoint(pid for _, pid in after)


def test_a_case_that_hangs_says_where():
    with Ranks(case_s=20.0) as ranks:
        ranks.run(added, 1)
        ranks.case_s = 1.0
        with pytest.raises(RanksError, match=r"rank 0 returned, rank 1 did not end(.|\n)*for_noth"):
            ranks.run(hanging)
        ranks.case_s = 20.0
        assert [int(total) for total, _ in ranks.run(added, 2)] == [5, 5]


def test_who_asks_again_gets_the_same(ranks):
    assert ranks.run(added, 5) is ranks.run(added, 5)
    errors = []
    for _ in range(2):
        with pytest.raises(RanksError) as failed:
            ranks.run(raising)
        errors.append(str(failed.value))
    assert errors[0] == errors[1]
