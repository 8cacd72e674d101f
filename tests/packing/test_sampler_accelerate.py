"""`BalancedSampler` under accelerate and Trainer, in one process and in two: each row once.

Their loaders count epochs by themselves, hand the number on or do not, and look a batch ahead.
"""

from __future__ import annotations

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader

from flexvarlen.packing import BalancedSampler
from tests.packing.sampler_ranks import CASES, OF_RANKS, made_by


@pytest.mark.parametrize("case", OF_RANKS)
def test_rows_of_two_processes(ranks, case):
    for got, expected in ranks.run(made_by, case):
        assert got == expected


@pytest.mark.usefixtures("_accelerate_as_it_was")
@pytest.mark.parametrize("case", [x for x in CASES if x.endswith(("-dealt", "-workers"))])
def test_rows_of_one_process(case):
    """Other loaders and Trainer: in two processes."""
    got, expected = made_by(case)
    assert got == expected


@pytest.mark.usefixtures("_accelerate_as_it_was")
def test_a_pass_that_was_left_counts_for_no_other():
    """accelerate keeps a loader that was left with `break` among those in a pass."""
    sampler = BalancedSampler([[i + 1] for i in range(8)], num_replicas=2)
    left, whole = (
        Accelerator(cpu=True).prepare(DataLoader(range(8), batch_size=1, sampler=sampler))
        for _ in range(2)
    )
    next(iter(left))
    assert len(list(whole)) == 8
    assert sampler.state_dict()["taken"] == 8
