"""What the table of machines says of each backend."""

from __future__ import annotations

import re

import pytest
import torch

from flexvarlen.attention.backends import machines
from flexvarlen.attention.backends.machines import Machine, refusal, row_of
from flexvarlen.attention.backends.registry import BACKENDS
from flexvarlen.attention.call import AttentionCall

OLD, HOPPER, AMD = "8.0 \\(Ampere\\)", "a Hopper GPU", "needs an NVIDIA GPU"
CUDA = "needs a CUDA GPU, got"


def call_on(device, head_dim=128, **options):
    return AttentionCall(torch.device(device), torch.bfloat16, 8, 2, head_dim, **options)


@pytest.fixture
def on(monkeypatch):
    """A function that makes this machine one of a vendor and a capability."""

    def make(vendor, major):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        monkeypatch.setattr(torch.version, "hip", "7" if vendor == "rocm" else None)
        return "cuda" if vendor in ("nvidia", "rocm") else vendor

    return make


@pytest.mark.parametrize(
    ("vendor", "major", "served", "refused"),
    [
        ("nvidia", 7, "flex", {"fa2": OLD, "varlen": OLD, "cudnn": OLD, "fa4": OLD}),
        ("nvidia", 8, "flex fa2 varlen nested", {"fa3": HOPPER, "fa4": "no backward on compute"}),
        ("nvidia", 9, "flex flex_fa4 fa2 fa3 fa4 varlen nested", {"cudnn": "forward-only"}),
        ("nvidia", 10, "flex flex_fa4 fa2 fa4 varlen", {"fa3": HOPPER}),
        ("nvidia", 12, "flex fa2 fa4 varlen nested", {"flex_fa4": "Hopper or Blackwell"}),
        ("nvidia", 13, "flex fa2 varlen", {"fa4": "8.x to 12.x", "flex_fa4": "Hopper or"}),
        ("rocm", 9, "flex fa2 varlen nested", {"fa3": AMD, "fa4": AMD, "cudnn": AMD}),
        ("xpu", 0, "flex fa2", {"varlen": AMD, "fa3": AMD, "nested": AMD}),
        ("mps", 0, "", {"flex": "no backward on MPS", "fa2": CUDA, "varlen": CUDA}),
        ("cpu", 0, "", {"flex": "no backward on the CPU", "fa2": CUDA, "cudnn": CUDA}),
        ("meta", 0, "", {"flex": CUDA, "fa2": CUDA}),
    ],
)
def test_what_a_machine_serves(on, vendor, major, served, refused):
    """fa4 was refused on 8.x and 12.x, where FlashAttention-4 runs."""
    call = call_on(on(vendor, major))
    for name in ("sdpa", "reference", *served.split()):
        assert refusal(name, call) is None
    for name, why in refused.items():
        assert re.search(f"^{name} .*{why}.*; use backend='", refusal(name, call))


@pytest.mark.parametrize(
    ("major", "dims", "needs_grad", "served"),
    [
        (9, (8, 40, 192, 256), False, (8, 40, 192, 256)),
        (9, (8, 40, 192, 256, 264), True, (192, 256)),
        (10, (40, 128, 192, 256), False, (40, 128, 256)),
        (10, (40, 128, 192, 256), True, (128, 256)),
        (8, (40, 128, 192), False, (40, 128)),
        (8, (64, 128), True, ()),
        (12, (40, 64, 128, 192), True, (64, 128)),
    ],
)
def test_head_dims_of_fa4(on, major, dims, needs_grad, served):
    calls = {dim: call_on(on("nvidia", major), dim, needs_grad=needs_grad) for dim in dims}
    assert tuple(dim for dim, call in calls.items() if refusal("fa4", call) is None) == served


def test_no_gpu_where_one_is_asked_for():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "fa2 needs a CUDA GPU, and torch finds none here" in refusal("fa2", call_on("cuda"))
    assert refusal("sdpa", call_on("cuda")) is None


def test_the_table_has_every_backend_on_every_machine():
    for vendor in machines.VENDORS:
        for major in range(14) if vendor in ("nvidia", "rocm") else [0]:
            assert all(row_of(name, Machine(vendor, major)) for name in BACKENDS)
