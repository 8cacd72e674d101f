"""Which backend serves which attention layers of a model: by layer kind, not once a model.

Layers of one kind share their documents' mask, their heads and what the kernel is asked for, so
they share one backend and one plan a forward. The attention function looks its own kind up by what
reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from flexvarlen.attention.backends.registry import BACKENDS, get_backend, why_not
from flexvarlen.mask.spec import MaskSpec
from flexvarlen.patches.models.llama4 import has_temperature
from flexvarlen.patches.models.towers import (
    VISION,
    first_attention,
    text_config_of,
    text_tower,
    vision_tower,
)

BackendChoice = str | Mapping[str, str]
"""A backend's name for all layers, or one for each of the model's layer types."""

# As in transformers' config.layer_types.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


class LayerKind(NamedTuple):
    """What a layer's attention is asked for; a key, so of constants only.

    Attributes:
        layer_type: transformers' name, as in `config.layer_types`.
        causal, window, chunk: as in `MaskSpec.of`.
        head_dim: the larger one, where values have their own.
        sinks: whether the layer has attention sinks.
    """

    layer_type: str
    causal: bool
    window: int | None
    chunk: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    softcap: float | None = None
    sinks: bool = False

    @property
    def spec(self) -> MaskSpec:
        """Its mask."""
        return MaskSpec.of(causal=self.causal, window=self.window, chunk=self.chunk)


class Route(NamedTuple):
    """Where the layers of one kind go.

    Attributes:
        backend: its name.
        plan: its plan of this forward.
        dtype, needs_grad: of the calls that "auto" was resolved for; None where it was not asked.
    """

    backend: str
    plan: Any
    dtype: torch.dtype | None = None
    needs_grad: bool | None = None

    def serves(self, dtype: torch.dtype, needs_grad: bool) -> bool:
        """Whether it was made for such calls: what serves with gradients serves without."""
        if self.dtype is None:
            return True
        return self.dtype == dtype and (bool(self.needs_grad) or not needs_grad)


def layer_type_of(layer: nn.Module, window: int | None, chunk: int | None = None) -> str:
    """transformers' name for the type of an attention layer with this window or chunk."""
    # Not getattr: an attribute that a module does not have costs a microsecond.
    named: str | None = layer.__dict__.get("layer_type")
    if named is not None:
        return named
    if chunk is not None:
        return CHUNKED
    return FULL if window is None else SLIDING


def chunk_size_of(config: Any) -> int | None:
    """Tokens of a chunk in the layers that have chunks (Llama 4), or None."""
    size: int | None = config.__dict__.get("attention_chunk_size")
    return size


def row_wide(config: Any) -> dict[str, Any]:
    """What a `PackedForward` must know of what layers do by a token's place in the row."""
    config = text_config_of(config)
    return {"chunk_size": chunk_size_of(config), "has_temperature": has_temperature(config)}


def chunk_of(layer: nn.Module, chunk_size: int | None) -> int | None:
    """Tokens of a chunk, which attention of this layer does not cross, or None."""
    if chunk_size is None:
        return None
    types: list[str] = layer.config.layer_types  # type: ignore[union-attr, assignment]
    return chunk_size if types[layer.layer_idx] == CHUNKED else None  # type: ignore[index]


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that call the attention function, in order."""
    return [layer for layer in model.modules() if "is_causal" in layer.__dict__]


def base_of(model: PreTrainedModel) -> nn.Module:
    """The model without a head: the one that holds the layers, and RoPE's tables."""
    base: nn.Module = model.base_model
    holds_layers = "layers" in model._modules or text_tower(model) is not model
    if base is not model or holds_layers:
        return base
    found = (part for part in model.children() if isinstance(part, PreTrainedModel))
    return next(found, model)  # Llama4ForCausalLM names another prefix than its attribute


def kinds_of(model: PreTrainedModel) -> tuple[LayerKind, ...]:
    """The kinds of the attention layers that run over tokens, each once, in their order."""
    return _kinds_in(text_tower(base_of(model)), text_config_of(model.config))


def vision_kinds_of(model: PreTrainedModel) -> tuple[LayerKind, ...]:
    """The kinds of the vision tower's attention layers, if there is one."""
    tower = vision_tower(base_of(model))
    if tower is None:
        return ()
    kinds = (kind._replace(layer_type=VISION) for kind in _kinds_in(tower, tower.config))
    return tuple(dict.fromkeys(kinds))


