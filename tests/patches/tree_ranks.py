"""What each process runs for test_tree_ranks.py: trees in parts, under DDP and FSDP2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flexvarlen as fv
from flexvarlen.reference.model import Float64, float64_model
from tests.patches.distributed_ranks import checkpointing, prepared
from tests.patches.forward.test_trees import samples
from tests.ranks import of_all_ranks, world
from tests.tiny_models import lora, new_model

MAX_TOKENS = (12, 1000, 7, 25)
"""Of each rank, so that they have other numbers of parts; the second has one."""


def samples_of(rank: int) -> list[list[int]]:
    """Of the first rank most, so that it has more parts."""
    texts = samples()
    return texts[:4] if rank == 0 else [texts[(4 + rank) % 6], [7 + rank, 8, 9]]


def new(family: str, *, is_lora: bool = False) -> Any:
    """Patched, in float64, also in what a backward runs again, which no mode enters."""
    model: Any = float64_model(new_model(family)).train()
    for module in (*model.model.layers, model.model.norm, model.model.rotary_emb):
        module.forward = partial(_in_float64, module.forward)
    model = lora(model).double() if is_lora else model
    return fv.patch_model(model, "sdpa")


def _in_float64(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with Float64():
        return forward(*args, **kwargs)


# ---- what a model becomes ----


def ddp(model: Any, **options: Any) -> Any:
    return DistributedDataParallel(model, **options)


def fsdp2(model: Any, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (world(),))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for module in (*inner.model.layers, inner):
        fully_shard(module, mesh=mesh, **options)
    return model


def hsdp(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, world() // 2), mesh_dim_names=("replicate", "shard"))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


WRAPPERS = {
    "ddp": ddp,
    "ddp, gradients in buckets": partial(ddp, gradient_as_bucket_view=True, bucket_cap_mb=0.01),
    "fsdp2": fsdp2,
    "fsdp2, gathered": partial(fsdp2, reshard_after_forward=False),
    "fsdp2, checkpoints": lambda model: fsdp2(checkpointing(model)),
    "hsdp": hsdp,
    "accelerate": prepared,
}

# ---- what it learns ----


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole, under the names of the bare model."""
    return {
        name.removeprefix("module."): getattr(x.grad, "full_tensor", x.grad.clone)()
        for name, x in model.named_parameters()
        if x.grad is not None
    }


def plain_loop(model: Any, shared: fv.SharedPrefixes, max_tokens: int, count: int) -> Any:
    """The sum of the losses, and of each part whether it is of the rank's trees."""
    losses, is_own = [], []
    for part in shared.parts(model, max_tokens):
        part["num_items_in_batch"] = count
        loss = model(**part).loss
        (loss * world()).backward()  # DDP and FSDP2 take the mean
        losses.append(loss.detach())
        is_own.append(len(part.tokens) > 0)
    return torch.stack(losses).sum(), is_own


def by_logprobs(model: Any, shared: fv.SharedPrefixes, max_tokens: int | None, count: int) -> Any:
    logprobs = fv.tree_logprobs(model, shared, max_tokens=max_tokens, chunk_tokens=10)
    loss = -(logprobs * shared.label_counts).sum() / count
    if dist.is_initialized():
        dist.all_reduce(loss.detach().clone())  # a metric, before some ranks' second forward
    (loss * world()).backward()
    return loss.detach(), []


LOOPS = {"plain loop": plain_loop, "logprobs": by_logprobs}


def all_labels(every: list[fv.SharedPrefixes]) -> int:
    return sum(int(each.label_counts.sum()) for each in every)


