"""A callback of transformers' Trainer that verifies isolation: before the first step, and later.

trainer = Trainer(model, args, train_dataset=..., data_collator=DataCollatorWithFlattening(),
                  callbacks=[IsolationCallback()])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from flexvarlen.equivalence.isolation import IsolationReport, verify_isolation
from flexvarlen.layout import PackedLayout
from flexvarlen.random_state import RandomState


class IsolationCallback(TrainerCallback):  # type: ignore[misc]
    """Ends the training with an `IsolationError` if a document sees another.

    The batch is the collator's, of the first examples of the dataset, or the one given: nothing is
    taken from the data loader, and random generators, gradients and modes are left as they were, so
    that a run with the callback trains as one without. The model runs in training mode, as Trainer
    wraps it for mixed precision, not compiled, and without DDP. It is verified on the first process
    alone, or, where parameters are sharded (FSDP, DeepSpeed ZeRO-3), on all with the same batch.

    Args:
        every: verify again each so many steps; None: only before the first.
        examples: of the dataset, that make the batch; None: those of one step on one device, at
            least 2.
        batch: keyword arguments of a forward, in place of the dataset's; needed with an
            `IterableDataset`.
        gradients, documents, layout, seed: as in `verify_isolation`. With `every`, another seed
            each time.

    Attributes:
        reports: by the number of steps done.

    Raises:
        ValueError: `every` or `examples` is not positive.
    """

    def __init__(
        self,
        *,
        every: int | None = None,
        examples: int | None = None,
        batch: Mapping[str, Any] | None = None,
        gradients: bool | None = None,
        documents: int | Sequence[int] | None = None,
        layout: PackedLayout | None = None,
        seed: int = 0,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, got {every}; None means only at first.")
        if examples is not None and examples < 1:
            raise ValueError(f"examples must be at least 1, got {examples}; None means a step's.")
        self.every, self.examples, self.batch, self.seed = every, examples, batch, seed
        self.options: dict[str, Any] = {
            "gradients": gradients,
            "documents": documents,
            "layout": layout,
        }
        self.reports: dict[int, IsolationReport] = {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Verify before the first step.

        Raises:
            IsolationError: a document sees another.
            ValueError: an `IterableDataset` and no batch; else as `verify_isolation`.
        """
        self._verify(args, state, kwargs["model"], kwargs["train_dataloader"])

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Verify each `every` steps. Raises as `on_train_begin`."""
        if self.every is not None and state.global_step % self.every == 0:
            self._verify(args, state, kwargs["model"], kwargs["train_dataloader"])

    def _verify(
        self, args: TrainingArguments, state: TrainerState, model: nn.Module, loader: Any
    ) -> None:
        if not state.is_world_process_zero and not is_sharded(model):
            return
        with random_state_kept(), training_mode(model):
            batch = self.batch
            if batch is None:
                batch = first_batch(
                    loader, self.examples or max(2, args.per_device_train_batch_size)
                )
            self.reports[state.global_step] = verify_isolation(
                model, batch, seed=self.seed + state.global_step, **self.options
            )


def first_batch(loader: Any, examples: int) -> Mapping[str, Any]:
    """What the loader's collator makes of the first examples of its dataset.

    Raises:
        ValueError: the dataset cannot be indexed; to iterate it could take from the training.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            "batch must be given to IsolationCallback where the dataset can only be iterated, got "
            f"a {type(dataset).__name__}; pass batch=, what the collator makes of a few examples."
        )
    made = loader.collate_fn([dataset[i] for i in range(min(examples, len(dataset)))])
    return dict(made)


def is_sharded(model: nn.Module) -> bool:
    """Whether no process holds all parameters: FSDP's, or DeepSpeed ZeRO-3's."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules()) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")
        for parameter in model.parameters()
    )


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """In training mode; afterwards each module is in its own again."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Afterwards the generators of Python, NumPy and torch on all devices are as they were."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()
