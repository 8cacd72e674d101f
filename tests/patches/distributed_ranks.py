"""What each of two processes runs for test_distributed.py: one training step a case."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
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

import flexvarlen as fv
from tests.contract_training import forget_accelerate
from tests.patches.distributed_inputs import DOCS, WORLD, inputs_of
from tests.tiny_models import LENGTHS, batch_of, lora, new_model

Change = Callable[[Any], Any]

# ---- what a model becomes ----


def patch(model: nn.Module, backend: str = "sdpa", **options: Any) -> nn.Module:
    return fv.patch_model(model, backend, **options)


unpad = partial(patch, unpad=True)
share_prefixes = partial(patch, unpad=True, share_prefixes=True)
in_chunks = partial(patch, mlp_chunk_tokens=8)
loss_in_chunks = partial(patch, loss_chunk_tokens=8)
compiled = partial(torch.compile, backend="eager")


def checkpointing(model: Any, use_reentrant: bool = False) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


def layers_of(model: Any) -> nn.ModuleList:
    return getattr(model.model, "language_model", model.model).layers


def layers_compiled(model: Any) -> Any:
    """In place, as accelerate does before it shards them."""
    for layer in layers_of(model):
        layer.compile(backend="aot_eager")
    return model


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def fsdp2(model: Any, **options: Any) -> Any:
    """Each layer and the rest, also of a model inside adapters."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    mesh = init_device_mesh("cpu", (WORLD,))
    for module in (*layers_of(inner), inner):
        fully_shard(module, mesh=mesh, **options)
    assert all(isinstance(p, DTensor) for p in inner.parameters())
    return model


def head_sharded(model: Any) -> Any:
    """The head as a unit of its own, freed after each of its calls."""
    fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (WORLD,)), reshard_after_forward=True)
    return model


IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OUT_OF_BF16 = replace(IN_BF16, output_dtype=torch.float32)  # the head's hooks cast it back


def fsdp1(model: Any) -> nn.Module:
    """accelerate's default: each layer and the rest."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def fsdp2_by_accelerate(model: Any, **options: Any) -> Any:
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


def prepared(model: nn.Module, **options: Any) -> nn.Module:
    """By `Accelerator.prepare`, beside an optimizer."""
    forget_accelerate()
    accelerator = Accelerator(cpu=True, **options)
    assert accelerator.num_processes == WORLD
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert isinstance(model, DistributedDataParallel)
    return model


# ---- what it learns ----


def mean(loss: Tensor) -> Tensor:
    """The mean over the ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / WORLD


def learned(model: nn.Module, loss: Tensor) -> dict[str, Any]:
    """The loss of all ranks, and the whole gradients under the names of the bare model."""
    whole = nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        whole = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    gradients = {}
    with whole:
        for name, parameter in model.named_parameters():
            for prefix in ("_orig_mod.", "_fsdp_wrapped_module.", "module."):
                name = name.replace(prefix, "")
            gradient = parameter.grad
            if gradient is not None:
                gradients[name] = getattr(gradient, "full_tensor", gradient.clone)()
    return {"loss": mean(loss), "gradients": gradients}


def one_step(model: nn.Module, form: str) -> dict[str, Any]:
    loss = model(**inputs_of(form)).loss
    loss.backward()
    return learned(model, loss)


