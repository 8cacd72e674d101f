"""`patch_model` and `unpatch_model`: add packed attention to a transformers model, or remove it.

The `forward` of the model and of its base model are wrapped on the instance: see `forward/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from transformers import PreTrainedModel

from flexvarlen.env import BATCH_INVARIANT, DETERMINISTIC, resolve_flag
from flexvarlen.layout.arguments import checked_sizes
from flexvarlen.patches.attention.backend_choice import check_machine, checked_choice, names_in
from flexvarlen.patches.forward.guards import guard_trainer_and_peft
from flexvarlen.patches.forward.heads import (
    HEAD,
    HeadReference,
    require_keywords,
    require_patched_heads,
    unwrap_loss,
)
from flexvarlen.patches.forward.padding import check_unpad
from flexvarlen.patches.forward.recurrent_layers import patch_recurrent, unpatch_recurrent
from flexvarlen.patches.forward.sequence_parallel import kinds_per_rank
from flexvarlen.patches.forward.steps import STEPS
from flexvarlen.patches.forward.vision_tower import patch_tower, unpatch_tower
from flexvarlen.patches.forward.wrapper import is_wrapped, unwrap_forward, wrap_forward
from flexvarlen.patches.models.layers import attention_layers, recurrent_layers
from flexvarlen.patches.models.rope import patch_rotary, unpatch_rotary
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.state import (
    ATTRIBUTE,
    LAYER_MARK,
    BackendChoice,
    Patch,
    Settings,
    implementation_before,
    one_at_a_time,
    register_model,
    set_implementation,
    unregister_model,
    wrapped_modules,
)
from flexvarlen.patches.verification import Verification, refuse_unloaded
from flexvarlen.patches.why_not import why_not, why_not_adapters, why_not_class

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Model = TypeVar("Model", bound=nn.Module)


@one_at_a_time
def patch_model(
    model: Model,
    backend: BackendChoice = "auto",
    *,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
    unpad: bool = False,
    unpad_to_multiple_of: int | None = None,
    share_prefixes: bool = False,
    sequence_parallel_group: ProcessGroup | None = None,
    verify: bool = False,
) -> Model:
    """Make a transformers model run on packed batches, in which no document attends to another.

    The documents of a forward are taken, in this order, from `packed_layout=` (a `PackedLayout` of
    all B·S tokens), `cu_seq_lens_q=`, or the union of restarts in `position_ids` and changes of
    value in a 2D `attention_mask` (padding, document ids) and in `seq_idx`; else each row is one
    document. Missing position_ids are built from the documents. Labels at the first token of each
    document are masked. Padding outputs of attention are zero.

    With `unpad` the caller passes a padded batch: left or right padding, a 2D `attention_mask` of
    ones and zeros, one document per row. The base model runs its real tokens as one packed row, and
    returns `last_hidden_state` and `hidden_states` in the padded shape, with exact zeros at
    padding, so heads, losses and metrics stay as they are. Labels of causal models at padding and
    at the first token of a row are masked. Batches without padding, batches that are packed
    already, `generate`, and forwards with a cache run as without `unpad`; by default no cache is
    built. Each forward copies the mask to the host once; under torch.compile this is one graph
    break, so `fullgraph=True` fails. docs/preference.md has more, and
    `patch_trainer` does this for the models of a trainer.

    With `share_prefixes` too, tokens that rows begin with in common, with as much padding on their
    left, run once, as a tree (`PackedLayout.from_tree`). A piece that rows share before they part
    has at least 32 tokens. Outputs are those of the padded batch, and a shared token's gradient is
    the sum over its rows; dropout drops it for all of them. Batches whose mask shows no padding run
    so too, and with inputs_embeds nothing is shared. Each forward copies the ids to the host.

    A `...ForSequenceClassification` gives one row of logits for each document, `[num_docs,
    num_labels]`, and takes labels `[num_docs]`; `config.pad_token_id` must be set. Its documents
    are found outside of a compiled graph. The head gets them padded on the right, or, if it is
    causal and gets inputs_embeds, on the left. Heads for question answering and multiple choice
    take one document per row, or a padded batch with `unpad`. A head of transformers refuses to run
    if its base model is patched and it is not.

    Bidirectional encoders (BERT) keep all labels, which belong to their own tokens. Their
    pooler_output has a row for each document; in a compiled graph `[capacity]` rows, of which those
    after the last document mean nothing. RoBERTa's positions begin at padding_idx + 1: given
    ones that begin at 0, as collators count, are shifted.

    Models of text and images (Qwen2-VL) take position_ids `[4, B, S]`, the text's own first, or
    `[3, B, S]` beside explicit documents; missing ones are made from the documents, the images and
    mm_token_type_ids, eagerly only. Each frame of an image is a document of the vision tower.

    Recurrent layers (Qwen3.5, Mamba-2) start anew at each document. Packed rows of these models
    have no cache: `use_cache=True` raises. On a GPU flash-linear-attention makes them fast.

    Labels that do not reach the model are not masked: Trainer removes labels for label smoothing
    and `compute_loss_func`, so let the collator mask them (DataCollatorWithFlattening does).

    `num_items_in_batch` is not corrected. Trainer counts it over the batches of a step before the
    model sees them, so if it counts labels that are masked here, the loss is too small by their
    share. The first batch with boundaries then warns; the same collator avoids this.

    A mixture of experts keeps its auxiliary loss (`output_router_logits=True`), over all tokens
    that are not padding.

    Rows of several documents fill no cache, and raise if they are given one or `use_cache=True`;
    rows of one document, padded or not, fill theirs. In training, and in a compiled model in any
    mode (also if compiled layer by layer, as a cache would give each layer its own graph), no cache
    is built unless one is asked for. Decoding (a non-empty cache) uses transformers' own sdpa, and
    raises if the new tokens of a row hold several documents.

    A deep copy of a patched model is patched too. A pickle (torch.save of the model, a spawned
    process) drops the wrapper, and so does replacing `forward` afterwards (Liger on a model,
    accelerate when it removes hooks): the model then raises until `patch_model` is called again.

    Args:
        model: a transformers model of a verified family (docs/families.md), or with `verify` of
            another, also inside PEFT, DDP or torch.compile wrappers.
        backend: a name of `flexvarlen.BACKENDS`, or transformers' name for the same kernel
            ("flash_attention_2"), or "auto"; or a mapping from the model's layer
            types ("full_attention", "sliding_attention", as in `config.layer_types`; in vision
            towers "vision_attention") to such names. "auto" is resolved by kind of layer: mask,
            heads, head_dim; with `unpad` always as for training, so that a reference model rounds
            as its policy does.
        deterministic, batch_invariant: as in `packed_attention`; None: use the environment
            variables FLEXVARLEN_DETERMINISTIC and FLEXVARLEN_BATCH_INVARIANT.
        capacity: document slots a row may hold when only a compiled graph sees them (position_ids
            or masks on the device); default `default_capacity(T)`. Also the slots of boundaries
            found eagerly, if given.
        max_seqlen_bound: upper bound on document length; default inside a compiled
            graph: all T tokens; eagerly: the longest, rounded up to a power of two.
        unpad: drop the padding of padded batches inside the model, see above.
        unpad_to_multiple_of: with `unpad` the packed row is rounded up to a multiple of this many
            tokens; the spare ones belong to no document. Default: 1,024 in a compiled model, so
            that few sizes compile, else 1.
        share_prefixes: with `unpad` what rows have in common at their beginnings (a prompt with its
            answers) is computed once, see above.
        sequence_parallel_group: ranks over which each row is sharded (Ulysses), see below.
        verify: check the patched model on a small random batch, as `verify_isolation` does, which
            any other causal model of text may pass too; a kind of model that passed is not checked
            again in the same process. Documents have up to 300 tokens (or as many as the model has
            positions), so a window or chunk that is larger is not checked.

    Returns:
        The same model. Patching again changes the arguments above, nothing else.

    Raises:
        IsolationError: with `verify`, a document reaches another: names the layer and both. The
            model is then as it was before, as it is whenever a check raises.
        ValueError: no transformers model inside, or a second one that is not part of the first; a
            `forward` that takes no `**kwargs`, an unknown backend, a mapping that misses one of the
            model's layer types or names another, a group whose ranks do not divide the heads, or
            an `unpad_to_multiple_of` that is no positive integer, or this or `share_prefixes`
            without `unpad`.
        NotImplementedError: the model type is not verified, or `verify` cannot check it or finds
            other outputs than those of each document alone; it keeps state that is not supported,
            or its recurrent layers do not call transformers' `causal_conv1d_fn`, or come from
            kernels of the hub (`use_kernels=True`); its head is of a kind whose labels are not
            known, a PEFT adapter's effect depends on the row (prompt tuning, aLoRA and similar; one
            that is added later makes each forward raise), a backend cannot run its layers on this
            machine, or the model is an encoder, takes images, has longrope or recurrent layers, and
            a group is given; `unpad` with a vision-language model, Mamba-2 or a group;
            `share_prefixes` with an encoder, longrope, recurrent layers, `batch_invariant` or a
            backend without trees.

    A forward with `unpad` raises for router logits (`output_router_logits`), `return_dict=False`,
    and left padding in an encoder's base model that has a pooler; any forward raises for left
    padding in an encoder that classifies by a row's first token.

    Under torch.compile, of the whole model or layer by layer (accelerate's `compile_regions`, of a
    patched model or before it is patched; its result keeps its own guarantees and mapping, so to
    patch again, patch that), other documents do not recompile as long as `capacity` and
    `max_seqlen_bound` stay the same. If they change (by default a layout rounds them to
    powers of two), Dynamo compiles once more when the first of them changes and once when the
    second does, then for any value; under dynamic=False for each pair. Each
    kind of batch (layout, position_ids, cu_seq_lens, mask), train and eval mode, and gradients on
    and off have separate graphs.

    With a `sequence_parallel_group` of P ranks, all ranks call the model together, each with what
    `shard_row(batch, group)` returns: `input_ids`, `position_ids`, `labels`, `shift_labels`
    `[1, T/P]`, `packed_layout` of all T tokens, `num_items_in_batch`. Attention exchanges heads for
    tokens and runs on the whole row; logits `[1, T/P, vocabulary]` are of the shard. Losses and
    gradients are each rank's part, to be summed over the group: all-reduce the gradients, or wrap
    the model in DDP or FSDP and multiply the loss by their number of ranks, as they take a mean.
    Other document boundaries, caches, `generate` and auxiliary losses of experts are refused.
    Traces under `fullgraph=True`; a pickle drops the group.

    Gradient checkpointing reruns attention in the backward. To keep its outputs instead, name its
    operator: `model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn":
    functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts,
    [torch.ops.flexvarlen.cu_seqlens_forward.default])})` (of `sdpa`: `sdpa_forward`).
    """
    why = why_not_adapters(*model.modules()) if isinstance(model, nn.Module) else None
    if why is not None:
        raise NotImplementedError(why)
    inner = transformers_model(model)
    _, capacity, max_seqlen_bound = checked_sizes(None, capacity, max_seqlen_bound)
    check_unpad(unpad, unpad_to_multiple_of, share_prefixes)
    settings = Settings(
        backend=backend,
        deterministic=resolve_flag(DETERMINISTIC, deterministic),
        batch_invariant=resolve_flag(BATCH_INVARIANT, batch_invariant),
        capacity=capacity,
        max_seqlen_bound=max_seqlen_bound,
        unpad=unpad,
        unpad_to_multiple_of=unpad_to_multiple_of,
        share_prefixes=share_prefixes,
        sequence_parallel_group=sequence_parallel_group,
        verify=verify,
    )
    why = why_not_class(type(inner), inner.config, settings)
    if why is not None:
        raise NotImplementedError(why)
    if verify:
        refuse_unloaded(inner)
    parts = ModelParts.of(inner)
    why = why_not(parts, settings)
    if why is not None:
        raise NotImplementedError(why)
    patch = _patch(inner, parts, settings)
    verification = Verification(inner, patch) if verify else None
    if verification is None or verification.has_passed:
        _apply(inner, patch)
        return model
    with ExitStack() as undo:
        undo.callback(restore, model, current_patch(model))
        unpatch_model(model)
        verification.before_patch()
        _apply(inner, patch)
        verification.after_patch()
        undo.pop_all()
    return model


def _patch(inner: PreTrainedModel, parts: ModelParts, settings: Settings) -> Patch:
    """The patch of a model that may have these settings.

    Raises:
        ValueError: a `forward` without `**kwargs`, an unknown backend, a mapping that does not fit
            the model's layer types, or a group whose ranks do not divide the heads.
        NotImplementedError: a backend cannot serve the layers it was chosen for.
    """
    require_keywords(wrapped_modules(inner, parts))
    kinds = parts.kinds
    if settings.sequence_parallel_group is not None:
        kinds = kinds_per_rank(kinds, settings.sequence_parallel_group)
    every = (*kinds, *parts.vision_kinds)
    backend = checked_choice(settings.backend, every)
    check_machine(
        backend,
        every,
        inner.device,
        deterministic=settings.deterministic,
        batch_invariant=settings.batch_invariant,
        trees=settings.share_prefixes,
    )
    named = names_in(backend)[0]
    return Patch(
        **settings.arguments() | {"backend": backend},
        parts=parts,
        kinds=kinds,
        named=named,
        backends=(named,),
        implementation_before=implementation_before(inner),
    )


def _apply(inner: PreTrainedModel, patch: Patch) -> None:
    """Patch a model whose arguments have been checked."""
    parts = patch.parts
    base, text, vision = parts.base(inner), parts.text_tower(inner), parts.vision_tower(inner)
    set_implementation(inner, patch.named)
    for module in wrapped_modules(inner, parts):
        wrap_forward(module, STEPS)
        setattr(module, ATTRIBUTE, patch if module is inner else patch.of_base())
    if base is not inner:
        base.__dict__[HEAD] = HeadReference(inner)
    for layer in attention_layers(inner):
        layer.__dict__[LAYER_MARK] = True
    for layer in recurrent_layers(text):
        patch_recurrent(layer)
    if vision is not None:
        patch_tower(vision, patch)
    require_patched_heads(inner)
    guard_trainer_and_peft()
    patch_rotary(text)
    register_model(inner)


@one_at_a_time
def unpatch_model(model: Model) -> Model:
    """Restore a patched model exactly; an unpatched model is unchanged.

    Models that share one config object share its attn_implementation, which is restored with the
    last of them. Until then unpatched models among them use flexvarlen by its name alone. The
    functions of recurrent layers that `patch_model` replaced in transformers' modules stay
    replaced; without documents they call transformers' own, or for float64 its plain torch.

    Returns:
        The same model.

    Raises:
        ValueError: no transformers model inside, or several.
    """
    inner = transformers_model(model)
    patch: Patch | None = inner.__dict__.get(ATTRIBUTE)
    if patch is None:
        return model
    parts = patch.parts
    text, vision = parts.text_tower(inner), parts.vision_tower(inner)
    for module in wrapped_modules(inner, parts):
        module.__dict__.pop(ATTRIBUTE, None)
        module.__dict__.pop(HEAD, None)
        unwrap_forward(module)
    for layer in attention_layers(inner):
        layer.__dict__.pop(LAYER_MARK, None)
    for layer in recurrent_layers(text):
        unpatch_recurrent(layer)
    unwrap_loss(inner)
    unpatch_rotary(text)
    unregister_model(inner, patch)
    if vision is not None and ATTRIBUTE in vision.__dict__:
        unpatch_tower(vision)  # last, as unregister_model sets the implementation of all parts
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether the transformers model inside is patched.

    False if a pickle dropped the wrapper, a library replaced `forward`, or a PEFT adapter was added
    whose effect depends on the row: such a model raises until the adapter is deleted, or
    `patch_model` is called again.

    Raises:
        ValueError: no transformers model inside, or several.
    """
    if isinstance(model, nn.Module) and why_not_adapters(*model.modules()) is not None:
        return False
    inner = transformers_model(model)
    patch: Patch | None = inner.__dict__.get(ATTRIBUTE)
    return patch is not None and all(map(is_wrapped, wrapped_modules(inner, patch.parts)))


