"""`patch_model` and `unpatch_model`: add packed attention to a transformers model, or remove it.

The `forward` of the model and of its base model are wrapped on the instance: see `forward/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from flexvarlen.env import BATCH_INVARIANT, DETERMINISTIC, resolve_flag
from flexvarlen.layout.arguments import checked_sizes
from flexvarlen.parallel.sharded_parameters import splits_tied_embeddings
from flexvarlen.patches.adapters import why_not_adapters
from flexvarlen.patches.apply import apply_patch, make_patch, undo_patch
from flexvarlen.patches.forward.chunk_tokens import check_chunk_tokens
from flexvarlen.patches.forward.padding import check_unpad
from flexvarlen.patches.forward.row_size import check_same_bits
from flexvarlen.patches.forward.wrapper import is_wrapped
from flexvarlen.patches.inner_model import transformers_model
from flexvarlen.patches.names import check_names
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.state import (
    ATTRIBUTE,
    BackendChoice,
    Patch,
    Settings,
    one_at_a_time,
    wrapped_modules,
)
from flexvarlen.patches.verification import checks_of, refuse_unloaded
from flexvarlen.patches.why_not import why_not, why_not_class

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
    same_bits: int | bool | None = None,
    loss_chunk_tokens: int | None = None,
    mlp_chunk_tokens: int | None = None,
    verify: bool = False,
) -> Model:
    """Make a transformers model run on packed batches, where no document attends to another.

    The documents of a forward are taken, in this order, from `packed_layout=` (a `PackedLayout` of
    all B·S tokens), `cu_seq_lens_q=`, or restarts in `position_ids` together with changes of value
    in a 2D `attention_mask` and in `seq_idx`; else each row is one document. Missing position_ids
    are made from the documents, and a causal model ignores the label of a document's first token.
    Rows of several documents cannot fill a KV cache; requesting one raises an error.

    Under torch.compile, other documents do not cause a recompilation while `capacity` and
    `max_seqlen_bound` stay the same; traces under `fullgraph=True`, except with `unpad`.

    Guides: docs/quick-start.md, docs/families.md (what encoders, images and recurrent layers need),
    docs/preference.md (padded batches, classifiers), docs/shared-prefixes.md, docs/several-gpus.md
    (Trainer, DDP, a row over ranks) and docs/troubleshooting.md.

    Args:
        model: a transformers model of a verified family, or with `verify` of any family; also
            inside PEFT, DDP or torch.compile wrappers.
        backend: a name of `flexvarlen.BACKENDS`, transformers' name for the same kernel
            ("flash_attention_2"), or "auto", which chooses for each kind of layer; or a mapping
            from `config.layer_types` ("vision_attention" in vision towers) to such names.
        deterministic, batch_invariant: as in `packed_attention`.
        capacity: document slots of a row whose boundaries are found in the batch, not given as a
            layout; default in a compiled graph: 64, or one for each 128 tokens if that is more.
        max_seqlen_bound: upper bound on a document's tokens; default: all T tokens in a compiled
            graph, else the longest document, rounded up to a power of two.
        unpad: take padded batches, one document a row, and run their real tokens as one packed row.
            Outputs have the padded shape, with zeros at padding. Copies the mask to the host.
            Images come along as a processor gives them, with `mm_token_type_ids`.
        unpad_to_multiple_of: with `unpad`, the packed row is rounded up to a multiple of this many
            tokens; default: 1,024 in a compiled model, else 1.
        share_prefixes: with `unpad`, compute a prefix that several rows share only once. Of images,
            only those of Qwen-VL models; others raise an error.
        sequence_parallel_group: ranks that share each row (context parallelism). They call the
            model together, each with `shard_row(batch, group, **shard_options(model))`.
        same_bits: the number of tokens of every row: shorter rows, unpadded ones and the inputs of
            a language model's head are padded to it, so that a document's outputs have the same
            bits whatever its neighbours and its offset are. (Samples that share a prefix are one
            document.) Checked at once, on the model's device and in its dtype, or autocast's, with
            the logits of two rows in memory. Forwards that fill or read a cache are not padded.
            True is for `patch_trainer` alone, which knows the size. See docs/backends.md.
        loss_chunk_tokens: with labels, compute the loss from hidden states, the logits of this
            many tokens at a time, in the backward too; `logits` of the outputs are then None. The
            loss must be transformers' own for the next token. A compiled graph has as many copies
            of the head as there are chunks. Forwards without labels (also under Trainer's label
            smoothing), that continue a cache, or with a 4D mask compute all logits.
        mlp_chunk_tokens: run each MLP on this many tokens at a time ("tiled MLP"), in the forward
            and the backward, and save only its input. Meant for layers under non-reentrant gradient
            checkpointing, where it adds no recomputation unless a norm follows the MLP; elsewhere
            each MLP runs once more. Outputs and gradients differ by rounding. Compiled graphs run
            MLPs whole. Encoders and mixtures of experts are not supported.
        verify: check the patched model on a small random batch, as `verify_isolation` does; a kind
            of model that has passed is not checked again in the same process.

    Returns:
        The same model. Patching again only changes the arguments above.

    Raises:
        IsolationError: with `verify`, a document reaches another.
        SameBitsError: with `same_bits`, a document's outputs have other bits in another row.
        ValueError: no transformers model is inside, or an argument does not fit it.
        NotImplementedError: the model, or a setting for this model, is not supported; the message
            says why, and what to do. After any error the model is unchanged.

    >>> model = fv.patch_model(AutoModelForCausalLM.from_pretrained(name))  # doctest: +SKIP
    >>> layout = fv.PackedLayout.from_lengths([512, 1, 1535])  # doctest: +SKIP
    >>> logits = model(input_ids=ids, packed_layout=layout).logits  # doctest: +SKIP
    """
    why = why_not_adapters(*model.modules()) if isinstance(model, nn.Module) else None
    if why is not None:
        raise NotImplementedError(why)
    inner = transformers_model(model)
    _, capacity, max_seqlen_bound = checked_sizes(None, capacity, max_seqlen_bound)
    check_unpad(unpad, unpad_to_multiple_of, share_prefixes)
    row_size = check_same_bits(same_bits, unpad_to_multiple_of)
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
        same_bits=row_size,
        loss_chunk_tokens=check_chunk_tokens(
            "loss_chunk_tokens",
            loss_chunk_tokens,
            4096,
            row_size,
            f"which pads each product of the head to {row_size} tokens",
        ),
        mlp_chunk_tokens=check_chunk_tokens(
            "mlp_chunk_tokens",
            mlp_chunk_tokens,
            8192,
            row_size,
            "whose rows have one size in every matrix product",
        ),
        verify=verify,
    )
    why = why_not_class(type(inner), inner.config, settings)
    if why is not None:
        raise NotImplementedError(why)
    check_names(inner)
    if splits_tied_embeddings(inner):
        raise NotImplementedError(
            "patch_model does not support tied embeddings with DistributedConfig(fsdp_size=...), "
            "which shards them without the head, so that training never changes the head, got "
            f"{type(inner).__name__}; load it without DistributedConfig, and shard it with "
            "accelerate."
        )
    if verify or settings.same_bits is not None:
        refuse_unloaded(inner, gradients=verify)
    parts = ModelParts.of(inner)
    why = why_not(parts, settings)
    if why is not None:
        raise NotImplementedError(why)
    patch, existing = make_patch(inner, parts, settings), current_patch(model)
    checks = [check for check in checks_of(inner, patch) if not check.has_passed]
    if not checks:
        apply_patch(inner, patch)
        return model
    with ExitStack() as undo:
        undo.callback(restore, model, existing)
        unpatch_model(model)
        for check in checks:
            check.before_patch()
        apply_patch(inner, patch)
        for check in checks:
            check.after_patch()
        undo.pop_all()
    return model


@one_at_a_time
def unpatch_model(model: Model) -> Model:
    """Restore a patched model exactly; an unpatched model is unchanged.

    Models that share one config object share its attn_implementation, which is restored with the
    last of them. Until then, unpatched models with this config use flexvarlen by name alone. The
    functions of recurrent layers that `patch_model` replaced in transformers' modules stay
    replaced; without documents they call transformers' functions (for float64, the plain torch
    versions).

    Returns:
        The same model.

    Raises:
        ValueError: there is no transformers model inside, or several.
    """
    inner = transformers_model(model)
    patch: Patch | None = inner.__dict__.get(ATTRIBUTE)
    if patch is None:
        return model
    undo_patch(inner, patch)
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
    same_bits: int | bool | None = None,
    loss_chunk_tokens: int | None = None,
    mlp_chunk_tokens: int | None = None,
    verify: bool = False,
) -> Iterator[Model]:
    """Patch a model for the duration of a `with` block, which then restores what it was before.

    The arguments are those of `patch_model`; the block gets the same model.
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
        same_bits=same_bits,
        loss_chunk_tokens=loss_chunk_tokens,
        mlp_chunk_tokens=mlp_chunk_tokens,
        verify=verify,
    )
    try:
        yield model
    finally:
        restore(model, existing)


def current_patch(model: nn.Module) -> Patch | None:
    """The patch of the transformers model inside, to be passed to `restore`."""
    patch: Patch | None = transformers_model(model).__dict__.get(ATTRIBUTE)
    return patch


def restore(model: nn.Module, existing: Patch | None) -> None:
    """Give a model back the patch that it had, or remove its patch if it had none."""
    if existing is None:
        unpatch_model(model)
    else:
        patch_model(model, **existing.arguments())


def shard_options(model: nn.Module) -> dict[str, Any]:
    """The keyword arguments that `shard_row` and `shard_batch` need for a model.

    Args:
        model: a transformers model, patched or not, also inside wrappers.

    Returns:
        `method="contiguous"` for a model with recurrent layers, `causal=False` for an encoder, the
        widest `window` of sliding layers; empty for other models.

    Raises:
        ValueError: there is no transformers model inside.

    >>> shard = fv.shard_row(batch, group, **fv.shard_options(model))  # doctest: +SKIP
    """
    return ModelParts.of(transformers_model(model)).shard_options()
