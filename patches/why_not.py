"""Why a model cannot be patched: one function for each reason, which gives a sentence or None.

`patch_model` raises the first one's as a NotImplementedError. What is wrong with an argument by
itself is a ValueError of `patch_model`, and what a backend cannot serve is its own `why_not`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from flexvarlen.patches.models.heads import UNKNOWN_HEAD, heads_of
from flexvarlen.patches.models.layers import text_config_of
from flexvarlen.patches.models.rope import why_not_dynamic
from flexvarlen.patches.models.verified import is_verified, why_not_by_type
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.state import Settings

_DOCUMENT_ALONE = "use the model's own attention, one document per row."


def why_not_class(
    model_class: type[PreTrainedModel], config: Any, settings: Settings
) -> str | None:
    """The first reason against all models of a class and config, or None.

    Asked before the parts of a model are found, as other models may have other parts.

    Args:
        config: of the whole model.
    """
    found = (reason(model_class, config, settings) for reason in WHY_NOT_CLASS)
    return next((why for why in found if why is not None), None)


def why_not(parts: ModelParts, settings: Settings) -> str | None:
    """The first reason why a model of these parts cannot be patched with these settings, or None.

    Syncs with no device. Every reason is one of `WHY_NOT`.
    """
    found = (reason(parts, settings) for reason in WHY_NOT)
    return next((why for why in found if why is not None), None)


# ---- the class of model ----


def encoder_and_decoder(
    model_class: type[PreTrainedModel], config: Any, settings: Settings
) -> str | None:
    """Two stacks of layers, such as T5's."""
    if not config.is_encoder_decoder:
        return None
    return (
        f"model must have one stack of layers, got {model_class.__name__}, an encoder with a "
        "decoder, which is not supported; use its own attention, one document per row."
    )


def model_type(model_class: type[PreTrainedModel], config: Any, settings: Settings) -> str | None:
    """A type that is not among the verified families."""
    return why_not_by_type(config.model_type, verify=settings.verify)


def code_of_another(
    model_class: type[PreTrainedModel], config: Any, settings: Settings
) -> str | None:
    """A class that is not transformers', such as one from a model's repository."""
    kind = config.model_type
    if settings.verify or is_verified(model_class, kind):
        return None
    return (
        f"model must be of a class of transformers for the verified {kind}, got "
        f"{model_class.__name__} of {model_class.__module__}, in which packed documents could leak "
        "into one another; call patch_model(model, verify=True), which checks a causal text model "
        "for leaks, or load it with transformers' own class, without trust_remote_code."
    )


def text_model_type(
    model_class: type[PreTrainedModel], config: Any, settings: Settings
) -> str | None:
    """A text model whose type is not among the verified families, below images."""
    text = text_config_of(config)
    if text is config or why_not_by_type(text.model_type) is None:
        return None
    return (
        f"text_config of model_type {config.model_type!r} must be of a verified family, got "
        f"{text.model_type!r}, in which packed documents could leak into one another; "
        f"{_DOCUMENT_ALONE}"
    )


WHY_NOT_CLASS = (encoder_and_decoder, model_type, code_of_another, text_model_type)
"""The reasons against a class of models, in the order in which they are looked for."""


# ---- the kind of model ----


def pipeline_parallel(parts: ModelParts, settings: Settings) -> str | None:
    """Layers that are split over ranks, between which only hidden states travel."""
    if parts.pipeline_stages == 1:
        return None
    return (
        "pp_size must be 1 in the DistributedConfig of a patched model, got "
        f"{parts.pipeline_stages}: pipeline parallelism passes hidden states between ranks, but no "
        "documents; load the model with tp_size, ep_size or fsdp_size instead."
    )


def not_verifiable(parts: ModelParts, settings: Settings) -> str | None:
    """A kind of model that `verify=True` cannot check, though its type is not verified."""
    cls, config = parts.model_class, parts.model_config
    if not settings.verify or is_verified(cls, config.model_type):
        return None
    reason = None
    if not parts.kinds or not cls._can_set_attn_implementation():
        reason = "has no attention layer that transformers' attention interface serves"
    elif parts.config is not config or config.sub_configs:
        reason = "has parts for more than text"
    elif not all(kind.causal for kind in parts.kinds):
        reason = "has attention layers that are not causal"
    return reason and (
        "verify=True is for causal models of text that call transformers' attention interface, "
        f"got {cls.__name__}, which {reason}; {_DOCUMENT_ALONE}"
    )


def encoder_as_decoder(parts: ModelParts, settings: Settings) -> str | None:
    """An encoder with a cache, and perhaps cross-attention."""
    if not getattr(parts.model_config, "is_decoder", False):  # only encoders have it
        return None
    return (
        f"an encoder must not be a decoder, got a {parts.model_config.model_type} model with "
        "config.is_decoder=True; set it to False before the model is built."
    )


