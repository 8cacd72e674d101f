"""What each process runs for test_meshes.py: models that transformers' DistributedConfig shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import flexvarlen as fv
from tests.contract_training import documents as trained_documents
from tests.contract_training import forget_accelerate, settings
from tests.patches.distributed_inputs import DOCS, padded, samples
from tests.patches.kinds import ROUTER_LOSS
from tests.patches.test_trl import WAYS, sft
from tests.planted import plant
from tests.ranks import of_all_ranks
from tests.tiny_models import LENGTHS, batch_of, documents, new_model, task_of
from tests.verify.planted import leak

MESHES: dict[str, dict[str, int]] = {
    "tp": {"tp_size": 2},
    "tp, ep": {"tp_size": 2, "ep_size": 2},
    "fsdp": {"fsdp_size": 2},
    "fsdp, ep": {"fsdp_size": 2, "ep_size": 2},
    "fsdp x tp": {"fsdp_size": 2, "tp_size": 2},
    "fsdp x tp, ep": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    "hsdp": {"dp_replicate_size": 2, "fsdp_size": 2},
    "fully_shard over two dimensions": {},
}
"""The sizes of transformers' mesh, by its name; none: see `hsdp`."""


@dataclass(frozen=True)
class Kind:
    """A model, and how its documents come.

    Attributes:
        family: of the tiny model, a name of `tests/tiny_models.py`.
        form: "packed", "padded" or "trees".
        config: changes of the config.
        max_tokens: of a part of a tree; None: whole.
        chunks: options of patch_model, of tokens that run at a time.
    """

    family: str
    form: str = "packed"
    config: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    chunks: dict[str, int] = field(default_factory=dict)

    def texts(self, replica: int) -> list[Tensor]:
        """What the ranks learn that see one batch."""
        every = samples() if self.form == "trees" else documents()
        return [every[i] for i in DOCS[replica]]

    def plain(self) -> Any:
        """Unpatched, of one process, in fp64."""
        return new_model(self.family, **self.config).double().train()

    def loaded(self, mesh: str) -> Any:
        """Patched and sharded; in fp32 with `ep_size`: FSDP2 divides fp64's gradients twice."""
        sizes = MESHES[mesh]
        plain = self.plain().float() if "ep_size" in sizes else self.plain()
        model = loaded(plain, self.family, sizes) if sizes else hsdp(plain)
        assert any(isinstance(x, DTensor) for x in model.parameters())
        return fv.patch_model(model, "sdpa", unpad=self.form == "padded", **self.chunks)

    def batches(self, model: nn.Module, replica: int) -> Iterable[Any]:
        """The keywords of the forwards of a step."""
        if self.form == "trees":
            shared = fv.share_prefixes([text.tolist() for text in self.texts(replica)])
            whole = self.max_tokens is None
            return [shared.batch()] if whole else shared.parts(model, self.max_tokens)
        if self.form == "padded":
            return [padded(self.texts(replica), "left")]
        lengths = [LENGTHS[i] for i in DOCS[replica]]
        ids = batch_of((DOCS[replica],), row_tokens=sum(lengths)).ids
        layout = fv.PackedLayout.from_lengths(lengths)
        return [{"input_ids": ids, "labels": ids, "packed_layout": layout}]

    def loss(self, model: nn.Module, replica: int) -> Tensor:
        """Of one step, whose backward has run."""
        losses = []
        for batch in self.batches(model, replica):
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()


CASES = {
    "dense": Kind("qwen3"),
    "in chunks": Kind("qwen3", chunks={"mlp_chunk_tokens": 16, "loss_chunk_tokens": 16}),
    "windows": Kind("qwen3_windows"),
    "padded": Kind("qwen3", "padded"),
    "trees": Kind("qwen3", "trees"),
    "parts": Kind("qwen3", "trees", max_tokens=60),
    "hybrid": Kind("qwen3_5_text"),
    "hybrid, trees": Kind("qwen3_5_text", "trees"),
    "router loss": Kind("qwen3_moe", config=ROUTER_LOSS),
    "experts, padded": Kind("qwen3_moe", "padded", ROUTER_LOSS),
    "experts, trees": Kind("qwen3_moe", "trees"),
    "experts, parts": Kind("qwen3_moe", "trees", max_tokens=60),
}


