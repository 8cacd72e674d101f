"""Recurrent layers of a reference run in plain torch, whatever kernels are installed."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

from flexvarlen.reference.model import float64_model, run_alone
from flexvarlen.reference.recurrences import CONVOLUTION, FUNCTIONS, plain_recurrences, replaced
from tests.reference.test_model import LENGTHS, build, ids


def kernel_of(function):
    """A kernel that stands in for a function, as transformers wraps it."""

    @functools.wraps(function)
    def kernel(*args, **kwargs):
        raise AssertionError("a kernel ran")

    return kernel


def test_the_reference_runs_no_kernel():
    model = build("qwen3_5_text", torch.float32)
    with replaced(model, dict.fromkeys(FUNCTIONS, kernel_of)):
        with pytest.raises(AssertionError, match="a kernel ran"):
            model(ids())
        run_alone(float64_model(model), ids(), LENGTHS)
        with plain_recurrences(model), torch.no_grad():
            model(ids())


def test_functions_are_replaced_in_the_block_alone():
    model = build("qwen3_5_text")
    module = sys.modules[type(model).__module__]
    before = getattr(module, CONVOLUTION)
    with replaced(model, {CONVOLUTION: lambda function: max}):
        assert getattr(module, CONVOLUTION) is max
    assert getattr(module, CONVOLUTION) is before
