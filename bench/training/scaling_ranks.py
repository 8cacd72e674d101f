"""`python -m flexvarlen.bench.training.scaling_ranks`: packed training on several GPUs of a host.

    python -m torch.distributed.run --nproc-per-node 4 -m flexvarlen.bench.training.scaling_ranks \
        --out rows.jsonl

without a launcher: one rank. Four measures, `--what`:

    ddp, fsdp2  tokens a second of whole training steps, a packed row a rank and step, rows in a
                plain shuffled order or in `BalancedSampler`'s. The rows are the same whatever the
                ranks: Python's help topics in random order, cut where a row ends. FSDP2 shards each
                layer and the rest.
    ulysses     attention over one long row through `flexvarlen.parallel.ulysses_attention`
                (`ulysses.py`), against one GPU.
    sequence    training on one document, cut over the ranks, that one GPU has no memory for
                (`sequence.py`).

Rank 0 writes the rows. What fails on one rank alone ends the run, when the others have waited for
it for three minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import nn
from torch._C._distributed_c10d import HashStore
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.model.accuracy import checkpoint_layers
from flexvarlen.bench.model.cases import BUDGET_BYTES, training_bytes
from flexvarlen.bench.model.geometries import GEOMETRIES, new_causal_lm
from flexvarlen.bench.model.step import free, synchronize
from flexvarlen.bench.model.utilisation import noting_auto
from flexvarlen.bench.training.ranks import data_parallel, largest, new_optimizer
from flexvarlen.bench.training.resumable import Measured, ResumableRun, add_run_arguments
from flexvarlen.bench.training.scaling_ranks_tables import SUITE, scaling_ranks_section
from flexvarlen.bench.training.sequence import SequenceCase, measure_sequence
from flexvarlen.bench.training.texts import crc_of, full_rows, topic_ids
from flexvarlen.bench.training.ulysses import UlyssesCase, measure_ulysses
from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.measure import memory_meaning
from flexvarlen.rows import Row

WAITS = timedelta(minutes=3)
WHAT = ("ddp", "fsdp2", "ulysses", "sequence")
ORDERS = ("shuffled", "balanced")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.training.scaling_ranks", description=summary
    )
    add = parser.add_argument
    add("--what", nargs="+", choices=WHAT, default=list(WHAT))
    add("--orders", nargs="+", choices=ORDERS, default=list(ORDERS))
    add("--geometry", choices=sorted(GEOMETRIES), default="qwen3-1.7b")
    add("--layers", type=int, help="default: the model's own number")
    add("--tokens", type=int, default=32_768, help="of a packed row")
    add("--rows", type=int, default=32, help="that are timed, over all ranks")
    add("--warmup", type=int, default=3, help="steps before the clock")
    add("--backend", default="auto")
    add("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16; on the CPU float32")
    add("--checkpointing", action=argparse.BooleanOptionalAction, help="default: where it must be")
    add("--row", type=int, default=262_144, help="tokens of Ulysses' row")
    add("--mean", type=int, default=32_768, help="tokens of a document there, log-normal")
    add("--heads", nargs="+", type=int, default=[32, 16], help="query heads there")
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--repeats", type=int, default=10, help="timed calls there")
    add("--document", type=int, default=98_304, help="tokens of sequence's document")
    add("--steps", type=int, default=3, help="timed steps on it")
    add("--seed", type=int, default=0)
    add_run_arguments(parser)
    args = parser.parse_args(argv)
    on_cuda = torch.device(args.device).type == "cuda"
    args.dtype = args.dtype or ("bfloat16" if on_cuda else "float32")
    args.layers = args.layers or GEOMETRIES[args.geometry](None).num_hidden_layers
    if args.steps < 1:
        parser.error(f"steps must be at least 1, got {args.steps}; set --steps 1 or more.")
    given = args.checkpointing

    def checkpointing(tokens: int) -> bool:
        return training_bytes(args.geometry, tokens) > BUDGET_BYTES if given is None else given

    args.checkpointing = checkpointing(args.tokens)
    # As if a rank held all of the document: how many there are is not known yet.
    args.sequence_checkpointing = checkpointing(max(args.tokens, args.document))
    return args


def require_sizes(args: argparse.Namespace, ranks: int) -> None:
    """Raise ValueError where so many ranks cannot share what is asked for."""
    if args.rows % ranks:
        raise ValueError(
            f"rows must be a multiple of the {ranks} ranks, got {args.rows}; all ranks train in "
            "each step."
        )
    if "sequence" not in args.what:
        return
    fewest = max(ranks, 2)  # one token has no next one to learn
    for name in ("tokens", "document"):
        count = getattr(args, name)
        if count % ranks or count < fewest:
            fits = max(count - count % ranks, fewest)
            raise ValueError(
                f"{name} must be a multiple of the {ranks} ranks and at least {fewest}, got "
                f"{count}; sequence cuts it into equal shares: set --{name} {fits}."
            )


def join(args: argparse.Namespace) -> None:
    """Meet the other ranks; `args.device` becomes this rank's own."""
    on_cuda = torch.device(args.device).type == "cuda"
    if on_cuda:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local)
        args.device = f"cuda:{local}"
    options: dict[str, Any] = {"device_id": torch.device(args.device)} if on_cuda else {}
    if "RANK" not in os.environ:  # no launcher
        options |= {"store": HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=WAITS, **options)
    if dist.get_rank():
        args.out = None


