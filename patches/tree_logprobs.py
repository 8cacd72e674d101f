"""`tree_logprobs`: the log-probabilities of a tree's labels, for any loss, in parts.

Shapes: T = tokens of the row of trees.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.layout.logprobs import token_logprobs
from flexvarlen.packing.prefixes import SharedPrefixes
from flexvarlen.patches.api import current_patch
from flexvarlen.patches.inner_model import transformers_model
from flexvarlen.patches.lm_head import lm_head
from flexvarlen.patches.parts import ModelParts
from flexvarlen.trees.run import PartBatch, check_trains_in_parts, no_random_numbers


def tree_logprobs(
    model: nn.Module,
    shared: SharedPrefixes,
    *,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> Tensor:
    """The log-probability of each token's label in a row of trees of any size.

    For any loss that is a function of log-probabilities, such as those of RL. In parts, the forward
    runs without gradients; when the loss built from the result runs backward, each part runs again,
    in the model as it is then, with the gradients of its own tokens, and adds to those of the
    parameters.

    Args:
        model: patched, with a language-model head; in training, in parts, without dropout.
        shared: of `fv.share_prefixes`, on the model's device.
        max_tokens: tokens of a part at most, as in `SharedPrefixes.parts`; None: one part.
        temperature: by which the logits are divided.
        chunk_tokens: tokens whose logits exist at a time.

    Returns:
        `[1, T]` in fp32 or wider, 0 where there is no label; `shared.unfold` splits it by sample.
        In parts, differentiable once, by `backward()` of a loss, not by `torch.autograd.grad`.

    Raises:
        ValueError: the model is not patched or has no language-model head, `shared` is of another
            type or has images, the temperature is not positive and finite, or `chunk_tokens` is
            below 1; and as `SharedPrefixes.parts`.
        NotImplementedError: as `SharedPrefixes.parts`, under DDP's forward too.
        RuntimeError: a second backward, in parts.

    >>> logprobs = fv.tree_logprobs(model, shared, max_tokens=16_384)  # doctest: +SKIP
    >>> loss_of(shared.unfold(logprobs)).backward()  # doctest: +SKIP
    """
    if not isinstance(temperature, Real) or not 0 < temperature < float("inf"):
        raise ValueError(
            f"temperature must be a positive number, got {temperature!r}; pass that of sampling."
        )
    if not isinstance(shared, SharedPrefixes) or shared.images:
        got = "samples with images" if isinstance(shared, SharedPrefixes) else type(shared).__name__
        raise ValueError(
            f"shared must be what fv.share_prefixes returns for text, got {got}; for images, call "
            "the model on shared.batch()."
        )
    inner, head = transformers_model(model), lm_head(model)
    if current_patch(inner) is None:
        raise ValueError(
            f"model must be patched, got {type(inner).__name__}; call fv.patch_model(model) first."
        )
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
        return of_part(PartBatch(shared.batch()))[None]

    def run(grad_T: Tensor | None) -> Tensor:
        """The result `[T]`, or with its gradient, a backward of every part."""
        found = None
        for part in shared.parts(base, max_tokens):
            on_device = part.tokens.to(shared.input_ids.device)
            own = of_part(part)[: len(part.tokens)]  # without padding
            if grad_T is not None:
                own.backward(grad_T[on_device])  # type: ignore[no-untyped-call]
            else:
                found = own.new_zeros(tokens) if found is None else found
                found.index_copy_(0, on_device, own)
        return shared.input_ids.new_zeros(0) if found is None else found

    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in model.parameters())
    if not needs_grad:
        with torch.no_grad():
            return run(None)[None]
    check_trains_in_parts(model)
    anchor = torch.zeros((), device=shared.input_ids.device, requires_grad=True)
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
        with no_random_numbers(anchor.device):
            return run(None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if ctx.run is None:
            raise RuntimeError(
                "tree_logprobs in parts runs backward once, got a second backward; sum the losses "
                "before backward()."
            )
        run, ctx.run = ctx.run, None
        with torch.enable_grad(), ctx.autocast():
            run(grad)
        return grad.new_zeros(()), None, None
