"""Suite "convergence": a small model trained from scratch, packed and padded.

A Llama of 20M parameters learns Python's help topics and the standard library's docstrings. Every
run of a seed has the same initial parameters and takes the same documents in the same steps, with
the same labels (a document's first token is none) and the same schedule of the learning rate:

    padded        a step's documents in one batch, padded to the longest, transformers' sdpa with
                  an attention_mask, not patched
    a backend     the same documents in one packed row, patched
    unpatched     the packed row through transformers' sdpa, not patched: what the verdict must see

Parameters are fp32, the forward runs under autocast. The gradient of the first step is compared
with that of each document alone; a run that is wrong is trained all the same.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.optimization import get_cosine_schedule_with_warmup

import flexvarlen as fv
from flexvarlen.bench.suites import FrozenCase
from flexvarlen.bench.suites.model.attends import taken_for
from flexvarlen.bench.suites.training import convergence_tables, texts
from flexvarlen.bench.suites.training.convergence_tables import PADDED, UNPATCHED
from flexvarlen.bench.suites.training.trainer import check_first_step, first_step_alone
from flexvarlen.measure import memory_meaning, peak_memory_mib
from flexvarlen.measure.timing import synchronize
from flexvarlen.report.records import Record, records_alike
from flexvarlen.report.table import Table
from flexvarlen.runner.each import measure_each
from flexvarlen.runner.suite import Finding, Findings, Options, Suite, require_known
from flexvarlen.verify.experiment.alone import Alone
from flexvarlen.verify.experiment.seed_noise import final_loss

ON_GPU = (PADDED, "auto", "fa3", "fa4", "fa2", "varlen", "flex", "flex_fa4", "nested", UNPATCHED)
ON_CPU = (PADDED, "auto", "sdpa", "reference", UNPATCHED)
SEEDS = 5
FEWEST_TOKENS = 16  # shorter docstrings only repeat a name
WARMUP_STEPS = 10  # before tokens per second are counted
MAX_NORM = 1.0


@dataclass(frozen=True)
class ConvergenceCase(FrozenCase):
    """One initialisation and one order of the documents.

    Attributes:
        seed: of both.
        tokens: of a packed row, at most.
        longest: tokens at which a document is cut.
        dtype: of the forward.
    """

    seed: int
    steps: int = 500
    tokens: int = 8192
    longest: int = 512
    vocabulary: int = 8192
    hidden: int = 384
    layers: int = 8
    learning_rate: float = 1e-3
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.steps}-steps-seed{self.seed}"

    def new_model(self, device: torch.device) -> PreTrainedModel:
        """In train mode, with the seed's initial parameters."""
        heads = self.hidden // (64 if self.hidden >= 128 else 16)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=self.tokens,
        )
        torch.manual_seed(self.seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
        return model.to(device).train()

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)

    def rows(self) -> list[list[texts.Document]]:
        """The documents of each step: all rows in random order before any comes again."""
        rows = _rows(self.vocabulary, self.longest, self.tokens)
        rng = random.Random(self.seed)
        order: list[int] = []
        while len(order) < self.steps:
            order += rng.sample(range(len(rows)), len(rows))
        return [rows[index] for index in order[: self.steps]]


@cache
def _rows(vocabulary: int, longest: int, tokens: int) -> list[list[texts.Document]]:
    every = texts.topics() + texts.docstrings()
    found = texts.document_ids(every, vocabulary, longest=longest, fewest=FEWEST_TOKENS)
    return texts.packed_rows(found, tokens)


