"""What each of two processes runs for test_contract_distributed.py: one training step a case.

Rank 0 packs documents 0 to 3 in a row, rank 1 documents 4 and 5, of another length: what they learn
together is what one process learns of all six.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import flexvarlen as fv
from tests import forms
from tests.contract_training import documents as many_documents
from tests.contract_training import recorded, settings
from tests.tiny_models import LENGTHS, batch_of, documents, new_model
from tests.two_processes import WORLD, meet

ROWS = ((0, 1, 2, 3), (4, 5))
LABELS = sum(LENGTHS) - len(LENGTHS)


BEGINNING = 40  # tokens that all samples share
SAMPLE_LABELS = sum(LENGTHS) + len(LENGTHS) * (BEGINNING - 1)


def samples() -> list[list[int]]:
    """What the ranks learn from trees: texts with one beginning.

    Not made on import: the process that the ranks are forked from must not run torch.
    """
    beginning = documents()[2][:BEGINNING].tolist()
    return [[*beginning, *text.tolist()] for text in documents()]


def lora(model: nn.Module) -> nn.Module:
    """Adapters that are not zero at first."""
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def inputs_of(form: str = "position_ids", docs: tuple[int, ...] | None = None) -> dict[str, Any]:
    """This rank's row; ranks average their losses, so each is divided by its share of labels."""
    docs = ROWS[dist.get_rank()] if docs is None else docs
    batch = batch_of((docs,), row_tokens=sum(LENGTHS[i] for i in docs))
    beside = ("cu_seq_lens_k",) if form == "cu_seq_lens" else ()
    share = torch.tensor(LABELS / WORLD)
    return {
        "input_ids": batch.ids,
        "labels": batch.ids,
        "num_items_in_batch": share,
        **forms.given(form, batch, *beside),
    }


def padded_inputs() -> dict[str, Any]:
    """This rank's documents in a padded batch, one in each row."""
    docs = ROWS[dist.get_rank()]
    batch = batch_of(tuple((doc,) for doc in docs), row_tokens=max(LENGTHS), left=True)
    mask = (batch.document_ids > 0).long()
    share = torch.tensor(LABELS / WORLD)
    return {
        "input_ids": batch.ids,
        "labels": batch.ids.masked_fill(mask == 0, -100),
        "num_items_in_batch": share,
        "attention_mask": mask,
    }


def tree_inputs() -> dict[str, Any]:
    """This rank's samples as a tree."""
    every = samples()
    shared = fv.share_prefixes([every[i] for i in ROWS[dist.get_rank()]])
    return {**shared.batch(), "num_items_in_batch": torch.tensor(SAMPLE_LABELS / WORLD)}


def padded_samples() -> dict[str, Any]:
    """This rank's samples in a padded batch."""
    every = samples()
    own = [torch.tensor(every[i]) for i in ROWS[dist.get_rank()]]
    ids = pad_sequence(own, batch_first=True)
    mask = pad_sequence([torch.ones_like(x) for x in own], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    share = torch.tensor(SAMPLE_LABELS / WORLD)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "num_items_in_batch": share}


def step(model: nn.Module, **inputs: Any) -> dict[str, Any]:
    """Loss and gradients of all ranks together."""
    loss = model(**(inputs or inputs_of())).loss
    loss.backward()
    return {"loss": mean(loss), "gradients": gradients_of(model)}


