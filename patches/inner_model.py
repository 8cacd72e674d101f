"""Find the transformers model inside wrappers."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The outermost transformers model inside, which contains all the others (base, towers)."""
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    found = [(name, part) for name, part in named if isinstance(part, PreTrainedModel)]
    if not found:
        raise ValueError(
            f"model must be, or wrap, a transformers PreTrainedModel, got "
            f"{model!r:.80}; load it with AutoModelForCausalLM.from_pretrained."
            if isinstance(model, str)
            else "model must be, or wrap, a transformers PreTrainedModel, got "
            f"{type(model).__name__}; load it with AutoModel."
        )
    # Not always the first one: a wrapper may list a base model before the model that contains it.
    for _, inner in found:
        if {part for _, part in found} <= {*inner.modules()}:
            return inner
    first, inner = found[0]
    name, part = next((name, part) for name, part in found if part not in {*inner.modules()})
    raise ValueError(
        f"model must contain one transformers model, got {type(inner).__name__} as {first!r} "
        f"and {type(part).__name__} as {name!r}, which is not part of it and would leak; "
        "patch each one separately."
    )
