"""Find a model's attention layers, and describe each kind of them (`LayerKind`).

The layers are in the model itself, or in a text and a vision tower. Gemma 3's vision tower gets
its images in batches and is not patched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexvarlen.attention.call import AttentionCall
from flexvarlen.attention.check_arguments import check_numbers
from flexvarlen.layout.boundaries import is_compiled
from flexvarlen.mask.spec import MaskSpec

# As in transformers' config.layer_types.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
VISION = "vision_attention"
"""The layer type of a vision tower's layers, for mappings of backends."""

_LISTS = ("layers", "blocks", "layer")  # Llama, Qwen-VL's vision tower, BERT
_ATTENTION = ("self_attn", "attn", "attention")  # Llama, ModernBERT, BERT


# ---- where the layers are ----


def text_config_of(config: Any) -> Any:
    """The config of the text tower, or of all of the model."""
    return config.__dict__.get("text_config") or config


def first_layer(tower: nn.Module) -> nn.Module | None:
    """The first layer of a tower, or None if its list of layers is not found."""
    holder = tower._modules.get("encoder") or tower  # BERT
    for name in _LISTS:
        layers: Any = holder._modules.get(name)
        if layers:
            first: nn.Module = layers[0]
            return first
    return None


def is_compiled_by_layer(tower: nn.Module) -> bool:
    """Whether a tower's layers are compiled separately."""
    first = first_layer(tower)
    return first is not None and is_compiled(first)


def runs_compiled(tower: nn.Module) -> bool:
    """Whether the forward that runs now is compiled, as a whole or layer by layer."""
    return torch.compiler.is_compiling() or is_compiled_by_layer(tower)


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that call the attention function, in order."""
    return [layer for layer in model.modules() if "is_causal" in layer.__dict__]


def attention_modules(tower: nn.Module) -> list[nn.Module]:
    """The modules of a tower that are named as layers name their attention."""
    return [part for name, part in tower.named_modules() if name.rpartition(".")[2] in _ATTENTION]


def recurrent_layers(tower: nn.Module) -> list[nn.Module]:
    """The layers of a text tower that hold a short convolution, also inside PEFT's wrapper."""
    found = []
    for layer in tower.modules():
        children = (layer._modules.get(name) for name in ("conv1d", "conv"))
        weights = (getattr(child, "weight", None) for child in children)
        if any(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights):
            found.append(layer)
    return found


def dense_mlps(tower: nn.Module) -> list[nn.Module]:
    """The MLPs of a text tower without experts, in the order of its layers."""
    return [part for part in tower.modules() if type(part).__name__.endswith("MLP")]


def first_position(base: nn.Module) -> int:
    """The position of a document's first token: RoBERTa counts from padding_idx + 1."""
    embeddings: Any = getattr(base, "embeddings", None)  # passed on by PEFT's wrapper
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1
    return 0


def table_of_positions(base: nn.Module) -> int | None:
    """Tokens of the longest document that an encoder's learned positions reach; None: no table."""
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    return table.num_embeddings - first_position(base) if isinstance(table, nn.Embedding) else None


_COMPUTED_IN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def dtype_of_queries(tower: nn.Module) -> tuple[torch.dtype, bool]:
    """The dtype of a tower's first attention projection, and whether its parameters are trainable.

    A guess if weights are quantized or cast on the fly; a layer whose queries differ builds
    another route.
    """
    layer = first_layer(tower)
    parts = () if layer is None else (layer._modules.get(name) for name in _ATTENTION)
    attention = next((part for part in parts if part), None)
    dtype = None
    learns = False
    for part in (tower,) if attention is None else (attention, tower):
        for parameter in part.parameters():
            learns = learns or (part is attention and parameter.requires_grad)
            if dtype is None and parameter.dtype in _COMPUTED_IN:  # skip quantized storage dtypes
                dtype = parameter.dtype
        if dtype is not None:
            break
    return dtype or torch.get_default_dtype(), learns