def learned(family: str, wrapper: str, loop: str, *, is_lora: bool = False) -> dict[str, Any]:
    """The second of two steps of ranks with other trees."""
    model = WRAPPERS[wrapper](new(family, is_lora=is_lora))
    ranks = [fv.share_prefixes(samples_of(rank)) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    for _ in range(2):
        model.zero_grad()
        loss, is_own = LOOPS[loop](model, ranks[rank], MAX_TOKENS[rank], all_labels(ranks))
    return {"loss": sum(of_all_ranks(loss)), "gradients": gradients_of(model), "is_own": is_own}


def of_one_tree(wrapper: str, loop: str, texts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Of one tree over all ranks, and the samples of each."""
    model = WRAPPERS[wrapper](new("llama"))
    own = fv.share_prefixes(texts).of_rank(dist.get_rank(), dist.get_world_size())
    loss, _ = LOOPS[loop](model, own, max_tokens, int(own.num_items_in_batch))
    gradients = gradients_of(model)
    return {"loss": sum(of_all_ranks(loss)), "gradients": gradients, "samples": own.samples}


def interrupted(wrapper: str) -> dict[str, Any]:
    """A step of all ranks that raises in the second part, on all, and one after it."""
    model = WRAPPERS[wrapper](new("llama"))
    shared = fv.share_prefixes(samples())
    flags = []
    try:
        for number, part in enumerate(shared.parts(model, 25)):
            flags.append(getattr(model, "require_backward_grad_sync", None))
            if number == 1:
                raise KeyError("a user's error")
            model(**part).loss.backward()
    except KeyError:
        flags.append(getattr(model, "require_backward_grad_sync", None))
    model.zero_grad()
    loss, _ = plain_loop(model, shared, 25, all_labels([shared]) * world())
    return {"flags": flags, "loss": loss * world(), "gradients": gradients_of(model)}


def unsynced(loop: str) -> dict[str, Any]:
    """Gradients of a rank alone inside `no_sync`, then summed by a row outside."""
    model = ddp(new("llama"))
    rank = dist.get_rank()
    ranks = [fv.share_prefixes(samples_of(each)) for each in range(world())]
    with model.no_sync():
        LOOPS[loop](model, ranks[rank], MAX_TOKENS[rank], all_labels(ranks))
    alone = {name: x.clone() for name, x in gradients_of(model).items()}
    model(**ranks[rank].batch()).loss.mul(0).backward()
    return {"alone": alone, "gradients": gradients_of(model)}


def without_gradients(wrapper: str) -> Any:
    """Logits of each rank's own trees, twice: log-probabilities in parts, and in one."""
    model = WRAPPERS[wrapper](new("llama"))
    shared, most = fv.share_prefixes(samples_of(dist.get_rank())), MAX_TOKENS[dist.get_rank()]
    with torch.no_grad():
        logits = torch.zeros(shared.layout.total_tokens, model_of(model).config.vocab_size).double()
        for part in shared.parts(model, most):
            logits[part.tokens] = model(**part).logits[0, : len(part.tokens)]
        found = fv.tree_logprobs(model, shared, max_tokens=most)
        whole = fv.tree_logprobs(model, shared)
    expected = logits.log_softmax(-1).gather(1, shared.shift_labels[0].clamp(min=0)[:, None])[:, 0]
    return found, whole, torch.where(shared.shift_labels[0] >= 0, expected, 0)[None]


def model_of(model: Any) -> Any:
    return getattr(model, "module", model)


def refused(kind: str) -> str:
    """What a model says that cannot run in parts."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    shared = fv.share_prefixes(samples())
    if kind == "fsdp1":
        model: Any = FullyShardedDataParallel(new("llama"), device_id=torch.device("cpu"))
    elif kind == "static_graph":
        model = ddp(new("llama"), static_graph=True)
    else:
        model = ddp(_InForward(new("llama"), shared))
    try:
        model(shared) if kind == "forward" else shared.parts(model, 25)
    except NotImplementedError as error:
        return str(error)
    return "nothing"


class _InForward(nn.Module):
    def __init__(self, model: nn.Module, shared: fv.SharedPrefixes) -> None:
        super().__init__()
        self.model = model

    def forward(self, shared: fv.SharedPrefixes) -> Tensor:
        return fv.tree_logprobs(self.model, shared, max_tokens=25)
