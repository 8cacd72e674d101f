"""A backend that cannot serve a call says why, in one sentence, and nothing else runs."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType

import pytest
import torch
from torch.autograd import forward_ad

from flexvarlen import PackedLayout, packed_attention, why_not
from flexvarlen.attention.backends import fa4_package, flex_fa4
from flexvarlen.attention.call import AttentionCall
from flexvarlen.env import FA4_FOLDER, FA4_KEEPS
from tests.sentences import (  # noqa: F401
    TOKENS,
    attend,
    failed_refusals,
    no_kernel_runs,
    refused,
    tensor,
)


def of_dtype(dtype):
    return {name: tensor(dtype=dtype) for name in "qkv"}


def test_a_backend_that_cannot_says_why_and_nothing_else_runs():
    numbers = "has no softcap, no sinks and no LSE"
    cases = [
        ("flex has no backward on the CPU", "flex", {"q": tensor().requires_grad_()}),
        ("flex returns no LSE on the CPU", "flex", {"return_lse": True}),
        ("flex returns no LSE on the CPU", "flex", {"sinks": torch.zeros(4)}),
        (
            "flex needs float32, bfloat16 or float16, got torch.float64",
            "flex",
            of_dtype(torch.float64),
        ),
        *(
            (f"{name} needs a CUDA GPU, got cpu", name, {})
            for name in ("flex_fa4", "varlen", "cudnn", "nested", "fa2", "fa3", "fa4")
        ),
        (f"sdpa {numbers}", "sdpa", {"softcap": 3.0}),
        (f"sdpa {numbers}", "sdpa", {"sinks": torch.zeros(4)}),
        (f"sdpa {numbers}", "sdpa", {"return_lse": True}),
        ("sdpa needs a float dtype, got torch.int32", "sdpa", of_dtype(torch.int32)),
        ("reference needs a float dtype, got torch.int32", "reference", of_dtype(torch.int32)),
        ("reference is not batch invariant", "reference", {"batch_invariant": True}),
    ]
    calls = [(words, {"backend": backend, **given}) for words, backend, given in cases]
    assert failed_refusals(calls, attend, NotImplementedError) == []


def test_unknown_backend():
    words = "backend must be one of reference, sdpa, flex, flex_fa4, "
    assert failed_refusals([(words, {"backend": "flash"})], attend) == []


def test_auto_gives_the_reason_of_each_backend_that_it_tried():
    call = partial(attend, {"softcap": 2.0, "batch_invariant": True})
    words = "^no backend can serve this call. sdpa: sdpa has no softcap"
    refused(NotImplementedError, words, "reference is not batch invariant", call)


def test_dual_tensor_is_refused():
    """flex and the kernels over cu_seqlens would leave the tangent out without a word."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensor(), tensor())
        cases = [
            (f"{chosen} has no forward-mode gradient", {name: dual, "backend": backend})
            for backend, chosen in (("sdpa", "sdpa"), ("flex", "flex"), ("auto", "sdpa"))
            for name in "qkv"
        ]
        assert failed_refusals(cases, attend, NotImplementedError) == []


IN_A_GRAPH = ("compiled", "compiled_inside")


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        *(("sdpa", how) for how in ("plain", "nested", *IN_A_GRAPH)),
        *(("flex", how) for how in ("plain", "nested")),
        # sdpa holds it by default: a graph is refused before a backend is called.
        *(pytest.param("flex", how, marks=pytest.mark.slow) for how in IN_A_GRAPH),
    ],
)
def test_forward_mode_transform_is_refused(backend, how):
    torch._dynamo.reset()
    attend = partial(packed_attention, layout=PackedLayout.from_lengths([TOKENS]), backend=backend)
    compile_ = partial(torch.compile, backend="eager")
    qkv = (tensor(), tensor(), tensor())
    one = torch.ones(())

    def weighed(q, k, v):  # of whose tangents the inner level knows nothing
        return torch.func.jvp(lambda s: attend(q, k, v) * s, (one,), (one,))[1]

    def tangent(function, *inputs):
        return torch.func.jvp(function, inputs, inputs)[1]

    run = {
        "plain": partial(tangent, attend, *qkv),
        "nested": partial(tangent, weighed, *qkv),
        "compiled": partial(compile_(partial(tangent, attend)), *qkv),
        "compiled_inside": partial(dual, compile_(attend), *qkv),
    }[how]
    with pytest.raises(Exception, match="no forward-mode gradient"):
        run()


def dual(function, q, k, v):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize(
    ("name", "package", "remedy"),
    [
        ("fa2", "flash-attn, version 2", r"pip install flash-attn --no-build"),
        ("fa3", "flash_attn_interface", "build it from the folder hopper"),
        ("fa4", "flash_attn.cute", r"pip install 'flash-attn-4>="),
        ("flex_fa4", "flash_attn.cute", r"pip install 'flash-attn-4>="),
    ],
)
def test_missing_package_says_how_to_get_it(monkeypatch, name, package, remedy):
    from flexvarlen.attention.backends.cu_seqlens import fa2, fa3, hub

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in (fa2, fa3, fa4_package, hub):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    reason = why_not(name, device="cuda", dtype=torch.bfloat16)
    assert f"{name} needs" in reason
    assert package in reason
    assert re.search(remedy, reason)
    assert (name == "flex_fa4") ^ ("kernels, which loads it, is not installed" in reason)


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A GPU by name, an empty cache folder, and an environment that says nothing of FA4's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("FLEXVARLEN_CACHE", str(tmp_path))
    for name in (FA4_KEEPS, FA4_FOLDER):
        monkeypatch.delenv(name, raising=False)
    return torch.device("cuda")


