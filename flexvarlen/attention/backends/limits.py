"""Limits of kernels that several backends run, as sentences why a call is not supported."""

from __future__ import annotations

from flexvarlen.attention.call import AttentionCall

_WIDEST_ORDERED_HEAD_DIM = 192

FA4_GRADIENTS = 32
"""FlashAttention-4's gradients are right for multiples of this head_dim. Measured on an H200 with
4.0.0b36, packed: at 8, 16, 40 and 80 dq, dk and dv are wrong (relative error about 1); at 32, 64,
96, 128, 160, 192 and 256 they are correct."""


def fa3_order_refusal(name: str, call: AttentionCall) -> str | None:
    """Refuse head dims for which FlashAttention-3 has no deterministic backward."""
    if call.ordered_backward and call.needs_grad and call.head_dim > _WIDEST_ORDERED_HEAD_DIM:
        return (
            f"{name} has no deterministic backward for head_dim above {_WIDEST_ORDERED_HEAD_DIM}, "
            f"got {call.head_dim}; use backend='fa2'."
        )
    return None


def fa4_gradient_refusal(name: str, call: AttentionCall) -> str | None:
    """Refuse head dims for which FlashAttention-4's gradients are wrong."""
    if call.needs_grad and call.head_dim % FA4_GRADIENTS:
        return (
            f"{name} gives wrong gradients on FlashAttention-4 unless head_dim is a multiple of "
            f"{FA4_GRADIENTS}, got {call.head_dim}; use backend='fa3' or 'flex'."
        )
    return None
