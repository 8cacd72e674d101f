"""Context parallelism in Trainer and TRL's SFTTrainer: P processes share each packed row.

The ranks 0 to P - 1 form a group, the next P another. All ranks of a group load the same batch,
and each keeps its shard. The Trainer treats a group as one process: W processes in groups of P
train as W / P would.

Trainer counts the labels of all ranks (their shards' `shift_labels`), and multiplies each loss by
the number of ranks, over which DDP and FSDP2 take the mean. So the losses of shards need no other
scaling. All differences are in `ContextParallelMixin`, a class because callbacks see neither losses
nor loaders.

Shapes: P = ranks of a group, T = tokens of a row.
"""

from __future__ import annotations

import copy
import zlib
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from flexvarlen.packing.loader_pass import DISPATCH_NOTHING
from flexvarlen.patches.api import current_patch, patch_model
from flexvarlen.patches.inner_model import transformers_model
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.shard_collator import CHECKSUM, ShardCollator
from flexvarlen.patches.state import BackendChoice
from flexvarlen.upstream import required


def enable_context_parallel(
    trainer: Trainer, backend: BackendChoice, ranks: int, options: dict[str, Any]
) -> None:
    """Make groups of `ranks` processes of a trainer share each packed row.

    Args:
        options: other arguments of `patch_model`.

    Raises:
        ValueError: the trainer makes padded batches, or has a setting that needs whole rows.
        NotImplementedError: the model cannot be sharded.
    """
    why = why_not_context_parallel(trainer, ranks)
    if why is not None:
        raise ValueError(why)
    group, _ = dist.new_subgroups(ranks, timeout=timedelta(seconds=trainer.args.ddp_timeout))
    patch_model(trainer.model, backend, sequence_parallel_group=group, **options)
    kind = type(trainer)
    trainer.__class__ = type(
        kind.__name__, (ContextParallelMixin, kind), {"__module__": kind.__module__}
    )
    trainer.group = group
    accelerator = trainer.accelerator
    accelerator.prepare_data_loader = trainer.prepare_data_loader
    accelerator.gather_for_metrics = trainer.gather_function = trainer.gather_for_metrics


class ContextParallelMixin(Trainer):  # type: ignore[misc]
    """A mixin, put before the trainer's class, that makes its processes share rows."""

    group: Any
    """This process's group."""

    @property
    def num_groups(self) -> int:
        """How many batches are loaded at a time."""
        return int(self.args.world_size) // dist.get_world_size(self.group)

    # ---- batches ----

    def get_total_train_batch_size(self, args: Any) -> int:
        """Examples of an optimizer step."""
        return int(super().get_total_train_batch_size(args)) // dist.get_world_size(self.group)

    def prepare_data_loader(
        self, loader: DataLoader[Any], device_placement: bool | None = None, **dispatching: Any
    ) -> DataLoader[Any]:
        """Like accelerate's method of this name, with a group instead of a process."""
        accelerator, ranks = self.accelerator, dist.get_world_size(self.group)
        patch = current_patch(self.model)
        if patch is None or patch.sequence_parallel_group is not self.group:
            raise ValueError(
                "the model of a trainer with context_parallel must not be patched again or "
                "unpatched; make a new trainer."
            )
        is_prepared = isinstance(loader, DataLoaderShard)
        if is_prepared:
            return loader
        refuse_dispatching(accelerator, loader)
        rank, of_group = dist.get_rank(self.group), accelerator.process_index // ranks
        pad_token_id = getattr(self.processing_class, "pad_token_id", None) or 0
        loader = copy.copy(loader)  # the caller may prepare the same loader again
        options = patch.parts.shard_options()
        loader.collate_fn = ShardCollator(loader.collate_fn, rank, ranks, pad_token_id, options)
        seed_worker = loader.worker_init_fn
        if isinstance(seed_worker, partial) and "rank" in seed_worker.keywords:  # Trainer's
            loader.worker_init_fn = partial(seed_worker, rank=of_group)
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=self.num_groups,
            process_index=of_group,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        return prepared

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of an optimizer step, compared over the ranks of the group."""
        batches, num_items_in_batch = super().get_batch_samples(*args, **kwargs)
        self.compare_rows(batches)
        return batches, num_items_in_batch

    def compare_rows(self, batches: list[dict[str, Any]]) -> None:
        """Raise if the ranks of the group have different rows. Syncs."""
        if any(CHECKSUM not in batch for batch in batches):
            raise ValueError(
                "batches must come from a loader that trainer.accelerator.prepare returned; return "
                "such a loader from get_train_dataloader and get_eval_dataloader."
            )
        local_digest = zlib.crc32(repr([batch.pop(CHECKSUM) for batch in batches]).encode())
        largest = torch.tensor([local_digest, -local_digest], device=self.accelerator.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        if largest.sum() != 0:
            raise ValueError(
                "the processes of a group must load the same row; seed the dataset, sampler and "
                "collator identically on every process."
            )

    # ---- losses ----

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """A step on this rank's shard; returns its loss, of which Trainer logs the mean."""
        inner = getattr(model, "_orig_mod", model)  # of a compiled model
        wrapped = isinstance(inner, DistributedDataParallel | FullyShardedDataParallel)
        if not (wrapped or any(isinstance(x, DTensor) for x in model.parameters())):  # FSDP2
            raise ValueError(
                "train() must come before evaluate(), which makes accelerate prepare the model "
                "without DDP, so gradients would not be summed over the processes; make a new "
                "trainer, or pass eval_on_start=True."
            )
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of the shard, scaled so that the mean over all ranks is the loss of the step.

        SFTTrainer evaluates without a count, by the mean over the labels of each process, and takes
        the mean over processes of the loss of routers, which it adds and logs.
        """
        if num_items_in_batch is None:
            num_items_in_batch = inputs["num_items_in_batch"] * self.num_groups
            self.current_gradient_accumulation_steps = 1  # by which it divides where it has a count
        if getattr(self, "aux_loss_enabled", False):
            model = partial(call_for_mean, model, dist.get_world_size(self.group))
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """Return the mean of the group's losses on each of its ranks, without predictions."""
        if not prediction_loss_only:
            raise NotImplementedError(_NO_PREDICTIONS)
        self.compare_rows([inputs])
        loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        loss = loss.clone()
        dist.all_reduce(loss, group=self.group)
        return loss / dist.get_world_size(self.group), None, None

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse, as each rank only has the predictions of its shard."""
        raise NotImplementedError(_NO_PREDICTIONS)

    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Like accelerate's method of this name, if each rank of a group has a value per example.

        At the end of a dataset, it keeps as many values as there are examples in the last batch.
        """
        accelerator = self.accelerator
        loader = accelerator.gradient_state.active_dataloader
        purpose = "the values of the last batch"
        examples = 0 if loader is None else required(loader, "remainder", purpose)
        if examples > 0:
            loader.remainder = examples * dist.get_world_size(self.group)
        try:
            return type(accelerator).gather_for_metrics(accelerator, *args, **kwargs)
        finally:
            if examples > 0:
                loader.remainder = examples


