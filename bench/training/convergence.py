"""`python -m flexvarlen.bench.training.convergence`: a model from scratch, packed or padded.

A Llama of 20M parameters learns Python's help topics and the standard library's docstrings. Every
run of a seed has the same initial parameters and takes the same documents in the same steps, with
the same labels (a document's first token is none) and the same schedule of the learning rate:

    padded        a step's documents in one batch, padded to the longest: transformers' sdpa with
                  an attention_mask, not patched
    a backend     the same documents in one packed row, patched
    unpatched     the packed row through transformers' sdpa, not patched, all left at its default:
                  what the verdict must tell

Parameters are in fp32, the forward under autocast in bf16 (with `--dtype float32` without).

First the gradient of the first step is held against that of each document alone in fp64: it must be
within 3 times the error of each document alone in the run's own precision. A run that is not is
trained all the same, and its row is "wrong". The verdict over all runs stands in
`convergence_tables.py`. `flexvarlen bench report` makes tables and the figure of several files.

    python -m flexvarlen.bench.training.convergence --out rows.jsonl --variants padded fa3
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.optimization import get_cosine_schedule_with_warmup

import flexvarlen as fv
from flexvarlen.bench.model.accuracy import GRADIENT_FACTOR, ORACLE_DTYPE
from flexvarlen.bench.model.step import free, synchronize
from flexvarlen.bench.model.utilisation import noting_auto
from flexvarlen.bench.model.variants import compiled_alone, patch_or_refuse
from flexvarlen.bench.training.convergence_documents import Documents
from flexvarlen.bench.training.convergence_tables import (
    PADDED,
    SUITE,
    UNPATCHED,
    convergence_section,
    final_loss,
)
from flexvarlen.bench.training.resumable import Measured, ResumableRun, add_run_arguments
from flexvarlen.equivalence.oracle import compute_in_float64
from flexvarlen.measure import memory_meaning, peak_memory_mib, watch_compilation
from flexvarlen.rows import Row

CUDA_VARIANTS = (PADDED, "auto", "fa3", "fa4", "fa2", "varlen", "flex", "flex_fa4", "nested")
CPU_VARIANTS = (PADDED, "auto", "sdpa", "reference")

WARMUP_STEPS = 10  # before the clock of tokens a second
MAX_NORM = 1.0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.training.convergence", description=summary
    )
    add = parser.add_argument
    add("--variants", nargs="+", metavar="NAME", help=f"default on CUDA: {' '.join(CUDA_VARIANTS)}")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="of weights and order")
    add("--steps", type=int, default=500)
    add("--tokens", type=int, default=8192, help="of a packed row, at most")
    add("--longest", type=int, default=1024, help="tokens at which a document is cut")
    add("--vocabulary", type=int, default=8192)
    add("--hidden", type=int, default=384, help="heads are of 64, or 16 below 128")
    add("--layers", type=int, default=8)
    add("--learning-rate", type=float, default=1e-3)
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the forward")
    add("--compile", action="store_true", help="the model under torch.compile")
    add("--compiler", default="inductor", help="default: inductor")
    add("--topics-alone", action="store_true", help="without the standard library's docstrings")
    add_run_arguments(parser)
    args = parser.parse_args(argv)
    on_cuda = torch.device(args.device).type == "cuda"
    args.variants = args.variants or list(CUDA_VARIANTS if on_cuda else CPU_VARIANTS)
    known = (PADDED, UNPATCHED, "auto", *fv.BACKENDS)
    for name in args.variants:
        if name not in known:
            parser.error(f"variants must be among {', '.join(known)}, got {name}")
    return args


class Run(ResumableRun):
    """The texts, and the first step's exact gradient of each seed."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(SUITE, args)
        self.documents = Documents(
            args.tokens, args.vocabulary, library=not args.topics_alone, longest=args.longest
        )
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.exact: dict[int, tuple[list[Tensor], float]] = {}
        self.say(f"{len(self.documents.rows)} rows of documents")

    def run(self) -> list[Row]:
        for variant in self.args.variants:
            for seed in self.args.seeds:
                self.measure(self.case(variant, seed), partial(self.train, variant, seed))
                free(self.device)
        return self.rows

    def case(self, variant: str, seed: int) -> dict[str, Any]:
        named = ("steps", "tokens", "longest", "vocabulary", "hidden", "layers", "learning_rate")
        return {
            "variant": variant,
            "seed": seed,
            "mode": "compiled" if self.args.compile else "eager",
            **{name: getattr(self.args, name) for name in named},
            "dtype": self.args.dtype,
            "texts_crc32": self.documents.crc,
        }

    # --- the model -------------------------------------------------------------------------------

    def new_model(self, seed: int) -> PreTrainedModel:
        args = self.args
        heads = args.hidden // (64 if args.hidden >= 128 else 16)
        config = LlamaConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 8 // 3,
            num_hidden_layers=args.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=args.tokens,
        )
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
        return model.to(self.device).train()

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    # --- the first gradient ----------------------------------------------------------------------

    def first_row(self, seed: int) -> int:
        return self.documents.order(seed, 1)[0]

    def exact_gradient(self, seed: int) -> tuple[list[Tensor], float]:
        """Of the first step, each document alone in fp64; and the peer's error."""
        if seed not in self.exact:
            model = self.new_model(seed)
            peer = self.alone(model, seed, self.autocast)
            compute_in_float64(model.to(ORACLE_DTYPE))
            exact = self.alone(model, seed, nullcontext)
            self.exact[seed] = exact, relative_error(peer, exact)
        return self.exact[seed]

    def alone(
        self,
        model: PreTrainedModel,
        seed: int,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> list[Tensor]:
        """The gradient of every parameter, documents one after another."""
        model.zero_grad(set_to_none=True)
        documents = self.documents.rows[self.first_row(seed)]
        counted = sum(map(len, documents)) - len(documents)
        for document in documents:
            if len(document) == 1:  # nothing to foretell
                continue
            ids = torch.tensor([document], device=self.device)
            with precision():
                loss = model(ids, labels=ids, num_items_in_batch=counted, use_cache=False).loss
            loss.backward()
        return gradients_of(model)

    # --- a run -----------------------------------------------------------------------------------

    def train(self, variant: str, seed: int) -> Measured:
        """Status, reason and measures of one training."""
        args = self.args
        exact, peer_error = self.exact_gradient(seed)
        model = self.new_model(seed)
        if variant not in (PADDED, UNPATCHED):
            patch_or_refuse(model, variant, dtype=self.dtype, needs_grad=True)
        call: Callable[..., Any] = model
        if args.compile:
            torch._dynamo.reset()
            dynamic = True if variant == PADDED else None
            call = compiled_alone(model, args.compiler, fullgraph=False, dynamic=dynamic)
        rows = self.documents.order(seed, args.steps)
        batches = {row: self.documents.batch(variant, row) for row in dict.fromkeys(rows)}
        optimizer = torch.optim.AdamW(
            model.parameters(),
            args.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=self.device.type == "cuda",
        )
        schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps)
        losses: list[Tensor] = []
        clock: list[float] = []
        errors: list[float] = []
        warmup = min(WARMUP_STEPS, args.steps - 1)

        def step(index: int) -> None:
            inputs = {name: self.moved(x) for name, x in batches[rows[index]].items()}
            with self.autocast():
                loss = call(**inputs).loss
            loss.backward()
            losses.append(loss.detach())
            if index == 0:
                errors.append(relative_error(gradients_of(model), exact))
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)

        def steps() -> None:
            for index in range(args.steps):
                if index in (0, warmup):
                    synchronize(self.device)
                    clock.append(time.perf_counter())
                step(index)
            synchronize(self.device)
            clock.append(time.perf_counter())

        with watch_compilation() as stats, noting_auto() as attends:
            peak = peak_memory_mib(steps, self.device)
        begin, timed, end = clock
        real = [sum(map(len, self.documents.rows[row])) for row in rows]
        positions = [batches[row]["input_ids"].numel() for row in rows]
        found: list[float] = torch.stack(losses).double().tolist()
        measures = {
            "attends": ", ".join(dict.fromkeys(attends)) or None,
            "parameters": sum(p.numel() for p in model.parameters()),
            "losses": [round(loss, 5) for loss in found],
            "final_loss": final_loss(found),
            "gradient_error": errors[0],
            "peer_gradient_error": peer_error,
            "seconds": end - begin,
            "ms_step": (end - timed) / (args.steps - warmup) * 1e3,
            "tokens_per_s": sum(real[warmup:]) / (end - timed),
            "tokens": sum(real),
            "labels": sum(int(batches[row]["num_items_in_batch"]) for row in rows),
            "positions": sum(positions),
            "peak_mib": peak,
            "peak_meaning": memory_meaning(self.device),
            "graph_breaks": stats.graph_breaks if args.compile else None,
            "compile_s": stats.compile_s,
        }
        limit = GRADIENT_FACTOR * (peer_error + torch.finfo(self.dtype).eps)
        if errors[0] <= limit:  # not where it is NaN
            return "ok", None, measures
        return (
            "wrong",
            f"relative error of the first gradient is {errors[0]:.2g}, more than {limit:.2g} "
            f"({GRADIENT_FACTOR:g} x the error of each document alone)",
            measures,
        )

    def moved(self, x: Any) -> Any:
        """A fresh copy of what the host holds: no step finds what another made of its layout."""
        movable = isinstance(x, Tensor | fv.PackedLayout)
        return x.to(self.device, non_blocking=True) if movable else x


def gradients_of(model: PreTrainedModel) -> list[Tensor]:
    """Copies, of every parameter."""
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """‖found − exact‖ / ‖exact‖, all parameters as one vector. Syncs."""
    off, whole = (
        torch.stack([x.double().norm() for x in tensors]).norm()
        for tensors in ([a - b for a, b in zip(found, exact, strict=True)], exact)
    )
    return float(off / whole)


def main(argv: list[str] | None = None) -> list[Row]:
    """Train what is to do, and print the table; rows go to `--out`, if given."""
    rows = Run(parse(argv)).run()
    if rows:
        sys.stdout.write(convergence_section(rows) + "\n")
    return rows


if __name__ == "__main__":
    main()
