"""Suite "end-to-end": transformers' `Trainer`, packed and padded: eager, compiled, and with LoRA.

A step's documents are Python's help topics in random order, exactly `tokens` of them; each variant
gets the same documents in the same steps. A variant is `<batching>:<attention>`:

    packed:auto               `PackedCollator` and `patch_model`; or any backend in place of "auto"
    packed:auto@kept          the same, and checkpointed layers keep attention's outputs
    packed:transformers:NAME  `DataCollatorWithFlattening`, with FlashAttention's arguments where
                              NAME is one: its fastest form
    padded:transformers:NAME  padded batches and an attention_mask: the step's documents in as many
                              batches of equal count as keep each within `tokens` positions
    padded-sorted:…           the same, a step's documents sorted by length: the fewest pads that
                              `train_sampling_strategy="group_by_length"` can reach

Loss and gradients of the first step are compared with each document alone in fp64; a variant that
is wrong is not timed. Trainer takes all GPUs that it sees: show the process one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, PreTrainedModel, PrinterCallback, TrainingArguments

import flexvarlen as fv
from flexvarlen.bench.suites.model.attends import taken_for
from flexvarlen.bench.suites.model.geometries import GeometryCase
from flexvarlen.bench.suites.training import end_to_end_tables, texts
from flexvarlen.bench.suites.training.end_to_end_tables import KEPT, LORA, parts_of
from flexvarlen.bench.suites.training.trainer import (
    CheckedTrainer,
    Clock,
    check_first_step,
    first_step_alone,
    fresh_accelerate,
)
from flexvarlen.measure import CompileStats, memory_meaning, summarize, watch_compilation
from flexvarlen.report.records import Record
from flexvarlen.report.table import Table
from flexvarlen.runner.each import measure_each
from flexvarlen.runner.suite import Finding, Findings, Options, Suite, require_known
from flexvarlen.verify.experiment.inputs import THEIRS
from flexvarlen.verify.experiment.step import checkpoint_layers
from flexvarlen.verify.experiment.variant import set_transformers

PACKED = (
    "packed:auto",
    f"packed:auto{KEPT}",
    "packed:transformers:flash_attention_3",
    "packed:transformers:flash_attention_2",
    "packed:transformers:flex_attention",
)
PADDED = (
    "padded:transformers:sdpa",
    "padded-sorted:transformers:sdpa",
    "padded:transformers:flash_attention_2",
    "padded-sorted:transformers:flash_attention_2",
)
WITH_LORA = (PACKED[0], *PACKED[2:4])
ON_CPU = (*PACKED[:2], *PADDED[:2])
KNOWN = (
    *PACKED,
    *PADDED,
    *(f"packed:{backend}{kept}" for backend in fv.BACKENDS for kept in ("", KEPT)),
    *(f"packed:{THEIRS}{name}" for name in ("eager", "sdpa", "flash_attention_4")),
)
LEARNING_RATE = 1e-5
PROJECTIONS = [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")]
ATTENTION = (
    torch.ops.flexvarlen.cu_seqlens_forward.default,  # of FlashAttention and varlen
    torch.ops.flexvarlen.sdpa_forward.default,
)
"""Operators whose outputs `@kept` keeps."""


@dataclass(frozen=True)
class TrainerCase(GeometryCase):
    """One model on the same documents.

    Attributes:
        mode: "eager", "compiled", or "lora": eager, and adapters alone are trained.
        tokens: of a step's documents.
        longest: tokens at which a document is cut.
        warmup, steps: before the clock, and timed.
    """

    geometry: str = "qwen3-1.7b"
    layers: int = 28
    mode: str = "eager"
    tokens: int = 32_768
    longest: int = 8192
    warmup: int = 3
    steps: int = 10
    checkpointing: bool = True

    @property
    def name(self) -> str:
        return f"{self.geometry}-{self.mode}"

    def documents(self) -> list[list[texts.Document]]:
        topics = texts.topic_ids(self.vocab_size, self.longest)
        return texts.full_rows(topics, self.tokens, self.warmup + self.steps, self.seed)

    def new_causal_lm(self, device: torch.device) -> PreTrainedModel:
        """Without transformers' cache, which would leak in train mode."""
        model = self.new_model(AutoModelForCausalLM, device, use_cache=False)
        if self.mode == LORA:
            from peft import LoraConfig, inject_adapter_in_model

            # With B = 0, as LoRA begins, A has no gradient to compare.
            lora = LoraConfig(target_modules=PROJECTIONS, init_lora_weights=False, r=16)
            inject_adapter_in_model(lora, model)
        return model


