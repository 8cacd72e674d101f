"""What each of two processes runs for test_distributed.py: one training step a case."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import flexvarlen as fv
from tests.patches import distributed_trainers as trainers
from tests.patches.distributed_inputs import (
    LENGTHS,
    ROWS,
    WORLD,
    batch_of,
    gradients_of,
    inputs_of,
    lora,
    mean,
    model_of,
    padded_inputs,
    padded_samples,
    step,
    tree_inputs,
)

ONE_LAYER = {"num_hidden_layers": 1}
"""Of models that are compiled, in which Dynamo would trace each layer."""

# ---- DDP ----


def ddp() -> dict[str, Any]:
    return step(DistributedDataParallel(fv.patch_model(model_of(), "sdpa")))


def ddp_patched_after() -> dict[str, Any]:
    return step(fv.patch_model(DistributedDataParallel(model_of()), "sdpa"))


def ddp_of_peft() -> dict[str, Any]:
    return step(DistributedDataParallel(lora(fv.patch_model(model_of(), "sdpa"))))


def ddp_compiled() -> dict[str, Any]:
    model = DistributedDataParallel(fv.patch_model(model_of(**ONE_LAYER), "sdpa"))
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
    model = fv.patch_model(model_of(**ONE_LAYER), "sdpa")
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return step(sharded(model))


def fsdp2_compiled() -> dict[str, Any]:
    model = sharded(fv.patch_model(model_of(**ONE_LAYER), "sdpa"))
    return step(torch.compile(model, backend="eager"))


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


CASES: dict[str, Callable[[], Any]] = {
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
        trainers.fsdp2_by_accelerate,
        trainers.fsdp2_by_accelerate_from_rank_0,
        trainers.fsdp2_by_accelerate_then_patch,
        trainers.accelerate_prepare,
        trainers.accelerate_prepare_then_patch,
        trainers.accelerate_bf16,
        trainers.trainer,
        trainers.trainer_dispatched,
        trainers.trainer_dispatched_without_a_size,
        trainers.trainer_dispatched_trees,
    )
}
CASES |= {f"ddp {kind}": partial(of_kind, kind, DistributedDataParallel) for kind in KINDS}
CASES |= {f"fsdp2 {kind}": partial(of_kind, kind, sharded) for kind in KINDS}


def run_case(case: str) -> Any:
    """What a case makes, whatever ran before it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return CASES[case]()
