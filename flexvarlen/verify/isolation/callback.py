"""A callback of transformers' Trainer that verifies isolation: before the first step, and later.

trainer = Trainer(model, args, train_dataset=..., data_collator=DataCollatorWithFlattening(),
                  callbacks=[fv.IsolationCallback()])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.measure.random_state import RandomState
from flexvarlen.parallel.every_rank import EveryRank
from flexvarlen.parallel.sharded_parameters import is_sharded
from flexvarlen.patches.isolation.documents import documents_of, shares_rows, units_of
from flexvarlen.patches.isolation.model_run import training_mode
from flexvarlen.patches.isolation.report import IsolationReport
from flexvarlen.patches.isolation.verify import verify_isolation


class IsolationCallback(TrainerCallback):  # type: ignore[misc]
    """Ends the training with an `IsolationError` if a document sees another.

    The collator makes the batch from as many examples as a step has on one device, unless a batch
    is given. They are the first of the dataset, or others if these are a single document. The data
    loader is not used, and random generators, gradients and modes are restored, so that training is
    the same as without the callback. The model runs in training mode, as Trainer wraps it for mixed
    precision, not compiled, and without DDP. It is verified on the first process or, with sharded
    parameters (FSDP, ZeRO-3), on all processes with the same batch. All raise if one does.

    Args:
        every: verify again every `every` steps; None: only before the first.
        examples: number of examples, from the start of the dataset, in the batch. None: as above.
        batch: keyword arguments of a forward, instead of a batch from the dataset; needed with an
            `IterableDataset`.
        gradients, documents, layout, seed: as in `verify_isolation`; with `every`, the seed varies.

    Attributes:
        reports: reports by the number of steps done.

    Raises:
        ValueError: `every` or `examples` is not positive.
        NotImplementedError: processes share rows (`context_parallel`); raised when training starts.

    >>> trainer = Trainer(..., callbacks=[fv.IsolationCallback()])  # doctest: +SKIP
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
        for name, number in (("every", every), ("examples", examples)):
            if number is not None:
                require_int_at_least(name, number, 1)
        self.every, self.examples, self.batch, self.seed = every, examples, batch, seed
        self.options: dict[str, Any] = {
            "gradients": gradients,
            "documents": documents,
            "layout": layout,
        }
        self.reports: dict[int, IsolationReport] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Verify before the first step.

        Raises:
            IsolationError: a document sees another.
            ValueError: an `IterableDataset` needs a batch; or as in `verify_isolation`.
        """
        self._verify(args, state, kwargs["model"], kwargs["train_dataloader"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Verify every `every` steps. Raises as `on_train_begin`."""
        if self.every is not None and state.global_step % self.every == 0:
            self._verify(args, state, kwargs["model"], kwargs["train_dataloader"])

    def _verify(
        self, args: TrainingArguments, state: TrainerState, model: nn.Module, loader: Any
    ) -> None:
        if shares_rows(model):
            raise NotImplementedError(
                "IsolationCallback verifies whole rows, but under context_parallel a process has "
                "only a shard; remove it, and call fv.verify_isolation before fv.patch_trainer."
            )
        verifies = state.is_world_process_zero or is_sharded(model)
        with ExitStack() as stack:
            stack.callback(RandomState().restore)
            stack.enter_context(training_mode(model))
            with EveryRank():  # before sharded parameters are gathered
                batch = self._batch(args, loader) if verifies else {}
            with EveryRank():
                if verifies:
                    self.reports[state.global_step] = verify_isolation(
                        model, batch, seed=self.seed + state.global_step, **self.options
                    )

    def _batch(self, args: TrainingArguments, loader: Any) -> Mapping[str, Any]:
        if self.batch is not None:
            return self.batch
        if self.examples is not None:
            return batch_of(loader, range(self.examples))
        return several_documents(loader, args.per_device_train_batch_size, self.options["layout"])


def batch_of(loader: Any, indices: Iterable[int]) -> Mapping[str, Any]:
    """The batch that the loader's collator makes of these examples, if the dataset has them.

    Raises:
        ValueError: the dataset cannot be indexed; iterating it could consume training data.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            "batch must be given to IsolationCallback if the dataset can only be iterated, got "
            f"a {type(dataset).__name__}; pass batch=, the collator's output for a few examples."
        )
    return dict(loader.collate_fn([dataset[i] for i in indices if i < len(dataset)]))


def several_documents(
    loader: Any, size: int, layout: PackedLayout | None = None
) -> Mapping[str, Any]:
    """A batch of `size` examples with at least two documents; of more examples if needed.

    An example may be a document, or a whole row, which leaves no room for another in a fixed shape.
    So other offsets in the dataset are tried first, each twice the previous one, and its end
    (packing puts long documents into the first rows), then one more example per batch.

    Args:
        loader: provides the dataset and the collator.
        size: examples of a step on one device.
        layout: the documents, if the batch does not contain the boundaries.

    Raises:
        ValueError: as in `batch_of`; or no batch that the collator accepts has two documents.
    """

    def is_enough(batch: Mapping[str, Any]) -> bool:
        return len(units_of(documents_of(batch, layout))) > 1

    batch = batch_of(loader, range(size))
    start, last = size, len(loader.dataset) - size
    while not is_enough(batch) and start <= last:
        batch = batch_of(loader, range(start, start + size))
        start = last if start < last < 2 * start else 2 * start
    if is_enough(batch):
        return batch
    try:
        return batch_of(loader, range(size + 1))
    except ValueError as error:
        raise ValueError(
            f"batch must contain at least two documents, but all batches of {size} examples that "
            f"were tried have one, and the collator does not accept {size + 1}; pass batch= to "
            "IsolationCallback, the collator's output for two short documents."
        ) from error
