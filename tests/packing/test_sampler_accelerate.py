"""`BalancedSampler` under accelerate and Trainer, in one process and in two: each row once.

Their loaders count epochs by themselves, hand the number on or do not, and look a batch ahead.

    STEPS: a list of steps, each the rows of all ranks.
"""

from __future__ import annotations

import tempfile
import warnings
from functools import partial
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from flexvarlen.packing import BalancedSampler
from tests.contract_training import forget_accelerate
from tests.ranks import of_all_ranks, world

LENGTHS = [[i + 1] for i in range(11)]
WAYS = {
    "dealt": {},
    "dispatched": {"dispatch_batches": True},
    "seedable": {"use_seedable_sampler": True},
    "workers": {},
}


def new_sampler(**options):
    return BalancedSampler(LENGTHS, num_replicas=world(), window=2, **options)


def epoch(number):
    """STEPS of an epoch."""
    sampler = new_sampler()
    sampler.set_epoch(number)
    return sampler.steps()


def state(number, steps):
    """Of these steps of an epoch."""
    sampler = new_sampler()
    sampler.set_epoch(number)
    return sampler.state_dict() | {"taken": steps * world()}


def prepared(way, sampler):
    """As a process that starts: nothing is left of the accelerate before."""
    forget_accelerate()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**WAYS[way]))
    assert accelerator.num_processes == world()
    workers = 2 if way == "workers" else 0
    loader = DataLoader(
        range(len(LENGTHS)), sampler=sampler, collate_fn=torch.tensor, num_workers=workers
    )
    return accelerator, accelerator.prepare(loader)


def steps_of(loader, most=None):
    """STEPS of a pass; after `most` of them it is left."""
    batches = of_all_ranks([int(batch) for batch in islice(iter(loader), most)])
    return [list(step) for step in zip(*batches, strict=True)]


def skipped_steps(way, batches):
    """One that dispatches skips batches of one process, and we warn of it."""
    return batches // world() if way == "dispatched" else batches


# ---- passes: what is called before each, its epoch and its first step ----


def sampler_epoch(number):
    return lambda sampler, loader: sampler.set_epoch(number)


def loader_epoch(number):
    return lambda sampler, loader: loader.set_epoch(number)


def state_loaded(sampler, loader):
    """Of two steps of epoch 2."""
    sampler.load_state_dict(state(2, 2))


def state_of_all_loaded(sampler, loader):
    """Of all six steps of two ranks, or all eleven of one."""
    sampler.load_state_dict(state(2, len(epoch(2))))


PASSES = {
    "epochs_are_counted": [((), 0, 0), ((), 1, 0), ((), 2, 0)],
    "epoch_of_the_sampler": [
        ((sampler_epoch(2),), 2, 0),
        ((), 3, 0),
        ((sampler_epoch(7),), 7, 0),
    ],
    "epoch_of_the_loader": [((sampler_epoch(4), loader_epoch(2)), 2, 0), ((), 3, 0)],
    "state": [((state_loaded,), 2, 2), ((), 3, 0)],
    "state_and_its_epoch": [
        ((state_loaded, sampler_epoch(2), loader_epoch(2)), 2, 2),
        ((sampler_epoch(3), loader_epoch(3)), 3, 0),
    ],
    "state_of_a_whole_epoch": [((state_of_all_loaded,), 2, len(LENGTHS)), ((), 3, 0)],
}


def passes(name, way):
    """What each pass gave, and should have given."""
    sampler = new_sampler()
    _, loader = prepared(way, sampler)
    got, expected = [], []
    for calls, number, first in PASSES[name]:
        for call in calls:
            call(sampler, loader)
        got.append(steps_of(loader))
        expected.append(epoch(number)[first:])
    return got, expected


def state_before_prepare(way):
    sampler = new_sampler()
    sampler.load_state_dict(state(2, 2))
    _, loader = prepared(way, sampler)
    return [steps_of(loader) for _ in range(2)], [epoch(2)[2:], epoch(3)]


