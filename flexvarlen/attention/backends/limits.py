"""Checks shared by several backends; each returns why a call is not supported, or None."""

from __future__ import annotations

import torch

from flexvarlen.attention.call import AttentionCall

HALF = (torch.bfloat16, torch.float16)

_WIDEST_ORDERED_HEAD_DIM = 192


def ampere_refusal(name: str, device: torch.device) -> str | None:
    """Refuse GPUs that the FlashAttention-2 kernels (torch's and the package's) do not support."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return (
            f"{name} needs compute capability 8.0 (Ampere) or newer; use backend='flex' or 'sdpa'."
        )
    return None


def half_refusal(name: str, call: AttentionCall) -> str | None:
    """Refuse dtypes other than bfloat16 and float16."""
    if call.dtype not in HALF:
        return (
            f"{name} needs bfloat16 or float16, got {call.dtype}; convert the model or use "
            "backend='flex'."
        )
    return None


def fa3_order_refusal(name: str, call: AttentionCall) -> str | None:
    """Refuse head dims for which FlashAttention-3 has no deterministic backward."""
    if call.ordered_backward and call.needs_grad and call.head_dim > _WIDEST_ORDERED_HEAD_DIM:
        return (
            f"{name} has no deterministic backward for head_dim above {_WIDEST_ORDERED_HEAD_DIM}, "
            f"got {call.head_dim}; use backend='fa2'."
        )
    return None


def fa4_gradient_refusal(name: str, call: AttentionCall) -> str | None:
    """Refuse head dims for which FlashAttention-4's gradients are wrong.

    Measured on an H200 with 4.0.0b36, packed: at head_dim 8, 16, 40 and 80 dq, dk and dv are wrong
    (relative error about 1); at 32, 64, 96, 128, 160, 192 and 256 they are correct.
    """
    if call.needs_grad and call.head_dim % 32:
        return (
            f"{name} gives wrong gradients on FlashAttention-4 unless head_dim is a multiple of "
            f"32, got {call.head_dim}; use backend='fa3' or 'flex'."
        )
    return None