def mean(loss: Tensor) -> Tensor:
    """The mean over the ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / WORLD


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients, under the names of the bare model."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        for prefix in ("_orig_mod.", "_fsdp_wrapped_module.", "module."):
            name = name.replace(prefix, "")
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        gradients[name] = whole.clone()
    return gradients


def model_of(kind: str = "qwen3", **changes: Any) -> Any:
    """A new model in train mode."""
    return new_model(kind, **changes).train()


# ---- DDP ----


def ddp() -> dict[str, Any]:
    return step(DistributedDataParallel(fv.patch_model(model_of(), "sdpa")))


def ddp_patched_after() -> dict[str, Any]:
    return step(fv.patch_model(DistributedDataParallel(model_of()), "sdpa"))


def ddp_of_peft() -> dict[str, Any]:
    return step(DistributedDataParallel(lora(fv.patch_model(model_of(), "sdpa"))))


def ddp_compiled() -> dict[str, Any]:
    model = DistributedDataParallel(fv.patch_model(model_of(), "sdpa"))
    return step(torch.compile(model, backend="eager"))


def ddp_checkpointing() -> dict[str, Any]:
    model = fv.patch_model(model_of(), "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return step(DistributedDataParallel(model, static_graph=True))


def ddp_accumulation() -> dict[str, Any]:
    """Each document of a rank in a forward of its own, packed with none; then one of two."""
    model = DistributedDataParallel(fv.patch_model(model_of(), "sdpa"))
    docs, losses = ROWS[dist.get_rank()], []
    first, last = docs[: len(docs) // 2], docs[len(docs) // 2 :]
    with model.no_sync():
        losses.append(model(**inputs_of("document_ids", first)).loss)
        losses[-1].backward()
    losses.append(model(**inputs_of("packed_layout", last)).loss)
    losses[-1].backward()
    return {"loss": mean(sum(losses)), "gradients": gradients_of(model)}


def ddp_unpad() -> dict[str, Any]:
    model = fv.patch_model(model_of(), "sdpa", unpad=True)
    return step(DistributedDataParallel(model), **padded_inputs())


def ddp_unpad_of_peft() -> dict[str, Any]:
    model = DistributedDataParallel(lora(model_of()))
    return step(fv.patch_model(model, "sdpa", unpad=True), **padded_inputs())


def ddp_trees() -> dict[str, Any]:
    return step(DistributedDataParallel(fv.patch_model(model_of(), "sdpa")), **tree_inputs())


def ddp_trees_of_a_hybrid() -> dict[str, Any]:
    model = fv.patch_model(model_of("qwen3_5_text"), "sdpa")
    return step(DistributedDataParallel(model), **tree_inputs())


def ddp_trees_in_padded_batches() -> dict[str, Any]:
    model = fv.patch_model(model_of(), "sdpa", unpad=True, share_prefixes=True)
    return step(DistributedDataParallel(model), **padded_samples())


def ddp_unpatched() -> dict[str, Any]:
    """Wrong, and the oracle must see it: in train mode transformers makes a cache."""
    return step(DistributedDataParallel(model_of()))


# ---- FSDP2 ----


def sharded(model: Any, **options: Any) -> Any:
    """Each layer and the rest."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in getattr(model.model, "language_model", model.model).layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


def fsdp2() -> dict[str, Any]:
    return step(sharded(fv.patch_model(model_of(), "sdpa")))


def fsdp2_trees() -> dict[str, Any]:
    return step(sharded(fv.patch_model(model_of(), "sdpa")), **tree_inputs())


