"""Packed rows in Trainer on two ranks: the steps of one process, each row once, and resumed."""

from __future__ import annotations

import pytest
import torch

from tests.packing.trainer_ranks import RUNS, STOPS, dataset_of, examples, resumed, saved, trained

EXAMPLES = sorted(examples())


@pytest.fixture(scope="module")
def made(ranks, tmp_path_factory):
    """STEPs of two processes, by the run, which leaves its checkpoints, or by one from these."""
    folder = tmp_path_factory.mktemp("ranks")
    return lambda name, case=saved: ranks.run(case, name, str(folder / name))[0]


@pytest.mark.usefixtures("_accelerate_as_it_was")
@pytest.mark.parametrize("name", RUNS)
def test_steps_are_those_of_one_process(made, name, tmp_path):
    steps, alone = made(name), trained(name, str(tmp_path))
    assert len(steps) == len(alone) > 2
    for number, ((ranks, loss), ((documents,), expected)) in enumerate(
        zip(steps, alone, strict=True)
    ):
        assert [*ranks[0], *ranks[1]] == documents, number
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("stream")])
def test_an_epoch_has_each_document_once(made, name):
    steps = made(name)
    half = len(steps) // 2
    assert half * 4 == len(dataset_of(name))
    for epoch in steps[:half], steps[half:]:
        assert sorted(x for ranks, _ in epoch for batch in ranks for x in batch) == EXAMPLES


def imbalance(steps):
    """Of the slowest rank's attention to that of the mean."""
    costs = torch.tensor(
        [[sum(len(x) ** 2 for x in batch) for batch in ranks] for ranks, _ in steps]
    ).double()
    return float(costs.amax(1).sum() / costs.mean(1).sum())


def test_ranks_have_equal_work(made):
    balanced = imbalance(made("balanced"))
    assert balanced < 1.1
    assert imbalance(made("random")) - 1 > 2 * (balanced - 1)
    assert imbalance(made("balanced-dispatched")) == balanced


@pytest.mark.parametrize("name", STOPS)
def test_resumed_steps_are_those_of_a_run_that_was_not_stopped(made, name):
    whole = made(name)
    steps = made(name, resumed)
    assert len(steps) > 1
    assert steps == whole[STOPS[name] :]
