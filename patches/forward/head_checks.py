"""Checks of the head on a base model, and of its loss: labels must belong to tokens."""

from __future__ import annotations

import functools
import inspect
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIPLE_CHOICE_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from flexvarlen.layout.arguments import is_integer_tensor
from flexvarlen.layout.head_chunks import BARE_HEAD
from flexvarlen.packing.loader_pass import DISPATCH_NOTHING
from flexvarlen.patches.forward.wrapper import has_fused_head_of_trl, is_wrapped
from flexvarlen.patches.models.heads import NO_HEAD, Head, changes_logits
from flexvarlen.patches.parts import ModelParts, base_of
from flexvarlen.patches.state import ATTRIBUTE, CONTEXT

_NEED_A_PATCH = (
    MODEL_FOR_CAUSAL_LM_MAPPING,  # would not mask labels
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,  # would pool rows, not documents
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_MULTIPLE_CHOICE_MAPPING,
)
"""transformers' heads that must be patched if their base model is."""

_LOSS = "_loss_function"  # the attribute in which a model stores a user's loss


def require_keywords(modules: list[nn.Module]) -> None:
    """Refuse a `forward` that cannot pass the documents on to the layers.

    Raises:
        ValueError: a class's takes no `**kwargs`.
    """
    for module in modules:
        parameters = inspect.signature(type(module).forward).parameters.values()
        if not any(x.kind is x.VAR_KEYWORD for x in parameters):
            raise ValueError(
                f"{type(module).__name__}.forward must take **kwargs and pass them on to "
                "super().forward, as they carry the documents to the layers, got "
                f"one of ({', '.join(x.name for x in parameters)}) that does not; add **kwargs to "
                "both."
            )


HEAD = "_flexvarlen_head"
"""On the base model of a patched head: a `HeadReference`."""


class HeadReference:
    """The patched head of a base model, held weakly.

    A deep copy refers to the copy of the head, if that is copied too; a pickle drops it.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)

    @property
    def module(self) -> nn.Module | None:
        """The head, or None if there is none or it was deleted."""
        return None if self._module is None else self._module()

    # In a compiled graph this is evaluated while tracing.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def is_unwrapped(self) -> bool:
        """Whether the head's `forward` no longer calls our wrapper."""
        head = self.module
        return head is not None and not (is_wrapped(head) or has_fused_head_of_trl(head))

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadReference:
        return HeadReference(memo.get(id(self.module)))

    def __reduce__(self) -> tuple[type[HeadReference], tuple[()]]:
        return HeadReference, ()


def head_over(base: nn.Module) -> Head:
    """The patched head that calls a base model, or `NO_HEAD`."""
    reference: HeadReference | None = base.__dict__.get(HEAD)
    head = None if reference is None else reference.module
    patch = None if head is None else head.__dict__.get(ATTRIBUTE)
    return NO_HEAD if patch is None else patch.parts.head


def require_patched_heads(model: PreTrainedModel) -> None:
    """Make transformers' heads around a patched base model refuse to run unless patched too.

    Wraps the `forward` of transformers' classes of this family, once per process. Heads over a base
    model that is not patched, or that are patched themselves, run as before.
    """
    for mapping in _NEED_A_PATCH:
        head: Any = mapping.get(type(model.config), None)
        if head is not None and not hasattr(head.forward, "_flexvarlen_requires_patch"):
            head.forward = _requiring_patch(head.forward)


def _requiring_patch(forward: Any) -> Any:
    @functools.wraps(forward)
    def checked(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        # getattr, as PEFT, torch.compile and FSDP wrap a base model and pass on its attributes
        if ATTRIBUTE not in self.__dict__ and getattr(base_of(self), ATTRIBUTE, None) is not None:
            raise ValueError(
                f"a head around a patched base model must be patched too, got {type(self).__name__}"
                ", which is not: it would neither mask labels nor pool by document; call "
                "patch_model on the whole model, or the base model alone."
            )
        return forward(self, *args, **kwargs)

    vars(checked)["_flexvarlen_requires_patch"] = True
    return checked


def mark_bare_head(model: PreTrainedModel, parts: ModelParts) -> None:
    """Mark a head's linear layer if the model scales or caps its logits: `document_logprobs` asks.

    Copies of the layer, and wrappers around it, have the mark too.
    """
    unmark_bare_head(model)
    if parts.head.labels == "next token" and changes_logits(parts.config):
        layer: Any = model.get_output_embeddings()
        layer.__dict__[BARE_HEAD] = True


def unmark_bare_head(model: nn.Module) -> None:
    """Undo `mark_bare_head`, also of a layer that was wrapped since."""
    for module in model.modules():
        module.__dict__.pop(BARE_HEAD, None)


def check_document_labels(labels: Any, documents: int) -> None:
    """Check that a head with one output per document got labels for these documents.

    Integers with two axes are labels of tokens, whose shape may be that of several outputs; but for
    a column of labels.

    Raises:
        ValueError: `labels` is not one label, or one vector of floating-point labels, for each.
    """
    if not isinstance(labels, Tensor):
        return
    is_column = documents > 1 and labels.numel() == documents
    of_tokens = labels.ndim > 1 and is_integer_tensor(labels) and not is_column
    if labels.ndim == 0 or len(labels) != documents or of_tokens:
        raise ValueError(
            f"labels must be one for each of the {documents} documents, [{documents}], or "
            f"floating-point [{documents}, num_labels], under a head that classifies documents, "
            f"got {labels.dtype} {tuple(labels.shape)}; give each document its label, and no "
            f"labels of tokens, and where an IterableDataset is loaded {DISPATCH_NOTHING}."
        )


@dataclass(eq=False)
class _UserLoss:
    """Calls a user's `loss_function` without the keywords that a patched model adds."""

    loss: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop(CONTEXT, None)
        kwargs.pop("use_cache", None)  # vision-language heads pass it to the loss
        return self.loss(*args, **kwargs)


def user_loss(model: nn.Module) -> Any:
    """The `loss_function` that the user set, or None."""
    loss = model.__dict__.get(_LOSS)
    return loss.loss if isinstance(loss, _UserLoss) else loss


def wrap_loss(model: nn.Module) -> None:
    """Keep our keywords from a user's loss, as heads pass it all their keyword arguments.

    transformers' own losses accept any keyword.
    """
    loss = model.__dict__.get(_LOSS)
    if loss is not None and not isinstance(loss, _UserLoss):
        model.__dict__[_LOSS] = _UserLoss(loss)


def unwrap_loss(model: nn.Module) -> None:
    """Undo `wrap_loss`."""
    loss = model.__dict__.get(_LOSS)
    if isinstance(loss, _UserLoss):
        model.__dict__[_LOSS] = loss.loss
