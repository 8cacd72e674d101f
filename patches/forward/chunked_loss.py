"""`loss_chunk_tokens`: a head's loss of hidden states, chunk by chunk, without `[T, V]` logits.

The head's own forward runs for its last token alone, without labels, so that it returns all its
other outputs; the loss then calls the head on each chunk, and again in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.loss.loss_utils import ForCausalLMLoss

from flexvarlen.layout.labels import IGNORE_INDEX, LABELS, int64_labels
from flexvarlen.parallel.sharded_parameters import is_fsdp2
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.delivery import Delivery
from flexvarlen.patches.batch.labels import Loss, loss_of
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.forward.chunk_tokens import autocast_of
from flexvarlen.patches.forward.head_checks import user_loss
from flexvarlen.patches.forward.padding import require_dict
from flexvarlen.patches.forward.router import router_loss
from flexvarlen.patches.forward.wrapper import (
    call_own,
    has_forward_of_user,
    has_fused_head_of_trl,
)
from flexvarlen.patches.lm_head import lm_head
from flexvarlen.patches.parts import base_of
from flexvarlen.patches.state import ATTRIBUTE, CONTEXT


def call_with_chunked_loss(
    module: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a head's own forward. With labels, compute the loss in chunks; `logits` is None.

    Raises:
        NotImplementedError: the model has another loss than transformers' for causal models.
        ValueError: the caller asks for a tuple of outputs, or for the logits of some tokens; or a
            head that learns in low precision has too many chunks.
    """
    context: Any = kwargs.get(CONTEXT)
    if not isinstance(context, PackedForward | PaddedBatch):  # decoding, or a 4D mask
        return call_own(module, own, args, kwargs)
    of_row = context.row.targets.loss if isinstance(context, PackedForward) else None
    if of_row is None and kwargs.get("labels") is None:
        return call_own(module, own, args, kwargs)
    _check_call(module, kwargs)
    without = {name: x for name, x in kwargs.items() if name not in _OF_LOSS}
    delivery, chunk_tokens = context.delivery, module.__dict__[ATTRIBUTE].loss_chunk_tokens
    with _changes_seen(base_of(module), delivery):
        outputs = call_own(module, own, args, without | {"logits_to_keep": 1})
    hidden, delivery.hidden_states = delivery.hidden_states, None
    assert hidden is not None
    loss = _loss_of_labels(kwargs, hidden.device) if of_row is None else of_row
    device_type, dtype, enabled = delivery.autocast  # of accelerate, which is left by now
    with torch.autocast(device_type, dtype, enabled):
        found = loss(hidden, head=lm_head(module), chunk_tokens=chunk_tokens)
    others = {name: x for name, x in outputs.items() if name not in ("loss", "logits")}
    balance = router_loss(module, outputs)
    balance = balance.to(found.device) if isinstance(balance, Tensor) else balance
    return type(outputs)(loss=found + balance, **others)


def keep_hidden_states(module: nn.Module, packed: PackedForward, outputs: Any) -> None:
    """Deliver the last hidden states of a base model, and its autocast, to its head."""
    hidden: Tensor = outputs["last_hidden_state"]
    packed.delivery.hidden_states = hidden
    packed.delivery.autocast = autocast_of(hidden)


_OF_LOSS = (*LABELS, "num_items_in_batch")


def _loss_of_labels(kwargs: dict[str, Any], device: torch.device) -> Loss:
    """The loss of ForCausalLMLoss, which shifts labels, and moves what it gets to the logits."""
    labels, count = kwargs.get("shift_labels"), kwargs.get("num_items_in_batch")
    if labels is None:
        labels = pad(int64_labels(kwargs["labels"]), (0, 1), value=IGNORE_INDEX)[..., 1:]
    labels = labels.to(device)
    count = count.to(device) if isinstance(count, Tensor) else count
    return loss_of(labels, torch.ones_like(labels), count)


def _changes_seen(base: nn.Module, delivery: Delivery) -> AbstractContextManager[None]:
    """Deliver what hooks, or a `forward` around ours, make of the base model's hidden states.

    Raises:
        NotImplementedError: a compiled graph of a base model with forward hooks. (It does not tell
            who set a `forward`.)
    """
    has_hooks = len(base._forward_hooks) > is_fsdp2(base)
    if torch.compiler.is_compiling():
        if has_hooks:
            raise NotImplementedError(
                "loss_chunk_tokens in a compiled graph takes the hidden states of the base model's "
                f"own forward, got a {type(base).__name__} with a forward hook; remove it, or call "
                "patch_model without loss_chunk_tokens."
            )
        return nullcontext()
    if has_hooks or has_forward_of_user(base, below=False):
        return _last_hook(base, delivery)
    return nullcontext()


@contextmanager
def _last_hook(base: nn.Module, delivery: Delivery) -> Iterator[None]:
    def keep(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if get_ident() == thread:
            delivery.hidden_states = outputs["last_hidden_state"]

    thread, handle = get_ident(), base.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def check_forward(model: nn.Module) -> None:
    """Refuse a model whose instance has another `forward`, which may add to the loss.

    Raises:
        NotImplementedError: a `forward` that no library set.
    """
    if has_forward_of_user(model, below=True):
        raise NotImplementedError(
            f"loss_chunk_tokens needs transformers' own forward, got a {type(model).__name__} with "
            "another one, which may change the loss; call patch_model without it."
        )


def _check_call(module: Any, kwargs: dict[str, Any]) -> None:
    loss = user_loss(module) or module.loss_function
    if loss is not ForCausalLMLoss:
        raise NotImplementedError(
            "loss_chunk_tokens computes the cross entropy of the next token, got a model with "
            f"another loss, {getattr(loss, '__name__', loss)}; call patch_model without it."
        )
    if has_fused_head_of_trl(module):
        raise NotImplementedError(
            "loss_chunk_tokens must be None in a trainer of TRL with a head that computes no "
            "logits itself, as SFTTrainer's; call patch_model without it."
        )
    kept = kwargs.get("logits_to_keep")
    if kept is not None and (isinstance(kept, Tensor) or kept != 0):
        raise ValueError(
            "logits_to_keep must not be given with labels and loss_chunk_tokens, which computes "
            f"no logits, got {kept}; remove it, or the labels."
        )
    require_dict(module.config, kwargs)
