"""The state of a patched model, and our attn_implementation names.

Patched models that share a config object share its attn_implementation, the name of any of their
backends.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from flexvarlen.attention.backends.registry import IMPLEMENTATIONS
from flexvarlen.patches.models.layers import text_config_of
from flexvarlen.patches.parts import ModelParts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ATTRIBUTE = "_flexvarlen_patch"
"""The attribute that holds the `Patch` of a patched model and its base model."""

LAYER_MARK = "_flexvarlen_patched"
"""The attribute that marks the attention layers of a patched model."""


class LostDocuments(ValueError):
    """Raised where a layer, or a base model below its head, is called without the documents."""


LOST_DOCUMENTS = (
    "the layers of a patched model must get its documents from the model's own forward, got a call "
    "without them: call the model, pass **kwargs on in each forward between it and its layers, and "
    "call patch_model again after a pickle was loaded or a library set another forward."
)

CONTEXT = "flexvarlen"
"""The keyword that passes what a forward found to the layers of a patched model: a `PackedForward`,
an `Unpacked`, in a vision tower a `PackedVision` or, from a head to its base model, a
`PaddedBatch`."""

ROUTES = "flexvarlen_routes"
"""The keyword that passes `routed_experts` on from a head to its base model."""

BackendChoice = str | Mapping[str, str]
"""A backend's name for all layers, or one for each of the model's layer types."""

VISION_IMPLEMENTATION = "flexvarlen_flash_vision"
"""The name on the config of a patched vision tower.

