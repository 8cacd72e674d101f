"""`loss_chunk_tokens`: a head's loss of hidden states, chunk by chunk, without `[T, V]` logits.

The head's own forward runs for its last token alone, without labels, so that it returns all its
other outputs; the loss then calls the head on each chunk, and again in the backward.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.loss.loss_utils import ForCausalLMLoss

from flexvarlen.layout.arguments import to_int_or_none
from flexvarlen.layout.labels import IGNORE_INDEX, LABELS, int64_labels
from flexvarlen.layout.logprobs import tree_loss
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.delivery import Delivery
from flexvarlen.patches.batch.labels import Loss
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.forward.router import router_loss
from flexvarlen.patches.forward.wrapper import call_own, has_fused_head_of_trl
from flexvarlen.patches.lm_head import lm_head
from flexvarlen.patches.state import ATTRIBUTE, CONTEXT


def check_loss_chunk_tokens(loss_chunk_tokens: int | None, same_bits: int | None) -> int | None:
    """The argument `loss_chunk_tokens` of `patch_model`: a number of tokens, or None.

    Raises:
        ValueError: it is none, or comes with `same_bits`.
    """
    if loss_chunk_tokens is None:
        return None
    tokens = to_int_or_none(loss_chunk_tokens)
    if tokens is None or tokens < 1:
        raise ValueError(
            "loss_chunk_tokens must be a positive number of tokens, or None, got "
            f"{loss_chunk_tokens!r}; pass 4096."
        )
    if same_bits is not None:
        raise ValueError(
            "loss_chunk_tokens must not be given with same_bits, by which each product of the head "
            f"has {same_bits} tokens, got {tokens}; remove one of them."
        )
    return tokens


def call_with_chunked_loss(
    module: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a head's own forward; with labels, for its outputs but the logits, and add the loss.

    Raises:
        NotImplementedError: the model has another loss than transformers' for causal models.
        ValueError: the caller asks for a tuple of outputs, or for the logits of some tokens.
    """
    context: Any = kwargs.get(CONTEXT)
    if isinstance(context, PaddedBatch) and context.delivery is None:
        kwargs[CONTEXT] = context = replace(context, delivery=Delivery())
    loss = _loss_of(context, kwargs)
    if loss is None:
        return call_own(module, own, args, kwargs)
    _check(module, kwargs)
    outputs = call_own(module, own, args, kwargs | {"logits_to_keep": 1})
    delivery = _delivery_of(context)
    hidden, delivery.hidden_states = delivery.hidden_states, None
    chunk_tokens = module.__dict__[ATTRIBUTE].loss_chunk_tokens
    found = loss(hidden, head=lm_head(module), chunk_tokens=chunk_tokens)
    others = {name: x for name, x in outputs.items() if name not in ("loss", "logits")}
    return type(outputs)(loss=found + router_loss(module, outputs), **others)


def keep_hidden_states(module: nn.Module, packed: PackedForward, outputs: Any) -> None:
    """Deliver the last hidden states of a base model to its head."""
    padded = packed.row.padded
    _delivery_of(packed if padded is None else padded).hidden_states = outputs["last_hidden_state"]


def _delivery_of(context: PackedForward | PaddedBatch) -> Delivery:
    found = context.delivery
    assert found is not None
    return found


def _loss_of(context: Any, kwargs: dict[str, Any]) -> Loss | None:
    """The loss that the labels among the arguments ask for; they are removed from these."""
    if not isinstance(context, PackedForward | PaddedBatch):  # decoding, which is not packed
        return None
    if isinstance(context, PackedForward) and context.row.targets.loss is not None:
        return context.row.targets.loss
    if kwargs.get("labels") is None:
        return None
    given = {name: kwargs.pop(name, None) for name in (*LABELS, "num_items_in_batch")}
    labels = given["shift_labels"]
    if labels is None:  # shifted as by ForCausalLMLoss
        labels = pad(int64_labels(given["labels"]), (0, 1), value=IGNORE_INDEX)[..., 1:]
    return partial(
        tree_loss,
        shift_labels=labels,
        label_counts=torch.ones_like(labels),
        num_items_in_batch=given["num_items_in_batch"],
    )


def _check(module: Any, kwargs: dict[str, Any]) -> None:
    loss = module.loss_function
    if loss is not ForCausalLMLoss:
        raise NotImplementedError(
            "loss_chunk_tokens computes the cross entropy of the next token, got a model with "
            f"another loss, {getattr(loss, '__name__', loss)}; call patch_model without it."
        )
    if has_fused_head_of_trl(module):
        raise NotImplementedError(
            "loss_chunk_tokens must be None in a trainer of TRL with a head that computes no "
            "logits itself, as loss_type='chunked_nll' has; call patch_model without it."
        )
    if kwargs.get("logits_to_keep"):
        raise ValueError(
            "logits_to_keep must not be given with labels and loss_chunk_tokens, which computes "
            f"no logits, got {kwargs['logits_to_keep']}; remove it, or the labels."
        )
    asked = kwargs.get("return_dict")
    if not (module.config.return_dict if asked is None else asked):
        raise ValueError("return_dict must stay True with loss_chunk_tokens, got False; remove it.")
