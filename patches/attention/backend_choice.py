"""Choose the backend for each kind of attention layer of a model.

Layers of one kind have the same mask, heads and kernel options, so
they share one backend and one plan per forward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexvarlen.attention.backends.registry import (
    BACKENDS,
    NOT_SAME_BITS,
    SAME_BITS,
    get_backend,
    named_refusal,
    our_name,
    refusal,
)
from flexvarlen.attention.call import AttentionCall
from flexvarlen.patches.models.layers import LayerKind
from flexvarlen.patches.state import BackendChoice


def checked_choice(choice: BackendChoice, kinds: tuple[LayerKind, ...]) -> BackendChoice:
    """The choice in our names, checked to name a backend for exactly the model's layer types.

    Raises:
        ValueError: an unknown backend, or layer types that are not the model's.
    """
    if isinstance(choice, str):
        return _checked_name(choice)
    if not isinstance(choice, Mapping):
        raise ValueError(
            "backend must be a name, or a mapping from layer types to names, got "
            f"{type(choice).__name__}; pass one of {', '.join(BACKENDS)} or auto."
        )
    types = list(dict.fromkeys(kind.layer_type for kind in kinds))
    unknown = [name for name in choice if name not in types]
    missing = [name for name in types if name not in choice]
    if unknown or missing:
        wrong = f"no layer is {unknown[0]!r}" if unknown else f"{missing[0]!r} has none"
        raise ValueError(
            f"backend must name a backend for each layer type ({', '.join(types)}), got "
            f"{dict(choice)!r}, where {wrong}; use these types as keys."
        )
    return {layer_type: _checked_name(name) for layer_type, name in choice.items()}


def _checked_name(name: str) -> str:
    name = our_name(name)
    if name != "auto":
        get_backend(name)  # raises, whatever it is
    return name


def chosen_for(choice: BackendChoice, layer_type: str) -> str:
    """The backend name chosen for this layer type; "auto" is not resolved.

    Raises:
        ValueError: the choice has no backend for it: when the model was patched, the layer did not
            exist or had another type.
    """
    if isinstance(choice, str):
        return choice
    if layer_type not in choice:
        raise ValueError(
            f"backend must name a backend for each layer type of the model, got {dict(choice)!r} "
            f"and a layer of type {layer_type!r}; call patch_model again with this type as a key."
        )
    return choice[layer_type]


def same_bits_choice(
    choice: BackendChoice,
    kinds: tuple[LayerKind, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    deterministic: bool,
    batch_invariant: bool,
) -> BackendChoice:
    """The choice with `same_bits`; "auto" is the first of `SAME_BITS` that serves all its layers.

    Raises:
        NotImplementedError: a backend gives a document other bits at another offset, or none of
            `SAME_BITS` can serve the layers of "auto".
    """
    wrong = next((name for name in names_in(choice) if name in NOT_SAME_BITS), None)
    if wrong is not None:
        raise NotImplementedError(
            "same_bits needs a backend that gives a document the same bits at every offset, "
            f"{', '.join(SAME_BITS)}, got {wrong!r}: {NOT_SAME_BITS[wrong]}; name one of them, or "
            "remove same_bits."
        )
    calls = [
        kind.call(
            device,
            dtype,
            needs_grad=True,
            deterministic=deterministic,
            batch_invariant=batch_invariant,
        )
        for kind in kinds
        if chosen_for(choice, kind.layer_type) == "auto"
    ]
    if not calls:
        return choice
    serve = (name for name in SAME_BITS if all(refusal(name, call) is None for call in calls))
    auto = next(serve, None)
    if auto is None:
        raise NotImplementedError(
            "same_bits needs a backend that gives a document the same bits at every offset, got "
            f"'auto' and a model on {device} in {dtype} that none of {', '.join(SAME_BITS)} can "
            "serve; name one of them to see why, or remove same_bits."
        )
    if isinstance(choice, str):
        return auto
    return {kind: auto if name == "auto" else name for kind, name in choice.items()}


def names_in(choice: BackendChoice) -> list[str]:
    """The distinct chosen names; the first is used for the model's attn_implementation."""
    return [choice] if isinstance(choice, str) else list(dict.fromkeys(choice.values()))


def check_machine(
    choice: BackendChoice,
    kinds: tuple[LayerKind, ...],
    device: torch.device,
    *,
    deterministic: bool,
    batch_invariant: bool,
    trees: bool = False,
) -> None:
    """Refuse backends that cannot work on any later device or dtype, such as a missing package.

    Args:
        trees: whether documents may be trees.

    Raises:
        NotImplementedError: a backend cannot serve the layers it was chosen for.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda")
    elif device.type == "meta":  # weights may be loaded on any device
        device = torch.device("cpu")
    for kind in kinds:
        backend = chosen_for(choice, kind.layer_type)
        if backend == "auto":
            continue
        call = kind.call(
            device,
            torch.bfloat16,
            needs_grad=False,
            trees=trees and kind.causal,  # those of a vision tower hold no trees
            deterministic=deterministic,
            batch_invariant=batch_invariant,
        )
        reason = named_refusal(backend, call)
        if reason is not None:
            several = len(kinds) > 1
            raise NotImplementedError(
                refusal_of_layers(reason, backend, kind, call) if several else reason
            )


def refusal_of_layers(reason: str, backend: str, kind: LayerKind, call: AttentionCall) -> str:
    """The error message for layers that a backend does not support, with alternatives."""
    could = [name for name in BACKENDS if name != backend and refusal(name, call) is None]
    others = (
        f"For these layers {', '.join(could)} could: pass "
        f"backend={{{kind.layer_type!r}: {could[0]!r}, ...}} to patch_model."
        if could
        else "No other backend could."
    )
    return f"{backend} cannot serve the {kind.layer_type} layers: {reason} {others}"
