"""`ModelParts`: what a transformers model is made of, found once, when it is patched.

It contains names, numbers and configs but no modules, so that copies of a model share it (a deep
copy, or the second module that accelerate makes of compiled layers).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from flexvarlen.patches.models.heads import NO_HEAD, Head, kind_of_head
from flexvarlen.patches.models.layers import (
    VISION,
    LayerKind,
    chunk_size_of,
    dense_mlps,
    first_position,
    has_temperature,
    kinds_in,
    recurrent_layers,
    table_of_positions,
    text_config_of,
)
from flexvarlen.patches.models.rope import has_longrope
from flexvarlen.patches.models.routers import Routers, routers_of


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model, and the special features of its family.

    Attributes:
        model_class: class of the whole model.
        model_config, config: configs of the whole model, and of its text tower.
        base_name: the attribute that holds the base model, which has the layers and RoPE's tables;
            "" if the model is one.
        text_name: the base model's attribute that holds its text tower; "" if it is one.
        vision_name: the base model's attribute that holds a tower of packed images; "" without.
        head: the kind of head; `NO_HEAD` for a base model.
        kinds, vision_kinds: the distinct kinds of attention layers in the two towers, in order.
        recurrent_classes: classes of the recurrent layers, in order.
        uses_hub_kernels: whether the model was loaded with `use_kernels=True`.
        pipeline_stages: ranks over which transformers split the layers; 1 for a whole model.
        tensor_ranks: ranks over which it split each layer's weights; they have the same tokens.
        rotary_type: the `rope_type` of the text tower's rotary module, if it has one.
        first_position: the position of a document's first token.
        max_positions: tokens of the longest document that learned positions reach; None: no table.
        chunk_size: tokens of a chunk, in the layers that have chunks.
        has_axes: whether rotary positions have rows for time, height and width.
        has_longrope: whether RoPE's frequencies depend on how long a document is.
        has_temperature: whether layers scale queries by their position in the row.
        shares_keys: whether later layers attend to keys of earlier ones (Gemma 4).
        routers: of the text tower's layers with experts; None without any.
        has_mlps: whether the text tower's layers have MLPs.
        drops_keywords: whether the head passes its base model no keywords (Mamba-2), so that the
            documents are passed as its attention_mask.
    """

    model_class: type[PreTrainedModel]
    model_config: Any
    config: Any
    base_name: str
    text_name: str
    vision_name: str
    head: Head
    kinds: tuple[LayerKind, ...]
    vision_kinds: tuple[LayerKind, ...]
    recurrent_classes: tuple[type[nn.Module], ...]
    uses_hub_kernels: bool
    pipeline_stages: int
    tensor_ranks: int
    rotary_type: str | None
    first_position: int
    max_positions: int | None
    chunk_size: int | None
    has_axes: bool
    has_longrope: bool
    has_temperature: bool
    shares_keys: bool
    routers: Routers | None
    has_mlps: bool
    drops_keywords: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelParts:
        """The parts of a model, whether it is patched or not."""
        base = base_of(model)
        text = text_tower_of(base)
        vision = base._modules.get("visual")
        if not isinstance(vision, PreTrainedModel):
            vision = None
        config = text_config_of(model.config)
        parts = cls(
            model_class=type(model),
            model_config=model.config,
            config=config,
            base_name=name_of(base, model),
            text_name=name_of(text, base),
            vision_name="" if vision is None else "visual",
            head=NO_HEAD,
            kinds=kinds_in(text, config),
            vision_kinds=() if vision is None else _vision_kinds(vision),
            recurrent_classes=tuple(map(type, recurrent_layers(text))),
            uses_hub_kernels=bool(model.use_kernels),
            pipeline_stages=_ranks_of_mesh(model.config, "pp_size"),
            tensor_ranks=_ranks_of_mesh(model.config, "tp_size"),
            rotary_type=getattr(text._modules.get("rotary_emb"), "rope_type", None),
            first_position=first_position(base),
            max_positions=table_of_positions(base),
            chunk_size=chunk_size_of(config),
            has_axes="mrope_section" in (getattr(config, "rope_parameters", None) or {}),
            has_longrope=has_longrope(config),
            has_temperature=has_temperature(config),
            shares_keys=bool(getattr(config, "num_kv_shared_layers", None)),
            routers=routers_of(text, getattr(config, "hidden_size", 0)),
            has_mlps=bool(dense_mlps(text)),
            drops_keywords=model.config.model_type == "mamba2",
        )
        if base is model:
            return parts
        return replace(parts, head=kind_of_head(type(model), causal=parts.causal))

    @property
    def recurrent(self) -> bool:
        """Whether there are recurrent layers, to which documents are passed too."""
        return bool(self.recurrent_classes)

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return self.recurrent or any(kind.causal for kind in self.kinds)

    def shard_options(self) -> dict[str, Any]:
        """The keyword arguments that `shard_row` needs for the model."""
        windows = [kind.window for kind in self.kinds if kind.window is not None]
        options: dict[str, Any] = {"method": "contiguous"} if self.recurrent else {}
        options |= {} if self.causal else {"causal": False}
        return options | ({"window": max(windows)} if windows else {})

    def of_base(self) -> ModelParts:
        """The parts of the base model by itself."""
        return replace(self, base_name="", head=NO_HEAD)

    def base(self, model: nn.Module) -> nn.Module:
        """The base model of the model that these are the parts of, or of a copy of it."""
        return _part(model, self.base_name)

    def text_tower(self, model: nn.Module) -> nn.Module:
        """The module that processes text tokens."""
        return _part(self.base(model), self.text_name)

    def vision_tower(self, model: nn.Module) -> PreTrainedModel | None:
        """The module that processes packed images, if there is one."""
        if not self.vision_name:
            return None
        tower: Any = getattr(self.base(model), self.vision_name, None)
        return tower


def _ranks_of_mesh(config: Any, size: str) -> int:
    """A size in transformers' `DistributedConfig`; saved configs and older releases lack it."""
    return getattr(getattr(config, "distributed_config", None), size, None) or 1


def base_of(model: PreTrainedModel) -> nn.Module:
    """The model without a head."""
    base: nn.Module = model.base_model
    holds_layers = "layers" in model._modules or text_tower_of(model) is not model
    if base is not model or holds_layers:
        return base
    found = (part for part in model.children() if isinstance(part, PreTrainedModel))
    return next(found, model)  # Llama4ForCausalLM names another prefix than its attribute


def text_tower_of(base: nn.Module) -> nn.Module:
    """The part of a base model that processes text tokens, which may be all of it."""
    named = (base._modules.get(name) for name in ("language_model", "text_model"))
    return next((tower for tower in named if tower is not None), base)


def _part(whole: nn.Module, name: str) -> nn.Module:
    """A module's attribute, also where torch.compile or PEFT wraps the module; itself for ""."""
    part: nn.Module = getattr(whole, name) if name else whole
    return part


def name_of(part: nn.Module, whole: nn.Module) -> str:
    """The attribute of a module that holds another, "" if both are the same."""
    return "" if part is whole else next(k for k, x in whole._modules.items() if x is part)


def _vision_kinds(tower: PreTrainedModel) -> tuple[LayerKind, ...]:
    kinds = (kind._replace(layer_type=VISION) for kind in kinds_in(tower, tower.config))
    return tuple(dict.fromkeys(kinds))