With "flash" in it the tower calls attention once a layer, with cu_seqlens; without, once a frame.
It is never passed to transformers' setters, which would load a package for it.
"""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Settings:
    """The arguments of `patch_model`, checked.

    Omitted arguments have been replaced by their defaults, which some environment variables set.
    """

    backend: BackendChoice
    deterministic: bool
    batch_invariant: bool
    capacity: int | None
    max_seqlen_bound: int | None
    unpad: bool
    unpad_to_multiple_of: int | None
    share_prefixes: bool
    sequence_parallel_group: ProcessGroup | None
    verify: bool
    same_bits: int | None
    loss_chunk_tokens: int | None
    mlp_chunk_tokens: int | None

    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return {field.name: getattr(self, field.name) for field in fields(Settings)}


class Stages(NamedTuple):
    """The functions of a model's capabilities that a module's forward calls; most models have few.

    `forward/stages.py` chooses them when a model is patched, and `forward/steps.py` calls them.

    Attributes:
        arguments: (module, patch, arguments) -> None, before the arguments are read.
        refusals: (given) -> None: refuse what this model does not support. (Module-level
            functions, as a patched model may be pickled.)
        batch: (given) -> given, or the arguments of a head whose base model makes the packed row.
        checks: (given, layout, several) -> None: refuse what these documents do not go with.
        positions: (given, layout, several) -> position_ids, or None.
        targets: (given, layout, several) -> `Targets`.
        pooled_tokens: (given, layout, several) -> those that a pooler reads; None without one.
        routes: (given, layout) -> experts to replay, `[T, M, K]`, or None; None without routers.
        image_runs: (given) -> `ImageRuns` or None; None where images see as text does.
        recurrent: (text tower, patch, layout) -> `RecurrentDocuments`; None without such layers.
        keywords: by which the layers get the documents.
        head: (given, row, packed, arguments) -> None: change the arguments of a head.
        outputs: (module, packed, outputs) -> None: change the outputs.
        call: calls the module's own forward, as `call_own` does.
    """

    arguments: tuple[Callable[..., None], ...]
    refusals: tuple[Callable[..., None], ...]
    batch: tuple[Callable[..., Any], ...]
    checks: tuple[Callable[..., None], ...]
    positions: Callable[..., Any]
    targets: Callable[..., Any]
    pooled_tokens: Callable[..., Any] | None
    image_runs: Callable[..., Any] | None
    routes: Callable[..., Any] | None
    recurrent: Callable[..., Any] | None
    keywords: tuple[str, ...]
    head: tuple[Callable[..., None], ...]
    outputs: tuple[Callable[..., None], ...]
    call: Callable[..., Any]


@dataclass(frozen=True)
class Patch(Settings):
    """The settings of a patched model, and what is needed to restore it.

    Attributes:
        parts: parts of the patched module: the model, its base model or its tower.
        stages: stages of its forward.
        named: the backend whose attn_implementation it set.
        backends: backends that its config may name: of all patched models that share the config.
        implementation_before: the attn_implementation to restore, by tower if it has any.
        attributes: names of the attributes of the whole model.
        checked_on: the device and dtype for which `same_bits` was checked.
    """

    parts: ModelParts
    stages: Stages
    named: str
    backends: tuple[str, ...]
    implementation_before: str | dict[str, str]
    attributes: tuple[str, ...]
    checked_on: tuple[torch.device, torch.dtype] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        return self  # immutable, and a process group cannot be copied

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"sequence_parallel_group": None}  # a group cannot be pickled


def wrapped_modules(model: nn.Module, parts: ModelParts) -> list[nn.Module]:
    """The modules whose forward is wrapped: the model and its base model."""
    base = parts.base(model)
    return [model] if base is model else [model, base]


# ---- models that share a config ----

_patched_models: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
_lock = threading.RLock()


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that runs patching and unpatching under a lock, for use from several threads."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _lock:
            return function(*args, **kwargs)

    return alone


def register_model(inner: PreTrainedModel) -> None:
    """Register a newly patched model with the models that share its config."""
    _patched_models.add(inner)
    _update_sharers(inner)


def unregister_model(inner: PreTrainedModel, patch: Patch) -> None:
    """Restore attn_implementation after unpatching, unless other patched models share it."""
    _patched_models.discard(inner)
    others = _update_sharers(inner)
    named = IMPLEMENTATIONS.get(text_config_of(inner.config)._attn_implementation)
    if not others:
        inner.set_attn_implementation(patch.implementation_before)
    elif named is not None and named not in others:
        set_implementation(inner, others[0])


def set_implementation(inner: PreTrainedModel, backend: str) -> None:
    """Set the attn_implementation of a backend: of the model, and of its text tower if it has one.

    A vision tower keeps its own, or gets transformers' default if that is one of ours, which
    `from_pretrained` sets in all towers.
    """
    name = next(name for name, its in IMPLEMENTATIONS.items() if its == backend)
    if text_config_of(inner.config) is inner.config:
        inner.set_attn_implementation(name)
    else:
        defaults = _defaults_of_towers(inner)
        inner.set_attn_implementation({**defaults, "": name, "text_config": name})


def _defaults_of_towers(inner: PreTrainedModel) -> dict[str, str]:
    """transformers' default attn_implementation of each tower beside the text whose own is ours."""
    parts = {name: getattr(inner.config, name, None) for name in inner.config.sub_configs}
    return {
        name: "sdpa" if tower._supports_sdpa else "eager"
        for name, config in parts.items()
        for tower in inner.modules()
        if isinstance(tower, PreTrainedModel)
        and tower.config is config
        and name != "text_config"
        and config._attn_implementation in IMPLEMENTATIONS
    }


def implementation_before(inner: PreTrainedModel) -> str | dict[str, str]:
    """The attn_implementation of the model's config before any patch.

    By tower, as `set_attn_implementation` takes it, if it has any.
    """
    for module in (inner, *_sharing(inner)):
        patch: Patch | None = module.__dict__.get(ATTRIBUTE)
        if patch is not None:  # recorded when the first one was patched
            return patch.implementation_before
    config: Any = inner.config
    whole: str = config._attn_implementation
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    of_parts = {name: x._attn_implementation for name, x in parts.items() if x is not None}
    return {"": whole, **of_parts} if of_parts else whole


def _sharing(inner: PreTrainedModel) -> list[nn.Module]:
    """The patched modules of all models with the model's config object."""
    return [
        module
        for model in _patched_models
        if model.config is inner.config and ATTRIBUTE in model.__dict__
        for module in wrapped_modules(model, model.__dict__[ATTRIBUTE].parts)
        if ATTRIBUTE in module.__dict__
    ]


def _update_sharers(inner: PreTrainedModel) -> list[str]:
    modules = _sharing(inner)
    backends = sorted({module.__dict__[ATTRIBUTE].named for module in modules})
    for module in modules:
        setattr(module, ATTRIBUTE, replace(module.__dict__[ATTRIBUTE], backends=tuple(backends)))
    return backends
