"""`mlp_chunk_tokens`: the MLPs of a model's layers, chunk by chunk, in the backward too.

A checkpointed layer recomputes its MLP, whose intermediates are several times as wide as hidden
states, for all tokens at once. Here forward and backward run one chunk of tokens at a time (a tiled
MLP), and the MLP's input alone is kept.

Shapes: T = tokens, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.random import fork_rng
from torch.utils.checkpoint import get_device_states, set_device_states

from flexvarlen.patches.forward.chunk_tokens import Autocast, autocast_of
from flexvarlen.patches.forward.wrapper import (
    Steps,
    call_own,
    unchanged,
    unwrap_marked,
    wrap_forward,
)
from flexvarlen.patches.models.layers import dense_mlps

MLP_TOKENS = "_flexvarlen_mlp_tokens"
"""Attribute of a wrapped MLP: the tokens of a chunk."""


def chunk_mlps(tower: nn.Module, tokens: int) -> None:
    """Make the MLPs of a tower's layers run this many tokens at a time."""
    for mlp in dense_mlps(tower):
        mlp.__dict__[MLP_TOKENS] = tokens
        wrap_forward(mlp, MLP_STEPS)


def unchunk_mlps(model: nn.Module) -> None:
    """Undo `chunk_mlps` of a model's tower, also of MLPs that were wrapped since."""
    unwrap_marked(model, MLP_TOKENS)


