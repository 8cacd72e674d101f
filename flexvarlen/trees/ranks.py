"""How a model runs the parts of trees on one rank, and on several under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch import nn

from flexvarlen.parallel.sharded_parameters import (
    ddp_of,
    gather_over,
    gathers_parameters,
    is_tensor_parallel,
    mesh_of_fsdp2,
    runs_ddp,
)
from flexvarlen.trees.steps import Step, common_schedule, fill_steps


class ModelRanks(Protocol):
    """The ranks of a model, as a loop over parts sees them."""

    @property
    def without_gradients(self) -> nn.Module:
        """The module to call without gradients: that inside DDP, whose own forward communicates."""

    @property
    def must_call_model(self) -> bool:
        """Whether each forward must be a call of the model, not of a module inside."""

    def steps(self, own: Sequence[Step]) -> Generator[Step, None, None]:
        """The steps that this rank runs; close the generator, also after an exception.

        Args:
            own: those of its own trees.
        """

    def call_with_forward(self, inner: nn.Module, run: Callable[..., Any], **inputs: Any) -> Any:
        """Call the model with `run` as the forward of `inner`, the model or a module of it."""


class OneRank:
    """A model of this rank alone."""

    must_call_model = False

    def __init__(self, model: nn.Module) -> None:
        self.without_gradients = model

    def steps(self, own: Sequence[Step]) -> Generator[Step, None, None]:
        yield from own

    def call_with_forward(self, inner: nn.Module, run: Callable[..., Any], **inputs: Any) -> Any:
        return run(**inputs)


class _Shared:
    """A model whose own call begins and ends what the ranks do together."""

    must_call_model = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def call_with_forward(self, inner: nn.Module, run: Callable[..., Any], **inputs: Any) -> Any:
        with _forward_replaced(inner, run):
            return self.model(**inputs)


class DdpRanks(_Shared):
    """A model inside DDP, which reduces the gradients of all parts in the backward of the last.

    Args:
        model: DDP itself, or what contains it.
        ddp: DDP.
    """

    def __init__(self, model: nn.Module, ddp: Any) -> None:
        super().__init__(model)
        self.ddp, self.without_gradients = ddp, ddp.module

    def call_with_forward(self, inner: nn.Module, run: Callable[..., Any], **inputs: Any) -> Any:
        # DDP sends buffers and sizes of buckets in a forward, in an order that gradients change.
        return (
            super().call_with_forward(inner, run, **inputs)
            if torch.is_grad_enabled()
            else run(**inputs)
        )

    def steps(self, own: Sequence[Step]) -> Generator[Step, None, None]:
        before = self.ddp.require_backward_grad_sync  # False inside `no_sync`
        try:
            for number, step in enumerate(own, 1):
                self.ddp.require_backward_grad_sync = before and number == len(own)
                yield step
        finally:
            self.ddp.require_backward_grad_sync = before


class Fsdp2Ranks(_Shared):
    """A model that FSDP2 shards: each forward and backward is one of all ranks.

    Args:
        model: whose call gathers the parameters.
        mesh: of the parameters.
    """

    def __init__(self, model: nn.Module, mesh: Any) -> None:
        super().__init__(model)
        self.without_gradients, self.mesh = model, mesh

    def steps(self, own: Sequence[Step]) -> Generator[Step, None, None]:
        every = gather_over(self.mesh, [step.is_first_pass for step in own])
        yield from fill_steps(own, common_schedule(every))


def ranks_of(model: nn.Module) -> ModelRanks:
    """The ranks of a model, which may be DDP, contain it, or be sharded by FSDP2."""
    if (mesh := mesh_of_fsdp2(model)) is not None:
        return Fsdp2Ranks(model, mesh)
    ddp = ddp_of(model)
    return OneRank(model) if ddp is None else DdpRanks(model, ddp)


def check_runs_in_parts(model: nn.Module) -> None:
    """Refuse models that cannot run in parts on several ranks.

    Raises:
        NotImplementedError: FSDP1 or ZeRO-3 shards it, or it trains under tensor parallelism,
            inside DDP's forward, or with its static_graph.
    """
    if gathers_parameters(model) and mesh_of_fsdp2(model) is None:
        raise NotImplementedError(
            "a tree cannot run in parts under FSDP1 or ZeRO-3, whose ranks would wait for each "
            "other; shard the model by FSDP2: torch.distributed.fsdp.fully_shard."
        )
    if torch.is_grad_enabled() and is_tensor_parallel(model):
        raise NotImplementedError(
            "a tree cannot train in parts under tensor parallelism: in each backward transformers "
            "sums the gradients of norms inside attention over the ranks, with those of earlier "
            "parts; run the whole tree, shared.batch(), or load the model with fsdp_size alone."
        )
    if torch.is_grad_enabled() and getattr(ddp_of(model), "static_graph", False):
        raise NotImplementedError(
            "a tree cannot train in parts under DDP with static_graph, whose first backward must "
            "reduce; leave static_graph out, and checkpoint with use_reentrant=False."
        )
    if torch.is_grad_enabled() and runs_ddp():
        raise NotImplementedError(
            "a tree cannot train in parts inside DDP's forward, which has one backward; call "
            "shared.parts or fv.tree_logprobs on the DDP model, outside of its forward."
        )


@contextmanager
def _forward_replaced(module: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a module; its hooks run as before."""

    @wraps(module.forward)  # so that a patched model's base model finds it wrapped
    def forward(*args: Any, **inputs: Any) -> Any:
        return run(*args, **inputs)

    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        if before is not None:
            own["forward"] = before
