"""Which backends a test runs on, and on which device: the one place that decides what needs a GPU.

A parameter that only a GPU can run carries the mark `gpu`, so a machine without CUDA does not
collect it, and `-m gpu` selects it elsewhere. Legend: a *kernel* is (backend, device, dtype).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import flexvarlen as fv

Kernel = tuple[str, str, torch.dtype]

ON_CPU = ("reference", "sdpa", "flex")
FLASH = ("varlen", "fa2", "fa3", "fa4")
ALL = ("reference", "sdpa", "flex", "flex_fa4", *FLASH, "nested", "cudnn")
ON_GPU = ("flex", "flex_fa4", "varlen", "cudnn", "nested", "fa2", "fa3", "fa4")
"""Those whose kernels of a GPU are not the CPU's."""

PACKAGES = {
    "fa2": ("flash_attn_2_cuda", "no flash-attn 2"),
    "fa3": ("flash_attn_interface", "no flash-attn 3"),
    # version 2 brings a folder cute too, but not what it is written in
    "fa4": ("cutlass", "no flash-attn 4"),
    "flex_fa4": ("cutlass", "no flash-attn 4"),
}
LACKS = {
    "sdpa": {"softcap", "sinks", "lse"},
    "varlen": {"softcap", "prefix"},
    "cudnn": {"grad", "window", "softcap", "prefix", "chunk", "cross"},
    "nested": {"window", "softcap", "sinks", "lse", "prefix", "chunk", "cross"},
    "fa2": {"prefix"},
    "fa3": {"prefix"},
    "fa4": {"prefix"},
    "flex_fa4": {"sinks", "lse"},
}
"""What a backend refuses on a GPU of those that have it."""


def gpu_param(backend: str, *others: Any, id: str | None = None) -> Any:
    """The parameter (backend, *others), which needs a GPU and the backend's package."""
    marks = [pytest.mark.gpu]
    if backend in PACKAGES:
        module, reason = PACKAGES[backend]
        marks.append(pytest.mark.skipif(find_spec(module) is None, reason=reason))
    return pytest.param(backend, *others, id=id, marks=marks)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def kernels(*names: str, cpu: bool = True, gpu: bool = True) -> list[Any]:
    """Parameters, each a kernel: fp32 on the CPU, bf16 and fp16 on the GPU."""
    params = []
    for name in names:
        if cpu and name in ON_CPU:
            # inductor compiles C++ for seconds for each shape of flex
            slow = [pytest.mark.slow] if name == "flex" else []
            kernel = (name, "cpu", torch.float32)
            params.append(pytest.param(kernel, id=f"{name}-cpu", marks=slow))
        # FlashAttention 4 compiles for seconds for each kind of call: one dtype is enough.
        both = (torch.bfloat16, torch.float16)
        for dtype in () if not gpu else both[:1] if name in ("fa4", "flex_fa4") else both:
            short = str(dtype).removeprefix("torch.")
            marks = gpu_param(name).marks
            params.append(pytest.param((name, "cuda", dtype), id=f"{name}-{short}", marks=marks))
    return params


def with_values(param: Any, *values: Any) -> Any:
    """The parameter with more values behind its own, and its marks."""
    name = "-".join(str(x) for x in (param.id, *values))
    return pytest.param(*param.values, *values, id=name, marks=param.marks)


def serving(params: list[Any], **call: Any) -> list[Any]:
    """Those of `kernels(...)` that serve a call, as `why_not` says where their device is.

    Where there is no GPU its kernels cannot be asked; they are not collected there anyway.
    """
    return [param for param in params if _serves(*param.values[0], **call)]


def _serves(backend: str, device: str, dtype: torch.dtype, **call: Any) -> bool:
    if device == "cuda" and not torch.cuda.is_available():
        return True
    return fv.why_not(backend, device=device, dtype=dtype, **call) is None


def differentiable(kernel: Kernel) -> bool:
    """Whether the kernel has a backward at all."""
    return kernel[:2] != ("flex", "cpu") and kernel[0] != "cudnn"


def skip_if_refused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Skip the test, with the refusal as the reason, where the function raises one.

    The error is dropped first: while it lives, torch before 2.13 keeps the hooks of the checkpoint
    that it was raised in, and they spoil the next test's.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NotImplementedError as refusal:
            reason = str(refusal)
        pytest.skip(reason)

    return run


def refuses(kernel: Kernel, call: Any, *wanted: str) -> bool:
    """Whether the kernel lacks any of these; if so, that `call` raises the sentence."""
    name, _, _ = kernel
    if not LACKS.get(name, set()) & set(wanted):
        return False
    with pytest.raises(NotImplementedError, match=rf"^{name} .*backend="):
        call()
    return True
