"""`run_parts`: a tree's parts in their order, depth first, and the passes without gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.layout.boundaries import is_compiled
from flexvarlen.layout.labels import IGNORE_INDEX
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.routed_experts import ROUTED_EXPERTS
from flexvarlen.trees.part import layout_of
from flexvarlen.trees.plan import PartSizes, TreePlan, plan_parts, segments_of
from flexvarlen.trees.ranks import ModelRanks, check_runs_in_parts, ranks_of
from flexvarlen.trees.states import PartStates
from flexvarlen.trees.steps import Step, steps_of

_ONE_TOKEN = plan_parts([1], [-1], 1)
"""What a rank runs while only others have a part: one token of no tree, without a label."""

NOT_PATCHED = (
    "model must be patched to run a tree in parts, and run one before the next is asked for, got a "
    "part that no patched layer ran; call fv.patch_model(model) first, and run each part."
)


class PartBatch(dict[str, Any]):
    """The keyword arguments of a patched model for a part of a tree.

    Attributes:
        tokens: int64 `[T]`, on the host: the indices of its tokens in the row of the whole tree,
            without padding at the end. Empty in a part that a rank runs under FSDP2 while only
            others have one. None in a copy that a library makes, on another device.
    """

    def __init__(self, inputs: Mapping[str, Any], tokens: Tensor | None = None) -> None:
        super().__init__(inputs)
        self.tokens: Any = tokens


def run_parts(
    model: nn.Module,
    layout: PackedLayout,
    columns: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    max_tokens: int,
) -> Iterator[PartBatch]:
    """The batches of the parts; the backward of each must run before the next is asked for.

    With gradients, the segments that other parts continue run here first, without gradients, and
    their part is yielded after those parts. Under `torch.no_grad()` each part runs once, before
    those that continue it.

    Args:
        model: patched.
        layout: of the whole trees.
        columns: `[1, T]` of the tokens.
        arguments: further keyword arguments, the same for each part.
        max_tokens: tokens of a part at most.

    Raises:
        ValueError: `max_tokens` is below 1; when a part has run, that the model is not patched, or
            draws random numbers, such as those of dropout.
        NotImplementedError: as `check_runs_in_parts`.
        RuntimeError: a part's backward did not run, or ran twice.
    """
    max_tokens = require_int_at_least("max_tokens", max_tokens, 1)
    check_runs_in_parts(model)
    plan, sizes = plan_parts(*segments_of(layout), max_tokens), None
    if has_compiled(model):
        depth = 1 if layout.segments is None else layout.segments.max_depth
        sizes = PartSizes.of(plan, max_tokens, layout.capacity, depth)
    return _batches(ranks_of(model), plan, columns, arguments, layout.device, sizes)


def _batches(
    ranks: ModelRanks,
    plan: TreePlan,
    columns: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    device: torch.device,
    sizes: PartSizes | None,
) -> Iterator[PartBatch]:
    starts = torch.tensor([0, *plan.lengths]).cumsum(0).tolist()
    states, needs_grad = PartStates(), torch.is_grad_enabled()

    def batch(step: Step) -> PartBatch:
        if step.part is None:
            tree, part, tokens = _ONE_TOKEN, _ONE_TOKEN.roots[0], torch.arange(0)
            segments = part.segments
            inputs = {name: x.new_zeros(1, 1, *x.shape[2:]) for name, x in columns.items()}
            inputs["shift_labels"].fill_(IGNORE_INDEX)
        else:
            tree, part, segments = plan, step.part, step.segments
            tokens = torch.cat([torch.arange(starts[x], starts[x + 1]) for x in segments])
            on_device = tokens.to(device)
            inputs = {name: x.index_select(1, on_device) for name, x in columns.items()}
        if sizes is not None:
            spare = sizes.tokens - inputs["shift_labels"].shape[1]
            fill = {"shift_labels": IGNORE_INDEX}
            inputs = {name: _padded(x, spare, fill.get(name, 0)) for name, x in inputs.items()}
        expects_backward = needs_grad and not step.is_first_pass
        flags = {"stores_states": step.stores, "needs_grad": expects_backward}
        made = layout_of(tree, part, segments, states, **flags, device=device, sizes=sizes)
        states.begin_part(made.shard)
        return PartBatch(inputs | {"packed_layout": made, **arguments}, tokens)

    try:
        with closing(ranks.steps(steps_of(plan, trains=needs_grad))) as steps:
            for step in steps:
                if step.is_first_pass:
                    _run_without_gradients(ranks.without_gradients, batch(step))
                else:
                    yield batch(step)
                _require_read(states)
                if needs_grad:
                    states.finish_part(step.done)
                states.discard(step.done)
    finally:
        states.clear()


def has_compiled(model: nn.Module) -> bool:
    """Whether the model, or one of its modules, is compiled; asked before a forward."""
    return any(map(is_compiled, model.modules()))


def _padded(x: Tensor, tokens: int, value: int) -> Tensor:
    """x `[1, T, ...]` with more tokens at its end."""
    return pad(x, (0, 0) * (x.ndim - 2) + (0, tokens), value=value)


def _run_without_gradients(model: nn.Module, batch: PartBatch) -> None:
    names = ("input_ids", "packed_layout", ROUTED_EXPERTS)
    inputs = {name: batch[name] for name in names if name in batch}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    few_logits = {} if head is None else {"logits_to_keep": 1}
    with torch.no_grad(), no_random_numbers(batch["input_ids"].device):
        model(**inputs, use_cache=False, **few_logits)


@contextmanager
def no_random_numbers(device: torch.device) -> Iterator[None]:
    """Raise if the forward inside draws some, as its second run would draw different ones.

    Raises:
        ValueError: it drew random numbers.
    """

    def state() -> list[Tensor]:
        on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *on_gpu]

    before = state()
    yield
    if not all(map(torch.equal, before, state())):
        raise ValueError(
            "dropout must be 0 where a tree runs in parts, as some segments run twice, got a model "
            "that draws random numbers; set its dropout and noise to 0, or call model.eval()."
        )


def _require_read(states: PartStates) -> None:
    if not states.was_read:
        raise ValueError(NOT_PATCHED)
