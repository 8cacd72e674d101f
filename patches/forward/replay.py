"""Replay the experts that an inference engine chose: routers weigh these instead of their own.

A router's output hook replaces its choice where the batch has one, and computes their weights by
the router's rule (`patches/models/routers.py`), so with gradients. Layers pass their routers no
keywords. In eager mode a layer's attention, which gets the forward's `PackedForward` and runs
before the router, also where a checkpoint is recomputed, passes it to the router; a compiled graph,
in which a checkpoint may change nothing outside it, reads it from an object that all routers share.

Shapes: B rows of S tokens, T = B·S; M layers with experts, of which K for each token.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.boundaries import raise_or_assert
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.routed_experts import (
    OWN_CHOICE,
    ROUTED_EXPERTS,
    are_routes,
    why_not_routes,
)
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.given import Given, Inputs
from flexvarlen.patches.forward.padding import unpad_below_head
from flexvarlen.patches.forward.recurrent_layers import DOCUMENTS
from flexvarlen.patches.forward.router import defer_router_loss_of_rows
from flexvarlen.patches.models.layers import runs_compiled
from flexvarlen.patches.models.routers import Routers, Rule, find_routers
from flexvarlen.patches.refusal import Refusal, refuse
from flexvarlen.patches.state import ATTRIBUTE, CONTEXT, ROUTES, Patch

_REPLAY = "_flexvarlen_replay"
"""The attribute of a router, and of a layer's attention, that says what is replayed there."""
_REPLAYED = "_flexvarlen_replayed"
"""The attribute of a router that says whether its last forward, but not in a backward, replayed."""


@dataclass(eq=False)
class _OfGraph:
    """What compiled graphs read: the routes of the forward that runs, `[T, M, K]`, or None."""

    routes: Tensor | None = None


@dataclass(frozen=True)
class _OfRouter:
    """How one router replays.

    Attributes:
        index: its layer among those with experts.
        rule: which gives its weights.
        of_graph: shared by all routers of the model.
    """

    index: int
    rule: Rule
    of_graph: _OfGraph


class _Current(threading.local):
    """What the attention of this thread's last layer with experts was given, while that lives."""

    def __init__(self) -> None:
        self.context: weakref.ref[PackedForward] | None = None


_current = _Current()


# ---- patching ----


def patch_routers(tower: nn.Module, routers: Routers | None) -> None:
    """Let the routers of a text tower replay, if all of them can. Safe to call twice."""
    if routers is None or routers.why_not is not None:
        return
    unpatch_routers(tower)
    of_graph = vars(tower)[_REPLAY] = _OfGraph()
    pairs = zip(find_routers(tower), routers.rules, strict=True)
    for index, (found, rule) in enumerate(pairs):
        vars(found.module)[_REPLAY] = _OfRouter(index, rule, of_graph)
        # First, as expert parallelism has hooks too, which take what the router returns.
        found.module.register_forward_hook(_replay, prepend=True)
        for mixer in found.mixers:
            vars(mixer)[_REPLAY] = of_graph
            mixer.register_forward_pre_hook(_pass_on, with_kwargs=True, prepend=True)


def unpatch_routers(tower: nn.Module) -> None:
    """Undo `patch_routers`."""
    for module in tower.modules():
        vars(module).pop(_REPLAYED, None)
        if vars(module).pop(_REPLAY, None) is None:
            continue
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number in [n for n, hook in hooks.items() if hook in (_replay, _pass_on)]:
                del hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)


# ---- one forward ----


def take_routes(module: nn.Module, patch: Patch, inputs: Inputs) -> None:
    """Take the routes from a forward's arguments; those of models without routers are refused.

    Raises:
        NotImplementedError: these routers cannot replay.
        ValueError: the routes do not fit the tokens or the model.
    """
    routes, routers = inputs.pop(ROUTED_EXPERTS, None), patch.parts.routers
    if routes is None:
        return
    if routers is None or routers.why_not is not None:
        why = "this model" if routers is None else routers.why_not
        raise NotImplementedError(
            f"{ROUTED_EXPERTS} is not supported with {why}; remove {ROUTED_EXPERTS}, so that the "
            "model chooses its experts itself."
        )
    ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
    tokens = embeds if ids is None else ids
    if tokens is not None:  # else the model's own error follows
        why = why_not_routes(routes, tokens.shape[:2], len(routers.rules), routers.top_k)
        if why is not None:
            raise ValueError(why)
    inputs[ROUTES] = routes


def refuse_routes(given: Given) -> None:
    """Refuse routes with what they do not go with, see `ROUTES_REFUSED`."""
    if given.inputs.get(ROUTES) is not None:
        refuse(given, ROUTES_REFUSED)


