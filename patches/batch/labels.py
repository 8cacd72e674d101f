"""The targets of a packed row: labels that no other document predicts, or a loss of its own.

`target_maker` chooses a function for a head: (what was given, the documents, whether a row may hold
several) -> `Targets`.

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexvarlen.layout.arguments import require_tensor
from flexvarlen.layout.labels import (
    IGNORE_INDEX,
    LABEL_COUNTS,
    LABELS,
    SAMPLE_COUNTS,
    int64_labels,
    unpredicted_tokens,
)
from flexvarlen.layout.logprobs import tree_loss
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.batch.given import Given, Inputs
from flexvarlen.patches.parts import ModelParts

Loss = Callable[..., Tensor]


class Targets(NamedTuple):
    """What a head learns.

    Attributes:
        labels: replace those among the arguments.
        withheld: names of arguments that the head must not get.
        loss: logits -> the loss, as `tree_loss`; None: the head's own.
    """

    labels: Inputs
    withheld: tuple[str, ...] = ()
    loss: Loss | None = None


NO_TARGETS = Targets({})
TargetMaker = Callable[[Given, PackedLayout, bool], Targets]


def target_maker(parts: ModelParts, *, over_ranks: bool) -> TargetMaker:
    """The function that makes the targets of a head."""
    if parts.head.labels == "next token":
        return _next_tokens
    return _own_tokens_of_shard if over_ranks else _as_given


def _as_given(given: Given, layout: PackedLayout, several: bool) -> Targets:
    return NO_TARGETS


def _next_tokens(given: Given, layout: PackedLayout, several: bool) -> Targets:
    """Mask the labels at documents' first tokens, which no token of their document predicts.

    Labels of a tree come with `weighted_targets`, and those of a shard shifted from `shard_row`.
    """
    if layout.segments is not None or not layout.shard.is_whole:
        return NO_TARGETS
    return Targets(next_token_labels(given, unpredicted_tokens(layout), several))


def _own_tokens_of_shard(given: Given, layout: PackedLayout, several: bool) -> Targets:
    """The part of a row's loss of the tokens of a shard, as most heads take the mean over them."""
    labels: Tensor | None = given.inputs.get("labels")
    if labels is None:
        return NO_TARGETS
    ones = torch.ones_like(labels)
    return _weighted(given, labels, ones, ("labels",))


def weighted_targets(given: Given, masked: Targets, user_loss: Any) -> Targets:
    """Targets of tokens that stand for several samples, which the head's loss would count once.

    Args:
        given: with `sample_counts` or `label_counts`.
        masked: the targets without them.
        user_loss: the loss function that the user set on the model, or None.

    Raises:
        ValueError: label_counts without shift_labels.
        NotImplementedError: a loss function that the user set.
    """
    counts = given.inputs.get(LABEL_COUNTS)
    if counts is None:
        return masked._replace(withheld=(*masked.withheld, SAMPLE_COUNTS, LABEL_COUNTS))
    labels = (given.inputs | masked.labels).get("shift_labels")
    if labels is None:
        raise ValueError(
            "label_counts must come with shift_labels; take both from fv.share_prefixes."
        )
    if user_loss is not None:
        raise NotImplementedError(
            "model.loss_function is not called with label_counts, got one that was set; compute "
            "the loss from the logits, or of each sample by fv.SharedPrefixes.unfold."
        )
    return _weighted(given, labels, counts, (SAMPLE_COUNTS, LABEL_COUNTS, "shift_labels"))


def _weighted(given: Given, labels: Tensor, counts: Tensor, withheld: tuple[str, ...]) -> Targets:
    loss = loss_of(labels, counts, given.inputs.get("num_items_in_batch"))
    return Targets({}, (*withheld, "num_items_in_batch"), loss)


def loss_of(shift_labels: Tensor, label_counts: Tensor, num_items_in_batch: Any) -> Loss:
    """`tree_loss` of these labels, each with how often it counts."""
    return functools.partial(
        tree_loss,
        shift_labels=shift_labels,
        label_counts=label_counts,
        num_items_in_batch=num_items_in_batch,
    )


def next_token_labels(given: Given, unpredicted_T: Tensor, several: bool) -> Inputs:
    """The labels among a forward's arguments, -100 where no token of a document predicts them.

    Args:
        unpredicted_T: bool `[T]`, True at documents' first tokens and at padding.
        several: whether a row may hold several documents, or padding.
    """
    inputs = given.inputs
    masked: Inputs = {}
    for name in LABELS:
        labels = inputs.get(name)
        if labels is None:
            continue
        require_tensor(name, labels)
        if labels.numel() != len(unpredicted_T):
            raise ValueError(
                f"{name} must have one label for each of {len(unpredicted_T)} tokens, got shape "
                f"{tuple(labels.shape)}; pass labels shaped like input_ids, -100 at "
                "tokens that the loss ignores."
            )
        at_T = unpredicted_T
        if name == "shift_labels":  # shift_labels[t] is token t + 1
            at_T = torch.nn.functional.pad(at_T[1:], (0, 1), value=False)
        at = at_T.view(labels.shape).to(labels.device)
        if labels.dtype != torch.int64:
            labels = int64_labels(labels)
        masked[name] = labels.masked_fill(at, IGNORE_INDEX)
    if several and masked and inputs.get("num_items_in_batch") is not None:
        _warn_if_counted(given.module, inputs, masked)
    return masked


_counted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose `num_items_in_batch` was already checked."""


def _warn_if_counted(model: nn.Module, given: Inputs, masked: Inputs) -> None:
    """Warn if `num_items_in_batch` counts labels that were just masked. One read per model.

    Only the caller knows what it counted, over all the batches of a step.
    """
    if torch.compiler.is_compiling() or model in _counted:
        return
    _counted.add(model)
    name = next(iter(masked))
    before, after = given[name], masked[name]
    if name == "labels":  # the loss ignores the first label of a row, so it is not counted
        before, after = before[..., 1:], after[..., 1:]
    if bool((before != after).any()):
        warnings.warn(
            "num_items_in_batch counts labels that the loss ignores: those at the first token of a "
            "document, or at padding, which a patched model masks. The loss is too small by their "
            "share; set these labels to -100 in the collator (DataCollatorWithFlattening does).",
            UserWarning,
            stacklevel=2,
        )
