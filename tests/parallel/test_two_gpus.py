"""A row over two GPUs by NCCL, as accurate as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import flexvarlen as fv
from flexvarlen.parallel.shard import Method
from tests.parallel.documents_ranks import Model, batch_of
from tests.two_processes import WORLD, start

METHODS: dict[str, Method] = {
    "llama": "documents",
    "qwen3_5_text": "contiguous",
    "kimi_linear": "contiguous",
    "bamba": "contiguous",
    "lfm2": "contiguous",
}
LENGTHS = (40, 60, 19)  # the second lies on both
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # for a try without GPUs


def step(model, batch, rank):
    """Loss and gradients, on the CPU."""
    moved = {name: x.to(f"{DEVICE}:{rank}") for name, x in batch.items()}
    model.zero_grad()
    out = model(**moved)
    out.loss.backward()
    found = {name: x.grad for name, x in model.named_parameters()}
    return {name: x.float().cpu() for name, x in (found | {"loss": out.loss.detach()}).items()}


def train(rank: int, port: int, folder: str) -> None:
    """Each model on the row alone, and on a shard of it."""
    where = f"tcp://127.0.0.1:{port}"
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=WORLD)
    torch.set_float32_matmul_precision("high")  # else fla's kernels are not taken
    made = {}
    for kind, method in METHODS.items():
        model = Model(kind, kind, WORLD, "", checkpointing=True)
        model = model.new(sequence_parallel_group=dist.group.WORLD).to(f"{DEVICE}:{rank}")
        batch = batch_of(LENGTHS)
        shard = fv.shard_row(
            {name: x.to(f"{DEVICE}:{rank}") for name, x in batch.items()}, method=method
        )
        shared = step(model, shard, rank)
        with fv.patched(model, "sdpa"):
            made[kind] = {"shared": shared, "alone": step(model, batch, rank)}
    torch.save(made, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpus")
    start(train, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")
@pytest.mark.parametrize("kind", METHODS)
def test_a_row_over_two_gpus(kind, made):
    """Errors against float64 at most three times those of one GPU on the whole row."""
    model = fv.patch_model(Model(kind, kind, 1, "").new().double(), "sdpa")
    out = model(**batch_of(LENGTHS))
    out.loss.backward()
    exact = {name: x.grad for name, x in model.named_parameters()} | {"loss": out.loss.detach()}
    for name, x in exact.items():
        alone = made[0][kind]["alone"][name]
        together = sum(share[kind]["shared"][name] for share in made)
        errors = [float((y - x).norm() / x.norm().clamp(min=1e-6)) for y in (together, alone)]
        assert errors[0] <= 3 * errors[1] + 1e-5, (name, errors)