class EndToEnd(Suite[TrainerCase]):
    name: ClassVar[str] = "end-to-end"

    def cases(self, options: Options) -> Sequence[TrainerCase]:
        case = TrainerCase()
        if options.quick:
            small: dict[str, Any] = {
                "geometry": "qwen3-tiny",
                "layers": 2,
                "tokens": 96,
                "longest": 40,
            }
            case = replace(case, **small, warmup=1, steps=2, dtype=options.dtype)
        return [case, replace(case, mode="compiled"), replace(case, mode=LORA)]

    def variants(self, case: TrainerCase, options: Options) -> Sequence[str]:
        if not options.on_gpu:
            return ON_CPU if case.mode == "eager" else ON_CPU[:1]
        return {"eager": PACKED + PADDED, "compiled": PACKED, LORA: WITH_LORA}[case.mode]

    def measure(self, case: TrainerCase, variants: Sequence[str], options: Options) -> Findings:
        if options.on_gpu and torch.cuda.device_count() > 1:
            raise ValueError(
                "one GPU must be visible, Trainer takes all; set CUDA_VISIBLE_DEVICES."
            )
        run = _TrainerCase(case, options)
        require_known(variants, KNOWN)
        return measure_each(case.name, variants, run.finding, options.device)

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return map(end_to_end_tables.table, end_to_end_tables.groups_of(records))

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        gain = "`auto` speedup over this variant"
        shown = ("batch, attention", "tokens/s", "peak GiB", "graph breaks", gain)
        return [table.only(*shown) for table in self.tables(records)]

    def figures(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        groups = end_to_end_tables.groups_of([r for r in records if r.case["mode"] != LORA])
        return [path for group in groups for path in end_to_end_tables.draw(group, folder)]


class _TrainerCase:
    def __init__(self, case: TrainerCase, options: Options) -> None:
        self.case, self.options, self.device = case, options, options.device
        self.dtype = case.torch_dtype
        self.steps = case.documents()
        new_model = partial(case.new_causal_lm, self.device)
        self.first = first_step_alone(new_model, self.steps[0], dtype=self.dtype)

    def finding(self, variant: str) -> Finding:
        case = self.case
        _, attention, kept = parts_of(variant)
        model = self.model(attention, kept=kept)
        groups, collate = self.batches(variant)
        clock = Clock(self.device, case.warmup)
        checked: list[tuple[dict[str, Any], str | None]] = []
        with (
            fresh_accelerate(),
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            watch_compilation() as stats,
        ):
            trainer = CheckedTrainer(
                model=model,
                args=self.arguments(folder, len(groups[0])),
                train_dataset=[group for step in groups for group in step],
                data_collator=lambda items: collate(items[0]),
                callbacks=[clock],
            )
            trainer.remove_callback(PrinterCallback)

            def check(loss: float) -> bool:
                checked.append(check_first_step(self.first, model, loss))
                return checked[0][1] is None

            trainer.go_on_after_first_backward = check
            trainer.train()
        ((measures, reason),) = checked
        if reason is not None:
            return Finding(variant, "wrong", reason, measures)
        batch = texts.pack(case.tokens, self.steps)(self.steps[0])
        attends = taken_for(model, batch, self.dtype) if attention == "auto" else None
        measures |= {"attends": attends}
        return Finding(variant, "ok", None, measures | self.measures(variant, clock, groups, stats))

    def model(self, attention: str, *, kept: bool) -> PreTrainedModel:
        model = self.case.new_causal_lm(self.device)
        name = attention.removeprefix(THEIRS)
        if attention == name:
            fv.patch_model(model, name)
        else:
            set_transformers(model, name)
        if self.case.checkpointing:
            contexts = partial(create_selective_checkpoint_contexts, list(ATTENTION))
            checkpoint_layers(model, contexts if kept else None)
        return model

    def batches(self, variant: str) -> tuple[list[list[list[texts.Document]]], texts.Collate]:
        """Each step's groups of documents, and what makes a batch of one."""
        batching, attention, _ = parts_of(variant)
        if batching == "packed":
            whole = [[documents] for documents in self.steps]
            if attention.startswith(THEIRS):
                return whole, texts.flatten(flash="flash" in attention)
            return whole, texts.pack(self.case.tokens, self.steps)
        steps = self.steps
        if batching == "padded-sorted":
            steps = [sorted(documents, key=len, reverse=True) for documents in steps]
        return texts.padded_batches(steps, self.case.tokens), texts.pad

    def arguments(self, folder: str, batches: int) -> TrainingArguments:
        on_gpu = self.options.on_gpu
        compiled = {"torch_compile": True}
        if self.options.quick:
            compiled["torch_compile_backend"] = "eager"  # type: ignore[assignment]
        return TrainingArguments(
            output_dir=folder,
            max_steps=self.case.warmup + self.case.steps,
            train_sampling_strategy="sequential",
            per_device_train_batch_size=1,  # of groups
            gradient_accumulation_steps=batches,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=not on_gpu,
            seed=self.case.seed,
            **(compiled if self.case.mode == "compiled" else {}),
        )

    def measures(
        self,
        variant: str,
        clock: Clock,
        groups: list[list[list[texts.Document]]],
        stats: CompileStats,
    ) -> dict[str, Any]:
        case, on_gpu = self.case, self.options.on_gpu
        timed, compiling = clock.steady()
        lengths = [len(ids) for step in timed for ids in self.steps[step]]
        timing = summarize([seconds * 1e3 for seconds in timed.values()])
        packed = variant.startswith("packed")
        positions = [
            case.tokens if packed else len(group) * max(map(len, group))
            for step in timed
            for group in groups[step]
        ]
        return {
            **asdict(timing),
            "tokens_per_s": case.tokens * len(timed) / sum(timed.values()),
            "steps_compiling": compiling,
            "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None,
            "peak_meaning": memory_meaning(self.device),
            "documents": len(lengths) / len(timed),
            "batches": len(groups[0]),
            "positions": sum(positions) / len(timed),
            "graph_breaks": stats.graph_breaks,
            "recompilations": stats.recompilations,
            "compile_s": stats.compile_s,
            "texts_crc32": texts.crc_of(self.steps),
        }


SUITE = EndToEnd()