def accumulated(model: Any, form: str) -> dict[str, Any]:
    """Of half of a rank's documents, then of the others."""
    docs = DOCS[dist.get_rank()]
    first, last = docs[: len(docs) // 2], docs[len(docs) // 2 :]
    with model.no_sync():
        loss_of_first = model(**inputs_of("document_ids", first)).loss
        loss_of_first.backward()
    loss = model(**inputs_of(form, last)).loss
    loss.backward()
    return learned(model, loss_of_first.detach() + loss)


def decoded(model: Any, form: str) -> dict[str, Any]:
    """After a step, in eval mode: greedy tokens, and the logits of the unpatched model."""
    made = one_step(model, form)
    model.eval()
    prompt = batch_of(((1,),), row_tokens=LENGTHS[1]).ids[:, :9]
    made["tokens"] = model.generate(prompt, max_new_tokens=4, do_sample=False)
    fv.unpatch_model(model)
    with torch.no_grad():
        made["logits"] = model(prompt).logits
    return made


@dataclass(frozen=True)
class Case:
    """A step of a model that is changed, wrapped and patched in some order.

    Attributes:
        changes: what the model goes through.
        form: of a rank's texts, as `inputs_of` makes it.
        train: what is then learned.
        kind, config: of the model.
    """

    changes: tuple[Change, ...]
    form: str = "position_ids"
    train: Callable[[nn.Module, str], dict[str, Any]] = one_step
    kind: str = "qwen3"
    config: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> Any:
        """What the step is held against in one process: the model without patch and wrapper."""
        model = new_model(self.kind, **self.config)
        return lora(model) if lora in self.changes else model

    def run(self) -> dict[str, Any]:
        model = new_model(self.kind, **self.config).train()
        for change in self.changes:
            model = change(model)
        return self.train(model, self.form)


HYBRID = "qwen3_5_text"
ONE_LAYER = {"num_hidden_layers": 1}  # of models that are compiled: Dynamo would trace each layer
CASES = {
    "ddp": Case((patch, ddp)),
    "ddp_patched_after": Case((ddp, patch)),
    "ddp_of_peft": Case((patch, lora, ddp)),
    "ddp_compiled": Case((patch, ddp, compiled), config=ONE_LAYER),
    "ddp_checkpointing": Case(
        (patch, partial(checkpointing, use_reentrant=True), partial(ddp, static_graph=True))
    ),
    "ddp_accumulation": Case((patch, ddp), "packed_layout", accumulated),
    "ddp_unpad": Case((unpad, ddp), "padded"),
    "ddp_unpad_of_peft": Case((lora, ddp, unpad), "padded"),
    "ddp_trees": Case((patch, ddp), "trees"),
    "ddp_trees_of_a_hybrid": Case((patch, ddp), "trees", kind=HYBRID),
    "ddp_trees_in_padded_batches": Case((share_prefixes, ddp), "padded samples"),
    "ddp_mlp_in_chunks": Case((in_chunks, checkpointing, ddp)),
    "fsdp2": Case((patch, fsdp2)),
    "fsdp2_patched_after": Case((fsdp2, patch), "document_ids"),
    "fsdp2_of_peft": Case((patch, lora, fsdp2), "packed_layout"),
    "fsdp2_compiled": Case((patch, fsdp2, compiled), config=ONE_LAYER),
    "fsdp2_compiled_layers": Case((patch, layers_compiled, fsdp2), config=ONE_LAYER),
    "fsdp2_checkpointing": Case((patch, checkpointing, fsdp2), "cu_seq_lens"),
    "fsdp2_mlp_in_chunks": Case((in_chunks, fsdp2)),
    "fsdp2_mlp_in_chunks_checkpointing": Case((in_chunks, checkpointing, fsdp2)),
    "fsdp2_mlp_in_chunks_of_peft": Case((lora, fsdp2, in_chunks)),
    "fsdp2_unpad": Case((unpad, fsdp2), "padded"),
    "fsdp2_trees": Case((patch, fsdp2), "trees"),
    "fsdp2_trees_of_a_hybrid": Case((patch, checkpointing, fsdp2), "trees", kind=HYBRID),
    "fsdp2_trees_in_padded_batches": Case((share_prefixes, fsdp2), "padded samples"),
    "fsdp2_decodes_and_is_unpatched": Case((patch, fsdp2), train=decoded),
    "fsdp1": Case((patch, fsdp1)),
    "fsdp1_patched_after": Case((fsdp1, patch), "packed_layout"),
    "fsdp1_loss_in_chunks": Case((loss_in_chunks, fsdp1)),
    "fsdp1_checkpointing": Case((patch, checkpointing, fsdp1), "cu_seq_lens"),
    "fsdp1_mlp_in_chunks": Case((in_chunks, checkpointing, fsdp1)),
    "accelerate_fsdp2": Case((patch, fsdp2_by_accelerate)),
    # Through the meta device, on which the patched model's own RoPE tables must survive.
    "accelerate_fsdp2_from_rank_0": Case(
        (patch, partial(fsdp2_by_accelerate, cpu_ram_efficient_loading=True))
    ),
    "accelerate_fsdp2_patched_after": Case((fsdp2_by_accelerate, patch), "packed_layout"),
    # accelerate shards the head with the last norm, and with tied embeddings.
    "accelerate_fsdp2_loss_in_chunks": Case((loss_in_chunks, fsdp2_by_accelerate)),
    "accelerate_fsdp2_loss_in_chunks_of_tied_weights": Case(
        (fsdp2_by_accelerate, loss_in_chunks), config={"tie_word_embeddings": True}
    ),
    "fsdp2_loss_in_chunks_of_a_sharded_head": Case((loss_in_chunks, head_sharded, fsdp2)),
    "accelerate": Case((patch, prepared)),
    "accelerate_patched_after": Case((prepared, patch)),
}
OTHER_CASES = {
    # Wrong, and the oracle must see it: in train mode transformers makes a cache.
    "not patched": Case((ddp,)),
    "bf16 autocast": Case((patch, partial(prepared, mixed_precision="bf16"))),
    "bf16 weights": Case((partial(patch, backend="auto"), partial(fsdp2, mp_policy=IN_BF16))),
    "bf16 weights, loss in chunks": Case(
        (loss_in_chunks, partial(fsdp2_by_accelerate, mixed_precision_policy=OUT_OF_BF16))
    ),
}


class Logits(nn.Module):
    """A module of a user's, which calls a model's base and head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        base = getattr(self.model, self.model.base_model_prefix)
        return fv.lm_head(self.model)(base(ids, use_cache=False).last_hidden_state)


def head_in_two_backwards(kind: str) -> dict[str, Any]:
    """The gradients with a sharded head and without; each forward's backward after the other."""
    ids, found = torch.arange(3, 20)[None], {}
    for name, change in (("plain", lambda model: model), ("sharded", head_sharded)):
        logits = Logits(change(new_model(kind)))
        if name == "sharded":
            fully_shard(logits, mesh=init_device_mesh("cpu", (WORLD,)))
        for loss in [logits(each).square().mean() for each in (ids, ids + 30)]:
            loss.backward()
        found[name] = learned(logits, loss)["gradients"]
    return found


def head_refused(change: Change) -> str:
    """What is said of such a head."""
    model = new_model("qwen3")
    change(model.lm_head)
    try:
        fv.lm_head(head_sharded(model))
    except NotImplementedError as why:
        return str(why)
    raise AssertionError("not refused")


def hooked(head: nn.Module) -> None:
    head.register_forward_hook(lambda *_: None)


def hooked_backward(head: nn.Module) -> None:
    head.register_full_backward_hook(lambda *_: None)


def unit_inside(head: nn.Module) -> None:
    head.inner = nn.Linear(2, 2)
    fully_shard(head.inner, mesh=init_device_mesh("cpu", (WORLD,)))


def run_case(case: str) -> dict[str, Any]:
    """What a case makes, whatever ran before it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return (CASES | OTHER_CASES)[case].run()


# ---- each kind of model ----

WRAPPERS = {"ddp": ddp, "fsdp2": fsdp2}
KINDS = ("windows", "MoE, router loss", "longrope", "encoder", "images", "hybrid")


def run_kind(kind: str, wrapper: str) -> dict[str, Any]:
    """The first rank's row counts once, the second's three times: DDP and FSDP2 take the mean."""
    from tests.patches.kinds import KINDS, row_of  # runs torch

    model = WRAPPERS[wrapper](patch(KINDS[kind].model()))
    loss = model(**row_of(kind)).loss * (1 + 2 * dist.get_rank())
    loss.backward()
    return learned(model, loss)
