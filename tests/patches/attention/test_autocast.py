"""Mixed precision: under autocast a rotation leaves q and k in fp32 beside v in bf16."""

from __future__ import annotations

import copy

import pytest
import torch

import flexvarlen as fv
from tests.oracle import assert_as_accurate
from tests.tiny_models import shared_model

LENGTHS = (50, 11, 1, 30)


def alone(model, ids):
    with torch.no_grad():
        return torch.cat([model(x[None], use_cache=False).logits[0] for x in ids[0].split(LENGTHS)])


@pytest.mark.parametrize(
    ("kind", "backend", "device"),
    [
        ("llama", "sdpa", "cpu"),
        ("qwen3", "reference", "cpu"),
        pytest.param("qwen3", "flex", "cpu", marks=pytest.mark.slow),
    ]
    + [
        pytest.param(kind, name, "cuda", marks=pytest.mark.gpu)
        for kind in ("llama", "qwen3")
        for name in ("flex", "varlen", "fa2")
    ],
)
def test_fp32_model_packs_under_autocast(kind, backend, device):
    reason = fv.why_not(backend, device=device, dtype=torch.bfloat16, needs_grad=False)
    if reason is not None:
        pytest.skip(reason)
    model = copy.deepcopy(shared_model(kind)).to(device, torch.float32).eval()
    ids = torch.randint(3, model.config.vocab_size, (1, sum(LENGTHS)), device=device)
    exact = alone(copy.deepcopy(model).double(), ids)
    layout = fv.PackedLayout.from_lengths(LENGTHS, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        baseline = alone(model, ids)
        with torch.no_grad(), fv.patched(model, backend):
            packed = model(input_ids=ids, packed_layout=layout).logits[0]
    assert packed.dtype == torch.bfloat16
    assert_as_accurate(packed, exact, baseline, 2)