@contextmanager
def patched(
    model: Model,
    backend: BackendChoice = "auto",
    *,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
    unpad: bool = False,
    unpad_to_multiple_of: int | None = None,
    share_prefixes: bool = False,
    sequence_parallel_group: ProcessGroup | None = None,
    verify: bool = False,
) -> Iterator[Model]:
    """`patch_model` for the duration of a `with` block; restores the previous state afterwards.

    Arguments as there.
    """
    existing = current_patch(model)
    patch_model(
        model,
        backend,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        capacity=capacity,
        max_seqlen_bound=max_seqlen_bound,
        unpad=unpad,
        unpad_to_multiple_of=unpad_to_multiple_of,
        share_prefixes=share_prefixes,
        sequence_parallel_group=sequence_parallel_group,
        verify=verify,
    )
    try:
        yield model
    finally:
        restore(model, existing)


def current_patch(model: nn.Module) -> Patch | None:
    """The patch of the transformers model inside, for `restore`."""
    patch: Patch | None = transformers_model(model).__dict__.get(ATTRIBUTE)
    return patch


def restore(model: nn.Module, existing: Patch | None) -> None:
    """Give a model the patch that it had before, or none."""
    if existing is None:
        unpatch_model(model)
    else:
        patch_model(model, **existing.arguments())


# ---- what is inside a model ----


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
    # Not always the first: a wrapper may list a base model before the model that contains it.
    for _, inner in found:
        if {part for _, part in found} <= {*inner.modules()}:
            return inner
    first, inner = found[0]
    name, part = next((name, part) for name, part in found if part not in {*inner.modules()})
    raise ValueError(
        f"model must hold one transformers model, got {type(inner).__name__} as {first!r} and "
        f"{type(part).__name__} as {name!r}, which is not part of it and would leak; "
        "patch each one separately."
    )
