"""The model types that are verified.

Packed equals per document, in outputs and gradients, by the tests.
"""

from __future__ import annotations

from flexvarlen.patches import llama, qwen

VERIFIED: tuple[str, ...] = (*llama.MODEL_TYPES, *qwen.MODEL_TYPES)


def require_verified(model_type: str) -> None:
    """Refuse a model whose packed outputs nobody has checked.

    Raises:
        NotImplementedError: the model type is not verified. It may keep state over the row, or draw
            a mask of its own, which documents would leak through.
    """
    if model_type not in VERIFIED:
        raise NotImplementedError(
            f"model_type must be one of the verified {', '.join(VERIFIED)}, got {model_type!r}; "
            "packed documents could leak into one another there: use the model's own attention, "
            "one document a row."
        )