def _in_chunks(module: nn.Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An MLP's outputs of hidden states `[..., H]`; in a compiled graph, of all at once."""
    (hidden,) = args or kwargs.values()
    size: int | None = module.__dict__.get(MLP_TOKENS)  # None: unpatched, below a hook
    if torch.compiler.is_compiling() or size is None or hidden.shape[:-1].numel() <= size:
        return call_own(module, own, (hidden,), {})
    parameters = tuple(module.parameters())
    if any(x._backward_hooks for x in parameters):
        raise NotImplementedError(
            "parameters of an MLP with mlp_chunk_tokens must have no hooks, which would run for "
            f"each chunk, got one in {type(module).__name__}; use "
            "register_post_accumulate_grad_hook."
        )
    learns = any(x.requires_grad for x in (hidden, *parameters))
    kept = _KeepInput.apply(hidden, hidden.new_empty(0, requires_grad=learns))  # type: ignore[no-untyped-call]
    return _Chunked.apply(kept, _Call.of(module, own, size, kept), *parameters)  # type: ignore[no-untyped-call]


MLP_STEPS = Steps(unchanged, call=_in_chunks)


@dataclass(frozen=True)
class _Call:
    """A call of an MLP, with what its backward needs to repeat it.

    Attributes:
        module, own: the MLP, and its instance forward if it has one.
        size: tokens of a chunk.
        keeper: the node of `_KeepInput`; None if nothing requires gradients.
        autocast: of the forward.
        rng: random state of the CPU, for dropout.
        devices, device_rngs: accelerators, and their random states.
    """

    module: nn.Module
    own: Any
    size: int
    keeper: Any
    autocast: Autocast
    rng: Tensor
    devices: list[int]
    device_rngs: list[Tensor]

    @classmethod
    def of(cls, module: nn.Module, own: Any, size: int, hidden: Tensor) -> _Call:
        """The call on these hidden states, with autocast and the random state of now."""
        states = torch.get_rng_state(), *get_device_states(hidden)
        return cls(module, own, size, hidden.grad_fn, autocast_of(hidden), *states)

    def chunks(self, tokens: int) -> Iterator[slice]:
        """The chunks of this many tokens."""
        return (slice(first, first + self.size) for first in range(0, tokens, self.size))

    def outputs(self, chunk_TH: Tensor) -> Tensor:
        """The MLP's own, `[T, H]`, of a chunk of hidden states."""
        # Without a cache: weights that are cast here, without a graph, must not be used outside.
        with torch.autocast(*self.autocast, cache_enabled=False):
            outputs: Tensor = call_own(self.module, self.own, (chunk_TH[None],), {})[0]
        return outputs

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Inside, chunks compute what they did in the forward, and keep their graph."""
        kind = self.autocast[0]
        with torch.enable_grad(), fork_rng(self.devices, device_type=kind):
            torch.set_rng_state(self.rng)
            set_device_states(self.devices, self.device_rngs, device_type=kind)
            yield


class _KeepInput(torch.autograd.Function):
    """Keeps the input of `_Chunked`, before that runs.

    A non-reentrant checkpoint stops recomputing a layer at the last tensor that the layer saved. If
    `_Chunked` saved its input itself, that would be after its forward, which would run once more.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, learns: Tensor) -> Tensor:
        """The same hidden states, with a node if one of the two tensors requires gradients."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        """The gradient as it is."""
        return grads[0], None


class _Chunked(torch.autograd.Function):
    """An MLP, called chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: _Call, *parameters: Tensor) -> Tensor:
        """The outputs `[..., H]` of hidden states `[..., H]`; autograd needs the parameters."""
        # Not by save_for_backward: FSDP frees and refills the storage of these tensors.
        ctx.call, ctx.parameters = call, parameters
        ctx.versions = [x._version for x in parameters]
        hidden_TH = hidden.flatten(0, -2)
        found: Tensor | None = None
        for chunk in call.chunks(len(hidden_TH)):
            outputs = call.outputs(hidden_TH[chunk])
            if found is None:
                found = outputs.new_empty(len(hidden_TH), outputs.shape[-1])
            found[chunk] = outputs
        assert found is not None
        return found.view(*hidden.shape[:-1], -1)

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        """The gradients; those of parameters are summed over the chunks in float32 at least."""
        call: _Call = ctx.call
        (hidden,) = call.keeper.saved_tensors  # which a checkpoint computes now
        parameters: tuple[Tensor, ...] = ctx.parameters
        if not parameters:
            raise RuntimeError(
                "an MLP with mlp_chunk_tokens must have parameters, got "
                f"{type(call.module).__name__} without any, as FSDP1 leaves it; pass "
                "use_orig_params=True, and non-reentrant checkpoints."
            )
        if ctx.versions != [x._version for x in parameters]:
            raise RuntimeError(
                "parameters of an MLP with mlp_chunk_tokens must be the same in the backward, got "
                "some that were changed in place; step the optimizer after the backward."
            )
        learned = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        sums: list[Tensor | None] = [None] * len(parameters)
        hidden_TH, grad_TH = hidden.flatten(0, -2), grad_output.flatten(0, -2)
        needs_hidden = call.keeper.needs_input_grad[0]
        found_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        with call.repeated():
            for chunk in call.chunks(len(hidden_TH)):
                leaf_TH = hidden_TH[chunk].detach().requires_grad_(needs_hidden)
                inputs = [parameters[i] for i in learned] + [leaf_TH] * needs_hidden
                outputs = call.outputs(leaf_TH)
                grads = torch.autograd.grad(outputs, inputs, grad_TH[chunk], allow_unused=True)
                if found_TH is not None:
                    found_TH[chunk] = grads[-1]
                for i, grad in zip(learned, grads, strict=False):
                    sums[i] = _added(sums[i], grad)
        found = None if found_TH is None else found_TH.view(hidden.shape)
        return found, None, *sums  # which autograd casts to the parameters' dtypes


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor:
    """A sum, in float32 at least, with the gradient of another chunk.

    Raises:
        RuntimeError: there is none, so that the MLP computed with other tensors.
    """
    if grad is None:
        raise RuntimeError(
            "an MLP with mlp_chunk_tokens must compute with the parameters that it had in the "
            "forward, got one that has no part in its outputs; remove FSDP units, "
            "parametrizations and functional_call inside MLPs, and adapters that are off."
        )
    if total is None:
        return grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
    return total.add_(grad)
