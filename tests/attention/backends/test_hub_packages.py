"""The FlashAttention packages of a GPU machine, laid out as repositories of the Hub.

The builds of the Hub are of the same sources; what is not run is how they are compiled.
"""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from flexvarlen.attention.backends.cu_seqlens import hub
from tests.attention.backends.hub_repositories import results, tensors, write_build
from tests.backends import gpu_param

MODULES = {
    "fa2": {"__init__.py": "from flash_attn import flash_attn_interface\n"},
    "fa3": {
        "__init__.py": "from . import _ops\n",
        "_ops.py": "import flash_attn_interface\nimport torch\n\nops = torch.ops.flash_attn_3\n",
    },
    "fa4": {"__init__.py": "from flash_attn.cute import interface\n"},
}
KINDS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 40},
    "softcap": {"softcap": 5.0},
    "deterministic": {"deterministic": True},
    "sinks": {},
}


@pytest.mark.parametrize("name", [gpu_param(name) for name in MODULES])
def test_forward_and_backward(local_kernels, monkeypatch, tmp_path, name):
    variant = tmp_path / "packages" / "build" / "torch-cuda"
    variant.mkdir(parents=True)
    for file, text in MODULES[name].items():
        (variant / file).write_text(text)
    write_build(variant, name)
    repository = hub.REPOSITORIES[name].name
    monkeypatch.setenv("LOCAL_KERNELS", f"{repository}={tmp_path / 'packages'}")
    layout = fv.PackedLayout.from_lengths([300, 1, 211], total_tokens=520, device="cuda")
    sizes = {"dtype": torch.bfloat16, "device": "cuda", "head_dim": 128}
    ran = []
    for kind, options in KINDS.items():
        heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
        asked = heads | options | {"device": "cuda", "dtype": torch.bfloat16}
        if fv.why_not(name, sinks=kind == "sinks", **asked) is not None:
            continue  # a build without softcap
        leaves = tensors(layout, sinks=kind == "sinks", **sizes)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        expected = results("reference", layout, exact, **options)
        for x, y in zip(results(name, layout, leaves, **options), expected, strict=True):
            assert (x.double() - y).norm() < 0.02 * y.norm(), kind  # bf16: about 0.004
        ran.append(kind)
    assert {"causal", "window", "deterministic", "sinks"} <= set(ran)
    assert hub.origin(name).startswith(str(hub.REPOSITORIES[name]))


@pytest.mark.parametrize("name", [gpu_param("fa2"), gpu_param("fa3")])
def test_compiled(local_kernels, monkeypatch, tmp_path, name):
    test_forward_and_backward(local_kernels, monkeypatch, tmp_path, name)
    torch._dynamo.reset()
    layout = fv.PackedLayout.from_lengths([300, 1, 211], total_tokens=520, device="cuda")
    leaves = tensors(layout, dtype=torch.bfloat16, device="cuda", head_dim=128)
    compiled = torch.compile(fv.packed_attention, fullgraph=True)
    out, *found = results(name, layout, leaves, attend=compiled)
    expected, *grads = results(name, layout, leaves)
    torch.testing.assert_close(out, expected)
    for x, y in zip(found, grads, strict=True):
        assert (x.double() - y.double()).norm() < 0.01 * y.double().norm()
