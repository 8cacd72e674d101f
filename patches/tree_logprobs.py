"""`tree_logprobs`: the log-probabilities of a tree's labels, for any loss, in parts.

Shapes: T = tokens of the row of trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.layout.labels import IGNORE_INDEX
from flexvarlen.layout.logprobs import token_scores
from flexvarlen.layout.routed_experts import ROUTED_EXPERTS
from flexvarlen.layout.sampling import NO_TOKEN, checked_sampling_mask, require_temperature
from flexvarlen.packing.prefixes import SharedPrefixes
from flexvarlen.patches.api import current_patch
from flexvarlen.patches.inner_model import transformers_model
from flexvarlen.patches.lm_head import lm_head
from flexvarlen.patches.parts import base_of
from flexvarlen.trees.ranks import check_runs_in_parts, ranks_of
from flexvarlen.trees.run import PartBatch, has_compiled, no_random_numbers

_INPUTS = ("input_ids", "packed_layout", "shift_labels", ROUTED_EXPERTS)


def tree_logprobs(
    model: nn.Module,
    shared: SharedPrefixes,
    *,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    sampling_mask: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """The log-probability of each token's label in a row of trees of any size.

    For any loss that is a function of log-probabilities, such as those of RL. In parts, the forward
    runs without gradients; when the loss built from the result runs backward, each part runs again,
    in the model as it is then, and adds to the gradients of the parameters. So DDP's `no_sync` must
    contain the backward, and under FSDP2 the loss must have no other forward of the model.

    Args:
        model: patched, with a language-model head; in training, in parts, without dropout. Under
            DDP and FSDP2 the wrapped model, whose ranks may have different trees.
        shared: of `fv.share_prefixes`, on the model's device.
        max_tokens: tokens of a part at most, as in `SharedPrefixes.parts`; None: one part.
        temperature, sampling_mask: as in `token_logprobs`; the mask `[1, T, K]`, of
            `shared.fold(fv.sampling_masks(...), -1)`.
        chunk_tokens: tokens whose logits exist at a time, as in `token_logprobs`.

    Returns:
        `[1, T]` in fp32 or wider, 0 where there is no label; `shared.unfold` splits it by sample.
        In parts, differentiable once, by `backward()` of a loss, not by `torch.autograd.grad`.

    Raises:
        ValueError: the model is not patched or has no language-model head, `shared` is of another
            type or has images, the temperature is not positive and finite, the sampling mask lacks
            a label, `chunk_tokens` is below 1, or accelerate's autocast is off; and as
            `SharedPrefixes.parts`.
        NotImplementedError: torch.compile of more than the base model; and as
            `SharedPrefixes.parts`.
        RuntimeError: a second backward, in parts.

    >>> logprobs = fv.tree_logprobs(model, shared, max_tokens=16_384)  # doctest: +SKIP
    >>> loss_of(shared.unfold(logprobs)).backward()  # doctest: +SKIP
    """
    (found,) = tree_scores(
        model,
        shared,
        ("log_probs",),
        max_tokens=max_tokens,
        temperature=temperature,
        sampling_mask=sampling_mask,
        chunk_tokens=chunk_tokens,
    )
    return found[None]


def tree_scores(
    model: nn.Module,
    shared: SharedPrefixes,
    names: Sequence[str],
    *,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    sampling_mask: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Sequence[Tensor]:
    """Scores of each token's label, as `tree_logprobs`, each `[T]`.

    Args:
        names: in `flexvarlen.layout.logprobs.SCORES`. In parts, the backward computes those that
            have gradients.
    """
    require_temperature(temperature)
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
    base: Any = base_of(inner)
    _check_runs_as_its_forward(model, base, shared.input_ids.device.type)
    ranks = ranks_of(model)
    kept_TK = checked_sampling_mask(sampling_mask, shared.shift_labels[0])

    def forward(
        shift_labels: Tensor, names: Sequence[str], kept: Tensor | None, **inputs: Any
    ) -> list[Tensor]:
        hidden = base(**inputs, use_cache=False).last_hidden_state[0]
        labels = shift_labels[0]
        index = (labels != IGNORE_INDEX).nonzero()[:, 0]  # the head runs on these alone
        found = token_scores(
            hidden.index_select(0, index),
            labels[index],
            names,
            head=head,
            temperature=temperature,
            kept=None if kept is None else kept[index],
            chunk_tokens=chunk_tokens,
        )
        return [x.new_zeros(len(labels)).index_copy(0, index, x) for x in found]

    def of_part(part: PartBatch, names: Sequence[str]) -> list[Tensor]:
        inputs = {name: part[name] for name in _INPUTS if name in part} | {"kept": kept_TK}
        if kept_TK is not None and part.tokens is not None:
            kept = kept_TK[part.tokens.to(kept_TK.device)]
            padding = part["input_ids"].shape[1] - len(kept)
            inputs["kept"] = pad(kept, (0, 0, 0, padding), value=NO_TOKEN)
        found: list[Tensor] = ranks.call_with_forward(inner, forward, names=names, **inputs)
        return found

    tokens = shared.layout.total_tokens
    if max_tokens is None:
        return of_part(PartBatch(shared.batch()), names)
    fits = require_int_at_least("max_tokens", max_tokens, 1) >= tokens
    if fits and not ranks.must_call_model:  # else all ranks call it in the backward, as some must
        return of_part(PartBatch(shared.batch()), names)
    check_runs_in_parts(model)

    def run(gradients: dict[str, Tensor] | None) -> list[Tensor]:
        """The scores `[T]`, or with the gradients of some of them, a backward of every part."""
        found: list[Tensor] = []
        for part in shared.parts(model if ranks.must_call_model else base, max_tokens):
            on_device = part.tokens.to(shared.input_ids.device)
            scores = of_part(part, names if gradients is None else list(gradients))
            own = [x[: len(part.tokens)] for x in scores]  # without padding
            if gradients is not None:
                torch.autograd.backward(own, [x[on_device] for x in gradients.values()])
                continue
            found = found or [x.new_zeros(tokens) for x in own]
            for total, x in zip(found, own, strict=True):
                total.index_copy_(0, on_device, x)
        return found

    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inner.parameters())
    if not needs_grad:
        with torch.no_grad():
            return run(None)
    device = shared.input_ids.device
    anchor = torch.zeros((), device=device, requires_grad=True)
    result: tuple[Tensor, ...] = _InParts.apply(anchor, run, names, _autocast_of(device.type))  # type: ignore[no-untyped-call]
    return result


def _check_runs_as_its_forward(model: nn.Module, base: nn.Module, device: str) -> None:
    """Refuse what is around a model's forward and would be lost, as the base model is called.

    Raises:
        ValueError: accelerate's autocast.
        NotImplementedError: torch.compile.
    """
    in_autocast = any(hasattr(each, "_original_forward") for each in model.modules())
    if in_autocast and not torch.is_autocast_enabled(device):
        raise ValueError(
            "tree_logprobs must run in the autocast that accelerate gave the model, got none; call "
            "it inside accelerator.autocast()."
        )
    if has_compiled(model) and not has_compiled(base):
        raise NotImplementedError(
            "tree_logprobs calls the base model, which must be what is compiled, got a compiled "
            "model around it; call compile() on the base model, such as model.model.compile()."
        )


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
        run: Callable[[dict[str, Tensor] | None], list[Tensor]],
        names: Sequence[str],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.names, ctx.autocast = run, names, autocast
        ctx.set_materialize_grads(False)
        with no_random_numbers(anchor.device):
            return tuple(run(None))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        if ctx.run is None:
            raise RuntimeError(
                "tree_logprobs in parts runs backward once, got a second backward; sum the losses "
                "before backward()."
            )
        run, ctx.run = ctx.run, None
        given = {name: x for name, x in zip(ctx.names, grads, strict=True) if x is not None}
        with torch.enable_grad(), ctx.autocast():
            run(given)
        return next(iter(given.values())).new_zeros(()), None, None, None