def unknown_head(parts: ModelParts, settings: Settings) -> str | None:
    """A head whose labels are not known to be of tokens, documents or rows."""
    if parts.head != UNKNOWN_HEAD:
        return None
    known = ", ".join(head.ending for head in heads_of(causal=parts.causal))
    return (
        f"model must be a base model, or have a head {known} or "
        f"a subclass of one, got {parts.model_class.__name__}, whose labels are not known; patch "
        "its base model, and call that alone."
    )


# ---- unsupported settings ----


def unpad(parts: ModelParts, settings: Settings) -> str | None:
    """Padded batches as packed rows."""
    if not settings.unpad or settings.sequence_parallel_group is None:
        return None
    return (
        "unpad=True must not be used with a sequence_parallel_group, whose ranks hold shards of "
        "packed rows; pass packed rows, or remove sequence_parallel_group."
    )


def share_prefixes(parts: ModelParts, settings: Settings) -> str | None:
    """Prefixes that rows share, as trees."""
    if not settings.share_prefixes:
        return None
    why = why_no_trees(parts, batch_invariant=settings.batch_invariant)
    return why and f"share_prefixes=True is not supported with {why}; remove it."


def why_no_trees(parts: ModelParts, *, batch_invariant: bool = False) -> str | None:
    """What in a model does not work with documents that share prefixes, or None."""
    if not parts.causal:
        return "bidirectional attention"
    if parts.has_longrope:
        return "rope_type 'longrope', whose frequencies depend on how long a document is"
    return "batch_invariant" if batch_invariant else None


def sequence_parallel(parts: ModelParts, settings: Settings) -> str | None:
    """Rows that are sharded over ranks, where more than attention depends on the whole row."""
    if settings.sequence_parallel_group is None:
        return None
    if parts.tensor_ranks > 1:
        ranks = dist.get_process_group_ranks(settings.sequence_parallel_group)
        if len({rank % parts.tensor_ranks for rank in ranks}) > 1:
            return (
                "sequence_parallel_group must have one rank of each tensor-parallel group, whose "
                f"ranks have the same tokens, got ranks {ranks} with tp_size={parts.tensor_ranks}; "
                'pass init_device_mesh(device, (rows, P, tp_size), mesh_dim_names=("dp", "cp", '
                '"tp")).get_group("cp").'
            )
    if settings.batch_invariant:
        return (
            "batch_invariant must be False with a sequence_parallel_group, got True: where a "
            "document is split over the ranks depends on its neighbours; remove one of the two."
        )
    reason = None
    if parts.text_name:
        reason = "takes images, whose tokens cannot be sharded"
    elif parts.has_longrope:
        reason = "has rope_type 'longrope', whose frequencies depend on whole documents"
    return reason and (
        "a model with sequence_parallel_group must take text alone, with rotary tables that do not "
        f"depend on other tokens, got {parts.model_config.model_type!r}, which {reason}; "
        "remove sequence_parallel_group, and give each rank its own rows."
    )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names in configs of the number of experts of a layer."""


def same_bits(parts: ModelParts, settings: Settings) -> str | None:
    """Rows of one size, where more than the size of rows decides which kernels run."""
    if settings.same_bits is None:
        return None
    what = None
    if parts.head.labels not in ("", "next token"):
        what = f"{parts.model_class.__name__}, whose head is no language model's"
    elif parts.text_name:
        what = f"{parts.model_config.model_type!r}, whose images have sizes of their own"
    elif parts.routers is not None or any(getattr(parts.config, x, None) for x in _EXPERTS):
        what = f"{parts.model_config.model_type!r}, whose experts get tokens of other documents too"
    elif settings.sequence_parallel_group is not None:
        what = "a sequence_parallel_group, whose ranks hold pieces of documents"
    return what and (
        "same_bits is for whole rows of a causal language model, or a base model, of text, got "
        f"{what}; remove same_bits."
    )


# ---- unsupported layers ----


RECURRENT_TYPES = ("linear_attention", "conv", "hybrid")
"""Names in `config.layer_types` of layers with a recurrence or a convolution."""
OTHER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "mlp", "moe")
"""Names of layers that mix tokens only by attention, or not at all."""

CONVOLUTION = "causal_conv1d_fn"
"""The function through which every supported recurrent layer mixes tokens first."""
SCANS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
"""The functions through which layers with a state mix them next: each of them has one."""


def _layer_types(parts: ModelParts) -> list[str]:
    """Types by layer; [] for a config with one kind (`patches.names` lists those with several)."""
    return list(getattr(parts.config, "layer_types", None) or ())


def unknown_layers(parts: ModelParts, settings: Settings) -> str | None:
    """Kinds of layers that no verified family has."""
    unknown = sorted(set(_layer_types(parts)) - {*RECURRENT_TYPES, *OTHER_TYPES})
    if settings.verify or not unknown:
        return None
    return (
        "config.layer_types must name kinds of layers that are verified, got "
        f"{unknown[0]!r}, which may mix the tokens of documents; call patch_model(model, "
        "verify=True), or use the model's own implementation, one document per row."
    )


def recurrent_layers(parts: ModelParts, settings: Settings) -> str | None:
    """Recurrent layers that do not call the functions that `patch_model` replaces."""
    types = [x for x in _layer_types(parts) if x in RECURRENT_TYPES]
    expected = len(types)
    if len(parts.recurrent_classes) != expected:
        return (
            "a model must have one layer with a convolution (conv1d or conv) for each recurrent "
            f"layer in config.layer_types, {expected}, got {len(parts.recurrent_classes)}; "
            "use the model's own implementation, one document per row."
        )
    wanted: tuple[tuple[str, ...], ...] = ((CONVOLUTION,),)
    if set(types) != {"conv"}:
        wanted += (SCANS,)
    for cls in parts.recurrent_classes:
        functions = functions_of(cls)
        absent = next((names for names in wanted if functions.keys().isdisjoint(names)), None)
        if absent is not None:
            return (
                f"a recurrent layer must call transformers' {' or '.join(absent)}, got a "
                f"{cls.__name__} that does not, whose state would run over all documents; use the "
                "model's own implementation, one document per row."
            )
    if expected and parts.uses_hub_kernels:
        return (
            "use_kernels=True replaces recurrent layers by kernels that may not keep documents "
            "apart; load the model without it."
        )
    return None


def functions_of(layer_class: type) -> dict[str, Any]:
    """The names that a layer's forward finds in its module."""
    found: dict[str, Any] = inspect.unwrap(layer_class.forward).__globals__  # type: ignore[attr-defined]
    return found