def loaded(plain: Any, family: str, sizes: dict[str, int]) -> Any:
    """The model as `from_pretrained` shards it over the mesh."""
    auto_class = getattr(transformers, f"AutoModelFor{task_of(family)}")
    with TemporaryDirectory() as folder:
        folder_of_all = of_all_ranks(folder)[0]
        plain.save_pretrained(folder_of_all)  # the first rank writes
        dist.barrier()
        model = auto_class.from_pretrained(
            folder_of_all,
            dtype=plain.dtype,
            attn_implementation=plain.config._attn_implementation,
            experts_implementation="eager",
            distributed_config=DistributedConfig(**sizes),
        )
        dist.barrier()
    return model.train()


def hsdp(plain: Any) -> Any:
    """By torch's `fully_shard` over a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (*plain.model.layers, plain):
        fully_shard(module, mesh=mesh)
    return plain


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def learned(kind: str, mesh: str) -> dict[str, Any]:
    """Whose texts the rank had, their loss, and the whole gradients of all ranks."""
    case = CASES[kind]
    model = case.loaded(mesh)
    replica = dist.get_rank() // MESHES[mesh].get("tp_size", 1) % len(DOCS)
    loss = case.loss(model, replica)
    gradients = {n: whole(x.grad) for n, x in model.named_parameters() if x.grad is not None}
    return {"replica": replica, "loss": loss, "gradients": gradients}


def refused_in_parts(mesh: str) -> tuple[str, list[float]]:
    """What training in parts raises, and the losses of the parts without gradients."""
    case = CASES["parts"]
    model = case.loaded(mesh)
    shared = fv.share_prefixes([text.tolist() for text in case.texts(0)])
    with torch.no_grad():
        losses = [model(**part).loss.item() for part in shared.parts(model, 60)]
    try:
        shared.parts(model, 60)
    except NotImplementedError as error:
        return str(error), losses
    return "nothing", losses


def refused(sizes: dict[str, int], **config: Any) -> str:
    """What `patch_model` says of a model on such a mesh."""
    model = loaded(new_model("qwen3", **config), "qwen3", sizes)
    try:
        fv.patch_model(model, "sdpa")
    except NotImplementedError as error:
        return str(error)
    return "nothing"


def verified(mesh: str, leaks: bool) -> str:
    """What `verify_isolation` says of a sharded model."""
    row = batch_of((DOCS[0],), row_tokens=sum(LENGTHS[i] for i in DOCS[0]))
    model = fv.patch_model(loaded(new_model("qwen3"), "qwen3", MESHES[mesh]), "sdpa")
    inputs = {"input_ids": row.ids, "position_ids": row.position_ids}
    with pytest.MonkeyPatch.context() as patch:
        if leaks:
            plant(patch, leak)
        try:
            return str(fv.verify_isolation(model, inputs))
        except fv.IsolationError as error:
            return str(error)


# ---- trainers ----


def trained(run: str, sizes: dict[str, int]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses that two steps log, and the weights after them.

    Args:
        run: "Trainer", or a way of `tests/patches/test_trl.py`.
        sizes: of the mesh; none: one process, whose batches are those of all ranks together.
    """
    forget_accelerate()
    datasets.disable_caching()
    model = new_model("qwen3")
    model = fv.patch_model(loaded(model, "qwen3", sizes) if sizes else model, "sdpa")
    replicas = sizes.get("fsdp_size", 1)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        # accelerate takes meshes on GPUs alone.
        patch.setattr(ParallelismConfig, "_validate_accelerator", lambda *_: None)
        batch = {"per_device_train_batch_size": 4 if sizes and replicas > 1 else 8}
        if run == "Trainer":
            trainer = Trainer(
                model,
                TrainingArguments(**settings(folder, **batch)),
                train_dataset=[{"input_ids": x} for x in trained_documents()],
                data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
            )
        else:
            trainer, _ = sft(model, folder, **WAYS[run], **batch)
        trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    return losses, {name: whole(x.detach()) for name, x in model.named_parameters()}
