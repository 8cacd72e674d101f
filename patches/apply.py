"""Apply a patch to a model after its arguments have been checked, and undo it."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from flexvarlen.patches.attention.backend_choice import (
    check_machine,
    checked_choice,
    names_in,
    same_bits_choice,
)
from flexvarlen.patches.forward.chunked_loss import check_forward
from flexvarlen.patches.forward.chunked_mlp import chunk_mlps, unchunk_mlps
from flexvarlen.patches.forward.guards import guard_trainer_and_peft
from flexvarlen.patches.forward.head_checks import (
    HEAD,
    HeadReference,
    head_over,
    mark_bare_head,
    require_keywords,
    require_patched_heads,
    unmark_bare_head,
    unwrap_loss,
)
from flexvarlen.patches.forward.multiple_choice import CHOICES_STEPS
from flexvarlen.patches.forward.recurrent_layers import patch_recurrent, unpatch_recurrent
from flexvarlen.patches.forward.replay import patch_routers, unpatch_routers
from flexvarlen.patches.forward.row_size import fix_head_size, free_head_size
from flexvarlen.patches.forward.sequence_parallel import check_group
from flexvarlen.patches.forward.stages import choose_stages
from flexvarlen.patches.forward.steps import STEPS
from flexvarlen.patches.forward.vision_tower import patch_tower, unpatch_tower
from flexvarlen.patches.forward.wrapper import unwrap_forward, wrap_forward
from flexvarlen.patches.models.layers import (
    attention_layers,
    dtype_of_forward,
    recurrent_layers,
)
from flexvarlen.patches.models.rope import patch_rotary, unpatch_rotary
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.state import (
    ATTRIBUTE,
    LAYER_MARK,
    Patch,
    Settings,
    implementation_before,
    register_model,
    set_implementation,
    unregister_model,
    wrapped_modules,
)


def make_patch(inner: PreTrainedModel, parts: ModelParts, settings: Settings) -> Patch:
    """Make the patch of a model that supports these settings.

    Raises:
        ValueError: a `forward` without `**kwargs`, an unknown backend, a mapping that does not fit
            the model's layer types, or a group without this process.
        NotImplementedError: a backend cannot serve the layers it was chosen for.
    """
    require_keywords(wrapped_modules(inner, parts))
    if settings.loss_chunk_tokens is not None:
        check_forward(inner)
    if settings.sequence_parallel_group is not None:
        check_group(settings.sequence_parallel_group)
    every = (*parts.kinds, *parts.vision_kinds)
    backend = checked_choice(settings.backend, every)
    checked_on = None
    if settings.same_bits is not None:
        checked_on = inner.device, dtype_of_forward(parts.text_tower(inner), inner.device)
        backend = same_bits_choice(
            backend,
            parts.kinds,
            *checked_on,
            deterministic=settings.deterministic,
            batch_invariant=settings.batch_invariant,
        )
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
        stages=choose_stages(parts, settings, below=head_over(inner)),
        named=named,
        backends=(named,),
        implementation_before=implementation_before(inner),
        attributes=(*vars(inner), ATTRIBUTE),
        checked_on=checked_on,
    )


def apply_patch(inner: PreTrainedModel, patch: Patch) -> None:
    """Patch a model whose arguments have been checked."""
    parts = patch.parts
    base, text, vision = parts.base(inner), parts.text_tower(inner), parts.vision_tower(inner)
    set_implementation(inner, patch.named)
    steps = CHOICES_STEPS if parts.head.has_choices else STEPS
    wrap_forward(inner, steps)
    setattr(inner, ATTRIBUTE, patch)
    if base is not inner:
        of_base = parts.of_base()
        stages = choose_stages(of_base, patch, below=parts.head)
        wrap_forward(base, STEPS)
        setattr(base, ATTRIBUTE, replace(patch, parts=of_base, stages=stages))
        base.__dict__[HEAD] = HeadReference(inner)
    for layer in attention_layers(inner):
        layer.__dict__[LAYER_MARK] = True
    for layer in recurrent_layers(text):
        patch_recurrent(layer)
    patch_routers(text, parts.routers)
    if vision is not None:
        patch_tower(vision, patch)
    require_patched_heads(inner)
    mark_bare_head(inner, parts)
    free_head_size(inner)
    unchunk_mlps(inner)
    if patch.mlp_chunk_tokens is not None:
        chunk_mlps(text, patch.mlp_chunk_tokens)
    if patch.same_bits is not None and parts.head.labels == "next token":
        fix_head_size(inner.get_output_embeddings(), patch.same_bits)
    guard_trainer_and_peft()
    patch_rotary(text)
    register_model(inner)


def undo_patch(inner: PreTrainedModel, patch: Patch) -> None:
    """Restore a model, except for the functions in transformers' modules."""
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
    if parts.routers is not None:
        unpatch_routers(text)
    unwrap_loss(inner)
    unmark_bare_head(inner)
    free_head_size(inner)
    unchunk_mlps(inner)
    unpatch_rotary(text)
    unregister_model(inner, patch)
    if vision is not None and ATTRIBUTE in vision.__dict__:
        unpatch_tower(vision)  # last, as unregister_model sets the implementation of all parts