def _kinds_in(tower: nn.Module, config: Any) -> tuple[LayerKind, ...]:
    kinds: dict[LayerKind, None] = {}
    for layer in attention_layers(tower):
        window = getattr(layer, "sliding_window", None)
        chunk = chunk_of(layer, chunk_size_of(config))
        heads: int = getattr(config, "num_attention_heads", None) or config.num_heads
        kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        head_dim: int = getattr(layer, "head_dim", None) or config.hidden_size // heads
        if hasattr(layer, "kv_lora_rank"):  # multi-head latent attention: keys of all heads
            dims: list[Any] = [layer.qk_head_dim, layer.v_head_dim]
            kv_heads, head_dim = heads, max(dims)
        kind = LayerKind(
            layer_type=layer_type_of(layer, window, chunk),
            causal=bool(layer.is_causal),
            window=window,
            chunk=chunk,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            softcap=getattr(layer, "attn_logit_softcapping", None),
            sinks="sinks" in layer._parameters,
        )
        kinds[kind] = None
    return tuple(kinds)


_COMPUTED_IN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def dtype_of_queries(module: nn.Module) -> torch.dtype:
    """That of the first attention projection, whatever the embedding is kept in.

    A guess where weights are quantized or cast on the way; a layer that gets other queries resolves
    "auto" anew.
    """
    tower = text_tower(base_of(module))  # type: ignore[arg-type]
    attention = first_attention(tower)
    for part in (tower,) if attention is None else (attention, tower):
        for parameter in part.parameters():
            if parameter.dtype in _COMPUTED_IN:  # not what weights are packed in
                return parameter.dtype
    return torch.get_default_dtype()


def check_choice(choice: BackendChoice, kinds: tuple[LayerKind, ...]) -> None:
    """Raise unless the choice names a backend for each of the layer types, and for no other.

    Raises:
        ValueError: an unknown backend, or layer types that are not the model's.
    """
    if isinstance(choice, str):
        _check_name(choice)
        return
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
            f"backend must name one for each layer type of the model ({', '.join(types)}), got "
            f"{dict(choice)!r}, where {wrong}; use these types as keys."
        )
    for name in choice.values():
        _check_name(name)


def _check_name(name: object) -> None:
    if name != "auto":
        get_backend(name)  # type: ignore[arg-type]  # raises, whatever it is


def chosen_for(choice: BackendChoice, layer_type: str) -> str:
    """The name chosen for layers of this type, "auto" not resolved.

    Raises:
        ValueError: the choice has none: the layer was not there, or of another type, when patched.
    """
    if isinstance(choice, str):
        return choice
    if layer_type not in choice:
        raise ValueError(
            f"backend must name one for each layer type of the model, got {dict(choice)!r} and a "
            f"layer of type {layer_type!r}; call patch_model again, with this type as a key too."
        )
    return choice[layer_type]


def names_in(choice: BackendChoice) -> list[str]:
    """The names chosen, each once; the first stands for the model's attn_implementation."""
    return [choice] if isinstance(choice, str) else list(dict.fromkeys(choice.values()))


def why_not_kind(backend: str, kind: LayerKind, **call: Any) -> str | None:
    """`flexvarlen.why_not` for layers of a kind; `call` is the rest of its arguments."""
    return why_not(
        backend,
        num_heads=kind.num_heads,
        num_kv_heads=kind.num_kv_heads,
        head_dim=kind.head_dim,
        causal=kind.causal,
        window=kind.window,
        chunk=kind.chunk,
        softcap=kind.softcap,
        sinks=kind.sinks,
        **call,
    )


def check_machine(
    choice: BackendChoice,
    kinds: tuple[LayerKind, ...],
    device: torch.device,
    *,
    deterministic: bool,
    batch_invariant: bool,
) -> None:
    """Refuse now what no later device or dtype of the model could mend (a missing package).

    Raises:
        NotImplementedError: a backend cannot serve the layers it was chosen for.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda")
    elif device.type == "meta":  # to be loaded anywhere
        device = torch.device("cpu")
    call = {
        "device": device,
        "dtype": torch.bfloat16,
        "needs_grad": False,
        "deterministic": deterministic,
        "batch_invariant": batch_invariant,
    }
    for kind in kinds:
        backend = chosen_for(choice, kind.layer_type)
        reason = None if backend == "auto" else why_not_kind(backend, kind, **call)
        if reason is not None:
            raise NotImplementedError(
                reason if len(kinds) == 1 else _of_layers(kind, backend, reason, call)
            )


def refusal_of_layers(refusal: Exception, backend: str, kind: LayerKind, **call: Any) -> str:
    """A kernel's refusal of a call, with the layers it was made for and what could serve them."""
    return _of_layers(kind, backend, str(refusal), call)


def _of_layers(kind: LayerKind, backend: str, reason: str, call: dict[str, Any]) -> str:
    could = [
        name for name in BACKENDS if name != backend and why_not_kind(name, kind, **call) is None
    ]
    others = (
        f"For these layers {', '.join(could)} could: pass "
        f"backend={{{kind.layer_type!r}: {could[0]!r}, ...}} to patch_model."
        if could
        else "No other backend could."
    )
    return f"{backend} cannot serve the {kind.layer_type} layers: {reason} {others}"
