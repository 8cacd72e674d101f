"""`fa4`: FlashAttention-4, `flash_attn.cute`. Optional: imported when it is first asked about.

It compiles a kernel for each kind of call, which takes seconds, and keeps it in the cache folder.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import KernelCall
from flexvarlen.attention.call import AttentionRequest
from flexvarlen.env import FA4_FOLDER, FA4_KEEPS, cache_folder

INSTALL = "install it with: pip install 'flexvarlen[fa4]'."
REINSTALL = (
    "install it again, after flash-attn, which puts an old copy of the folder in its place: pip "
    "install --force-reinstall --no-deps flash-attn-4."
)
_HOPPER, _BLACKWELL = (9,), (10, 11)
_NEEDED = ("cu_seqlens_q", "softcap", "window_size_left", "deterministic")
"""Arguments of the backward that versions before 4.0.0b36 lack, some or all."""


class FlashAttention4Backend(CuSeqlensBackend):
    """FlashAttention-4 over cu_seqlens."""

    name = "fa4"
    head_dims = (8, 256)

    def why_missing(self, device: torch.device) -> str | None:
        """Needs the package and a Hopper or Blackwell GPU."""
        return cute_refusal(self.name, device)

    def why_not_this(self, request: AttentionRequest) -> str | None:
        """Head dimensions differ by GPU; gradients want multiples of 32."""
        fits_blackwell = request.head_dim <= 128 or request.head_dim == 256
        if not fits_blackwell and not _is_hopper(request.device):
            return (
                "fa4 needs head_dim of at most 128, or 256, on Blackwell, got "
                f"{request.head_dim}; use backend='flex'."
            )
        if request.batch_invariant and request.head_dim == 256 and not _is_hopper(request.device):
            return (
                "fa4 chooses kernels by the number of documents for head_dim 256 on Blackwell, and "
                "is not batch invariant there; use backend='fa2'."
            )
        return gradient_refusal(self.name, request)


def gradient_refusal(name: str, request: AttentionRequest) -> str | None:
    """Where FlashAttention-4's gradients are wrong.

    Measured on an H200 with 4.0.0b36, packed: at head_dim 8, 16, 40 and 80 dq, dk and dv are wrong
    by their own size, at 32, 64, 96, 128, 160, 192 and 256 they are right.
    """
    if request.needs_grad and request.head_dim % 32:
        return (
            f"{name} gives wrong gradients on FlashAttention-4 unless head_dim is a multiple of "
            f"32, got {request.head_dim}; use backend='fa3' or 'flex'."
        )
    return None


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in _HOPPER


@contextmanager
def keeping_kernels(device: torch.device) -> Iterator[None]:
    """Around the import of `flash_attn.cute`, which looks once: FA4 keeps compiled kernels.

    In the cache folder, as inductor and Triton do theirs, unless the environment says anything
    about it, which it does not to other processes. Not in a folder that is another user's, or that
    cannot be written or locked. A folder a kind of GPU, and none where there are two kinds: not all
    of FA4's keys name it.
    """
    import fcntl  # POSIX alone, as FA4

    kinds = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    if FA4_KEEPS in os.environ or FA4_FOLDER in os.environ or len(kinds) != 1:
        yield
        return
    major, minor = torch.cuda.get_device_capability(device)
    try:
        folder = cache_folder() / f"fa4-sm{major}{minor}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        own = folder.stat().st_uid == os.geteuid()
    except (OSError, RuntimeError):  # the latter of a folder of ~somebody who is nobody
        own = False
    if not own:
        yield
        return
    os.environ |= {FA4_KEEPS: "1", FA4_FOLDER: str(folder)}
    try:
        yield
    finally:
        for name in (FA4_KEEPS, FA4_FOLDER):
            os.environ.pop(name, None)


_IMPORTING = threading.Lock()
"""One thread at a time puts variables into the environment, and takes them out."""


@cache
def _import_problem(device: torch.device) -> str | None:
    """Why the installed `flash_attn.cute` is not usable, without a full stop, or None."""
    try:
        with _IMPORTING, keeping_kernels(device):
            from flash_attn.cute.interface import _flash_attn_bwd
    except Exception as error:  # of two packages that do not fit each other, anything
        return f"which does not import here ({type(error).__name__}: {error})"
    missing = [
        name for name in _NEEDED if name not in inspect.signature(_flash_attn_bwd).parameters
    ]
    return f"which is too old here (it lacks {', '.join(missing)})" if missing else None


def cute_refusal(name: str, device: torch.device) -> str | None:
    """Why FlashAttention-4 cannot run on this machine, or None."""
    # FA2's package brings an old copy of the folder: what FA4 is written in tells them apart.
    if find_spec("cutlass") is None or find_spec("flash_attn") is None:
        return f"{name} needs flash_attn.cute, FlashAttention-4, which is not installed; {INSTALL}"
    if torch.cuda.get_device_capability(device)[0] not in (*_HOPPER, *_BLACKWELL):
        return f"{name} needs a Hopper or Blackwell GPU; use backend='fa2' or 'flex'."
    problem = _import_problem(device)
    if problem is not None:
        return f"{name} needs flash_attn.cute, FlashAttention-4, {problem}; {REINSTALL}"
    return None


class _FlashAttention4Kernel:
    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out_THD, lse_HT, *_ = _flash_attn_fwd(
            call.q_THD,
            call.k_THD,
            call.v_THD,
            cu_seqlens_q=call.cu_seqlens_q,
            cu_seqlens_k=call.cu_seqlens_k,
            max_seqlen_q=call.max_seqlen_q,
            max_seqlen_k=call.max_seqlen_k,
            softmax_scale=call.scale,
            causal=call.causal,
            softcap=call.softcap or None,
            window_size_left=_side(call.left),
            window_size_right=_side(call.right),
            num_splits=1,  # more are for decoding, and would depend on the batch
            return_lse=True,
        )
        return out_THD, lse_HT

    def backward(
        self, call: KernelCall, grad_THD: Tensor, out_THD: Tensor, lse_HT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_bwd

        dq, dk, dv = _flash_attn_bwd(
            call.q_THD,
            call.k_THD,
            call.v_THD,
            out_THD,
            grad_THD,
            lse_HT,
            call.scale,
            call.causal,
            call.softcap,
            window_size_left=_side(call.left),
            window_size_right=_side(call.right),
            cu_seqlens_q=call.cu_seqlens_q,
            cu_seqlens_k=call.cu_seqlens_k,
            max_seqlen_q=call.max_seqlen_q,
            max_seqlen_k=call.max_seqlen_k,
            deterministic=call.deterministic,
        )
        return dq, dk, dv


def _side(keys: int) -> int | None:
    """A side of a window as FA4 takes it."""
    return None if keys < 0 else keys


BACKEND = FlashAttention4Backend(_FlashAttention4Kernel())
