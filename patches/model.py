"""`patch_model`: give a transformers model packed attention under the full contract, or undo it.

The `forward` of the model and of its base model are wrapped on the instance (a hook would not do:
PEFT's tuners call `model.forward`). The wrapper finds the documents once, masks the labels at their
first tokens, hands every layer the same `PackedForward`, and passes a 4D placeholder as mask, so
that transformers builds none and reads nothing back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexvarlen.layout import PackedLayout
from flexvarlen.patches.documents import (
    CONTEXT,
    EXPLICIT,
    PackedForward,
    Unpacked,
    find_layout,
    first_tokens,
)
from flexvarlen.patches.families import require_verified
from flexvarlen.patches.interface import IMPLEMENTATIONS
from flexvarlen.patches.one_document import check_one_document, why_not_whole_rows
from flexvarlen.patches.packed_cache import (
    mark_cache,
    note_documents,
    one_document_a_row,
    refuse_packed_documents,
)
from flexvarlen.patches.rotary import (
    check_restarts,
    has_longrope,
    own_tables,
    refuse_dynamic_rope,
    shared_tables,
)
from flexvarlen.patches.routing import (
    BackendChoice,
    base_of,
    check_choice,
    check_machine,
    dtype_of_queries,
    kinds_of,
    names_in,
    row_wide,
)
from flexvarlen.patches.shared_config import (
    ATTRIBUTE,
    Patch,
    implementation_before,
    join_sharers,
    leave_sharers,
    name_of,
    wrapped_modules,
)
from flexvarlen.patches.wrapped_forward import (
    has_forward_of_class,
    mark_layers,
    unmark_layers,
    unwrap_forward,
    wrap_forward,
)
from flexvarlen.switches import BATCH_INVARIANT, DETERMINISTIC, promised

Model = TypeVar("Model", bound=nn.Module)

IGNORE_INDEX = -100  # the label that transformers' losses leave out


def patch_model(
    model: Model,
    backend: BackendChoice = "auto",
    *,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
) -> Model:
    """Make a transformers model run on packed batches, no document seeing another.

    The documents of a forward are found, in this order, in `packed_layout=` (a `PackedLayout` over
    all B·S tokens), `cu_seq_lens_q=`, or the union of restarts in `position_ids` and changes of
    value in a 2D `attention_mask` (padding, document ids); else each row is one document. Missing
    position_ids are made from the documents. Labels at the first token of each document are masked.
    Padding outputs of attention are zero.

    Labels that never reach the model are not: Trainer takes them out with `label_smoothing_factor`
    or `compute_loss_func`, so let the collator mask them (DataCollatorWithFlattening does).

    Decoding (a non-empty cache) goes to transformers' own sdpa; from a cache that a packed batch
    filled it raises, and so do several documents in the new tokens of a row. Training, and a
    compiled model in any mode (also one compiled layer by layer: with a cache each layer would get
    a graph of its own), makes no cache unless `use_cache=True` is passed.

    A deep copy is patched as the model is. A pickle (torch.save of the model, a spawned process)
    leaves the wrapper out: the loaded model raises until `patch_model` is called on it again.

    Args:
        model: a Llama, Qwen2 or Qwen3 model of transformers, also inside PEFT, DDP or torch.compile
            wrappers.
        backend: a name of `flexvarlen.BACKENDS`, or "auto"; or a mapping from the model's layer
            types ("full_attention", "sliding_attention", as in `config.layer_types`) to such
            names. "auto" is resolved by kind of layer: mask, heads, head_dim.
        deterministic, batch_invariant: as in `packed_attention`; None: what the environment
            variables FLEXVARLEN_DETERMINISTIC and FLEXVARLEN_BATCH_INVARIANT say.
        capacity: document slots a row may hold when only a compiled graph sees them (position_ids
            or masks on the device); default `default_capacity(T)`. Also the slots of boundaries
            found eagerly, if given.
        max_seqlen_bound: longest document that kernels are made for; default inside a compiled
            graph: all T tokens; eagerly: the longest, rounded up to a power of two.

    Returns:
        The same model. Patching again changes the backend and the sizes, nothing else.

    Raises:
        ValueError: no transformers model inside, an unknown backend, or a mapping that misses one
            of the model's layer types or names another.
        NotImplementedError: the model type is not verified, or a backend cannot run the layers it
            is for on this machine.

    Under torch.compile, of the whole model or layer by layer (accelerate's `compile_regions`, of a
    patched model or before it is patched; what it returns keeps its own promises and mapping, so to
    patch again, patch that), other documents compile nothing anew as long as `capacity` and
    `max_seqlen_bound` stay. Where they do not (a layout has those it was made with, by default
    powers of two), Dynamo compiles once more when the one first changes and once more when the
    other does, and then for any; under dynamic=False for each pair, of which a warning tells. Each
    form of a batch (layout, position_ids, cu_seq_lens, mask), train and eval mode, and gradients on
    and off have a graph of their own.

    Gradient checkpointing runs attention again in the backward. To keep its outputs, name its
    operator: `model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn":
    functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts,
    [torch.ops.flexvarlen.cu_seqlens_forward.default])})` (of `sdpa`: `sdpa_forward`).
    """
    inner = _transformers_model(model)
    require_verified(inner.config.model_type)
    if base_of(inner) is not inner and not type(inner).__name__.endswith("ForCausalLM"):
        raise NotImplementedError(
            f"model must be a base model or a ...ForCausalLM, got {type(inner).__name__}: labels "
            "of other heads are not next tokens; patch its base model, and pool by document."
        )
    refuse_dynamic_rope(inner.config)
    kinds = kinds_of(inner)
    check_choice(backend, kinds)
    check_machine(
        backend,
        kinds,
        inner.device,
        deterministic=promised(DETERMINISTIC, deterministic),
        batch_invariant=promised(BATCH_INVARIANT, batch_invariant),
    )
    before = implementation_before(inner)
    named = names_in(backend)[0]
    inner.set_attn_implementation(name_of(named))
    patch = Patch(
        backend=backend if isinstance(backend, str) else dict(backend),
        named=named,
        backends=(named,),
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        capacity=capacity,
        max_seqlen_bound=max_seqlen_bound,
        kinds=kinds,
        implementation_before=before,
    )
    for module in wrapped_modules(inner):
        if ATTRIBUTE not in module.__dict__ or has_forward_of_class(module):
            wrap_forward(module, _before_forward, _after_forward)
        setattr(module, ATTRIBUTE, patch)
    mark_layers(inner)
    own_tables(base_of(inner))
    join_sharers(inner)
    return model


def unpatch_model(model: Model) -> Model:
    """Restore a patched model exactly; a model that is not patched stays as it is.

    Models that share one config object share its attn_implementation, which is restored with the
    last of them: until then the others that are not patched attend by the plugin name alone.

    Returns:
        The same model.

    Raises:
        ValueError: no transformers model inside.
    """
    inner = _transformers_model(model)
    patch: Patch | None = inner.__dict__.get(ATTRIBUTE)
    if patch is None:
        return model
    for module in wrapped_modules(inner):
        module.__dict__.pop(ATTRIBUTE, None)
        unwrap_forward(module)
    unmark_layers(inner)
    shared_tables(base_of(inner))
    leave_sharers(inner, patch)
    return model


@contextmanager
def patched(
    model: Model,
    backend: BackendChoice = "auto",
    *,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
) -> Iterator[Model]:
    """`patch_model` for the length of a `with` block; then as before, patched or not.

    Arguments as there.
    """
    inner = _transformers_model(model)
    existing: Patch | None = inner.__dict__.get(ATTRIBUTE)
    patch_model(
        model,
        backend,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        capacity=capacity,
        max_seqlen_bound=max_seqlen_bound,
    )
    try:
        yield model
    finally:
        if existing is None:
            unpatch_model(model)
        else:
            patch_model(model, **existing.arguments())


# ---- what the wrapped forward does ----


def _before_forward(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    patch: Patch | None = module.__dict__.get(ATTRIBUTE)
    return None if patch is None else prepare_inputs(module, patch, inputs)


def _after_forward(inputs: dict[str, Any], outputs: Any) -> None:
    packed = inputs.get(CONTEXT)
    if isinstance(packed, PackedForward) and packed.one_a_row is not None:
        mark_cache(outputs, packed)


def prepare_inputs(module: nn.Module, patch: Patch, inputs: dict[str, Any]) -> dict[str, Any]:
    """A forward's keyword arguments with the documents found, or marked as checked for decoding.

    Raises:
        ValueError: boundaries that break the contract, a packed batch with a non-empty cache, with
            one that makes room for other tokens, or with a 4D mask, or another attn_implementation
            set since (it would take our placeholder for a mask that hides nothing).

    Decoding reads the device once a forward, if there are positions or a mask to look at.
    """
    tokens = _tokens(inputs)
    if tokens is None or inputs.get(CONTEXT) is not None:
        return inputs
    config: Any = module.config
    if IMPLEMENTATIONS.get(config._attn_implementation) not in patch.backends:
        raise ValueError(
            "a patched model's attn_implementation must stay its own, got "
            f"{config._attn_implementation!r}, set since; call unpatch_model before setting "
            "another, or patch_model again."
        )
    batch, row_tokens = tokens.shape[:2]
    attention_mask, cache = inputs.get("attention_mask"), inputs.get("past_key_values")
    position_ids = inputs.get("position_ids")
    if position_ids is not None and position_ids.ndim != 2:
        raise ValueError(
            f"position_ids must have shape [B, S], got {tuple(position_ids.shape)}; pass the text "
            "row."
        )
    given = {name: inputs.pop(name, None) for name in EXPLICIT}
    explicit = given["packed_layout"] is not None or given["cu_seq_lens_q"] is not None
    not_whole_rows = why_not_whole_rows(cache, attention_mask, row_tokens)
    if not_whole_rows is not None:
        if explicit:
            raise ValueError(
                f"a packed batch must not come with {not_whole_rows}; pass an empty cache or "
                "use_cache=False, and no 4D attention_mask."
            )
        refuse_packed_documents(cache)
        check_one_document(
            row_tokens,
            position_ids=position_ids,
            attention_mask=attention_mask,
            with_what=not_whole_rows,
            seen=0 if cache is None else cache.get_seq_length(),
        )
        inputs[CONTEXT] = Unpacked.CHECKED
        return inputs
    layout = find_layout(
        batch,
        row_tokens,
        tokens.device,
        position_ids=position_ids,
        attention_mask=attention_mask,
        capacity=patch.capacity,
        max_seqlen_bound=patch.max_seqlen_bound,
        **given,
    )
    if position_ids is not None and has_longrope(config):
        check_restarts(layout, position_ids, row_tokens)
    # Inside a compiled graph nothing that varies with the documents may be asked: it would be
    # guarded on.
    packs = torch.compiler.is_compiling() or layout.num_docs != batch or layout.has_padding
    if position_ids is None and packs:
        inputs["position_ids"] = layout.position_ids().view(batch, row_tokens)
    for name in ("labels", "shift_labels"):
        if inputs.get(name) is not None:
            inputs[name] = _mask_labels(inputs[name], layout, shifted=name == "shift_labels")
    wants_no_cache = (
        explicit
        or module.training
        or torch.compiler.is_compiling()
        or _compiled_by_layer(base_of(module))
    )
    if wants_no_cache and inputs.get("use_cache") is None and cache is None:
        inputs["use_cache"] = False
    packed = _packed_forward(module, patch, layout)
    use_cache = inputs.get("use_cache")
    if cache is not None or (config.use_cache if use_cache is None else use_cache):
        packed.one_a_row = one_document_a_row(layout, batch)
        if not torch.compiler.is_compiling():
            packed.several_a_row = not bool(packed.one_a_row)
        note_documents(cache, packed)  # before any layer fills it: one of them may fail
    inputs[CONTEXT] = packed
    inputs["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=tokens.device)
    return inputs


def _tokens(inputs: dict[str, Any]) -> Tensor | None:
    """The forward's `[B, S]` ids or `[B, S, hidden]` embeddings."""
    input_ids: Tensor | None = inputs.get("input_ids")
    return inputs.get("inputs_embeds") if input_ids is None else input_ids


