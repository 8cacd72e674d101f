"""An LSE that raises when differentiated, for kernels that have no gradient for it.

If its gradient were silently dropped, a loss that uses the LSE would have a wrong gradient.

Shape legend: T = tokens of the row, H = num_heads, D = head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


@torch.library.custom_op("flexvarlen::lse_without_gradient", mutates_args=())
def lse_without_gradient(lse_HT: Tensor, q_THD: Tensor, k_THD: Tensor, kernel: str) -> Tensor:
    """Return the LSE as a function of q and k whose backward raises."""
    return lse_HT.clone()


@lse_without_gradient.register_fake
def _(lse_HT: Tensor, q_THD: Tensor, k_THD: Tensor, kernel: str) -> Tensor:
    return torch.empty_like(lse_HT)


@torch.library.custom_op("flexvarlen::refuse_lse_gradient", mutates_args=())
def _refuse_lse_gradient(grad_HT: Tensor, kernel: str) -> Tensor:
    """Return a zero for the gradients of q and k, so that the graph keeps this check.

    Raises if the incoming gradient is not 0; on a GPU, through a device-side assertion, after which
    the process can no longer use the GPU.
    """
    torch._assert_async((grad_HT == 0).all(), _no_gradient(kernel))
    return grad_HT.new_zeros(())


@_refuse_lse_gradient.register_fake
def _(grad_HT: Tensor, kernel: str) -> Tensor:
    return grad_HT.new_empty(())


def _no_gradient(kernel: str) -> str:
    return f"{kernel} has no gradient for the LSE; use backend='flex' or 'reference', or detach it."


def _refuse_gradient(ctx: Any, grad_HT: Tensor) -> tuple[None, Tensor, Tensor, None]:
    if not is_fake(grad_HT):
        raise NotImplementedError(_no_gradient(ctx.kernel))
    # A compiled graph differentiates all of its outputs, and the gradient of the LSE is zero if the
    # loss does not depend on it. This is known only at run time.
    zero = torch.ops.flexvarlen.refuse_lse_gradient(grad_HT, ctx.kernel)
    q_THD, k_THD = ctx.saved_tensors
    return None, *(zero.to(x.dtype).expand_as(x) for x in (q_THD, k_THD)), None  # type: ignore[return-value]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, q_THD, k_THD, ctx.kernel = inputs
    ctx.save_for_backward(q_THD, k_THD)


lse_without_gradient.register_autograd(_refuse_gradient, setup_context=_keep_inputs)
