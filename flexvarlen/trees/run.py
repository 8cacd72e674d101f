"""`run_parts`: the parts of a tree in their order, depth first, and the passes that keep keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.parallel.sharded_parameters import is_sharded
from flexvarlen.trees.part import layout_of
from flexvarlen.trees.plan import PlannedPart, plan_parts
from flexvarlen.trees.step import TreeStep


class PartBatch(dict[str, Any]):
    """The keyword arguments of a patched model for a part of a tree.

    Attributes:
        tokens: int64 `[T]`, on the host: where they are in the row of the whole tree.
    """

    def __init__(self, tokens: Tensor, inputs: Mapping[str, Any]) -> None:
        super().__init__(inputs)
        self.tokens = tokens


def run_parts(
    model: nn.Module,
    layout: PackedLayout,
    columns: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
    max_tokens: int,
) -> Iterator[PartBatch]:
    """Yield the batches of the parts; each one's backward runs before the next is asked for.

    With gradients, a part that others hang from runs here first, without them, and is yielded
    after these; under `torch.no_grad()` each part runs once, before those below it.

    Args:
        model: patched.
        layout: of the whole trees.
        columns: `[1, T]` of the tokens.
        numbers: arguments that each part gets.
        max_tokens: of a part.

    Raises:
        ValueError: `max_tokens` is below 1, the model is not patched, or a module has dropout in
            training, which would differ between the two passes of a segment.
        NotImplementedError: training of a model that ranks share.
        RuntimeError: a part's backward did not run, or ran twice.
    """
    most = require_int_at_least("max_tokens", max_tokens, 1)
    learns = torch.is_grad_enabled()
    if learns:
        _check_model(model)
    device, segments = layout.device, layout.segments
    lengths: Sequence[int] = layout.lengths or () if segments is None else segments.lengths
    parents = [-1] * len(lengths) if segments is None else segments.parents
    plan = plan_parts(lengths, parents, most)
    starts = torch.tensor([0, *plan.lengths]).cumsum(0).tolist()
    step = TreeStep()

    def batch(part: PlannedPart, own: Sequence[int], *, keeps: bool) -> PartBatch:
        tokens = torch.cat([torch.arange(starts[x], starts[x + 1]) for x in own])
        there = tokens.to(device)
        inputs = {name: x.index_select(1, there) for name, x in columns.items()}
        made = layout_of(plan, part, own, step, keeps=keeps, device=device)
        return PartBatch(tokens, inputs | {"packed_layout": made, **numbers})

    # Iterative, as a conversation of many turns is a deep tree.
    waiting: list[tuple[PlannedPart, bool]] = [(part, False) for part in reversed(plan.roots)]
    while waiting:
        part, seen = waiting.pop()
        if seen and not learns:
            step.drop(part.kept)
            continue
        if part.below and not seen:
            waiting += [(part, True), *((each, False) for each in reversed(part.below))]
            if learns:
                first = batch(part, part.kept, keeps=True)
                _run_first(model, first)
                if not step.has(part.kept[0]):
                    raise ValueError(
                        "model must be patched to run a tree in parts, got one whose layers did "
                        "not get the documents; call fv.patch_model(model) first."
                    )
                continue
        yield batch(part, part.segments, keeps=not learns and bool(part.below))
        if learns:
            step.finish_part()
            step.drop(part.kept)


def _run_first(model: Callable[..., Any], batch: PartBatch) -> None:
    """Run segments without gradients, so that their keys are kept."""
    inputs = {"input_ids": batch["input_ids"], "packed_layout": batch["packed_layout"]}
    with torch.no_grad():
        model(**inputs, use_cache=False, logits_to_keep=1)


def _check_model(model: nn.Module) -> None:
    if is_sharded(model) or any(hasattr(x, "require_backward_grad_sync") for x in model.modules()):
        raise NotImplementedError(
            "a tree cannot train in parts under DDP, FSDP or ZeRO-3, whose ranks would have other "
            "numbers of parts, and wait for each other; pass the module inside DDP, and sum its "
            "gradients over the ranks after the last part."
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            raise ValueError(
                f"dropout must be 0 where a tree runs in parts, as some segments run twice, got "
                f"{module.p} at {name}; set it to 0, or run the whole tree: shared.batch()."
            )
