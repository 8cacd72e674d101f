"""Refuses, as Trainer begins, a model or a loader that our collators' batches are not for."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from flexvarlen.packing.collator import PackedCollator
from flexvarlen.packing.loader_pass import is_dispatched
from flexvarlen.packing.prefixes import TreeCollator
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.patches.state import ATTRIBUTE


def register_callback() -> None:
    """Add CollatorCallback to Trainer's defaults. Safe to call twice."""
    from transformers import trainer

    if CollatorCallback not in trainer.DEFAULT_CALLBACKS:
        trainer.DEFAULT_CALLBACKS.append(CollatorCallback)


class CollatorCallback(TrainerCallback):  # type: ignore[misc]
    """Checks the model and the loader on all ranks, before one of them waits for another."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check what is trained."""
        _check(kwargs.get("model"), kwargs.get("train_dataloader"))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check what is evaluated: Trainer has no event before its first batch."""
        _check(kwargs.get("model"), kwargs.get("eval_dataloader"))


def _check(model: Any, loader: Any) -> None:
    collator = getattr(loader, "collate_fn", None)
    collator = getattr(collator, "data_collator", collator)  # below Trainer's, for unused columns
    if not isinstance(collator, PackedCollator | TreeCollator):
        return
    if is_dispatched([loader]):
        collator.check_dispatched()
    found = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not found or any(ATTRIBUTE in part.__dict__ for part in found):
        return
    family = BY_TYPE.get(found[0].config.model_type)
    if isinstance(collator, TreeCollator) or family is None or not family.by_name_alone:
        raise ValueError(
            f"model must be patched for the batches of {type(collator).__name__}, got an unpatched "
            f"{type(found[0]).__name__}, in which documents of a row see one another; call "
            "flexvarlen.patch_model on it before it is trained or evaluated, or pad."
        )
