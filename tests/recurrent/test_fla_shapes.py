"""fla's scans as operators, without their kernels: what autograd and a graph see of them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexvarlen.recurrent.fla_kernels.check import OPERATORS
from flexvarlen.recurrent.fla_kernels.levels import Boundaries
from tests.recurrent.cases import HV, H, K, T, V, branches, documents

BY_TOKEN = {
    "gated delta rule": [(H, K), (H, K), (HV, V), (HV,), (HV,)],
    "Kimi's delta rule": [(H, K), (H, K), (H, V), (H, K), (H,)],
    "Mamba-2's scan": [(H, K), (H, K), (HV, V), (HV,)],
}


@pytest.mark.parametrize("row", ["documents", "trees", "part"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_every_input_has_its_gradient(kind, row):
    boundaries = Boundaries.of(documents() if row == "documents" else branches())
    if row == "part":
        boundaries = boundaries._replace(part=torch.tensor(1), layer=2, expects_backward=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [
            torch.empty(1, T, *shape, requires_grad=True, dtype=dtype)
            for shape, dtype in zip(BY_TOKEN[kind], dtypes(), strict=False)
        ]
        out, *others = OPERATORS[kind](*inputs, *boundaries)
        assert out.shape == inputs[2].shape
        assert not any(x.requires_grad for x in others)
        grads = torch.autograd.grad(out.sum(), inputs)
    for x, grad in zip(inputs, grads, strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)


def dtypes():
    return torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16