def loss_in_chunks(parts: ModelParts, settings: Settings) -> str | None:
    """The loss in chunks of a head whose own loss may be more than that of the next token."""
    if settings.loss_chunk_tokens is None:
        return None
    cls, takes = parts.model_class, inspect.signature(parts.model_class.forward).parameters
    is_own = cls.forward.__module__.startswith(_KNOWN_LOSSES)
    is_own = is_own and is_verified(cls, parts.model_config.model_type)
    if parts.head.labels != "next token" or "logits_to_keep" not in takes or not is_own:
        return (
            "loss_chunk_tokens needs the language-model head of a verified family, with "
            f"transformers' own forward, got {cls.__name__}; remove it."
        )
    if getattr(parts.config, "z_loss_coefficient", 0):
        return (
            "loss_chunk_tokens computes the cross entropy alone, got a config with "
            f"z_loss_coefficient={parts.config.z_loss_coefficient}; remove it, or set that to 0."
        )
    return None


_KNOWN_LOSSES = ("transformers.models.", "liger_kernel.")
"""Modules of forwards whose loss is the cross entropy of the next token, and that of routers."""


def mlp_in_chunks(parts: ModelParts, settings: Settings) -> str | None:
    """MLPs in chunks, of layers that have other large intermediates, or are not known."""
    if settings.mlp_chunk_tokens is None:
        return None
    why = why_no_mlp_chunks(parts)
    return why and (
        f"mlp_chunk_tokens is for decoder layers with an MLP, of verified families, got {why}; "
        "remove it."
    )


def why_no_mlp_chunks(parts: ModelParts) -> str | None:
    """What keeps a model's MLPs from running in chunks, or None."""
    cls, kind = parts.model_class, parts.model_config.model_type
    if not is_verified(cls, kind):
        return f"{cls.__name__}, whose layers are not known"
    if not parts.causal:
        return f"{kind!r}, an encoder"
    if parts.routers is not None:
        return f"{kind!r}, whose layers mix experts"
    return None if parts.has_mlps else f"{kind!r}, whose layers have none"


def windows_both_ways(parts: ModelParts, settings: Settings) -> str | None:
    """Bidirectional windows of Gemma 4, in which transformers' own attentions disagree."""
    config = parts.config
    if config.model_type != "gemma4_text" or config.use_bidirectional_attention != "all":
        return None
    return (
        "use_bidirectional_attention must not be 'all' in a gemma4 model: transformers' eager "
        "and sdpa see one token more on each side of a sliding window than its FlashAttention; "
        "use the model's own attention, one document per row."
    )


def dynamic_rope(parts: ModelParts, settings: Settings) -> str | None:
    """RoPE whose frequencies depend on the longest document of a batch."""
    return why_not_dynamic(parts.config, parts.rotary_type)


WHY_NOT = (
    pipeline_parallel,
    not_verifiable,
    encoder_as_decoder,
    unknown_head,
    share_prefixes,
    unpad,
    unknown_layers,
    recurrent_layers,
    sequence_parallel,
    same_bits,
    loss_in_chunks,
    mlp_in_chunks,
    windows_both_ways,
    dynamic_rope,
)
"""The reasons against a model and its settings, in the order in which they are looked for."""
