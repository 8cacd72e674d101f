"""The kinds of heads on a base model: whose labels they take, and what they pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel


@dataclass(frozen=True)
class Head:
    """What a kind of head does with the hidden states of its base model.

    Attributes:
        ending: of the names of its classes; "" of a base model without a head.
        labels: whose they are; "" if nobody's.
        has_choices: whether its rows are `[B, choices, S]`.
    """

    ending: str
    labels: Literal["", "next token", "own token", "document", "row"]
    has_choices: bool = False

    @property
    def pools(self) -> bool:
        """Whether it has one output for each document or row."""
        return self.labels in ("document", "row")


NO_HEAD, UNKNOWN_HEAD = Head("", ""), Head("?", "")
HEADS = (
    Head("ForCausalLM", "next token"),
    Head("LMHeadModel", "next token"),
    Head("ForConditionalGeneration", "next token"),
    Head("ForMaskedLM", "own token"),
    Head("ForTokenClassification", "own token"),
    Head("ForSequenceClassification", "document"),
    Head("ForReward", "document"),
    Head("ForQuestionAnswering", "row"),  # refuses rows of several documents, as the next
    Head("ForMultipleChoice", "row", has_choices=True),
)

_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def heads_of(*, causal: bool) -> tuple[Head, ...]:
    """The kinds that a model may have, by whether its attention is causal."""
    return tuple(head for head in HEADS if causal or head.labels != "next token")


def kind_of_head(model_class: type[PreTrainedModel], *, causal: bool) -> Head:
    """The kind of a head's class, or of the transformers class that it derives from.

    Args:
        causal: whether attention is.
    """
    classes = model_class.__mro__
    own = [each for each in classes if each.__module__.startswith("transformers.models.")]
    names = [each.__name__ for each in own or classes]
    heads = heads_of(causal=causal)
    found = (head for name in names for head in heads if name.endswith(head.ending))
    return next(found, UNKNOWN_HEAD)


def changes_logits(config: Any) -> bool:
    """Whether the head of a language model scales or caps the logits of its linear layer.

    Args:
        config: of the text tower.
    """
    scales = (getattr(config, name, None) for name in _SCALES)
    caps = (getattr(config, name, None) for name in _CAPS)
    return any(x not in (None, 1) for x in scales) or any(x is not None for x in caps)
