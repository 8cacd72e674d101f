"""Choose the stages of a forward, once, from what a model is made of and how it is patched.

A capability that a model does not have is in none of them, so that its forward never asks for it.
"""

from __future__ import annotations

from typing import Any

from flexvarlen.patches.batch.image_runs import runs_finder
from flexvarlen.patches.batch.labels import target_maker
from flexvarlen.patches.batch.positions import position_maker
from flexvarlen.patches.forward.chunked_loss import call_with_chunked_loss, keep_hidden_states
from flexvarlen.patches.forward.idle_tower import has_idle_tower, run_idle_tower
from flexvarlen.patches.forward.padding import pad_outputs, unpad_batch, unpad_below_head
from flexvarlen.patches.forward.pooling import (
    check_document_head,
    check_row_head,
    pool_outputs,
    pooled_tokens,
    rows_of_documents,
)
from flexvarlen.patches.forward.recurrent_layers import DOCUMENTS, recurrent_documents
from flexvarlen.patches.forward.refusals import prepare_shared_keys, refuse_sound
from flexvarlen.patches.forward.replay import (
    find_routes,
    forget_routes,
    refuse_routes,
    take_routes,
    unpad_below_head_that_replays,
)
from flexvarlen.patches.forward.router import (
    add_router_loss,
    defer_router_loss,
    keep_router_logits,
    request_router_logits,
    weigh_tokens,
    weigh_tokens_or_defer,
)
from flexvarlen.patches.forward.row_size import (
    call_with_whole_chunks,
    check_row_size,
    fill_row,
    fill_row_below_head,
)
from flexvarlen.patches.forward.sequence_parallel import check_shard
from flexvarlen.patches.forward.under_head import (
    context_from_mask,
    context_into_mask,
    documents_of_head,
)
from flexvarlen.patches.forward.wrapper import call_own
from flexvarlen.patches.models.heads import NO_HEAD, Head
from flexvarlen.patches.models.verified import is_verified
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.state import CONTEXT, Settings, Stages


def choose_stages(parts: ModelParts, settings: Settings, *, below: Head = NO_HEAD) -> Stages:
    """The stages of a module's forward.

    Args:
        parts: of the module: a model with a head, a base model or a tower.
        settings: of its patch.
        below: the head that a base model is called by; `NO_HEAD` if it is the model.
    """
    is_base, head = not parts.base_name, parts.head
    over_ranks = settings.sequence_parallel_group is not None
    of_documents = head.labels == "document"
    has_sound = hasattr(parts.model_config, "audio_config")
    has_router = hasattr(parts.config, "output_router_logits") or not is_verified(
        parts.model_class, parts.model_config.model_type
    )
    replays = parts.routers is not None
    shares_router_loss = has_router and (over_ranks or replays)
    weigh = weigh_tokens_or_defer if replays else weigh_tokens
    unpad = unpad_below_head_that_replays if replays else unpad_below_head
    fixed_size = settings.same_bits is not None
    chunks_loss = settings.loss_chunk_tokens is not None
    pads = settings.unpad or below.labels == "document" or fixed_size
    may_pool = is_base and not parts.causal
    call = call_own
    if not is_base and chunks_loss:
        call = call_with_chunked_loss
    elif not is_base and fixed_size:
        call = call_with_whole_chunks
    return Stages(
        arguments=_those(
            (replays, take_routes),
            (is_base and parts.shares_keys, prepare_shared_keys),
            (is_base and parts.drops_keywords, context_from_mask),
            (is_base and has_idle_tower(parts), run_idle_tower),
            (is_base and shares_router_loss, request_router_logits),
        ),
        refusals=_those(
            (has_sound, refuse_sound), (over_ranks, check_shard), (replays, refuse_routes)
        ),
        batch=_those(
            (below != NO_HEAD, documents_of_head),
            (is_base and below == NO_HEAD and settings.unpad, unpad_batch),
            (not is_base and settings.unpad, unpad),
            (is_base and fixed_size, fill_row),
            (not is_base and fixed_size, fill_row_below_head),
            (of_documents, rows_of_documents),
        ),
        checks=_those(
            (fixed_size, check_row_size),
            (of_documents, check_document_head),
            (head.labels == "row", check_row_head),
        ),
        positions=position_maker(parts),
        targets=target_maker(parts, over_ranks=over_ranks),
        pooled_tokens=pooled_tokens if may_pool else None,
        image_runs=runs_finder(parts),
        routes=find_routes if replays else None,
        recurrent=recurrent_documents if parts.recurrent else None,
        keywords=(CONTEXT, DOCUMENTS) if parts.recurrent else (CONTEXT,),
        head=_those(
            (not is_base and has_router and not over_ranks, weigh),
            (not is_base and has_router and over_ranks, defer_router_loss),
            (not is_base and parts.drops_keywords, context_into_mask),
        ),
        outputs=_those(
            (is_base and pads, pad_outputs),
            (is_base and below != NO_HEAD and chunks_loss, keep_hidden_states),
            (may_pool, pool_outputs),
            (is_base and shares_router_loss, keep_router_logits),
            (is_base and replays, forget_routes),
            (not is_base and shares_router_loss, add_router_loss),
        ),
        call=call,
    )


def _those(*stages: tuple[bool, Any]) -> tuple[Any, ...]:
    return tuple(stage for has_it, stage in stages if has_it)
