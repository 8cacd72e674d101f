"""torch's own switch, which `varlen` needs; it also poisons fresh memory with NaN."""

from __future__ import annotations

from contextlib import contextmanager

import torch


@contextmanager
def torch_is_deterministic(on=True):
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
