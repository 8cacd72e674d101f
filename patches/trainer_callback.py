"""The callback that every Trainer gets, for our datasets and collators.

When training begins, it refuses a model or a loader that does not fit our collators' batches; it
also sets the epoch of a `PackedDataset`.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import RemoveColumnsCollator

from flexvarlen.packing.collator import PackedCollator
from flexvarlen.packing.dataset import PackedDataset
from flexvarlen.packing.loader_pass import is_dispatched
from flexvarlen.packing.tree_collator import TreeCollator
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.patches.models.unsupported import STATEFUL
from flexvarlen.patches.state import ATTRIBUTE
from flexvarlen.upstream import required


def register_callback() -> None:
    """Add CollatorCallback to Trainer's defaults. Safe to call twice."""
    from transformers import trainer

    if CollatorCallback not in trainer.DEFAULT_CALLBACKS:
        trainer.DEFAULT_CALLBACKS.append(CollatorCallback)


class CollatorCallback(TrainerCallback):  # type: ignore[misc]
    """Checks the model and the loader on all ranks, before one of them waits for another.

    It also sets the epoch of a `PackedDataset`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check what is trained."""
        _check(kwargs.get("model"), kwargs.get("train_dataloader"))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the epoch: on several ranks, accelerate gives it to a random sampler alone."""
        dataset = getattr(kwargs.get("train_dataloader"), "dataset", None)
        if isinstance(dataset, PackedDataset):
            dataset.set_epoch(int(state.epoch))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check what is evaluated: Trainer has no event before its first batch."""
        _check(kwargs.get("model"), kwargs.get("eval_dataloader"))


def below_trainers(collator: Any) -> Any:
    """The collator itself, where Trainer wraps it to remove unused columns."""
    if isinstance(collator, RemoveColumnsCollator):
        return required(collator, "data_collator", "what it checks of collators")
    return getattr(collator, "data_collator", collator)  # `ShardCollator` wraps another too


def _check(model: Any, loader: Any) -> None:
    collator = below_trainers(getattr(loader, "collate_fn", None))  # events may have no loader
    if not isinstance(collator, PackedCollator | TreeCollator):
        return
    if is_dispatched([loader]):
        collator.check_dispatched()
    found = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not found or any(ATTRIBUTE in part.__dict__ for part in found):
        return
    model_type, unpatched = found[0].config.model_type, type(found[0]).__name__
    family = BY_TYPE.get(model_type)
    if family is None and model_type not in STATEFUL and isinstance(collator, PackedCollator):
        _warn_of_unknown(unpatched)
    elif family is None or isinstance(collator, TreeCollator) or not family.by_name_alone:
        raise ValueError(
            f"model must be patched for the batches of {type(collator).__name__}, got an unpatched "
            f"{unpatched}, in which documents of a row see one another; call "
            "flexvarlen.patch_model on it before it is trained or evaluated, or pad."
        )


@functools.cache
def _warn_of_unknown(model_class: str) -> None:
    warnings.warn(
        f"flexvarlen: documents of a row may see one another in an unpatched {model_class}, which "
        "is not among the verified families; flexvarlen.patch_model(model, verify=True) finds out.",
        stacklevel=2,
    )
