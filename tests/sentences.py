"""What every refusal's test asks: one sentence, and no kernel called before it."""

from __future__ import annotations

import re

import pytest
import torch

from flexvarlen import BACKENDS, PackedLayout
from flexvarlen.attention.backends.registry import get_backend

TOKENS = 16


@pytest.fixture(autouse=True)
def _no_kernel_may_run(monkeypatch):
    def attend(*_args, **_options):
        pytest.fail("a kernel was called")

    for name in BACKENDS:
        monkeypatch.setattr(type(get_backend(name)), "attend", attend)


def refused(error, contract, remedy, call):
    """`call` raises one sentence: the contract and what was given, a semicolon, and what to do."""
    with pytest.raises(error) as raised:
        call()
    sentence = str(raised.value)
    assert re.search(contract, sentence), sentence
    assert re.search(rf";[^;]*{remedy}", sentence), sentence
    assert sentence.endswith("."), sentence
    assert "\n" not in sentence
    return sentence


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def cu_seqlens(*values, **options):
    return lambda: PackedLayout.from_cu_seqlens(int32(*values), **options)


def lengths(*values, **options):
    return lambda: PackedLayout.from_lengths(values, **options)


def tensor(tokens=TOKENS, heads=4, dim=8, dtype=torch.float32, device="cpu"):
    return torch.zeros(tokens, heads, dim, dtype=dtype, device=device)
