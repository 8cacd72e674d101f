"""A pytest fixture that verifies isolation, for the tests of models and of training code.

It is not a pytest plugin, which would import torch at the start of every pytest run on the machine.
Import the fixture in a test module or in conftest.py:

    from flexvarlen.verify.isolation.fixture import isolation_verifier  # noqa: F401

    def test_my_model_keeps_documents_apart(isolation_verifier):
        isolation_verifier(my_model, my_collator(my_examples))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from torch import nn

from flexvarlen.patches.isolation.model_run import training_mode, transformers_model
from flexvarlen.patches.isolation.report import IsolationReport
from flexvarlen.patches.isolation.verify import verify_isolation
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.isolation.command import LENGTHS

__all__ = ["isolation_verifier", "packed_batch"]


def packed_batch(
    model: nn.Module, lengths: Sequence[int] = LENGTHS, *, seed: int = 0
) -> PackedBatch:
    """Pack documents of random tokens of the model's vocabulary into one row.

    Raises:
        ValueError: there is no transformers model inside, or a length is below 1.
    """
    vocabulary = int(transformers_model(model).config.get_text_config().vocab_size)
    return PackedBatch.random(lengths, vocabulary, seed)


@pytest.fixture
def isolation_verifier(record_property: Any) -> Callable[..., dict[str, IsolationReport]]:
    """A function that raises `IsolationError` if the model lets a document see another.

    Its arguments are `model`; `batch`, keyword arguments of the forward (default:
    `packed_batch(model)`, passed as input_ids and position_ids); `modes` of the model (default:
    "eval" and "train"; each module's mode is restored afterwards); and the options of
    `verify_isolation`. It returns the reports by mode, and writes their sentences into pytest's
    report (`--junitxml`).

    Raises:
        IsolationError, NotImplementedError, ValueError: as `verify_isolation`.
    """

    def verify(
        model: nn.Module,
        batch: PackedBatch | Mapping[str, Any] | None = None,
        *,
        modes: Sequence[str] = ("eval", "train"),
        **options: Any,
    ) -> dict[str, IsolationReport]:
        __tracebackhide__ = True
        if not modes or not set(modes) <= {"eval", "train"}:
            raise ValueError(f'modes must be among "eval" and "train", got {modes!r}; pass one.')
        inputs = packed_batch(model) if batch is None else batch
        reports = {}
        for mode in modes:
            with training_mode(model):
                model.train(mode == "train")
                reports[mode] = verify_isolation(model, inputs, **options)
            record_property(f"isolation in {mode} mode", reports[mode].sentence())
        return reports

    return verify