ROUTES_REFUSED = (
    Refusal(
        lambda given: given.why_unpacked,
        "routed_experts must come with packed rows or a padded batch of whole samples, got {got}; "
        "remove routed_experts, or pass no cache and no 4D mask.",
    ),
)


def unpad_below_head_that_replays(given: Given) -> Given | Inputs:
    """`unpad_below_head` of a head whose routers may replay."""
    entered = unpad_below_head(given)
    if isinstance(entered, dict):
        defer_router_loss_of_rows(given, entered)
    return entered


def find_routes(given: Given, layout: PackedLayout) -> Tensor | None:
    """The routes of a row, `[T, M, K]`, without those of padding; None if none are given.

    Raises:
        ValueError: they are no experts, or a token has one twice. Reads the device once, if there
            are any; in a compiled graph the device asserts that they are.
    """
    routes: Tensor | None = given.inputs.pop(ROUTES, None)
    tower = given.parts.text_tower(given.module)
    if routes is not None:
        routers: Any = given.parts.routers
        raise_or_assert(
            are_routes(routes, routers.num_experts),
            f"{ROUTED_EXPERTS} must be from 0 to {routers.num_experts - 1}, or -1 at all "
            f"{routers.top_k} experts of a token in a layer, for the router's own choice, and "
            "different experts of a token; make it with fv.engine_routes.",
        )
        real = layout.real_tokens()[:, None, None]
        routes = routes.flatten(0, 1).masked_fill(~real, OWN_CHOICE)
    of_graph = vars(tower).get(_REPLAY)
    if of_graph is not None and runs_compiled(tower):
        of_graph.routes = routes
    return routes


def forget_routes(module: Any, packed: PackedForward, outputs: Any) -> None:
    """Drop the routes that a compiled forward has read; of an eager one, check that all were.

    Raises:
        NotImplementedError: a router did not get them.
    """
    routes = packed.row.routes
    if routes is None:
        return
    tower = module.__dict__[ATTRIBUTE].parts.text_tower(module)
    if runs_compiled(tower):
        vars(tower)[_REPLAY].routes = None
    elif packed.delivery.replayed < routes.shape[1]:
        raise NotImplementedError(
            f"{ROUTED_EXPERTS} must reach each router by the attention of its layer, got "
            f"{packed.delivery.replayed} of {routes.shape[1]} routers of {type(module).__name__}; "
            f"remove {ROUTED_EXPERTS}, so that the model chooses its experts itself."
        )


# ---- hooks ----


def _pass_on(mixer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Before a layer's attention: keep what it was given for the layer's router."""
    given = kwargs.get(CONTEXT, kwargs.get(DOCUMENTS))
    context = given if isinstance(given, PackedForward) and given.row.routes is not None else None
    if torch.compiler.is_compiling():
        of_graph, routes = vars(mixer)[_REPLAY], None if context is None else context.row.routes
        if of_graph.routes is not routes:  # of layers that are compiled one by one
            of_graph.routes = routes
    else:
        _current.context = None if context is None else weakref.ref(context)


def _replay(router: nn.Module, args: Any, output: Any) -> Any:
    """The router's logits, and weights and indices of the engine's experts where there are any."""
    own: _OfRouter = vars(router)[_REPLAY]
    routes = own.of_graph.routes if torch.compiler.is_compiling() else _routes_of(router)
    if routes is None:
        return output
    logits, weights, indices = output
    chosen = routes[:, own.index].to(logits.device, torch.int64)
    if len(chosen) != len(logits):
        raise ValueError(
            f"{ROUTED_EXPERTS} must cover the tokens of each layer, got {len(chosen)} for "
            f"{len(logits)} in {type(router).__name__}; remove {ROUTED_EXPERTS}."
        )
    is_given = chosen != OWN_CHOICE
    chosen = torch.where(is_given, chosen, indices)
    replayed = own.rule(logits, chosen).to(weights.dtype)
    return logits, torch.where(is_given, replayed, weights), chosen.to(indices.dtype)


def _routes_of(router: nn.Module) -> Tensor | None:
    """The routes that the attention of this layer was given; each router takes them once.

    Raises:
        NotImplementedError: a checkpoint computes the router again without its layer's attention.
    """
    reference, _current.context = _current.context, None
    context = None if reference is None else reference()
    if torch._C._current_graph_task_id() == -1:
        vars(router)[_REPLAYED] = context is not None
    elif context is None and vars(router).get(_REPLAYED):
        raise NotImplementedError(
            f"{ROUTED_EXPERTS} needs checkpoints of whole layers, with their attention, got one "
            f"around {type(router).__name__} alone; checkpoint the layers, such as by "
            "model.gradient_checkpointing_enable()."
        )
    if context is None:
        return None
    context.delivery.replayed += 1
    return context.row.routes