class Run(ResumableRun):
    """Ranks that measure the same cases in the same order."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(SUITE, args)
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        require_sizes(args, self.ranks)

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            super().say(text)

    def is_todo(self, case: dict[str, Any]) -> bool:
        """As rank 0 knows."""
        found = [super().is_todo(case)]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def run(self) -> list[Row]:
        training = [name for name in self.args.what if name in ("ddp", "fsdp2")]
        if training or "sequence" in self.args.what:
            self.make_rows()
        for variant in training:
            for order in self.args.orders:
                if order == "balanced" and self.ranks == 1:  # nothing to balance
                    continue
                self.measure(self.case(variant, order), partial(self.train, variant, order))
                free(self.device)
        if "ulysses" in self.args.what and self.ranks > 1:
            for heads in self.args.heads:
                case = self.ulysses_case(heads)
                self.measure(
                    case.data(), partial(measure_ulysses, case, self.device, self.args.repeats)
                )
                free(self.device)
        if "sequence" in self.args.what:
            self.sequence()
        return self.rows

    # --- training --------------------------------------------------------------------------------

    def make_rows(self) -> None:
        args = self.args
        ids = GEOMETRIES[args.geometry](args.layers).vocab_size
        texts = topic_ids(ids, args.tokens)
        self.texts = full_rows(texts, args.tokens, args.rows, args.seed)
        self.lengths = [[len(document) for document in row] for row in self.texts]

    def case(self, variant: str, order: str) -> dict[str, Any]:
        named = ("geometry", "layers", "tokens", "warmup", "checkpointing", "backend", "dtype")
        return {
            "variant": variant,
            "order": order,
            "ranks": self.ranks,
            "timed_rows": self.args.rows,
            **{name: getattr(self.args, name) for name in (*named, "seed")},
            "texts_crc32": crc_of(self.texts),
        }

    def steps(self, order: str) -> list[list[int]]:
        """The row of each rank, step by step; each row once."""
        if order == "balanced":
            sampler = fv.BalancedSampler(
                self.lengths, num_replicas=self.ranks, seed=self.args.seed, drop_last=True
            )
            return sampler.steps()
        rows = np.random.default_rng(self.args.seed).permutation(len(self.texts))
        found: list[list[int]] = rows.reshape(-1, self.ranks).tolist()
        return found

    def train(self, variant: str, order: str) -> Measured:
        """Status, reason and measures of a few warm-up steps and one pass over the rows."""
        args = self.args
        model = self.new_model()
        fv.patch_model(model, args.backend)
        if args.checkpointing:
            checkpoint_layers(model)
        wrapped = self.wrapped(model, variant)
        optimizer = new_optimizer(wrapped, self.device)
        most = round_up_to_power_of_two(max(map(len, self.lengths)))
        pack = fv.PackedCollator(args.tokens, most, max(map(max, self.lengths)))
        steps = self.steps(order)
        losses = []

        def step(rows: list[int]) -> None:
            batch = pack([{"input_ids": ids} for ids in self.texts[rows[self.rank]]])
            loss = wrapped(**send_to_device(batch, self.device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())

        with noting_auto() as attends:
            for index in range(args.warmup):
                step(steps[index % len(steps)])
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        dist.barrier()
        synchronize(self.device)
        begin = time.perf_counter()
        for rows in steps:
            step(rows)
        synchronize(self.device)
        seconds = self.largest(time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated(self.device) / 2**20 if on_cuda else 0.0
        costs = np.array([sum(n * n for n in row) for row in self.lengths], np.float64)
        by_step = costs[np.array(steps)]
        rate = args.tokens * len(self.texts) / seconds
        found: list[float] = torch.stack(losses).double().tolist()
        peak = self.largest(peak)  # of all ranks, as what follows: one alone must not return
        if self.largest(float(not np.isfinite(found).all())):
            return "wrong", "a loss is not finite", {}
        return (
            "ok",
            None,
            {
                "attends": ", ".join(dict.fromkeys(attends)) or args.backend,
                "seconds": seconds,
                "ms_step": seconds / len(steps) * 1e3,
                "tokens_per_s": rate,
                "tokens_per_s_rank": rate / self.ranks,
                "imbalance": float(by_step.max(1).sum() / by_step.mean(1).sum()),
                "first_loss": found[0],
                "last_loss": found[-1],
                "peak_mib": peak if on_cuda else None,
                "peak_meaning": memory_meaning(self.device),
            },
        )

    def new_model(self) -> PreTrainedModel:
        """The same weights each time, on each rank."""
        args = self.args
        torch.manual_seed(args.seed)
        return new_causal_lm(args.geometry, args.layers, self.dtype, self.device).train()

    def wrapped(self, model: PreTrainedModel, variant: str) -> nn.Module:
        if variant == "ddp":
            return data_parallel(model, self.device)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.ranks,))
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        sharded: nn.Module = fully_shard(model, mesh=mesh)
        return sharded

    def largest(self, value: float) -> float:
        """Of all ranks."""
        return largest([value], self.device)[0]

    # --- one document over all ranks -------------------------------------------------------------

    def sequence(self) -> None:
        args = self.args
        text = [token for row in self.texts for ids in row for token in ids]
        document = (text * (args.document // len(text) + 1))[: args.document]
        row = self.texts[0]
        named = ("geometry", "layers", "tokens", "document", "steps", "backend", "dtype", "seed")
        case = SequenceCase(
            ranks=self.ranks,
            checkpointing=args.sequence_checkpointing,
            **{name: getattr(args, name) for name in named},
            texts_crc32=crc_of([row, [document]]),
        )
        self.measure(case.data(), partial(measure_sequence, case, self.new_model, row, document))
        free(self.device)

    # --- Ulysses ---------------------------------------------------------------------------------

    def ulysses_case(self, heads: int) -> UlyssesCase:
        args = self.args
        return UlyssesCase(
            ranks=self.ranks,
            tokens=args.row,
            mean_doc=args.mean,
            num_heads=heads,
            num_kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            backend=args.backend,
            dtype=args.dtype,
            seed=args.seed,
        )


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure what is to do, and print the tables on rank 0; rows go to `--out`, if given."""
    args = parse(argv)
    join(args)
    try:
        rows = Run(args).run()
        if rows and dist.get_rank() == 0:
            sys.stdout.write(scaling_ranks_section(rows) + "\n")
    finally:
        dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    main()
