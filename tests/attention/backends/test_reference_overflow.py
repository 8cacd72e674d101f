"""`reference` is the most careful of all backends: others are compared with it."""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv

LAYOUT = fv.PackedLayout.from_lengths([40, 1, 20], total_tokens=64)


def attend(q, k, v, **options):
    return fv.packed_attention(q, k, v, LAYOUT, backend="reference", return_lse=True, **options)


@pytest.mark.pairwise(
    autocast=[False, True],
    options=[{}, {"softcap": 20.0}, {"sinks": torch.ones(4)}],
    dtype=[torch.float16, torch.bfloat16],
)
def test_scores_that_overflow_in_half_precision(dtype, options, autocast):
    """Queries times keys reach 10⁵, and 65,504 is float16's largest number."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(64, heads, 128).to(dtype) for heads in (4, 2, 2))
    q, k = q * 40, k * 40
    exact, exact_lse = attend(q.double(), k.double(), v.double(), **options)
    q.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out, lse = attend(q, k, v, **options)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-3)
    assert torch.autograd.grad(out.float().sum(), q)[0].isfinite().all()
