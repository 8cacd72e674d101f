"""What two processes train by accelerate and Trainer for test_distributed.py."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import flexvarlen as fv
from tests.contract_oracle import Step
from tests.contract_training import documents as many_documents
from tests.contract_training import recorded, settings
from tests.patches.distributed_inputs import WORLD, gradients_of, inputs_of, mean, model_of, step


def sharded_by_accelerate(model: Any, **options: Any) -> Any:
    """By what `Accelerator.prepare` calls, which takes a plugin of FSDP on GPUs alone."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options
    )
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=dist.get_rank() == 0,
        device=torch.device("cpu"),
    )
    prepared = fsdp2_prepare_model(accelerator, model)
    assert all(isinstance(p, DTensor) for p in prepared.parameters())
    assert isinstance(model.model.layers[0], FSDPModule)
    return prepared


def fsdp2_by_accelerate() -> dict[str, Any]:
    model = fv.patch_model(model_of(), "sdpa")
    return step(sharded_by_accelerate(model, cpu_ram_efficient_loading=False))


def fsdp2_by_accelerate_from_rank_0() -> dict[str, Any]:
    """Through the meta device, on which the patched model's own RoPE tables must survive."""
    model = fv.patch_model(model_of(), "sdpa")
    return step(sharded_by_accelerate(model, cpu_ram_efficient_loading=True))


def fsdp2_by_accelerate_then_patch() -> dict[str, Any]:
    model = sharded_by_accelerate(model_of())
    return step(fv.patch_model(model, "sdpa"), **inputs_of("packed_layout"))


def prepared(patch_first: bool, **options: Any) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, **options)
    assert accelerator.num_processes == WORLD
    model = model_of()
    if patch_first:
        fv.patch_model(model, "sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not patch_first:
        fv.patch_model(model, "sdpa")
    assert isinstance(model, DistributedDataParallel)
    loss = model(**inputs_of()).loss
    accelerator.backward(loss)
    return {"loss": mean(loss), "gradients": gradients_of(model)}


def accelerate_prepare() -> dict[str, Any]:
    return prepared(patch_first=True)


def accelerate_prepare_then_patch() -> dict[str, Any]:
    return prepared(patch_first=False)


def accelerate_bf16() -> dict[str, Any]:
    return prepared(patch_first=True, mixed_precision="bf16")


def trained(collate: Any, dataset: Any, **options: Any) -> list[Step]:
    """Two steps of Trainer, the loss as the ranks' mean."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with TemporaryDirectory() as folder:
        made, recorder = recorded(
            Trainer,
            model=fv.patch_model(model_of(), "sdpa"),
            args=TrainingArguments(**settings(folder, **options)),
            train_dataset=dataset,
            data_collator=collate,
        )
        made.train()
    steps = []
    for one in recorder.steps:
        weights, gradients = (
            {name.removeprefix("module."): x for name, x in named.items()}
            for named in (one.weights, one.gradients)
        )
        steps.append(Step(weights, mean(one.loss), gradients))
    return steps


def trainer() -> list[tuple[Step, Any]]:
    """Rows of another length on each rank: each step with the documents of both."""
    dataset = [{"input_ids": x} for x in many_documents()]
    collate, collated = DataCollatorWithFlattening(return_flash_attn_kwargs=True), []
    steps = trained(lambda own: (collated.append(own), collate(own))[1], dataset)
    documents = []
    for features in collated[: len(steps)]:  # a loader looks ahead
        of_ranks: list[Any] = [None] * WORLD
        dist.all_gather_object(of_ranks, [x["input_ids"] for x in features])
        documents.append([x for of_rank in of_ranks for x in of_rank])
    return list(zip(steps, documents, strict=True))


class Rows(IterableDataset):
    """Packed rows, of which accelerate loads those of both processes in the first."""

    def __iter__(self):
        documents = many_documents()
        for row in fv.pack([len(document) for document in documents], 64, strategy="in_order"):
            yield [documents[i] for i in row]


def dispatched(collate: Any) -> list[tuple[Step, Any]]:
    """By its default for such a data set."""
    steps = trained(collate, Rows(), per_device_train_batch_size=1)
    rows = list(Rows())
    return [(step, rows[2 * i] + rows[2 * i + 1]) for i, step in enumerate(steps)]


def trainer_dispatched() -> list[tuple[Step, Any]]:
    return dispatched(fv.PackedCollator(total_tokens=64, capacity=16, max_seqlen_bound=64))


def refused(collate: Any) -> str:
    """What both ranks raise, so that none waits for the other."""
    try:
        dispatched(collate)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def trainer_dispatched_without_a_size() -> str:
    return refused(fv.PackedCollator())


def trainer_dispatched_trees() -> str:
    return refused(fv.TreeCollator(total_tokens=64))