def call_for_mean(model: Any, ranks: int, /, **inputs: Any) -> Any:
    """The outputs of a model on a shard, with an `aux_loss` whose mean over ranks is the row's."""
    outputs = model(**inputs)
    outputs["aux_loss"] = outputs["aux_loss"] * ranks
    return outputs


_NO_PREDICTIONS = (
    "predictions need whole rows, but with context_parallel each process has a shard; remove "
    "compute_metrics, and predict in your own loop inside `with fv.patched(trainer.model):`."
)


# ---- refusals ----


def why_not_context_parallel(trainer: Any, ranks: int) -> str | None:
    """Why the processes of a trainer cannot share rows, or None."""
    args = trainer.args
    if isinstance(trainer, ContextParallelMixin):
        return "a trainer with context_parallel cannot be patched twice; make a new trainer."
    if args.world_size % ranks:
        return (
            "context_parallel must divide the number of processes, got "
            f"{ranks} with {args.world_size}; start more with torchrun or accelerate launch."
        )
    given = {
        "tp_size, cp_size or sp_size": (
            trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1
        ),
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        **settings_that_read_logits(trainer),
        "train_sampling_strategy='batch_rebalance'": (
            args.train_sampling_strategy == "batch_rebalance"
        ),
        "a model without num_items_in_batch": not trainer.model_accepts_loss_kwargs,
        "an encoder": not ModelParts.of(transformers_model(trainer.model)).causal,
        f"a compute_loss of {type(trainer).__name__}": not has_known_loss(trainer),
    }
    refused = [name for name, is_given in given.items() if is_given]
    if refused:
        return f"context_parallel does not support {' and '.join(refused)}; remove it."
    if is_padded(trainer):
        return (
            "context_parallel shares packed rows, got batches that are padded; use Trainer with "
            "PackedCollator or DataCollatorWithFlattening, or SFTTrainer with padding_free=True or "
            'packing=True, packing_strategy="bfd".'
        )
    return None


def settings_that_read_logits(trainer: Any) -> dict[str, bool]:
    """Whether each of them is set."""
    return {
        "label_smoothing_factor": trainer.args.label_smoothing_factor != 0,
        "compute_loss_func": trainer.compute_loss_func is not None,
        "compute_metrics": trainer.compute_metrics is not None,
    }


def has_known_loss(trainer: Trainer) -> bool:
    """Whether the loss is transformers' or TRL's, which accept the labels of a shard."""
    names = getattr(trainer.compute_loss, "__globals__", {})  # the instance's own, if it has one
    return names.get("__name__", "").partition(".")[0] in ("transformers", "trl")


def is_padded(trainer: Any) -> bool:
    """Whether a trainer of TRL makes padded batches, or generates its samples."""
    of_trl = [each for each in type(trainer).__mro__ if each.__module__.startswith("trl.")]
    if not any(each.__name__ == "SFTTrainer" for each in of_trl):
        return bool(of_trl)
    collator = trainer.data_collator
    names = [each.__name__ for each in type(collator).__mro__ if each.__module__.startswith("trl.")]
    if "DataCollatorForLanguageModeling" not in names:  # other collators' batches are checked
        return False
    return not required(collator, "padding_free", "refusing padded batches")


def refuse_dispatching(accelerator: Any, loader: DataLoader[Any]) -> None:
    """Raise if one process would load the batches of all."""
    dispatches = accelerator.dispatch_batches
    if dispatches is None:
        dispatches = isinstance(loader.dataset, IterableDataset)
    if dispatches:
        raise ValueError(
            "the processes of a group must load their row themselves, but accelerate's "
            "dispatch_batches, its default for an IterableDataset, loads it in one process; "
            f"{DISPATCH_NOTHING}."
        )
