"""The suites of the benchmarks, by name; a module is imported when its suite is asked for."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from flexvarlen.runner.suite import Suite


class Entry(NamedTuple):
    """The location of a suite, and what it measures."""

    module: str
    summary: str


SUITES: dict[str, Entry] = {
    "kernels": Entry("attention.kernels", "Every backend beside the kernel that it wraps; auto."),
    "varlen-study": Entry("attention.varlen_study", "FA2 and torch's varlen on a study's rows."),
    "padding": Entry("attention.padding", "Packed against padded attention."),
    "published": Entry("attention.published", "Three published results, measured again."),
    "host-time": Entry("attention.host_time", "The host's time for a call, over the raw kernel's."),
    "model": Entry("model.whole_model", "Steps of whole models, packed, padded and one by one."),
    "packings": Entry("model.packings", "Compiled steps, one packing after another."),
    "hybrid": Entry("model.hybrid", "Steps of a hybrid model, packed, padded and compiled."),
    "trees": Entry("model.trees", "Samples that share prompts, as trees and repeated."),
    "compile": Entry("model.compile_time", "Seconds of torch.compile, cold and warm."),
    "small-inference": Entry("model.small_inference", "Short forwards, where the host decides."),
    "embeddings": Entry(
        "model.embeddings", "Vectors of many short texts, beside sentence-transformers."
    ),
    "end-to-end": Entry("training.end_to_end", "transformers' Trainer, tokens per second."),
    "preference": Entry("training.preference", "TRL's trainers, padded batches and packed rows."),
    "convergence": Entry("training.convergence", "Training from scratch, packed and padded."),
    "scaling-ranks": Entry("training.scaling_ranks", "Training on several GPUs."),
    "mask-build": Entry("masks.mask_build", "Document BlockMasks, beside create_block_mask's."),
    "leaks": Entry("contract.leaks", "In which form of a batch documents leak."),
    "families": Entry("contract.families", "Every verified family in every form of a batch."),
    "capabilities": Entry("contract.capabilities", "What each backend supports."),
}
"""Suites by name, in the order of `flexvarlen bench list`."""


@dataclass(frozen=True)
class FrozenCase:
    """A case whose fields are what its records hold; a subclass adds `name`."""

    def data(self) -> dict[str, Any]:
        """The fields as JSON gives them back: tuples are lists."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found


def suite_of(name: str) -> Suite[Any]:
    """The suite of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in SUITES:
        raise ValueError(
            f"suite must be one of {', '.join(SUITES)}, or all, got {name!r}; choose one."
        )
    module = importlib.import_module(f"flexvarlen.bench.suites.{SUITES[name].module}")
    return cast("Suite[Any]", module.SUITE)
