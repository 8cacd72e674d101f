"""`python -m flexvarlen.bench.training.end_to_end`: transformers' `Trainer`, packed and padded.

A step's documents are Python's help topics in random order, exactly `--tokens` of them; each
variant gets the same documents in the same steps, of which the pads are not counted. A variant is
`<batching>:<attention>`:

    packed:auto               `PackedCollator` and `patch_model`; any backend in place of "auto"
    packed:auto@kept          the same, and where layers are checkpointed attention's outputs are
                              kept (not flex's): two lines of the user's
    packed:transformers:NAME  `DataCollatorWithFlattening`: position_ids, and the arguments of
                              FlashAttention where NAME is one, its fastest form
    padded:transformers:NAME  padded batches and an attention_mask: the step's documents in as many
                              batches of equal count as keep each within `--tokens` positions
    padded-sorted:…           the same, a step's documents sorted by length first: the fewest pads
                              that `train_sampling_strategy="group_by_length"` can reach

Each is one run of `Trainer` on a fresh model of the same seed, eager and with `torch_compile`; a
step in which a graph was compiled is not counted (`Clock.steady`).
First, loss and gradients of the first step are held against each document alone in fp64: within 2
and 3 times what each document alone errs in the model's dtype (and its rounding). A variant that is
not, is "wrong" and not timed. Show the process one GPU:

    CUDA_VISIBLE_DEVICES=0 python -m flexvarlen.bench.training.end_to_end --out rows.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PrinterCallback, TrainingArguments

from flexvarlen.bench.model.accuracy import checkpoint_layers
from flexvarlen.bench.model.cases import BUDGET_BYTES, SORTED, training_bytes
from flexvarlen.bench.model.geometries import GEOMETRIES, new_causal_lm
from flexvarlen.bench.model.step import free
from flexvarlen.bench.model.utilisation import noting_auto, peak_tflops, step_tflop, utilisation
from flexvarlen.bench.model.variants import patch_or_refuse
from flexvarlen.bench.training.end_to_end_batches import (
    Documents,
    Flatten,
    Pack,
    pad,
    padded_batches,
)
from flexvarlen.bench.training.end_to_end_first_step import FirstStep, WrongError
from flexvarlen.bench.training.end_to_end_tables import SUITE, end_to_end_section, parts_of
from flexvarlen.bench.training.end_to_end_trainer import CheckedTrainer, Clock, accelerate_as_it_was
from flexvarlen.bench.training.resumable import Measured, ResumableRun, add_run_arguments
from flexvarlen.bench.training.texts import crc_of, full_rows, topic_ids
from flexvarlen.equivalence.variants import set_transformers
from flexvarlen.measure import memory_meaning, summarize, watch_compilation
from flexvarlen.rows import Row

THEIRS = "transformers:"
CUDA_VARIANTS = (
    "packed:auto",
    "packed:auto@kept",
    "packed:transformers:flash_attention_3",
    "packed:transformers:flash_attention_2",
    "packed:transformers:flex_attention",
    "padded:transformers:sdpa",
    "padded-sorted:transformers:sdpa",
    "padded:transformers:flash_attention_2",
    "padded-sorted:transformers:flash_attention_2",
)
CPU_VARIANTS = (
    "packed:auto",
    "packed:auto@kept",
    "padded:transformers:sdpa",
    "padded-sorted:transformers:sdpa",
)

LEARNING_RATE = 1e-5
ATTENTION = (
    torch.ops.flexvarlen.cu_seqlens_forward.default,  # of FlashAttention and varlen
    torch.ops.flexvarlen.sdpa_forward.default,
)
"""Operators whose outputs `@kept` keeps."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.training.end_to_end", description=summary
    )
    add = parser.add_argument
    add("--variants", nargs="+", metavar="NAME", help=f"default on CUDA: {' '.join(CUDA_VARIANTS)}")
    add("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    add("--geometry", choices=sorted(GEOMETRIES), default="qwen3-1.7b")
    add("--layers", type=int, help="default: the model's own number")
    add("--tokens", type=int, default=32_768, help="of a step's documents")
    add("--longest", type=int, default=8192, help="tokens at which a document is cut")
    add("--warmup", type=int, default=3, help="steps before the clock")
    add("--steps", type=int, default=10, help="steps that are timed")
    add("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16; on the CPU float32")
    add("--checkpointing", action=argparse.BooleanOptionalAction, help="default: where it must be")
    add("--compiler", default="inductor", help="default: inductor")
    add("--seed", type=int, default=0)
    add_run_arguments(parser)
    args = parser.parse_args(argv)
    on_cuda = torch.device(args.device).type == "cuda"
    args.variants = args.variants or list(CUDA_VARIANTS if on_cuda else CPU_VARIANTS)
    args.dtype = args.dtype or ("bfloat16" if on_cuda else "float32")
    args.layers = args.layers or GEOMETRIES[args.geometry](None).num_hidden_layers
    if args.warmup < 1 or args.steps < 1:
        parser.error(f"warmup and steps must be at least 1, got {args.warmup} and {args.steps}")
    if args.checkpointing is None:
        args.checkpointing = training_bytes(args.geometry, args.tokens) > BUDGET_BYTES
    for name in args.variants:
        batching, attention, kept = parts_of(name)
        if batching == "serial" or (batching != "packed" and not attention.startswith(THEIRS)):
            parser.error(f"variants must be packed, or padded with transformers:…, got {name}")
        if kept and attention.startswith(THEIRS):
            parser.error(f"variants of transformers' own must not end in @kept, got {name}")
    if on_cuda and torch.cuda.device_count() > 1:
        parser.error("one GPU must be visible, Trainer takes all; set CUDA_VISIBLE_DEVICES.")
    return args


class Run(ResumableRun):
    """The steps' documents, and what each alone teaches in the first."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(SUITE, args)
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        ids = GEOMETRIES[args.geometry](args.layers).vocab_size
        texts = topic_ids(ids, args.longest)
        self.steps = full_rows(texts, args.tokens, args.warmup + args.steps, args.seed)
        self._truth: FirstStep | None = None

    def run(self) -> list[Row]:
        for variant in self.args.variants:
            for mode in self.args.modes:
                case = self.case(variant, mode)
                self.measure(case, partial(self.train, variant, mode))
                free(self.device)
        return self.rows

    def case(self, variant: str, mode: str) -> dict[str, Any]:
        named = ("geometry", "layers", "tokens", "longest", "warmup", "steps", "checkpointing")
        return {
            "variant": variant,
            "mode": mode,
            **{name: getattr(self.args, name) for name in (*named, "dtype", "seed")},
            "texts_crc32": crc_of(self.steps),
        }

    def new_model(self) -> PreTrainedModel:
        torch.manual_seed(self.args.seed)
        model = new_causal_lm(self.args.geometry, self.args.layers, self.dtype, self.device)
        model.config.use_cache = False  # transformers' own would leak in train()
        return model.train()

    @property
    def truth(self) -> FirstStep:
        """Made when it is first asked for."""
        if self._truth is None:
            self._truth = found = FirstStep(self.new_model, self.steps[0])
            self.say(f"each document alone: loss {found.loss:.4f}, peer's {found.alone_loss:.4f}")
        return self._truth

    # --- a variant -------------------------------------------------------------------------------

    def train(self, variant: str, mode: str) -> Measured:
        """One run of Trainer."""
        args = self.args
        truth = self.truth  # before the model: its peak is its own
        batching, attention, kept = parts_of(variant)
        model = self.new_model()
        self.set_attention(model, attention)
        if args.checkpointing:
            checkpoint_layers(model, ATTENTION if kept else ())
        batches, collate = self.batches(batching, attention)
        found: dict[str, float] = {}
        clock = Clock(self.device, args.warmup)
        with (
            accelerate_as_it_was(),
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            watch_compilation() as stats,
            noting_auto() as chosen,
        ):
            trainer = CheckedTrainer(
                model=model,
                args=self.arguments(folder, mode, len(batches[0])),
                train_dataset=[batch for step in batches for batch in step],
                data_collator=collate,
                callbacks=[clock],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.first_step = partial(truth.check, model, found)
            try:
                trainer.train()
            except WrongError as error:
                return "wrong", str(error), found
        timed, compiling = clock.steady()
        lengths = [len(ids) for step in timed for ids in self.steps[step]]
        head = model.get_output_embeddings().weight.numel()
        tflop = step_tflop(model.base_model, lengths, head=head) / len(timed)
        peak = peak_tflops(self.environment["gpu"], args.dtype)
        mean_ms = statistics.fmean(timed.values()) * 1e3
        timing = summarize([s * 1e3 for s in timed.values()])
        shapes = [
            len(batch) * max(map(len, batch)) if batching != "packed" else args.tokens
            for step in timed
            for batch in batches[step]
        ]
        on_cuda = self.device.type == "cuda"
        return (
            "ok",
            None,
            {
                **found,
                "attends": ", ".join(dict.fromkeys(chosen)) or None,
                "ms_p20": timing.ms_p20,
                "ms_p50": timing.ms_p50,
                "ms_p80": timing.ms_p80,
                "tokens_per_s": args.tokens * len(timed) / sum(timed.values()),
                "steps_compiling": compiling,
                "mfu": utilisation(tflop, mean_ms, peak),
                "model_tflop": tflop,
                "peak_tflops": peak,
                "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_cuda else None,
                "peak_meaning": memory_meaning(self.device),
                "documents": len(lengths) / len(timed),
                "batches": len(batches[0]),
                "positions": sum(shapes) / len(timed),
                "graph_breaks": stats.graph_breaks,
                "recompilations": stats.recompilations,
                "compile_s": stats.compile_s,
            },
        )

    def set_attention(self, model: PreTrainedModel, attention: str) -> None:
        if attention.startswith(THEIRS):
            set_transformers(model, attention.removeprefix(THEIRS))
            return
        patch_or_refuse(model, attention, dtype=self.dtype, needs_grad=True)

    def batches(
        self, batching: str, attention: str
    ) -> tuple[list[list[Documents]], Callable[[list[Documents]], dict[str, Any]]]:
        """Each step's groups of documents, and what makes a batch of one."""
        if batching == "packed":
            whole = [[documents] for documents in self.steps]
            if attention.startswith(THEIRS):
                return whole, Flatten("flash" in attention)
            return whole, Pack(self.args.tokens, self.steps)
        steps = self.steps
        if batching == SORTED:
            steps = [sorted(documents, key=len, reverse=True) for documents in steps]
        return padded_batches(steps, self.args.tokens), pad

    def arguments(self, folder: str, mode: str, batches: int) -> TrainingArguments:
        args = self.args
        on_cuda = self.device.type == "cuda"
        compiled = {"torch_compile": True, "torch_compile_backend": args.compiler}
        return TrainingArguments(
            output_dir=folder,
            max_steps=args.warmup + args.steps,
            per_device_train_batch_size=1,  # of groups
            gradient_accumulation_steps=batches,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused" if on_cuda else "adamw_torch",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=not on_cuda,
            seed=args.seed,
            **(compiled if mode == "compiled" else {}),
        )


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure what is to do, and print the table; rows go to `--out`, if given."""
    rows = Run(parse(argv)).run()
    if rows:
        sys.stdout.write(end_to_end_section(rows) + "\n")
    return rows


if __name__ == "__main__":
    main()
