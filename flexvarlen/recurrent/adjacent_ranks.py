"""Exchange between adjacent ranks if a document continues on the next one.

Each rank holds T consecutive tokens of a row. The convolution needs the last tokens of the previous
rank, and the scan its final state; their gradients are sent back. Only ranks between which a
document continues communicate, and both in the same order.

Shapes: T = tokens of a rank, C channels, REACH = the widest convolution's kernel size - 1.

Imports torch, never transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexvarlen.layout.launch_sizes import NOT_CAPTURED
from flexvarlen.layout.row_split import BoundaryLinks
from flexvarlen.recurrent.tree_parts import REACH


def send(x: Tensor, step: int, group: str) -> Any:
    """Begin to send x to the rank `step` after this one, and return a `Work`.

    Args:
        x: contiguous; must not change before `wait()`.
        step: 1, or -1 for the previous rank.
        group: the name of the ranks' group.
    """
    ranks = _group_of(group)
    return dist.isend(x, group=ranks, group_dst=dist.get_rank(ranks) + step)


def receive(x: Tensor, step: int, group: str) -> Any:
    """Begin to fill x from the rank `step` after this one, and return a `Work`."""
    ranks = _group_of(group)
    return dist.irecv(x, group=ranks, group_src=dist.get_rank(ranks) + step)


def _group_of(name: str) -> Any:
    # imported here, as a torch built without distributed lacks this module
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    return _resolve_process_group(name)  # type: ignore[arg-type]


def shift(sent: Tensor | None, received: Tensor | None, step: int, group: str) -> None:
    """Send to the rank `step` after this one and receive from the one before; skip what is None.

    Not `batch_isend_irecv`, whose first call under NCCL must come from all ranks of the group.
    """
    works = [] if sent is None else [send(sent, step, group)]
    works += [] if received is None else [receive(received, -step, group)]
    for work in works:
        work.wait()


# ---- the tokens before ----


@torch.library.custom_op("flexvarlen::prepend_tokens", mutates_args=(), tags=NOT_CAPTURED)
def prepend_tokens(x_TC: Tensor, links: Tensor, group: str) -> Tensor:
    """`[REACH + T, C]`: the previous rank's last tokens, or zeros if no document continues; x."""
    found, own = BoundaryLinks.of(links), x_TC.contiguous()
    out = x_TC.new_empty(REACH + len(x_TC), x_TC.shape[1])
    out[REACH:] = own
    out[:REACH] = 0
    sent = own[-REACH:] if found.continues_on_next else None
    received = out[:REACH] if found.continues_from_previous else None
    shift(sent, received, 1, group)
    return out


@torch.library.custom_op("flexvarlen::prepend_tokens_backward", mutates_args=(), tags=NOT_CAPTURED)
def _prepend_tokens_backward(grad: Tensor, links: Tensor, group: str) -> Tensor:
    found, grad = BoundaryLinks.of(links), grad.contiguous()
    dx = grad[REACH:].clone()
    returned = dx.new_zeros(REACH, dx.shape[1])
    sent = grad[:REACH] if found.continues_from_previous else None
    shift(sent, returned if found.continues_on_next else None, -1, group)
    dx[-REACH:] += returned
    return dx


@prepend_tokens.register_fake
def _(x_TC: Tensor, links: Tensor, group: str) -> Tensor:
    return x_TC.new_empty(REACH + x_TC.shape[0], x_TC.shape[1])


@_prepend_tokens_backward.register_fake
def _(grad: Tensor, links: Tensor, group: str) -> Tensor:
    return grad.new_empty(grad.shape[0] - REACH, grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, links, ctx.group = inputs
    ctx.save_for_backward(links)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _prepend_tokens_backward(grad, *ctx.saved_tensors, ctx.group), None, None


prepend_tokens.register_autograd(_gradients, setup_context=_keep)


# ---- a state, for scans in plain torch ----


def receive_state(
    shape: tuple[int, ...], dtype: torch.dtype, group: str, sources: Sequence[Tensor]
) -> Tensor:
    """The final state of the previous rank; its gradient is sent back there.

    Args:
        sources: all inputs of the scan. The state requires a gradient if one of them does, as the
            previous rank's output then does.
    """
    found: Tensor = _ReceiveState.apply(shape, dtype, group, *sources)  # type: ignore[no-untyped-call]
    return found


def send_state(out: Tensor, state: Tensor, group: str) -> Tensor:
    """The output of a document; its final state is sent to the next rank."""
    found: Tensor = _SendState.apply(out, state.contiguous(), group)  # type: ignore[no-untyped-call]
    return found


class _ReceiveState(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, group: str, *sources: Tensor
    ) -> Tensor:
        ctx.group = group
        state = sources[0].new_empty(shape, dtype=dtype)
        receive(state, -1, group).wait()
        return state

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        send(grad.contiguous(), -1, ctx.group).wait()
        return (None,) * len(ctx.needs_input_grad)


class _SendState(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, state: Tensor, group: str) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(state)  # a checkpoint sends it again before the gradient is received
        send(state, 1, group).wait()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        of_state = torch.empty_like(*ctx.saved_tensors)
        receive(of_state, 1, ctx.group).wait()
        return grad, of_state, None
