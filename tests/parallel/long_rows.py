"""Speed and memory of training on one row of up to a million tokens, which ranks share.

LoRA on a dense model under FSDP2, layers checkpointed, the loss in chunks. Each rank first trains
alone on a row of its own; then all share rows, by documents and by the heads of attention (Ulysses,
whose ranks each compute all tokens for some heads). From the checkout:

    torchrun --nproc-per-node 2 -m tests.parallel.long_rows COMMIT [NAME ...]

appends to `long_rows.jsonl`: on GPUs the Qwen3-8B geometry, the cases of so many ranks whose name
holds a NAME; without GPUs a tiny model.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import peft
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.models.qwen3 import Qwen3Config

import flexvarlen as fv
from flexvarlen.bench.suites.model.geometries import GEOMETRIES
from flexvarlen.bench.suites.training.ranks import largest, seconds_of
from flexvarlen.measure.machine import environment

RECORDS = Path(__file__).with_suffix(".jsonl")

CHUNK, MLP_CHUNK = 4096, 8192
QWEN3_8B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=1_048_576,
    rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    tie_word_embeddings=False,
)


@dataclass(frozen=True)
class Case:
    """A row that ranks share.

    Attributes:
        tokens: all tokens of the row.
        document: tokens of each of its documents.
        ranks: that share it.
        way: "documents" (ours), "ulysses", or "alone".
        offload: whether what checkpointed layers save is in host memory.
        mlp_chunks: whether MLPs run `MLP_CHUNK` tokens at a time.
        geometry: "qwen3-8b", or of `GEOMETRIES`.
        steps: timed steps.
    """

    tokens: int
    document: int
    ranks: int
    way: str = "documents"
    offload: bool = False
    mlp_chunks: bool = False
    geometry: str = "qwen3-8b"
    steps: int = 2

    @property
    def name(self) -> str:
        how = "-offloaded" * self.offload + "-mlp_chunks" * self.mlp_chunks
        return f"{self.geometry}-{self.way}-{self.tokens}-{self.document}{how}"


K = 1024
CASES = [
    Case(128 * K, 16 * K, 1, "alone"),
    Case(256 * K, 16 * K, 2),
    Case(256 * K, 16 * K, 2, "ulysses"),
    Case(128 * K, 64 * K, 1, "alone", steps=1),
    Case(256 * K, 64 * K, 2, steps=1),
    Case(256 * K, 16 * K, 2, mlp_chunks=True),
    Case(512 * K, 8 * K, 2, mlp_chunks=True, steps=1),
    Case(512 * K, 8 * K, 2, offload=True, mlp_chunks=True, steps=1),
    Case(1024 * K, 16 * K, 4, mlp_chunks=True, steps=1),
    Case(256 * K, 16 * K, 2, geometry="qwen3.5-2b"),
    Case(512 * K, 8 * K, 2, geometry="qwen3.5-2b", steps=1),
    Case(256 * K, 256 * K, 2, steps=1),
    Case(256 * K, 256 * K, 2, "ulysses", steps=1),
    Case(512 * K, 512 * K, 2, mlp_chunks=True, steps=1),
    Case(256 * K, 8 * K, 1, "alone", mlp_chunks=True, steps=1),
    Case(1024 * K, 16 * K, 2, mlp_chunks=True, geometry="qwen3-1.7b", steps=1),
    Case(1024 * K, 16 * K, 2, mlp_chunks=True, geometry="qwen3.5-2b", steps=1),
    Case(1024 * K, 1024 * K, 2, mlp_chunks=True, geometry="qwen3.5-2b", steps=1),
]
TINY = [
    Case(tokens, document, ranks, way, mlp_chunks=mlp_chunks, geometry="qwen3-tiny")
    for tokens, document, ranks, way, mlp_chunks in (
        (256, 64, 1, "alone", False),
        (512, 64, 2, "documents", False),
        (512, 64, 2, "ulysses", False),
        (512, 512, 2, "documents", True),
        (512, 512, 2, "ulysses", False),
    )
]


def new_model(case: Case, device: torch.device) -> Any:
    """With LoRA on every linear layer; parameters that are not learned have no gradient."""
    torch.manual_seed(0)
    own = {"qwen3-8b": QWEN3_8B}
    config = own.get(case.geometry) or GEOMETRIES[case.geometry](None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    lora = peft.LoraConfig(r=16, target_modules="all-linear")
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    options = {"offload": True} if case.offload else {}
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False}, **options)
    return model


# ---- attention by heads ----


class Ulysses(nn.Module):
    """A model's loss on consecutive tokens of each rank, each with some heads of attention."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        AttentionInterface.register("ulysses", attend_by_heads)
        AttentionMaskInterface.register("ulysses", lambda *_, **__: None)
        model.get_base_model().set_attn_implementation("ulysses")  # type: ignore[operator]

    def forward(self, shift_labels: Tensor, num_items: int, **inputs: Any) -> Tensor:
        model = self.model.get_base_model()  # type: ignore[operator]
        hidden = model.model(**inputs, use_cache=False).last_hidden_state
        head = fv.lm_head(model)
        scores = fv.token_logprobs(hidden, shift_labels, head=head, chunk_tokens=CHUNK)
        return -scores.sum() / num_items