def dtype_of_forward(tower: nn.Module, device: torch.device) -> torch.dtype:
    """The dtype of a tower's matrix products, under autocast too; a guess, as the one above."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype_of_queries(tower)[0]


# ---- kinds of layers ----


class LayerKind(NamedTuple):
    """The static properties of a layer's attention. Used as a dictionary key.

    Attributes:
        layer_type: transformers' name, as in `config.layer_types`.
        causal, window, chunk: as in `MaskSpec.of`.
        head_dim: the larger one, if values have a different head_dim.
        scale: factor on the scores.
        sinks: whether the layer has attention sinks.
    """

    layer_type: str
    causal: bool
    window: int | None
    chunk: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    sinks: bool = False

    @property
    def spec(self) -> MaskSpec:
        """The mask of these layers."""
        return MaskSpec.of(causal=self.causal, window=self.window, chunk=self.chunk)

    @property
    def numbers(self) -> dict[str, Any]:
        """What attention computes, whatever the heads."""
        names = ("causal", "window", "chunk", "scale", "softcap", "sinks")
        return {name: getattr(self, name) for name in names}

    def call(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        needs_grad: bool,
        trees: bool = False,
        cross: bool = False,
        runs: bool = False,
        deterministic: bool = False,
        batch_invariant: bool = False,
        past_int32: bool = False,
    ) -> AttentionCall:
        """The `AttentionCall` of such a layer.

        Args:
            trees: whether the row of keys has trees.
            cross: whether that row is another one than that of the queries.
            runs: whether tokens of images see one another both ways.

        Raises:
            ValueError: a scale or softcap that is not positive and finite.
        """
        check_numbers(self.softcap, self.scale)
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        spec = replace(self.spec, cross=cross)
        spec = spec.with_trees() if trees else spec
        spec = spec.with_runs() if runs else spec
        numbers = (self.scale, self.softcap, self.sinks)
        guarantees = (deterministic, batch_invariant)
        # Not changed by _replace: torch 2.11 cannot break a compiled graph that keeps such a copy.
        return AttentionCall(
            device, dtype, *heads, spec, *numbers, needs_grad, *guarantees, False, past_int32
        )


def layer_type_of(layer: nn.Module, window: int | None, chunk: int | None) -> str:
    """transformers' name for the type of an attention layer with this window or chunk."""
    # Not getattr: an attribute that a module does not have costs a microsecond.
    named: str | None = layer.__dict__.get("layer_type")
    if named is not None:
        return named
    if chunk is not None:
        return CHUNKED
    return FULL if window is None else SLIDING


def window_of(layer: nn.Module) -> int | None:
    """The sliding window of a layer, or None.

    Mistral's layers have no attribute for it, and EXAONE 4's full layers have one all the same.
    """
    config: Any = layer.__dict__.get("config")
    own = {} if config is None else config.__dict__
    types: list[str] | None = own.get("layer_types")
    index: int | None = layer.__dict__.get("layer_idx")  # layers of some vision towers have none
    if types is not None and index is not None and types[index] != SLIDING:
        return None
    unused = own.get("model_type") == "nemotron_h"  # its config has the field, its layers do not
    window: int | None = layer.__dict__.get(
        "sliding_window", None if unused else own.get("sliding_window")
    )
    return window


def chunk_size_of(config: Any) -> int | None:
    """The chunk size of chunked layers (Llama 4), or None."""
    size: int | None = getattr(text_config_of(config), "attention_chunk_size", None)
    return size


def chunk_of(layer: nn.Module, chunk_size: int | None) -> int | None:
    """The chunk size of this layer, or None if it is not chunked."""
    if chunk_size is None:
        return None
    types: list[str] = layer.config.layer_types  # type: ignore[union-attr, assignment]
    return chunk_size if types[layer.layer_idx] == CHUNKED else None  # type: ignore[index]


def has_temperature(config: Any) -> bool:
    """Whether layers without RoPE scale their queries by the token's position (Llama 4)."""
    return bool(getattr(config, "attn_temperature_tuning", False))


def kinds_in(tower: nn.Module, config: Any) -> tuple[LayerKind, ...]:
    """The distinct kinds of a tower's attention layers, in order.

    Args:
        config: of the tower.
    """
    return tuple(dict.fromkeys(kinds_of_layers(tower, config)))


def kinds_of_layers(tower: nn.Module, config: Any) -> list[LayerKind]:
    """The kind of each of a tower's attention layers, in order.

    Args:
        config: of the tower.
    """
    heads: int = getattr(config, "num_attention_heads", 0) or getattr(config, "num_heads", 0)
    kinds: list[LayerKind] = []
    for layer in attention_layers(tower) if heads else ():
        # Gemma 4 has other head_dims and KV heads by layer type, which its config does not tell.
        groups: int | None = getattr(layer, "num_key_value_groups", None)
        kv_heads: int = (
            heads // groups if groups else getattr(config, "num_key_value_heads", None) or heads
        )
        head_dim: int = getattr(layer, "head_dim", None) or config.hidden_size // heads
        own_dim = head_dim
        if hasattr(layer, "kv_lora_rank"):  # multi-head latent attention: keys of all heads
            dims: list[Any] = [layer.qk_head_dim, layer.v_head_dim]
            kv_heads, own_dim, head_dim = heads, dims[0], max(dims)
        scale: float | None = getattr(layer, "scaling", None)
        window = window_of(layer)
        chunk = chunk_of(layer, chunk_size_of(config))
        kind = LayerKind(
            layer_type=layer_type_of(layer, window, chunk),
            causal=bool(layer.is_causal),
            window=window,
            chunk=chunk,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=own_dim**-0.5 if scale is None else scale,
            softcap=getattr(layer, "attn_logit_softcapping", None),
            sinks="sinks" in layer._parameters,
        )
        kinds.append(kind)
    return kinds
