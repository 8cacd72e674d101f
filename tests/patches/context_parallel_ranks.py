"""What test_context_parallel_trainer.py trains in one process, and in four that share rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import numpy as np
import peft
import torch
import torch.distributed as dist
import trl
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    modeling_utils,
)
from transformers.distributed import DistributedConfig

import flexvarlen as fv
from tests.contract_training import forget_accelerate, settings
from tests.parallel import documents_rows
from tests.patches.forward.test_liger import fused_forward
from tests.tiny_models import VOCABULARY, new_model, tokenizer

WORLD, TOKENS, ROWS = 4, 64, 2  # two rows a step, of one process or of two groups
COMMON: dict[str, Any] = {
    "max_steps": -1,
    "ddp_timeout": 900,
    "num_train_epochs": 2,
    "optim": "adamw_torch",
    "adam_epsilon": 0.001,  # else a step has the size of the rate, whatever the gradient
    "learning_rate": 0.003,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "include_num_input_tokens_seen": "all",
}
TWICE, EVALUATED = {"gradient_accumulation_steps": 2}, {"eval_strategy": "epoch"}
OFFLOADED = {  # checkpoints in host memory
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False, "offload": True},
}
UNDISPATCHED = {"accelerator_config": {"dispatch_batches": False}}
SPLIT = {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": ROWS}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {  # the processes that share a row, and settings
    "packed": (4, EVALUATED),
    "accumulated": (2, {**TWICE, **EVALUATED, "save_strategy": "steps", "save_steps": 3}),
    "flattened": (2, {**SPLIT, "dataloader_drop_last": True, "max_grad_norm": 0.0}),
    "grouped": (4, {"train_sampling_strategy": "group_by_length"}),
    "streamed": (2, {"max_steps": 3, **UNDISPATCHED}),
    "sft_packing_lora": (2, {"packing": True, "max_length": TOKENS, **EVALUATED}),
    "fsdp2": (2, {"max_steps": 2, **OFFLOADED}),
    "hybrid": (4, {"max_steps": 2, **OFFLOADED}),
    "expert_parallel": (2, {"max_steps": 2, "save_strategy": "no"}),
    "sft_padding_free": (4, {"padding_free": True, "max_length": None, **TWICE, **EVALUATED}),
}
IN_CHUNKS = ("packed", "fsdp2", "streamed")  # the runs whose ranks have no logits of their tokens
MLP_IN_CHUNKS = ("sft_packing_lora", "fsdp2")
ROUTERS = ("packed", "sft_padding_free")  # the runs whose loss has one of routers


def examples(seed: int, count: int) -> list[list[int]]:
    """Documents of token ids: of seed 0, 12 are six rows and 11 five."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, n).tolist() for n in rng.integers(2, 60, count)]


def parts_of(run: str) -> dict[str, Any]:
    """A trainer's datasets and collator. The last batch of one group is incomplete in some."""
    odd = RUNS[run][0] == WORLD
    train, held_out = examples(0, 11 if odd else 12), examples(1, 9 if odd else 10)
    if run.endswith("lora"):  # the mean over groups of SFTTrainer's evaluation is that over labels
        held_out = [x * 16 for x in ([4, 9], [7, 5], [3, 8], [9, 6])] * 2
    if run.startswith("sft"):
        columns = [datasets.Dataset.from_dict({"input_ids": x}) for x in (train, held_out)]
        return {"train_dataset": columns[0], "eval_dataset": columns[1]}
    if run in ("flattened", "grouped"):
        documents = [{"input_ids": x} for x in train]
        return {"train_dataset": documents, "data_collator": DataCollatorWithFlattening()}
    packed = fv.StreamPacker if run == "streamed" else fv.PackedDataset
    return {
        "train_dataset": packed(train, TOKENS),
        "eval_dataset": fv.PackedDataset(held_out, TOKENS),
        "data_collator": fv.PackedCollator(),
    }


def experts(**changes: Any) -> Any:
    """A mixture of experts whose heads are a multiple of the ranks."""
    return new_model("qwen3_moe", num_attention_heads=8, router_aux_loss_coef=0.1, **changes)