def attend_by_heads(
    layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **given: Any
) -> tuple[Tensor, None]:
    """`[1, H, S, D]` of the rank's S tokens -> `[1, S, H, D]`."""
    q_THD, k_THD, v_THD = map(_all_tokens, (q, k, v))
    out = fv.packed_attention(
        q_THD, k_THD, v_THD, given["row"], backend=given["backend"], scale=given["scaling"]
    )
    sent = out.unflatten(0, (dist.get_world_size(), -1)).contiguous()
    found = all_to_all_single(torch.empty_like(sent), sent)  # [P, S, H / P, D]
    return found.transpose(0, 1).flatten(1, 2)[None], None


def _all_tokens(x: Tensor) -> Tensor:
    """`[1, H, S, D]` of a rank's tokens -> `[T, H / P, D]`."""
    sent = x[0].unflatten(0, (dist.get_world_size(), -1)).transpose(1, 2).contiguous()
    return all_to_all_single(torch.empty_like(sent), sent).flatten(0, 1)


# ---- a step ----


def sharded(model: Any, layers: Any, device: torch.device) -> Any:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def row_of(tokens: int, document: int, vocab: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (tokens // document, document), generator=rng).tolist()
    return fv.PackedCollator(total_tokens=tokens)([ids])


@dataclass(frozen=True)
class Training:
    """A model, what this rank takes of a row, and its part of the row's loss, times the ranks."""

    model: Any
    of_rank: Callable[[dict[str, Any]], dict[str, Any]]
    loss: Callable[[dict[str, Any]], Tensor]


def training(case: Case, device: torch.device) -> Training:
    model = new_model(case, device)
    backend = "auto" if device.type == "cuda" else "sdpa"
    chunks = {"loss_chunk_tokens": CHUNK}
    chunks |= {"mlp_chunk_tokens": MLP_CHUNK} if case.mlp_chunks else {}
    layers = model.get_base_model().model.layers
    if case.way == "alone":
        fv.patch_model(model, backend, **chunks)
        return Training(
            model, lambda row: send_to_device(row, device), lambda row: model(**row).loss
        )
    if case.way == "documents":
        group = dist.group.WORLD
        fv.patch_model(model, backend, sequence_parallel_group=group, **chunks)
        wrapped = sharded(model, layers, device)
        options = fv.shard_options(model)
        return Training(
            model,
            lambda row: fv.shard_row(send_to_device(row, device), group, **options),
            lambda shard: wrapped(**shard).loss * case.ranks,
        )
    wrapped = sharded(Ulysses(model), layers, device)

    def of_rank(row: dict[str, Any]) -> dict[str, Any]:
        layout, labels = row["packed_layout"], row["labels"].roll(-1, 1)
        labels[:, -1] = -100
        parts = {
            "input_ids": row["input_ids"],
            "position_ids": layout.position_ids()[None],
            "shift_labels": labels,
        }
        mine = {name: x.chunk(case.ranks, 1)[dist.get_rank()] for name, x in parts.items()}
        others = {"num_items": int((labels != -100).sum()), "backend": backend}
        return send_to_device(mine, device) | others | {"row": layout.to(device)}

    return Training(model, of_rank, lambda shard: wrapped(**shard) * case.ranks)


class Memory:
    """GiB of this rank's GPU, by part of a step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.found = device, dict[str, float]()

    def note(self, name: str, *, peak: bool = False) -> None:
        if self.device.type == "cuda":
            read = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
            self.found[name] = read(self.device) / 2**30
            torch.cuda.reset_peak_memory_stats(self.device)


def measured(case: Case, device: torch.device) -> dict[str, Any]:
    trained = training(case, device)
    learned = [x for x in trained.model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(learned, 1e-5)
    memory, losses = Memory(device), []
    vocab = trained.model.get_base_model().config.vocab_size

    def of_rank(shorter: int) -> dict[str, Any]:
        return trained.of_rank(row_of(case.tokens // shorter, case.document // shorter, vocab))

    def step(row: dict[str, Any]) -> None:
        memory.note("weights and optimizer")
        part = trained.loss(row)
        memory.note("peak of the forward", peak=True)
        memory.note("kept for the backward")
        part.backward()
        memory.note("peak of the backward", peak=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(part.detach() / case.ranks)

    step(of_rank(shorter=16))  # warm-up
    losses.clear()
    once = partial(step, of_rank(shorter=1))
    seconds = [largest([seconds_of(once, device)], device)[0] for _ in range(case.steps)]
    total = torch.stack(losses)
    if case.ranks > 1:
        dist.all_reduce(total)
    names = list(memory.found)
    gib = dict(zip(names, largest([memory.found[x] for x in names] or [0.0], device), strict=False))
    took = median(seconds)
    return {
        "case": vars(case),
        "ms": took * 1e3,
        "tokens_per_s": case.tokens / took,
        "gib": gib,
        "losses": total.tolist(),
    }


def cases(names: list[str], device: torch.device) -> Iterator[Case]:
    for case in CASES if device.type == "cuda" else TINY:
        fits = case.ranks in (1, dist.get_world_size())
        if fits and (not names or any(name in case.name for name in names)):
            yield case


def main(commit: str, *names: str) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    options = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group("nccl" if options else "gloo", **options)
    about = {"environment": environment(device) | {"git_commit": commit}}
    for case in cases(list(names), device):
        try:
            found = measured(case, device)
        except torch.OutOfMemoryError as why:
            found = {"case": vars(case), "status": "oom", "reason": str(why)[:200]}
        gc.collect()
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
            with RECORDS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found | about) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
