"""`patch_trainer`: run the padded batches of a Trainer, or of a trainer of TRL, as packed rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Trainer

from flexvarlen.patches.api import current_patch, patch_model, restore
from flexvarlen.patches.state import BackendChoice

T = TypeVar("T", bound=Trainer)


def patch_trainer(
    trainer: T,
    backend: BackendChoice = "auto",
    *,
    unpad_to_multiple_of: int | None = None,
    share_prefixes: bool = False,
    verify: bool = False,
) -> T:
    """Make a trainer's models drop the padding of their batches: one line before `train()`.

    Calls `patch_model(model, unpad=True)` on each model that gets padded batches: the policy, the
    reference model, and GRPO's reward models. Collators, losses and metrics stay as they are, so
    losses and gradients are those of the padded run, and so are metrics, except those that read
    padding: CPO and ORPO log the mean of all logits, which are other ones at padding. With LoRA the
    policy without its adapter is the reference, and is patched with it.

    With `share_prefixes` the trained and the reference model compute a prefix that rows of a batch
    share once: the prompt of DPO's chosen and rejected answers, and of GRPO's completions.
    GRPOTrainer, which shuffles completions before it splits them into batches, then shuffles blocks
    of completions of one prompt, also after its model is unpatched.

    Works with transformers' Trainer in any padded task, and with TRL's RewardTrainer, DPOTrainer,
    KTOTrainer and GRPOTrainer (TRL 1.16). `fv.unpatch_model(trainer.model)` restores a model.

    Args:
        trainer: a trainer whose `train()` has not been called.
        backend, unpad_to_multiple_of, share_prefixes, verify: as in `patch_model`.

    Returns:
        The same trainer.

    Raises:
        ValueError: not a Trainer, or one with `model_init`; with `share_prefixes`, batches of
            GRPOTrainer that cannot hold two completions of each prompt.
        NotImplementedError: a model cannot be patched (see `patch_model`), as a vision-language
            model; or, with `share_prefixes`, another class's completions cannot be shuffled
            together. All models are then as they were before.

    >>> import flexvarlen as fv  # doctest: +SKIP
    >>> trainer = DPOTrainer(model, args=config, train_dataset=data)  # doctest: +SKIP
    >>> fv.patch_trainer(trainer).train()  # doctest: +SKIP
    """
    if not isinstance(trainer, Trainer):
        raise ValueError(
            "trainer must be a transformers Trainer or one of TRL's, got "
            f"{type(trainer).__name__}; without a Trainer, call patch_model(model, unpad=True)."
        )
    if trainer.model_init is not None:
        raise ValueError(
            "trainer must be made with model=, got model_init=, which makes a new model when "
            "training starts; call patch_model(model, unpad=True) inside model_init."
        )
    together = _completions_together(trainer) if share_prefixes else None
    with ExitStack() as undo:
        for model, is_policy in _models(trainer):
            undo.callback(restore, model, current_patch(model))
            patch_model(
                model,
                backend,
                unpad=True,
                unpad_to_multiple_of=unpad_to_multiple_of,
                share_prefixes=share_prefixes and is_policy,
                verify=verify,
            )
        if together is not None:
            _shuffle_together(trainer, together)
        undo.pop_all()
    return trainer


def _completions_together(trainer: Any) -> int | None:
    """How many completions of one prompt a GRPOTrainer may keep together; None of others."""
    if not hasattr(trainer, "num_generations"):
        return None
    rows = trainer.args.per_device_train_batch_size
    together = math.gcd(rows, trainer.num_generations)
    if together == 1:
        raise ValueError(
            "per_device_train_batch_size must have a divisor in common with num_generations, so "
            f"that a batch holds completions of one prompt, got {rows} and "
            f"{trainer.num_generations}; set it to a multiple of num_generations."
        )
    return together


def _models(trainer: Any) -> list[tuple[nn.Module, bool]]:
    """The models that get padded batches, and whether each is the policy or its reference."""
    trained = (trainer.model, getattr(trainer, "ref_model", None))
    rewards = getattr(trainer, "reward_funcs", None) or ()
    found = [*((model, True) for model in trained), *((model, False) for model in rewards)]
    return [(model, is_policy) for model, is_policy in found if isinstance(model, nn.Module)]


_SHUFFLE = "shuffle_sequence_dict"
"""TRL's function that shuffles the completions of a generation, of the module of GRPOTrainer."""


def _shuffle_together(trainer: Any, size: int) -> None:
    """Make a GRPOTrainer shuffle `size` completions at a time, not single ones."""
    owner = next(each for each in type(trainer).__mro__ if "_prepare_inputs" in vars(each))
    functions = vars(sys.modules[owner.__module__])
    if _SHUFFLE not in functions:
        raise NotImplementedError(
            f"share_prefixes=True needs {type(trainer).__name__} to shuffle its completions by "
            f"{_SHUFFLE}, as TRL 1.16 does; leave it out."
        )
    prepare, shuffle = trainer._prepare_inputs, partial(_shuffled, size=size)

    def prepare_inputs(batch: Any) -> Any:
        before, functions[_SHUFFLE] = functions[_SHUFFLE], shuffle
        try:
            return prepare(batch)
        finally:
            functions[_SHUFFLE] = before

    trainer._prepare_inputs = prepare_inputs


def _shuffled(batch: dict[str, Any], size: int) -> dict[str, Any]:
    """The rows of a batch in another order, `size` of them at a time.

    Args:
        batch: columns: tensors `[B, ...]`, lists of B; None and 0-d tensors are kept.
    """
    rows = next(len(x) for x in batch.values() if _has_rows(x))
    order = torch.arange(rows).view(-1, size)[torch.randperm(rows // size)].flatten()
    return {name: _take(x, order) if _has_rows(x) else x for name, x in batch.items()}


def _has_rows(column: Any) -> bool:
    return column is not None and not (isinstance(column, Tensor) and column.ndim == 0)


def _take(column: Tensor | Sequence[Any], order: Tensor) -> Tensor | list[Any]:
    if isinstance(column, Tensor):
        return column[order.to(column.device)]
    return [column[i] for i in order]
