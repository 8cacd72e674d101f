"""What calls of an unpatched recurrent layer run in float64, which kernels lack."""

from __future__ import annotations

import functools

import pytest
import torch

from flexvarlen.patches.forward.recurrent_layers import _by_document


def plain(x, seq_idx=None):
    return "plain torch"


@functools.wraps(plain)
def kernel(x, seq_idx=None):
    return "kernel"


@pytest.mark.parametrize(
    ("dtype", "seq_idx", "runs"),
    [
        (torch.float32, None, "kernel"),
        (torch.float64, None, "plain torch"),
        # The kernel keeps these documents apart, or transformers refuses; plain torch does not.
        (torch.float64, torch.zeros(1, 4), "kernel"),
    ],
)
def test_reference_in_float64_runs_a_kernel(dtype, seq_idx, runs):
    call = _by_document(kernel, plain)
    assert call(torch.zeros(1, 4, dtype=dtype), seq_idx=seq_idx) == runs
