"""Whether models of a type are verified, and why those of another are not packed."""

from __future__ import annotations

from flexvarlen.patches.models.families import BY_TYPE, TEXT_TOWERS
from flexvarlen.patches.models.unsupported import why_not_supported

NOT_PATCHED = (
    "got an unpatched model whose config has an attn_implementation of flexvarlen, set on it or on "
    "a patched model that shares the config object; call flexvarlen.patch_model on this model too "
    "(patch_trainer patches every model of a trainer), or build it with a config of its own and "
    "another attn_implementation."
)
"""How refusals end where layers run without `patch_model`."""

_VERIFIED = {**BY_TYPE, **TEXT_TOWERS}


def is_verified(model_class: type, model_type: str) -> bool:
    """Whether a class is transformers' own code, or derives from it, for a verified family."""
    own_code = any(x.__module__.startswith("transformers.models.") for x in model_class.__mro__)
    return own_code and model_type in _VERIFIED


def why_not_by_type(model_type: str, *, verify: bool = False) -> str | None:
    """Why models of a type are not packed, or None.

    They keep, or may keep, state across the row, or use a mask of their own, through which
    documents would leak.

    Args:
        verify: the model itself is going to be checked, so that its type need not be listed.
    """
    why = why_not_supported(model_type)
    if why is not None or verify or model_type in _VERIFIED:
        return why
    return (
        f"model_type must be of a verified family, got {model_type!r}, in which packed "
        "documents could leak into one another; call patch_model(model, verify=True), which "
        "checks a causal text model for leaks, or use the model's own attention, one document "
        "per row (docs/families.md lists the verified families)."
    )


def why_not_by_name(model_type: str) -> str | None:
    """Why models of a type need `patch_model`, and not their attn_implementation alone, or None."""
    why = why_not_by_type(model_type)
    if why is not None or _VERIFIED[model_type].by_name_alone:
        return why
    return (
        f"a {model_type} model needs its documents outside the attention layers too, {NOT_PATCHED}"
    )


def require_verified(model_type: str) -> None:
    """Refuse a model type that is not verified.

    Raises:
        NotImplementedError: with the sentence of `why_not_by_type`.
    """
    why = why_not_by_type(model_type)
    if why is not None:
        raise NotImplementedError(why)