def kept(device):
    """What FA4's import would find in its two variables."""
    with fa4_package._keeping_kernels(device):
        return os.environ.get(FA4_KEEPS), os.environ.get(FA4_FOLDER)


def test_fa4_keeps_its_kernels(hopper, tmp_path):
    before = dict(os.environ)
    assert kept(hopper) == ("1", str(tmp_path / "fa4-sm90"))
    assert os.environ == before  # other processes may have another GPU
    assert list((tmp_path / "fa4-sm90").iterdir()) == []


def test_fa4_that_does_not_import_is_refused(hopper, monkeypatch):
    """Of two packages that do not fit each other, whatever they raise; several threads ask."""

    class Broken(ModuleType):
        def __getattr__(self, name):
            time.sleep(0.01)
            raise RuntimeError("cutlass is another")

    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", Broken("interface"))
    monkeypatch.setattr(fa4_package, "find_spec", lambda name: name)
    before = dict(os.environ)
    fa4_package._import_problem.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: fa4_package.package_refusal("fa4", hopper), range(4)))
    fa4_package._import_problem.cache_clear()
    (reason,) = found
    assert ": it cannot be imported here (RuntimeError: cutlass is another)" in reason
    assert reason.endswith("pip install --force-reinstall --no-deps flash-attn-4.")
    assert os.environ == before


@pytest.mark.parametrize(("name", "value"), [(FA4_KEEPS, "0"), (FA4_FOLDER, "/elsewhere")])
def test_fa4_keeps_kernels_as_its_own_environment_says(hopper, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    found = {FA4_KEEPS: None, FA4_FOLDER: None} | {name: value}
    assert kept(hopper) == tuple(found.values())


@pytest.mark.parametrize("why", ["no locks", "no folder", "another user's", "two kinds of GPU"])
def test_fa4_keeps_no_kernels_where_they_would_fail(hopper, monkeypatch, tmp_path, why):
    def refuse(file, how):
        raise OSError(38, "no locks on this file system")

    if why == "no locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    elif why == "no folder":
        (tmp_path / "fa4-sm90").write_text("a file")
    elif why == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9 + (i == 1), 0))
    assert kept(hopper) == (None, None)


@pytest.mark.parametrize(
    ("behind", "kind", "reason"),
    [
        ("FA4", {"head_dim": 40}, "wrong gradients on FlashAttention-4 unless.* multiple of 32"),
        ("FA3", {"head_dim": 256, "deterministic": True}, "no deterministic backward for head_dim"),
    ],
)
def test_what_the_kernel_behind_varlen_lacks(monkeypatch, behind, kind, reason):
    """torch.nn.attention.activate_flash_attention_impl changes it."""
    from flexvarlen.attention.backends.cu_seqlens import varlen

    call = AttentionCall(torch.device("cuda"), torch.bfloat16, 4, 2, **kind)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert varlen.BACKEND.why_unsupported(call) is None
    monkeypatch.setattr(varlen, "flash_attention_impl", lambda: behind)
    assert re.search(reason, varlen.BACKEND.why_unsupported(call))
    assert varlen.BACKEND.why_unsupported(call._replace(needs_grad=False)) is None


@pytest.mark.parametrize("keeps_masks", [False, True])
def test_flex_fa4_refuses_graphs_that_lose_the_mask(monkeypatch, hopper, keeps_masks):
    monkeypatch.setattr(flex_fa4, "package_refusal", lambda *_: None)
    monkeypatch.setattr(flex_fa4, "_INDUCTOR_KEEPS_MASKS", keeps_masks)
    asked = partial(why_not, "flex_fa4", device=hopper, dtype=torch.bfloat16)
    assert asked() is asked(needs_grad=False) is asked(compiled=True) is None
    reason = asked(compiled=True, needs_grad=False) or ""
    assert (
        "torch 2.13 or later in a compiled graph without gradients" in reason
    ) is not keeps_masks


@pytest.mark.gpu
def test_head_dim_or_dtype_that_a_gpu_kernel_lacks():
    dims = "varlen needs head_dim a multiple of 8 and at most 256, got "
    cases = [
        (f"{dims}264", "varlen", {"dim": 264, "dtype": torch.bfloat16}),
        (f"{dims}60", "varlen", {"dim": 60, "dtype": torch.bfloat16}),
        ("varlen needs bfloat16 or float16, got torch.float32", "varlen", {"dim": 64}),
        ("flex needs head_dim at least 16, got 8", "flex", {"dtype": torch.bfloat16}),
    ]
    layout = PackedLayout.from_lengths([TOKENS], device="cuda")
    for words, backend, kind in cases:
        qkv = {name: tensor(device="cuda", **kind) for name in "qkv"}
        given = {**qkv, "layout": layout, "backend": backend}
        assert failed_refusals([(words, given)], attend, NotImplementedError) == []
