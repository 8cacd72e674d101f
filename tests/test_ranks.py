"""The runner of ranks: what one case does to the others, and what its error says."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.ranks import CASE_S, Ranks, RanksError


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


def hanging(folder):
    (Path(folder) / str(dist.get_rank())).touch()
    if dist.get_rank() == 1:
        waiting_for_nothing()
    waiting_for_the_other()


def waiting_for_nothing():
    time.sleep(1000)


def waiting_for_the_other():
    dist.barrier()


def returning_before_it_dies():
    threading.Timer(0.3, os.abort).start()
    return "all there is"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            (killed, signal.SIGSEGV),
            ("rank 1 died of SIGSEGV", "error: Segmentation fault", "rank 0 of the case"),
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


def test_a_case_that_hangs_says_where(ranks, tmp_path, monkeypatch):
    """By a clock that goes on when both ranks have begun."""
    clock = SimpleNamespace(monotonic=lambda: CASE_S * (len([*tmp_path.iterdir()]) == 2))
    monkeypatch.setattr("tests.ranks.time", clock)
    with pytest.raises(RanksError) as failed:
        ranks.run(hanging, str(tmp_path))
    assert "hanging on 2 ranks: rank 0 did not end, rank 1 did not end" in str(failed.value)
    of_ranks = str(failed.value).split("---- rank 1 printed ----")
    assert "in waiting_for_the_other" in of_ranks[0]
    assert "in waiting_for_nothing" in of_ranks[1]
    assert len(ranks.run(added, next(numbers))) == 2


def test_a_rank_that_dies_with_its_result_sent_fails_no_case(ranks):
    """As gloo may at the end of a process; it is a warning."""
    assert ranks.run(returning_before_it_dies) == ["all there is"] * 2
    for rank in ranks._ranks:
        rank.process.join()
    with pytest.warns(UserWarning, match="between cases on 2 ranks: rank 0 died of SIGABRT"):
        assert len(ranks.run(added, next(numbers))) == 2


def test_who_asks_again_gets_the_same(ranks):
    number = next(numbers)
    assert ranks.run(added, number) is ranks.run(added, number)
    errors = []
    for _ in range(2):
        with pytest.raises(RanksError) as failed:
            ranks.run(raising)
        errors.append(str(failed.value))
    assert errors[0] == errors[1]