def _compiled_by_layer(base: Any) -> bool:
    """Whether its layers are compiled one by one: with a cache each would get its own graph."""
    layers = base._modules.get("layers")
    if not layers:
        return False
    first = layers[0]
    return "_orig_mod" in first._modules or first._compiled_call_impl is not None


def _packed_forward(module: nn.Module, patch: Patch, layout: PackedLayout) -> PackedForward:
    promises = (patch.deterministic, patch.batch_invariant)
    packed = PackedForward(layout, patch.backend, *promises, **row_wide(module.config))
    device_type = layout.device.type
    dtype = (
        torch.get_autocast_dtype(device_type)
        if torch.is_autocast_enabled(device_type)
        else dtype_of_queries(module)
    )
    # As in the layers: a reentrant checkpoint runs a training forward without gradients first.
    needs_grad = torch.is_grad_enabled() or module.training
    for kind in patch.kinds:
        others = tuple(packed.routes.items())
        packed.routes[kind] = packed.make_route(kind, dtype, needs_grad, others)
    return packed


def _mask_labels(labels: Tensor, layout: PackedLayout, *, shifted: bool) -> Tensor:
    """Labels with -100 where they would cross a border.

    What a document's last token would have to foresee.
    """
    first = first_tokens(layout)
    if shifted:  # the label of token t stands at t, and is the token t + 1
        first = torch.nn.functional.pad(first[1:], (0, 1), value=False)
    return labels.masked_fill(first.view(labels.shape).to(labels.device), IGNORE_INDEX)


# ---- what is inside a model ----


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(
        f"model must be, or wrap, a transformers PreTrainedModel, got {type(model).__name__}; load "
        "it with AutoModel."
    )
