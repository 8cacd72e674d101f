"""Training steps of the suite `model`: forward, next-token loss, backward, optimizer.

The model is compiled without its loss, which is the same code in every variant. The learning rate
is 0: AdamW does all its work, and each variant meets the same weights.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.bench.model.accuracy import (
    ORACLE_DTYPE,
    Answer,
    checkpoint_layers,
    errors_of,
    packed_answer,
    per_document,
)
from flexvarlen.bench.model.batches import Collection, positions_of, shapes_of
from flexvarlen.bench.model.cases import SORTED, split_variant
from flexvarlen.bench.model.compared import why_not_tried
from flexvarlen.bench.model.geometries import new_causal_lm
from flexvarlen.bench.model.measure import Checked, Measurement
from flexvarlen.bench.model.step import Batch, forward_backward, free, next_token_gradient
from flexvarlen.bench.model.utilisation import noting_auto, step_tflop, utilisation
from flexvarlen.bench.model.variants import (
    Sizes,
    Unsupported,
    Variant,
    compiled_alone,
    make_variant,
)
from flexvarlen.measure import Timing, watch_compilation


def named(attention: str) -> str | None:
    """What attends by a variant's name; None of transformers' own."""
    return None if attention.startswith("transformers:") else attention.partition("@")[0]


class Training(Measurement):
    """A training case: shared weights, one optimizer, one oracle."""

    passes = ("",)

    def prepare(self) -> None:
        case = self.case
        torch.manual_seed(case.seed)
        self.lm = new_causal_lm(case.geometry, case.layers, self.dtype, self.device).train()
        self.base = self.lm.base_model
        self.head: Tensor = self.lm.get_output_embeddings().weight
        if case.checkpointing:
            checkpoint_layers(self.base)
        lengths = case.lengths(self.options.text)
        ids = torch.randint(self.lm.config.vocab_size, (1, case.tokens), device=self.device)
        self.collection = Collection(ids, tuple(lengths))
        self.sizes = Sizes.of(case.tokens, lengths)
        oracle = self.alone(ORACLE_DTYPE)
        self.peer = errors_of(self.alone(self.dtype), oracle)
        self.oracle = oracle.on_host()
        del oracle
        self.optimizer = torch.optim.AdamW(
            self.lm.parameters(), lr=0.0, weight_decay=0.0, fused=True
        )
        # Its state is there before any step, so that all steps' peaks hold it.
        for parameter in self.lm.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        free(self.device, self.lm)

    def alone(self, dtype: torch.dtype) -> Answer:
        """Each document alone, and its loss's gradients."""
        head, labels = self.head.detach().to(dtype), self.collection.labels

        def gradient(outputs: Tensor, rows: slice) -> Tensor:
            return next_token_gradient(outputs, head, labels[:, rows], self.collection.counted)

        ids, lengths = self.collection.ids, self.collection.lengths
        answer = per_document(self.base, ids, lengths, gradient, dtype=dtype, checkpointing=True)
        free(self.device, self.lm)
        return answer

    def modules(self) -> Sequence[nn.Module]:
        return (self.lm,) if hasattr(self, "lm") else ()

    # --- one variant -----------------------------------------------------------------------------

    def check(self, variant: str) -> Checked:
        """Make a variant, compile it if asked, and hold its first step against the oracle."""
        batching, attention = split_variant(variant)
        reason = None if self.options.variants else why_not_tried(self.case, variant)
        if reason is not None:
            raise Unsupported(reason)
        made = make_variant(attention, self.base, self.sizes)
        lengths = self.collection.lengths
        # "auto" measures here, as it would at an eager first step, before anything is compiled.
        attends = made.resolved(lengths) if batching == "packed" else None
        batches = self.batches(batching, made)
        call = self.call(made, batching, batches)
        begin = time.perf_counter()
        with watch_compilation() as stats, noting_auto() as chosen:
            outputs = self.forward_backward(call, batches, keep=True)
        first_step_s = time.perf_counter() - begin
        whole = torch.cat(outputs)
        if batching == SORTED:
            whole = self.collection.in_order(whole, self.collection.by_length())
        found = packed_answer(self.base, whole[None])
        error = errors_of(found, self.oracle.on(self.device))
        measures = {
            "attends": ", ".join(dict.fromkeys(chosen)) or attends or named(attention),
            "documents": len(lengths),
            "longest_document": max(lengths),
            "forwards": len(batches),
            "positions": positions_of(batches),
            "error": error.outputs,
            "error_worst_document": error.worst_document,
            "grad_error": error.gradients,
            "oracle_dtype": str(ORACLE_DTYPE).removeprefix("torch."),
            "peer_error": self.peer.outputs,
            "peer_error_worst_document": self.peer.worst_document,
            "peer_grad_error": self.peer.gradients,
            "first_step_s": first_step_s,
            "compile_s": stats.compile_s,
            "graphs": stats.compilations,
            "graph_breaks": stats.graph_breaks,
            "break_reasons": stats.break_reasons,
        }
        step = partial(self.step, call, batches)
        return Checked({"": step}, measures, error.why_wrong(self.peer, self.dtype))

    def batches(self, batching: str, variant: Variant) -> list[Batch]:
        """The documents as a variant gets them."""
        if batching == "packed":
            return self.collection.packed(variant.inputs(self.collection.lengths))
        if batching == "serial":
            return self.collection.serial()
        order = self.collection.by_length() if batching == SORTED else None
        return self.collection.padded(self.case.tokens, order)

    def call(self, variant: Variant, batching: str, batches: Sequence[Batch]) -> Callable[..., Any]:
        """The model as it is called; compiled for any shape where there are several."""
        if self.case.mode == "eager":
            eager: Callable[..., Any] = variant.model
            return eager
        return compiled_alone(
            variant.model,
            self.compiler,
            fullgraph=variant.fullgraph and batching == "packed",
            dynamic=True if shapes_of(batches) > 1 else None,
        )

    def step(self, call: Callable[..., Any], batches: Sequence[Batch]) -> None:
        """What is timed."""
        self.forward_backward(call, batches)
        self.optimizer.step()

    def forward_backward(
        self, call: Callable[..., Any], batches: Sequence[Batch], *, keep: bool = False
    ) -> list[Tensor]:
        return forward_backward(self.lm, call, batches, self.gradient, keep=keep)

    def gradient(self, outputs: Tensor, batch: Batch) -> Tensor:
        assert batch.labels is not None
        return next_token_gradient(outputs, self.head, batch.labels, self.collection.counted)

    # --- the clock -------------------------------------------------------------------------------

    def concluded(self, pass_: str, timings: dict[str, Timing]) -> dict[str, Any]:
        timing = timings[pass_]
        tflop = step_tflop(self.base, self.collection.lengths, head=self.head.numel())
        return dataclasses.asdict(timing) | {
            "tokens_per_s": self.case.tokens / (timing.ms_p50 / 1e3),
            "model_tflop": tflop,
            "peak_tflops": self.peak_tflops,
            "mfu": utilisation(tflop, timing.ms_p50, self.peak_tflops),
        }
