"""The kinds of heads on a base model, by the ending of their classes' names."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Heads whose labels are next tokens."""

PER_DOCUMENT = ("ForSequenceClassification", "ForReward")
"""Heads with one output per document."""

PER_TOKEN = ("ForMaskedLM", "ForTokenClassification")
"""Heads whose labels are the tokens' own."""

CHOICES = "ForMultipleChoice"
"""A head whose rows are `[B, choices, S]`."""

PER_ROW = ("ForQuestionAnswering", CHOICES)
"""Heads with one output per row, which refuse rows of several documents."""

_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

HEADS = (*CAUSAL, *PER_TOKEN, *PER_DOCUMENT, *PER_ROW)


def heads_of(*, causal: bool) -> tuple[str, ...]:
    """The kinds that a model may have, by whether its attention is causal."""
    return tuple(head for head in HEADS if causal or head not in CAUSAL)


def kind_of_head(model_class: type[PreTrainedModel], *, causal: bool) -> str | None:
    """The kind of a head's class, or of the transformers class that it derives from; else None.

    Args:
        causal: whether attention is.
    """
    classes = model_class.__mro__
    own = [each for each in classes if each.__module__.startswith("transformers.models.")]
    names = [each.__name__ for each in own or classes]
    heads = heads_of(causal=causal)
    return next((head for name in names for head in heads if name.endswith(head)), None)


def changes_logits(config: Any) -> bool:
    """Whether the head of a language model scales or caps the logits of its linear layer.

    Args:
        config: of the text tower.
    """
    scales = (getattr(config, name, None) for name in _SCALES)
    caps = (getattr(config, name, None) for name in _CAPS)
    return any(x not in (None, 1) for x in scales) or any(x is not None for x in caps)
