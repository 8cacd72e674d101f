"""Refuse what goes wrong around a patched model in Trainer and PEFT, which its forward cannot see.

Predictions of a packed classifier are of documents, where Trainer counts examples. PEFT's prompt
learning wraps the model, and drops the position_ids that mark documents.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from flexvarlen.import_hook import after_import
from flexvarlen.patches.adapters import why_not_adapters
from flexvarlen.patches.state import ATTRIBUTE, Patch


@functools.cache
def guard_trainer_and_peft() -> None:
    """Make other libraries' classes refuse what goes wrong around a patched model."""
    after_import("transformers.trainer", _guard_predictions)
    after_import("peft.peft_model", _guard_prompts)


def _guard_predictions(module: ModuleType) -> None:
    """Make Trainer raise where a patched model has no logits, or where it would cut a classifier's.

    Trainer gathers a batch's predictions from all ranks, which hangs if they have different
    numbers, and cuts those of the last batch to the examples that the dataset has left.
    """
    trainer_class: Any = module.Trainer  # type: ignore[attr-defined]
    prediction_step = trainer_class.prediction_step

    @functools.wraps(prediction_step)
    def guarded(
        self: Any, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kw: Any
    ) -> Any:
        takes_labels = self.label_smoother is None and self.compute_loss_func is None
        if not prediction_loss_only and takes_labels and inputs.get("labels") is not None:
            _require_logits(model)
        found = prediction_step(self, model, inputs, prediction_loss_only, *args, **kw)
        if _gives_documents(model):
            logits = next(iter(found[1]), None) if isinstance(found[1], tuple) else found[1]
            ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
            if isinstance(logits, Tensor) and ids is not None:
                _check(self.accelerator, documents=len(logits), rows=len(ids))
        return found

    trainer_class.prediction_step = guarded


def _guard_prompts(peft_model: ModuleType) -> None:
    """Make PEFT's prompt learning refuse a patched model, in each forward."""
    cls: Any = peft_model.PeftModel  # type: ignore[attr-defined]
    get_prompt = cls.get_prompt

    @functools.wraps(get_prompt)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.get_base_model()
        is_patched = any(
            ATTRIBUTE in vars(part) for part in (inner, getattr(inner, "base_model", inner))
        )
        why = why_not_adapters(self) if is_patched else None
        if why is not None:
            raise NotImplementedError(why)
        return get_prompt(self, *args, **kwargs)

    cls.get_prompt = guarded


def _patches(model: nn.Module) -> list[Patch]:
    return [vars(module)[ATTRIBUTE] for module in model.modules() if ATTRIBUTE in vars(module)]


def _gives_documents(model: nn.Module) -> bool:
    return any(patch.parts.head.labels == "document" for patch in _patches(model))


def _require_logits(model: nn.Module) -> None:
    """Refuse predictions of a model that computes no logits: they would be its other outputs."""
    if any(patch.loss_chunk_tokens is not None for patch in _patches(model)):
        raise NotImplementedError(
            "predictions need logits, which a model with loss_chunk_tokens does not compute "
            "beside labels; predict after fv.unpatch_model(trainer.model), or without it."
        )


def _check(accelerator: Any, *, documents: int, rows: int) -> None:
    """Compare the predictions of a batch on this rank with its examples.

    Args:
        accelerator: Trainer's.
        documents: predictions.
        rows: rows of the batch's input_ids.

    Raises:
        ValueError: some would be cut, or a rank would wait for others forever.
    """
    state = accelerator.gradient_state
    loader, ranks = state.active_dataloader, accelerator.num_processes
    if documents == rows or loader is None:  # not packed
        return
    examples = documents
    if ranks > 1:
        examples = loader.total_batch_size // ranks
    elif state.end_of_dataloader and state.remainder > 0:
        examples = min(documents, state.remainder)
    if documents != examples:
        raise ValueError(
            "an example must be one document where Trainer gathers a classifier's predictions, got "
            f"{documents} documents in a batch of {examples} examples; make each example a "
            "document, and let the collator pack them, or pass prediction_loss_only=True."
        )
