"""What test_sampler_accelerate.py runs in one process, and in each of two: `BalancedSampler` under
accelerate's loaders. A case gives, or raises, what it got and what it should have.

    STEPS: a list of steps, each the rows of all ranks.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import flexvarlen as fv

LENGTHS = [[i + 1] for i in range(11)]
WAYS: dict[str, dict[str, Any]] = {
    "dealt": {},
    "dispatched": {"dispatch_batches": True},
    "seedable": {"use_seedable_sampler": True},
    "workers": {},
}
Pair = tuple[Any, Any]


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def of_all_ranks(mine: Any) -> list[Any]:
    every: list[Any] = [mine] * world()
    if dist.is_initialized():
        dist.all_gather_object(every, mine)
    return every


def new_sampler(**options: Any) -> fv.BalancedSampler:
    return fv.BalancedSampler(LENGTHS, num_replicas=world(), window=2, **options)


def epoch(number: int) -> list[list[int]]:
    """STEPS of an epoch."""
    sampler = new_sampler()
    sampler.set_epoch(number)
    return sampler.steps()


def state(number: int, steps: int) -> dict[str, Any]:
    """Of these steps of an epoch."""
    sampler = new_sampler()
    sampler.set_epoch(number)
    return sampler.state_dict() | {"taken": steps * world()}


def prepared(way: str, sampler: Any) -> tuple[Accelerator, Any]:
    """As a process that starts: nothing is left of the accelerate before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**WAYS[way]))
    assert accelerator.num_processes == world()
    workers = 2 if way == "workers" else 0
    loader = DataLoader(
        range(len(LENGTHS)), sampler=sampler, collate_fn=torch.tensor, num_workers=workers
    )
    return accelerator, accelerator.prepare(loader)


def steps_of(loader: Any, most: int | None = None) -> list[list[int]]:
    """STEPS of a pass; at most so many, then it is left."""
    batches = of_all_ranks([int(batch) for batch in islice(iter(loader), most)])
    return [list(step) for step in zip(*batches, strict=True)]


def skipped_steps(way: str, batches: int) -> int:
    """One that dispatches skips batches of one process, and we warn of it."""
    return batches // world() if way == "dispatched" else batches


# ---- accelerate ----


def passes_count_epochs(way: str) -> Pair:
    _, loader = prepared(way, new_sampler())
    return [steps_of(loader) for _ in range(3)], [epoch(n) for n in range(3)]


def epoch_of_the_sampler(way: str) -> Pair:
    _, loader = prepared(way, sampler := new_sampler())
    sampler.set_epoch(2)
    got = [steps_of(loader) for _ in range(2)]
    sampler.set_epoch(7)
    return [*got, steps_of(loader)], [epoch(2), epoch(3), epoch(7)]


def epoch_of_the_loader(way: str) -> Pair:
    _, loader = prepared(way, sampler := new_sampler())
    sampler.set_epoch(4)
    loader.set_epoch(2)
    return [steps_of(loader) for _ in range(2)], [epoch(2), epoch(3)]


def state_alone(way: str) -> Pair:
    _, loader = prepared(way, sampler := new_sampler())
    sampler.load_state_dict(state(2, 2))
    return [steps_of(loader) for _ in range(2)], [epoch(2)[2:], epoch(3)]


def state_before_prepare(way: str) -> Pair:
    sampler = new_sampler()
    sampler.load_state_dict(state(2, 2))
    _, loader = prepared(way, sampler)
    return [steps_of(loader) for _ in range(2)], [epoch(2)[2:], epoch(3)]


def state_and_its_epoch(way: str) -> Pair:
    _, loader = prepared(way, sampler := new_sampler())
    sampler.load_state_dict(state(2, 2))
    got = []
    for number in (2, 3):
        sampler.set_epoch(number)
        loader.set_epoch(number)
        got.append(steps_of(loader))
    return got, [epoch(2)[2:], epoch(3)]


def state_of_a_whole_epoch(way: str) -> Pair:
    _, loader = prepared(way, sampler := new_sampler())
    sampler.load_state_dict(state(2, len(epoch(2))))
    return [steps_of(loader) for _ in range(2)], [[], epoch(3)]


def skipping_loader_is_told_the_epoch(way: str) -> Pair:
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


def skipping_after_the_epoch_was_set(way: str) -> Pair:
    accelerator, loader = prepared(way, sampler := new_sampler())
    got = []
    for number, skip in ((1, 2), (2, 0)):
        sampler.set_epoch(number)
        got.append(steps_of(accelerator.skip_first_batches(loader, skip)))
    return got, [epoch(1)[skipped_steps(way, 2) :], epoch(2)]


def checkpoints_of_accelerate(way: str) -> Pair:
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


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def refusals(way: str) -> Pair:
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
CASES: dict[str, Callable[[], Pair]] = {
    f"{case.__name__}-{way}": lambda case=case, way=way: case(way)  # type: ignore[misc]
    for case in (
        passes_count_epochs,
        epoch_of_the_sampler,
        epoch_of_the_loader,
        state_alone,
        state_before_prepare,
        state_and_its_epoch,
        state_of_a_whole_epoch,
        skipping_loader_is_told_the_epoch,
        skipping_after_the_epoch_was_set,
        checkpoints_of_accelerate,
        refusals,
    )
    for way in WAYS
    if (way, case.__name__) not in NOT
}


# A worker that is forked beside gloo's threads takes ten seconds and more to end.
OF_RANKS = [case for case in CASES if not case.endswith("-workers")]


def made_by(case: str) -> Pair:
    """What the case got and should have."""
    return CASES[case]()
