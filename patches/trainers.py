"""`patch_trainer`: run the padded batches of a Trainer, or of a trainer of TRL, as packed rows."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeVar

from torch import nn
from transformers import Trainer

from flexvarlen.patches.api import current_patch, patch_model, restore
from flexvarlen.patches.state import BackendChoice

T = TypeVar("T", bound=Trainer)


def patch_trainer(
    trainer: T,
    backend: BackendChoice = "auto",
    *,
    unpad_to_multiple_of: int | None = None,
    verify: bool = False,
) -> T:
    """Make a trainer's models drop the padding of their batches: one line before `train()`.

    Calls `patch_model(model, unpad=True)` on each model that gets padded batches: the policy, the
    reference model, and GRPO's reward models. Collators, losses and metrics stay as they are, so
    losses and gradients are those of the padded run. With LoRA the policy without its adapter is
    the reference, and is patched with it.

    Works with transformers' Trainer in any padded task, and with TRL's RewardTrainer, DPOTrainer,
    KTOTrainer and GRPOTrainer (TRL 1.16). `fv.unpatch_model(trainer.model)` restores a model.

    Args:
        trainer: a trainer whose `train()` has not been called.
        backend, unpad_to_multiple_of, verify: as in `patch_model`.

    Returns:
        The same trainer.

    Raises:
        ValueError: not a Trainer, or one with `model_init`.
        NotImplementedError: the trainer adds a router's auxiliary loss, whose inputs would not
            match the padded batch, or a model cannot be patched (see `patch_model`), as a
            vision-language model. All models are then as they were before.

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
    if getattr(trainer, "aux_loss_enabled", False):
        raise NotImplementedError(
            "the trainer must not add a router's auxiliary loss, as router logits of a packed row "
            "do not match the padded batch; set router_aux_loss_coef=0.0 in the trainer's config."
        )
    with ExitStack() as undo:
        for model in _models(trainer):
            undo.callback(restore, model, current_patch(model))
            patch_model(
                model,
                backend,
                unpad=True,
                unpad_to_multiple_of=unpad_to_multiple_of,
                verify=verify,
            )
        undo.pop_all()
    return trainer


def _models(trainer: Any) -> list[nn.Module]:
    """The models that get padded batches."""
    rewards = getattr(trainer, "reward_funcs", None) or ()
    found = [trainer.model, getattr(trainer, "ref_model", None), *rewards]
    return [model for model in found if isinstance(model, nn.Module)]
