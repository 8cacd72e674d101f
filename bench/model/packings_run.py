"""One run of `packings.py`, whose docstring has its steps."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexvarlen.bench.bench_run import BenchRun
from flexvarlen.bench.model.accuracy import (
    ORACLE_DTYPE,
    Answer,
    Errors,
    errors_of,
    packed_answer,
    per_document,
)
from flexvarlen.bench.model.geometries import Case, log_normal_lengths, new_base_model
from flexvarlen.bench.model.step import Batch, forward_backward, free, outcome_of, seconds
from flexvarlen.bench.model.utilisation import noting_auto, peak_tflops, step_tflop, utilisation
from flexvarlen.bench.model.variants import Sizes, Variant, make_variant
from flexvarlen.measure import memory_meaning, peak_memory_mib, time_interleaved, watch_compilation
from flexvarlen.rows import Status, one_line

SUITE = "packings"
SLOW_STEP_S = 1.0  # variants whose step takes longer get a third of the repeats


@dataclass
class Live:
    """A variant on its way through the run."""

    case: Case
    variant: Variant
    compiled: Callable[..., Any]
    measures: dict[str, Any] = field(default_factory=dict)
    eager_s: float = 0.0
    compiled_s: float = 0.0


class Run(BenchRun):
    """The shared state of one run: model, packings, oracle, file."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(SUITE, args)
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        torch.manual_seed(args.seed)
        self.base = new_base_model(args.geometry, args.layers, self.dtype, self.device).train()
        config = self.base.config
        hidden = (1, args.tokens, config.hidden_size)
        self.input_ids = torch.randint(config.vocab_size, (1, args.tokens), device=self.device)
        self.cotangent = torch.randn(hidden, device=self.device, dtype=self.dtype)
        self.packings = [
            log_normal_lengths(args.tokens, args.mean, args.sigma, args.seed + index)
            for index in range(1 + args.packings)
        ]
        self.sizes = Sizes.of(args.tokens, *self.packings)
        self.caches = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

    def write(
        self, case: Case, status: Status, reason: str | None, measures: dict[str, Any] | None = None
    ) -> None:
        self.say(f"{case.variant}: {status}{'' if reason is None else ', ' + reason}")
        self.append(case.data(), status, reason, measures or {})

    # --- 1. oracle -------------------------------------------------------------------------------

    def make_oracle(self) -> None:
        """Oracle and peer of the first packing with gradients, of the last without."""
        first, last = self.packings[0], self.packings[-1]
        self.oracle = self.alone(first, ORACLE_DTYPE)
        self.peer = errors_of(self.alone(first, self.dtype), self.oracle)
        self.last_oracle = self.alone(last, ORACLE_DTYPE, gradients=False)
        self.last_peer = errors_of(self.alone(last, self.dtype, gradients=False), self.last_oracle)
        self.say(f"oracle done; peer's errors: {self.peer.outputs:.2g}, {self.peer.gradients:.2g}")

    def alone(self, lengths: list[int], dtype: torch.dtype, gradients: bool = True) -> Answer:
        answer = per_document(
            self.base, self.input_ids, lengths, self.cotangent, dtype=dtype, gradients=gradients
        )
        self.clean()
        return answer

    # --- 2. variants -----------------------------------------------------------------------------

    def prepare(self, name: str) -> Live | None:
        """Make, check and compile a variant; None if its row is written already."""
        args = self.args
        case = Case(
            variant=name,
            geometry=args.geometry,
            layers=self.base.config.num_hidden_layers,
            tokens=args.tokens,
            mean_doc=args.mean,
            sigma=args.sigma,
            seed=args.seed,
            dtype=args.dtype,
            compiler=args.compiler,
        )
        if self.seconds_since_begin() > args.start_until:
            self.write(case, "skipped", f"not begun within {args.start_until:g} s of the run")
            return None
        try:
            variant = make_variant(name, self.base, self.sizes)
            live = Live(case, variant, variant.compiled(args.compiler))
            reason = self.check_and_compile(live)
        except Exception as error:  # kernel packages assert, and raise types of their own
            self.write(case, *outcome_of(error))
        else:
            if reason is None:
                self.say(f"{name}: right and compiled, {live.measures}")
                return live
            self.write(case, "wrong", reason, live.measures)
        self.clean()
        return None

    def check_and_compile(self, live: Live) -> str | None:
        """The first eager and the first compiled step; why either is wrong, or None."""
        inputs = live.variant.inputs(self.packings[0])
        # Before anything is compiled: "auto" measures here, as it would at an eager first step.
        attends = live.variant.resolved(self.packings[0])
        live.measures["attends"] = attends
        if self.args.eager:
            with noting_auto() as chosen:
                error = self.errors(live, live.variant.model, inputs)
            live.measures["attends_eager"] = ", ".join(dict.fromkeys(chosen)) or attends
            live.measures |= {"error_eager": error.outputs, "grad_error_eager": error.gradients}
            reason = error.why_wrong(self.peer, self.dtype)
            if reason is not None:
                return f"eager: {reason}"
            live.eager_s = seconds(lambda: self.step(live.variant.model, inputs), self.device)
        begin = time.perf_counter()
        with watch_compilation() as stats, self.fresh_cache(), noting_auto() as chosen:
            error = self.errors(live, live.compiled, inputs)
        live.measures |= {
            "attends": ", ".join(dict.fromkeys(chosen)) or attends,
            "error": error.outputs,
            "error_worst_document": error.worst_document,
            "grad_error": error.gradients,
            "peer_error": self.peer.outputs,
            "peer_error_worst_document": self.peer.worst_document,
            "peer_grad_error": self.peer.gradients,
            "first_step_s": time.perf_counter() - begin,
            "compile_s": stats.compile_s,
            "graph_breaks": stats.graph_breaks,
            "graphs": stats.compilations,
            "break_reasons": stats.break_reasons,
        }
        reason = error.why_wrong(self.peer, self.dtype)
        live.compiled_s = seconds(lambda: self.step(live.compiled, inputs), self.device)
        return None if reason is None else f"compiled: {reason}"

    def fresh_cache(self) -> AbstractContextManager[None]:
        """Inductor caches of this variant alone, so that each is compiled cold."""
        if self.args.compiler != "inductor":
            return nullcontext()
        from torch._inductor.utils import fresh_cache

        # Kept on disk until the run ends: compiled code may be loaded from there late.
        return fresh_cache(dir=self.caches.name, delete=False)

    def errors(self, live: Live, call: Callable[..., Any], inputs: dict[str, Any]) -> Errors:
        outputs = self.step(call, inputs, keep=True)
        found = errors_of(packed_answer(live.variant.model, outputs[0][None]), self.oracle)
        del outputs
        self.clean()
        return found

    def step(
        self, call: Callable[..., Any], inputs: dict[str, Any], *, keep: bool = False
    ) -> list[Tensor]:
        """One training step without the optimizer: gradients dropped, forward, backward."""
        batch = Batch({"input_ids": self.input_ids, **inputs})
        return forward_backward(
            self.base, call, [batch], lambda outputs, batch: self.cotangent, keep=keep
        )

    # --- 3. timing -------------------------------------------------------------------------------

    def time(self, lives: list[Live]) -> None:
        """Interleaved timings, eager and then compiled; nothing may compile meanwhile."""
        if self.args.eager:
            steps = {live.case.variant: self.timed(live, live.variant.model) for live in lives}
            slow = {live.case.variant: live.eager_s for live in lives}
            self.record(lives, "eager_", steps, self.repeats(slow, self.args.eager_repeats))
        steps = {live.case.variant: self.timed(live, live.compiled) for live in lives}
        slow = {live.case.variant: live.compiled_s for live in lives}
        with watch_compilation() as stats:
            self.record(lives, "", steps, self.repeats(slow, self.args.repeats))
        for live in lives:
            live.measures["compilations_while_timing_all"] = stats.compilations

    def timed(self, live: Live, call: Callable[..., Any]) -> Callable[[], object]:
        inputs = live.variant.inputs(self.packings[0])

        def step() -> None:
            self.step(call, inputs)

        return step

    def repeats(self, seconds: dict[str, float], wanted: int) -> dict[str, int]:
        return {
            name: max(min(3, wanted), wanted // 3) if took > SLOW_STEP_S else wanted
            for name, took in seconds.items()
        }

    def record(
        self,
        lives: list[Live],
        prefix: str,
        steps: dict[str, Callable[[], object]],
        repeats: dict[str, int],
    ) -> None:
        timings = time_interleaved(
            steps, device=self.device, warmup=1, repeats=repeats, flush_l2=False, lead_in=1
        )
        tflop = step_tflop(self.base, self.packings[0])
        peak = peak_tflops(self.environment["gpu"], self.args.dtype)
        for live in lives:
            timing = timings[live.case.variant]
            found = dataclasses.asdict(timing) | {"mfu": utilisation(tflop, timing.ms_p50, peak)}
            live.measures |= {prefix + key: value for key, value in found.items()}
            live.measures |= {"model_tflop": tflop, "peak_tflops": peak}
        self.say(
            f"{prefix or 'compiled_'}timed: "
            + ", ".join(f"{name} {timing.ms_p50:.0f} ms" for name, timing in timings.items())
        )

    # --- 4. other packings -----------------------------------------------------------------------

    def finish(self, lives: list[Live]) -> None:
        """Peak memory, and a row of each; another, instead, once its other packings have run."""
        for live in lives:
            self.clean()
            live.measures |= self.once_timed(live)
            self.write(live.case, "ok", None, live.measures)
        for live in lives:
            self.clean()
            reason = self.other_packings(live)
            self.write(live.case, "ok" if reason is None else "wrong", reason, live.measures)

    def once_timed(self, live: Live) -> dict[str, Any]:
        """What is measured of a timed variant before any other packing."""
        return {
            "other_packings": 0,
            "peak_mib": peak_memory_mib(self.timed(live, live.compiled), self.device),
            "peak_meaning": memory_meaning(self.device),
            "capacity": self.sizes.capacity,
            "max_seqlen_bound": self.sizes.max_seqlen_bound,
            "documents": len(self.packings[0]),
            "longest_document": max(self.packings[0]),
        }

    def other_packings(self, live: Live) -> str | None:
        """Run the other packings; why one of them is wrong, or None."""
        last, reason, done = None, None, 0
        with watch_compilation() as stats:
            for lengths in self.packings[1:]:
                if self.seconds_since_begin() > self.args.packings_until:
                    break
                try:
                    (last,) = self.step(live.compiled, live.variant.inputs(lengths), keep=True)
                except Exception as error:
                    reason = f"raised on another packing: {one_line(error)}"
                    break
                done += 1
        if last is not None and done == len(self.packings) - 1:
            found = errors_of(Answer(last, {}), self.last_oracle)
            live.measures["error_last_packing"] = found.outputs
            wrong = found.why_wrong(self.last_peer, self.dtype)
            reason = None if wrong is None else f"on another packing: {wrong}"
        live.measures |= {
            "other_packings": done,
            "recompilations": stats.recompilations,
            "recompile_s": stats.compile_s,
            "recompile_reasons": stats.first_reasons(),
        }
        return reason

    # --- housekeeping ----------------------------------------------------------------------------

    def clean(self) -> None:
        free(self.device, self.base)