def skipping_loader_is_told_the_epoch(way):
    """As Trainer does; accelerate's loader does not hand it on to the sampler."""
    accelerator, loader = prepared(way, new_sampler())
    skipping = accelerator.skip_first_batches(loader, 2)
    skipping.set_epoch(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = [steps_of(skipping)]
    warned = any("skip_first_batches counts batches of one" in str(each.message) for each in told)
    loader.set_epoch(2)
    expected = [epoch(1)[skipped_steps(way, 2) :], epoch(2)]
    must_warn = way == "dispatched" and world() > 1
    return [*got, steps_of(loader), of_all_ranks(warned)[0]], [*expected, must_warn]


def skipping_after_the_epoch_was_set(way):
    accelerator, loader = prepared(way, sampler := new_sampler())
    got = []
    for number, skip in ((1, 2), (2, 0)):
        sampler.set_epoch(number)
        got.append(steps_of(accelerator.skip_first_batches(loader, skip)))
    return got, [epoch(1)[skipped_steps(way, 2) :], epoch(2)]


def checkpoints_of_accelerate(way):
    """Taken within an epoch by `save_state`, which does not count what the loader looks ahead."""
    made = []
    stops = (1, 3) if way == "dispatched" else (1, 3, None)  # NOT says why
    for most in stops:
        accelerator, loader = prepared(way, sampler := new_sampler())
        accelerator.register_for_checkpointing(sampler)
        loader.set_epoch(1)
        before = steps_of(loader, most)
        folder = of_all_ranks(tempfile.mkdtemp())[0]
        accelerator.save_state(folder)
        of_all_ranks(None)  # the first process wrote it
        accelerator, later = prepared(way, sampler := new_sampler())
        accelerator.register_for_checkpointing(sampler)
        accelerator.load_state(folder)
        made.append([before + steps_of(later), steps_of(later)])
    return made, [[epoch(1), epoch(2)]] * len(stops)


def message(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def refusals(way):
    """Parts of sentences, in their order."""
    got = []
    accelerator, loader = prepared(way, sampler := new_sampler())
    sampler.load_state_dict(state(2, 2))
    got.append(message(lambda: loader.set_epoch(1)))
    got.append(message(lambda: steps_of(accelerator.skip_first_batches(loader, 1))))
    parts = ["epoch must be 2, which load_state_dict resumed", "skip_first_batches must not be"]
    if world() > 1:
        _, loader = prepared(way, sampler := new_sampler())
        sampler.load_state_dict(state(2, 2) | {"taken": 3})
        got.append(message(lambda: steps_of(loader)))
        _, loader = prepared(way, new_sampler(rank=dist.get_rank()))
        got.append(message(lambda: steps_of(loader)))
        parts += ["taken must be a multiple of 2", "rank must be None if accelerate shards"]
    return [
        text if part not in text else part for text, part in zip(got, parts, strict=True)
    ], parts


# A pass without rows ends dispatching with an error of accelerate's, and what is loaded ahead by
# workers nobody can count.
NOT = {("dispatched", "state_of_a_whole_epoch"), ("workers", "checkpoints_of_accelerate")}
NOT |= {("dispatched", "refusals")}  # by one rank: the other would wait for it
CASES = {name: partial(passes, name) for name in PASSES} | {
    case.__name__: case
    for case in (
        state_before_prepare,
        skipping_loader_is_told_the_epoch,
        skipping_after_the_epoch_was_set,
        checkpoints_of_accelerate,
        refusals,
    )
}
LOADED = [(case, way) for case in CASES for way in WAYS if (way, case) not in NOT]


# Each starts processes: by default those of a count and of a state.
WITH_WORKERS = [(case, "workers") for case in CASES if case not in ("epochs_are_counted", "state")]


def made_by(case, way):
    return CASES[case](way)


# A worker that is forked beside gloo's threads takes ten seconds and more to end.
@pytest.mark.parametrize(("case", "way"), [x for x in LOADED if x[1] != "workers"])
def test_rows_of_two_processes(ranks, case, way):
    for got, expected in ranks.run(made_by, case, way):
        assert got == expected


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(case, way, marks=[pytest.mark.slow] * ((case, way) in WITH_WORKERS))
        for case, way in LOADED
        if way in ("dealt", "workers")
    ],
)
def test_rows_of_one_process(case, way):
    """Other loaders and Trainer: in two processes."""
    got, expected = made_by(case, way)
    assert got == expected


@pytest.mark.usefixtures("fresh_accelerate")
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