def on_mesh(model: Any, folder: str, mesh: str) -> Any:
    """The model, loaded by transformers onto a mesh of all processes."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    options = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    config = DistributedConfig(**MESHES[mesh])
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, **options)


def trainer_of(run: str, folder: str, *, alone: bool = False, **changes: Any) -> Trainer:
    """The trainer of a run, of one process or of four that share rows."""
    forget_accelerate()
    ranks, given = RUNS[run]
    batch = ROWS if alone else ROWS * ranks // WORLD
    sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    given = settings(folder, **COMMON | sizes | given | changes)
    model, more = new_model("qwen3", num_attention_heads=8), parts_of(run)
    if run == "hybrid":
        model = new_model("qwen3_5_text")
    elif run in ROUTERS:
        model = experts(output_router_logits=True)
    elif run == "expert_parallel":
        model = experts() if alone else on_mesh(experts(), folder, "fsdp 4, ep 2")
    if alone:
        fv.patch_model(model, "sdpa")
    elif run == "flattened":  # as Liger does it, without logits
        model.forward = MethodType(fused_forward, model)
    if run.startswith("sft"):
        plain = {"bf16": False, "gradient_checkpointing": False, "shuffle_dataset": False}
        args = trl.SFTConfig(**plain | given)
        if run.endswith("lora"):
            more["peft_config"] = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
        return trl.SFTTrainer(model, args, processing_class=tokenizer(), **more)
    if run == "fsdp2" and not alone:
        for layer in (*model.model.layers, model):
            fully_shard(layer)
    trainer = Trainer(model, TrainingArguments(**given), **more)
    if run == "fsdp2" and not alone:  # accelerate has FSDP2 on a GPU alone, and would take DDP
        trainer.accelerator.prepare_model = lambda model, **_: model
    return trainer


def without_pinned_memory(**asked: Any) -> save_on_cpu:
    """As there is none without an accelerator."""
    return save_on_cpu()


def trained(trainer: Trainer, checkpoint: str | None = None) -> Any:
    """What a trainer logs, and its weights."""
    with mock.patch.object(modeling_utils, "save_on_cpu", without_pinned_memory):
        trainer.train(checkpoint)
    weights = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
    weights = {name: getattr(x, "full_tensor", x.clone)() for name, x in weights.items()}
    return trainer.state.log_history, weights


def shared(run: str, folder: str, ranks: int | None = None, **changes: Any) -> Trainer:
    """The trainer of a run that shares its rows."""
    datasets.disable_progress_bars()
    trainer = trainer_of(run, f"{folder}/{run}", **changes)
    options = {"context_parallel": ranks or RUNS[run][0]}
    if run in IN_CHUNKS and not changes:
        options["loss_chunk_tokens"] = 16
    if run in MLP_IN_CHUNKS:
        options["mlp_chunk_tokens"] = 8
    return fv.patch_trainer(trainer, "sdpa", **options)


def learned(run: str, folder: str) -> Any:
    """As one of four processes."""
    return trained(shared(run, folder))


# ---- a plain loop on a mesh of transformers ----

HAS_MESHES = "ep_size" in DistributedConfig.__dataclass_fields__  # transformers 5.24
MESHES = {
    "fsdp 4, ep 2": {"fsdp_size": 4, "ep_size": 2},
    "fsdp 4, ep 4": {"fsdp_size": 4, "ep_size": 4},
    "fsdp 2, tp 2": {"fsdp_size": 2, "tp_size": 2},
    "fsdp 2, tp 2, ep 4": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
}


def rows_of_mesh(mesh: str) -> list[dict[str, Any]]:
    """A row for each pair of ranks with other tokens, and the labels of all of them."""
    names = ("mixed", "long")[: MESHES[mesh]["fsdp_size"] // 2]
    rows = [documents_rows.batch_of(documents_rows.ROWS[name]) for name in names]
    labels = sum(fv.shard_batch(row, 0, 2)["num_items_in_batch"] for row in rows)
    return [row | {"num_items_in_batch": labels} for row in rows]


def step_on_mesh(mesh: str, folder: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of the ranks' losses, and the gradients, of a step in which pairs share rows."""
    rows = rows_of_mesh(mesh)
    dp, tp = len(rows), MESHES[mesh].get("tp_size", 1)
    model = on_mesh(experts(output_router_logits=True), f"{folder}/mesh", mesh).train()
    of_ranks = init_device_mesh("cpu", (dp, 2, tp), mesh_dim_names=("dp", "cp", "tp"))
    group = of_ranks.get_group("cp")
    fv.patch_model(model, "sdpa", sequence_parallel_group=group)
    row = rows[of_ranks.get_local_rank("dp")]
    shard = fv.shard_row(row, group, **fv.shard_options(model))
    loss = model(**shard).loss
    (loss * dp * 2).backward()  # FSDP2 takes the mean
    loss = loss.detach()
    dist.all_reduce(loss)
    gradients = {name: x.grad for name, x in model.named_parameters()}
    return loss / tp, {name: getattr(x, "full_tensor", x.clone)() for name, x in gradients.items()}