def fsdp2_trees_of_a_hybrid() -> dict[str, Any]:
    model = fv.patch_model(model_of("qwen3_5_text"), "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return step(sharded(model), **tree_inputs())


def fsdp2_trees_in_padded_batches() -> dict[str, Any]:
    model = fv.patch_model(model_of(), "sdpa", unpad=True, share_prefixes=True)
    return step(sharded(model), **padded_samples())


def fsdp2_unpad() -> dict[str, Any]:
    model = sharded(fv.patch_model(model_of(), "sdpa", unpad=True))
    return step(model, **padded_inputs())


def fsdp2_patched_after() -> dict[str, Any]:
    return step(fv.patch_model(sharded(model_of()), "sdpa"), **inputs_of("document_ids"))


def fsdp2_layout() -> dict[str, Any]:
    return step(sharded(fv.patch_model(model_of(), "sdpa")), **inputs_of("packed_layout"))


def fsdp2_checkpointing() -> dict[str, Any]:
    model = fv.patch_model(model_of(), "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return step(sharded(model), **inputs_of("cu_seq_lens"))


def fsdp2_compiled_layers() -> dict[str, Any]:
    """As accelerate does: layers compiled in place, then sharded."""
    model = fv.patch_model(model_of(), "sdpa")
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return step(sharded(model))


def fsdp2_compiled() -> dict[str, Any]:
    return step(torch.compile(sharded(fv.patch_model(model_of(), "sdpa")), backend="eager"))


def fsdp2_bf16() -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return step(sharded(fv.patch_model(model_of(), "auto"), mp_policy=policy))


def fsdp2_of_peft() -> dict[str, Any]:
    model = lora(fv.patch_model(model_of(), "sdpa"))
    sharded(model.get_base_model())
    return step(model)


def fsdp2_decodes_and_is_unpatched() -> dict[str, Any]:
    """After a step, in eval mode: greedy tokens, and the logits of the unpatched model."""
    model = sharded(fv.patch_model(model_of(), "sdpa"))
    made = step(model)
    model.eval()
    prompt = batch_of(((1,),), row_tokens=LENGTHS[1]).ids[:, :9]
    made["tokens"] = model.generate(prompt, max_new_tokens=4, do_sample=False)
    fv.unpatch_model(model)
    with torch.no_grad():
        made["logits"] = model(prompt).logits
    return made


# ---- each kind of model ----


def of_kind(kind: str, wrap: Callable[[Any], Any]) -> dict[str, Any]:
    """The first rank's row counts once, the second's three times: DDP and FSDP2 take the mean."""
    from tests.patches.kinds import KINDS, row_of  # runs torch

    inner = fv.patch_model(KINDS[kind].model(), "sdpa")
    model = wrap(inner)  # DDP sums gradients for as long as it lives
    loss = model(**row_of(kind)).loss * (1 + 2 * dist.get_rank())
    loss.backward()
    return {"loss": mean(loss), "gradients": gradients_of(inner)}


KINDS = ("windows", "MoE, router loss", "longrope", "encoder", "images", "hybrid")


# ---- FSDP1, accelerate's default ----


def fsdp1_of(model: Any) -> FullyShardedDataParallel:
    """Each layer and the rest."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def fsdp1_step(model: FullyShardedDataParallel, **inputs: Any) -> dict[str, Any]:
    loss = model(**inputs).loss
    loss.backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        gradients = gradients_of(model)
    return {"loss": mean(loss), "gradients": gradients}


def fsdp1() -> dict[str, Any]:
    return fsdp1_step(fsdp1_of(fv.patch_model(model_of(), "sdpa")), **inputs_of())


def fsdp1_patched_after() -> dict[str, Any]:
    return fsdp1_step(fv.patch_model(fsdp1_of(model_of()), "sdpa"), **inputs_of("packed_layout"))


def fsdp1_checkpointing() -> dict[str, Any]:
    model = fv.patch_model(model_of(), "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return fsdp1_step(fsdp1_of(model), **inputs_of("cu_seq_lens"))


# ---- accelerate and Trainer ----


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


def trainer() -> dict[str, Any]:
    """Two steps of Trainer: rows of another length on each rank."""
    AcceleratorState._reset_state(reset_partial_state=True)
    collate, seen = DataCollatorWithFlattening(return_flash_attn_kwargs=True), []
    made, recorder = recorded(
        Trainer,
        model=fv.patch_model(model_of(), "sdpa"),
        args=TrainingArguments(**settings(f"/tmp/flexvarlen-contract-{os.getpid()}")),
        train_dataset=[{"input_ids": x} for x in many_documents()],
        data_collator=lambda features: (seen.append(features), collate(features))[1],
    )
    made.train()
    steps = []
    for one, features in zip(recorder.steps, seen, strict=False):
        all_documents: list[Any] = [None] * WORLD
        dist.all_gather_object(all_documents, [x["input_ids"] for x in features])
        weights = {name.removeprefix("module."): x for name, x in one.weights.items()}
        gradients = {name.removeprefix("module."): x for name, x in one.gradients.items()}
        ids = [x for of_rank in all_documents for x in of_rank]
        steps.append(
            {"weights": weights, "loss": mean(one.loss), "gradients": gradients, "documents": ids}
        )
    return {"steps": steps}


class Rows(IterableDataset):
    """Packed rows, of which accelerate loads those of both processes in the first."""

    def __iter__(self):
        documents = many_documents()
        for row in fv.pack([len(document) for document in documents], 64, strategy="in_order"):
            yield [documents[i] for i in row]


def dispatched(collate: Any) -> dict[str, Any]:
    """Two steps of Trainer, by its default for such a data set."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = f"/tmp/flexvarlen-contract-{os.getpid()}"
    made, recorder = recorded(
        Trainer,
        model=fv.patch_model(model_of(), "sdpa"),
        args=TrainingArguments(**settings(folder, per_device_train_batch_size=1)),
        train_dataset=Rows(),
        data_collator=collate,
    )
    made.train()
    rows, steps = list(Rows()), []
    for number, one in enumerate(recorder.steps):
        weights = {name.removeprefix("module."): x for name, x in one.weights.items()}
        gradients = {name.removeprefix("module."): x for name, x in one.gradients.items()}
        steps.append(
            {
                "weights": weights,
                "loss": mean(one.loss),
                "gradients": gradients,
                "documents": rows[2 * number] + rows[2 * number + 1],
            }
        )
    return {"steps": steps}


def trainer_dispatched() -> dict[str, Any]:
    return dispatched(fv.PackedCollator(total_tokens=64, capacity=16, max_seqlen_bound=64))


def trainer_dispatched_without_a_size() -> dict[str, Any]:
    return dispatched(fv.PackedCollator())


def trainer_dispatched_trees() -> dict[str, Any]:
    return dispatched(fv.TreeCollator(total_tokens=64))


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        ddp,
        ddp_patched_after,
        ddp_of_peft,
        ddp_compiled,
        ddp_checkpointing,
        ddp_accumulation,
        ddp_unpad,
        ddp_unpad_of_peft,
        ddp_trees,
        ddp_trees_of_a_hybrid,
        ddp_trees_in_padded_batches,
        ddp_unpatched,
        fsdp2,
        fsdp2_trees,
        fsdp2_trees_of_a_hybrid,
        fsdp2_trees_in_padded_batches,
        fsdp2_unpad,
        fsdp2_patched_after,
        fsdp2_layout,
        fsdp2_checkpointing,
        fsdp2_compiled_layers,
        fsdp2_compiled,
        fsdp2_bf16,
        fsdp2_of_peft,
        fsdp2_decodes_and_is_unpatched,
        fsdp1,
        fsdp1_patched_after,
        fsdp1_checkpointing,
        fsdp2_by_accelerate,
        fsdp2_by_accelerate_from_rank_0,
        fsdp2_by_accelerate_then_patch,
        accelerate_prepare,
        accelerate_prepare_then_patch,
        accelerate_bf16,
        trainer,
        trainer_dispatched,
        trainer_dispatched_without_a_size,
        trainer_dispatched_trees,
    )
}
CASES |= {f"ddp {kind}": partial(of_kind, kind, DistributedDataParallel) for kind in KINDS}
CASES |= {f"fsdp2 {kind}": partial(of_kind, kind, sharded) for kind in KINDS}


def run(rank: int, port: int, folder: str) -> None:
    """Every case; rank 0 saves what it made, or why it failed."""
    meet(rank, port, timeout_s=60)
    for name, case in CASES.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            made = case()
        except Exception:
            made = {"failed": traceback.format_exc()}
        torch.save(made, Path(folder) / f"{name}-{rank}.pt")
