"""`tree_logprobs`: the log-probabilities of a tree's labels, for any loss, in parts.

Shapes: T = tokens of the row of trees.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.layout.logprobs import token_logprobs
from flexvarlen.packing.prefixes import SharedPrefixes
from flexvarlen.patches.inner_model import transformers_model
from flexvarlen.patches.lm_head import lm_head
from flexvarlen.patches.parts import ModelParts
from flexvarlen.trees.run import PartBatch


def tree_logprobs(
    model: nn.Module,
    shared: SharedPrefixes,
    *,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> Tensor:
    """The log-probability of each token's label in a row of trees of any size.

    For losses that are functions of log-probabilities, such as those of RL: the trees of a whole
    step, over as many micro-batches as there are, run once. In parts, the forward runs without
    gradients; when the loss built from the result runs backward, each part runs again with the
    gradients of its own tokens, which go straight to the parameters.

    Args:
        model: patched, with a language-model head; in training without dropout.
        shared: of `fv.share_prefixes`, on the model's device.
        max_tokens: tokens of a part at most, as in `SharedPrefixes.parts`; None: one part.
        temperature: by which the logits are divided.
        chunk_tokens: tokens whose logits exist at a time.

    Returns:
        `[1, T]` in fp32 or wider, 0 where there is no label; `shared.unfold` splits it by sample.
        Differentiable: by `backward()` of a loss, not `torch.autograd.grad`. Under DDP or FSDP
        gradients are not summed over the ranks, as the model's base is called.

    Raises:
        ValueError: the model has no language-model head, a temperature that is not positive; or as
            `SharedPrefixes.parts`.

    >>> logprobs = fv.tree_logprobs(model, shared, max_tokens=16_384)  # doctest: +SKIP
    >>> loss_of(shared.unfold(logprobs)).backward()  # doctest: +SKIP
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; pass that of sampling.")
    inner, head = transformers_model(model), lm_head(model)
    base: Any = ModelParts.of(inner).base(inner)

    def of_part(part: PartBatch) -> Tensor:
        inputs = {name: part[name] for name in ("input_ids", "packed_layout")}
        hidden = base(**inputs, use_cache=False).last_hidden_state
        return token_logprobs(
            hidden,
            part["shift_labels"],
            head=lambda x: head(x) / temperature,
            chunk_tokens=chunk_tokens,
        )[0]

    tokens = shared.layout.total_tokens
    if max_tokens is None or require_int_at_least("max_tokens", max_tokens, 1) >= tokens:
        return of_part(PartBatch(torch.arange(tokens), shared.batch()))[None]

    def run(grad_T: Tensor | None) -> Tensor:
        """The result `[T]`, or with its gradient, a backward of every part."""
        found = None
        for part in shared.parts(model, max_tokens):
            there = part.tokens.to(shared.input_ids.device)
            own = of_part(part)
            if grad_T is not None:
                own.backward(grad_T[there])  # type: ignore[no-untyped-call]
            elif found is None:
                found = own.new_zeros(tokens).index_copy(0, there, own)
            else:
                found.index_copy_(0, there, own)
        return shared.input_ids.new_zeros(0) if found is None else found

    learns = torch.is_grad_enabled() and any(x.requires_grad for x in model.parameters())
    anchor = torch.zeros((), device=shared.input_ids.device, requires_grad=learns)
    result: Tensor = _InParts.apply(anchor, run, _autocast_of(shared.input_ids.device.type))  # type: ignore[no-untyped-call]
    return result[None]


def _autocast_of(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast that is on now, for the backward."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled=enabled)


class _InParts(torch.autograd.Function):
    """Run the parts without gradients, and in the backward with them; `anchor` makes it run."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        run: Callable[[Tensor | None], Tensor],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        ctx.run, ctx.autocast = run, autocast
        return run(None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        with torch.enable_grad(), ctx.autocast():
            ctx.run(grad)
        return grad.new_zeros(()), None, None