class Convergence(Suite[ConvergenceCase]):
    """Each variant trained on several seeds; the verdict is taken over all of them."""

    name: ClassVar[str] = "convergence"

    def cases(self, options: Options) -> Sequence[ConvergenceCase]:
        case = ConvergenceCase(0)
        if options.quick:
            small: dict[str, Any] = {"steps": 4, "tokens": 96, "longest": 48, "vocabulary": 300}
            case = replace(case, **small, hidden=32, layers=1, dtype=options.dtype)
        return [replace(case, seed=seed) for seed in range(3 if options.quick else SEEDS)]

    def variants(self, case: ConvergenceCase, options: Options) -> Sequence[str]:
        return ON_GPU if options.on_gpu else ON_CPU

    def measure(self, case: ConvergenceCase, variants: Sequence[str], options: Options) -> Findings:
        rows, device = case.rows(), options.device
        first = first_step_alone(
            partial(case.new_model, device),
            rows[0],
            dtype=getattr(torch, case.dtype),
            precision=partial(case.precision, device),
        )
        known = (*ON_GPU, "sdpa", "reference", *fv.BACKENDS)

        def train(variant: str) -> Finding:
            return Training(case, variant, rows, device).finding(first)

        require_known(variants, known)
        return measure_each(case.name, variants, train, options.device)

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return map(convergence_tables.table, records_alike(records, ("variant", "seed")))

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        shown = ("run", "verdict", "seeds", "final loss", "difference")
        return [table.only(*shown) for table in self.tables(records)]

    def figures(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        largest = max(records_alike(records, ("variant", "seed")), key=len)
        return convergence_tables.draw(largest, folder)


class Training:
    """One training of a variant, on the documents of each step."""

    def __init__(
        self,
        case: ConvergenceCase,
        variant: str,
        rows: Sequence[Sequence[texts.Document]],
        device: torch.device,
    ) -> None:
        self.case, self.variant, self.rows, self.device = case, variant, rows, device
        self.model = case.new_model(device)
        if variant not in (PADDED, UNPATCHED):
            fv.patch_model(self.model, variant)
        self.collate = texts.pad if variant == PADDED else texts.pack(case.tokens, rows)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            case.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=device.type == "cuda",
        )
        self.schedule = get_cosine_schedule_with_warmup(
            self.optimizer, case.steps // 20, case.steps
        )
        self.batches = [self.batch(row) for row in rows]
        self.losses: list[Tensor] = []

    def batch(self, documents: Sequence[texts.Document]) -> texts.Inputs:
        """Keyword arguments of a forward, on the host."""
        batch = self.collate(documents)
        if self.variant == UNPATCHED:
            del batch["packed_layout"], batch["use_cache"]
        labels = sum(map(len, documents)) - len(documents)
        return batch | {"num_items_in_batch": torch.tensor(labels)}

    def backward(self, index: int) -> None:
        inputs = {
            name: x.to(self.device, non_blocking=True)
            if isinstance(x, Tensor | fv.PackedLayout)
            else x
            for name, x in self.batches[index].items()
        }
        with self.case.precision(self.device):
            loss = self.model(**inputs).loss
        loss.backward()
        self.losses.append(loss.detach())

    def update(self) -> None:
        clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finding(self, first: Alone) -> Finding:
        """Train to the end."""
        self.backward(0)
        measures, reason = check_first_step(first, self.model, float(self.losses[0]))
        self.update()
        steps, warmup = self.case.steps, min(WARMUP_STEPS, self.case.steps - 1)
        begun: list[float] = []

        def train() -> None:
            for index in range(1, steps):
                if index == warmup:
                    synchronize(self.device)
                    begun.append(time.perf_counter())
                self.backward(index)
                self.update()
            synchronize(self.device)

        peak = peak_memory_mib(train, self.device)
        seconds = time.perf_counter() - begun[0]
        losses: list[float] = torch.stack(self.losses).double().tolist()
        tokens = [sum(map(len, row)) for row in self.rows]
        is_auto, dtype = self.variant == "auto", getattr(torch, self.case.dtype)
        measures |= {
            "attends": taken_for(self.model, self.batches[0], dtype) if is_auto else None,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "losses": [round(loss, 5) for loss in losses],
            "final_loss": final_loss(losses),
            "ms_step": seconds / (steps - warmup) * 1e3,
            "tokens_per_s": sum(tokens[warmup:]) / seconds,
            "tokens": sum(tokens),
            "labels": sum(int(batch["num_items_in_batch"]) for batch in self.batches),
            "positions": sum(batch["input_ids"].numel() for batch in self.batches),
            "peak_mib": peak,
            "peak_meaning": memory_meaning(self.device),
            "texts_crc32": texts.crc_of(self.rows),
        }
        return Finding(self.variant, "ok" if reason is None else "wrong", reason, measures)


SUITE = Convergence()
