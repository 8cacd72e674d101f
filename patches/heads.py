"""What may stand on a base model: heads whose labels belong to tokens."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from flexvarlen.patches.routing import base_of

_CAUSAL = ("ForCausalLM", "ForConditionalGeneration")  # labels are next tokens
_BIDIRECTIONAL = ("ForMaskedLM", "ForTokenClassification")  # labels are the tokens' own


def check_head(model: PreTrainedModel, *, causal: bool) -> None:
    """Refuse a head that pools rows, or an encoder that is set to decode.

    Args:
        causal: whether attention is.

    Raises:
        NotImplementedError: it is one.
    """
    refuse_decoder(model.config)
    name = type(model).__name__
    if base_of(model) is not model and not name.endswith(_CAUSAL if causal else _BIDIRECTIONAL):
        heads = "ForCausalLM" if causal else "ForMaskedLM or ...ForTokenClassification"
        raise NotImplementedError(
            f"model must be a base model or a ...{heads}, got {name}: labels of other heads are "
            f"not {'next tokens' if causal else 'of tokens'}; patch its base model, and pool by "
            "document."
        )


def refuse_decoder(config: Any) -> None:
    """Refuse an encoder that is set to decode: it has caches, and may have cross-attention.

    Raises:
        NotImplementedError: it is.
    """
    if config.__dict__.get("is_decoder"):
        raise NotImplementedError(
            f"an encoder must stay one, got a {config.model_type} model with "
            "config.is_decoder=True; set it to False before the model is built."
        )