def resumed(folder: str) -> dict[str, Any]:
    """From a checkpoint of the run "accumulated", and what its trainer says of its loaders."""
    trainer = shared("accumulated", folder)
    made = {"run": trained(trainer, f"{folder}/accumulated/checkpoint-3")}
    seed = trainer.get_train_dataloader().worker_init_fn.keywords["rank"]
    made["seeds_of_workers"] = trainer.accelerator.gather(torch.tensor([seed])).tolist()
    loader = DataLoader(fv.PackedDataset(examples(0, 12), TOKENS), collate_fn=fv.PackedCollator())
    twice = [trainer.accelerator.prepare(loader) for _ in range(2)]
    made["batches"] = [*map(len, twice), len(trainer.accelerator.prepare(twice[0]))]
    backend = trainer.group._get_backend(torch.device("cpu"))
    made["timeout_s"] = backend.options._timeout.total_seconds()
    made["examples_of_a_step"] = trainer.get_total_train_batch_size(trainer.args)
    return made


def errors(folder: str) -> dict[str, str]:
    """The sentences of what cannot be, by the case."""
    said = {}

    def note(case: str, make: Callable[[], Any]) -> None:
        try:
            make()
        except (ValueError, NotImplementedError) as error:
            said[case] = str(error)

    def patched(run: str, ranks: int = 2, **changes: Any) -> Trainer:
        return shared(run, folder, ranks, **changes)

    note("ranks", lambda: patched("packed", 3))
    note("smoothing", lambda: patched("packed", label_smoothing_factor=0.1))
    note("own count", lambda: patched("packed", average_tokens_across_devices=False))
    note("rebalanced", lambda: patched("flattened", train_sampling_strategy="batch_rebalance"))
    note("tensor parallel", on_ranks_with_the_same_tokens)
    note("padded", lambda: patched("sft_packing_lora", packing=False))
    note("dispatched", lambda: patched("streamed", accelerator_config={}).train())
    for case, changes in (
        ("evaluated first", {}),
        ("evaluated first, compiled", {"torch_compile": True, "torch_compile_backend": "eager"}),
    ):
        trainer = patched("packed", **changes)
        with torch.compiler.set_stance("force_eager"):  # the wrapper is there, and traces nothing
            trainer.evaluate()
            note(case, trainer.train)
    trainer = patched("streamed", gradient_accumulation_steps=4)
    trainer.train_dataset = Fewer()
    note("fewer rows", trainer.train)
    trainer = patched("packed")
    note("twice", lambda: fv.patch_trainer(trainer, context_parallel=2))
    note("predict", lambda: trainer.predict(trainer.eval_dataset))
    trainer.add_callback(fv.IsolationCallback())
    note("isolation", trainer.train)
    trainer.remove_callback(fv.IsolationCallback)
    for same, case in ((0, "other rows"), (1, "other rows later")):
        trainer.data_collator = Differing(same)
        note(case, trainer.train)
    trainer.data_collator = DataCollatorWithPadding(tokenizer())
    trainer.train_dataset = [{"input_ids": [5, 6], "labels": 1}, {"input_ids": [7], "labels": 0}]
    note("padded batches", trainer.train)
    fv.patch_model(trainer.model)
    note("patched again", trainer.train)
    return said


def on_ranks_with_the_same_tokens() -> None:
    model = new_model("qwen3")
    model.config.distributed_config = SimpleNamespace(tp_size=2)
    group, _ = dist.new_subgroups(2)
    fv.patch_model(model, sequence_parallel_group=group)


class Fewer(IterableDataset):
    """Rows of which every second process has three, and the others one."""

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        yield from [[np.arange(1, 9)]] * (1 + 2 * (int(os.environ["RANK"]) % 2))


@dataclass
class Differing:
    """Makes this many rows that are equal on all ranks, then others."""

    same: int

    def __call__(self, features: Any) -> dict[str, Any]:
        self.same -= 1
        other = int(os.environ["RANK"]) if self.same < 0 else 0
        return fv.PackedCollator(total_tokens=TOKENS)([np.arange(1, 9) + other])
