"""`Measurement`: a case of the suite `model`: its variants checked, then timed, interleaved."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flexvarlen.bench.model.cases import ModelCase, split_variant
from flexvarlen.bench.model.step import free, outcome_of, repeats_for, seconds
from flexvarlen.bench.model.utilisation import peak_tflops
from flexvarlen.bench.suite import DeviceLost, Finding, Options
from flexvarlen.drift.op.failures import is_lost
from flexvarlen.measure import (
    Timing,
    environment,
    memory_meaning,
    peak_memory_mib,
    summarize,
    time_interleaved,
    watch_compilation,
)

MOST_REPEATS = 15
SLOW_S = 2.0
"""A call that takes longer is not timed again: the seconds of its second run stand, if nothing was
compiled in them. A shorter one is timed after another of its own, as a hot GPU's clocks follow the
power that the last half second drew."""

# Variants of one class share their code objects, and Dynamo's limits go by code object.
LIMITS = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}


@dataclass
class Checked:
    """A variant after its check.

    Attributes:
        calls: of each pass, what is timed.
        measures: of all passes.
        wrong: why its numbers are false; it is then not timed.
    """

    calls: dict[str, Callable[[], object]]
    measures: dict[str, Any]
    wrong: str | None


@dataclass
class Live:
    """A variant that is right, ready for the clock: of each pass its seconds and measures.

    `settled`: nothing was compiled in those seconds.
    """

    checked: Checked
    took: dict[str, float]
    measures: dict[str, dict[str, Any]]
    settled: bool = True


class Measurement(ABC):
    """One case in one process.

    Args:
        case: what is measured.
        options: of the run.
    """

    passes: ClassVar[tuple[str, ...]]

    def __init__(self, case: ModelCase, options: Options) -> None:
        self.case, self.options = case, options
        self.device = options.device
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.compiler = "inductor" if options.on_gpu else "aot_eager"
        self.peak_tflops = peak_tflops(environment(self.device)["gpu"], case.dtype)
        self.findings: list[Finding] = []
        self.lives: dict[str, Live] = {}

    @abstractmethod
    def prepare(self) -> None:
        """The model, its documents, the oracle."""

    @abstractmethod
    def check(self, variant: str) -> Checked:
        """A variant's first run, held against the oracle; raises what the variant raises."""

    @abstractmethod
    def concluded(self, pass_: str, timings: dict[str, Timing]) -> dict[str, Any]:
        """Measures of one pass, of the timings of all passes of a variant."""

    @abstractmethod
    def modules(self) -> Sequence[torch.nn.Module]:
        """Whose gradients may be dropped between variants."""

    def measure(self, variants: Sequence[str]) -> list[Finding]:
        """A finding a variant and pass.

        Raises:
            ValueError: a variant that is none.
            DeviceLost: nothing can be measured any more in this process.
        """
        for variant in variants:
            split_variant(variant)
        with torch._dynamo.config.patch(LIMITS), _young_objects_alone():
            try:
                self.prepare()
            except Exception as error:  # no room for the oracle, say: then of every variant
                if is_lost(error, self.device):
                    message = f"the oracle of {self.case.name} killed the device; run again"
                    raise DeviceLost(message, ()) from error
                for variant in variants:
                    self.give_up(variant, error)
                return self.findings
            say = self.options.say
            say(f"{self.case.name}: oracle done")
            for variant in variants:
                self.attempt(variant)
                outcome = "right" if variant in self.lives else self.findings[-1].status
                say(f"{self.case.name}: {variant}: {outcome}")
            self.time()
            say(f"{self.case.name}: timed")
        return self.findings

    # --- one variant -----------------------------------------------------------------------------

    def attempt(self, variant: str) -> None:
        """Check, and measure memory; a finding says why a variant does not go on."""
        try:
            checked = self.check(variant)
            if checked.wrong is None:
                self.lives[variant] = self.alive(checked)
            else:
                for pass_ in self.passes:
                    wrong = Finding(variant, "wrong", checked.wrong, checked.measures, pass_)
                    self.findings.append(wrong)
        except Exception as error:  # kernel packages assert, and raise types of their own
            self.give_up(variant, error)
        free(self.device, *self.modules())

    def alive(self, checked: Checked) -> Live:
        """The second run of each pass, for its time and its peak of memory."""
        live = Live(checked, {}, {})
        for pass_, call in checked.calls.items():

            def timed(pass_: str = pass_, call: Callable[[], object] = call) -> None:
                live.took[pass_] = seconds(call, self.device)

            with watch_compilation() as stats:
                peak_mib = peak_memory_mib(timed, self.device)
            live.settled = live.settled and not stats.compilations
            live.measures[pass_] = {
                "peak_mib": peak_mib,
                "peak_meaning": memory_meaning(self.device),
            }
        return live

    def give_up(self, variant: str, error: Exception) -> None:
        """The findings of every pass of a variant that raised.

        Raises:
            DeviceLost: the error took the device with it.
        """
        lost = is_lost(error, self.device)
        status, reason = outcome_of(error)
        measures = {"fatal": True} if lost else {}
        for pass_ in self.passes:
            self.findings.append(Finding(variant, status, reason, measures, pass_))
        if lost:
            message = f"{variant} of {self.case.name} killed the device; run again to go on"
            raise DeviceLost(message, self.findings) from error

    # --- the clock -------------------------------------------------------------------------------

    def time(self) -> None:
        """Interleaved timings of all that is right; what raises meanwhile is left out, and said."""
        while self.lives:
            calls, once, fast = {}, {}, {}
            for variant, live in self.lives.items():
                for pass_, taken in live.took.items():
                    name = f"{variant} {pass_}"
                    if taken > SLOW_S and live.settled:
                        once[name] = summarize([taken * 1e3])
                    else:
                        calls[name], fast[name] = live.checked.calls[pass_], taken
            called: list[str] = []
            try:
                with watch_compilation() as stats:
                    timings = time_interleaved(
                        calls,
                        device=self.device,
                        warmup=0,  # each ran twice
                        repeats=repeats_for(fast, self.options.seconds, MOST_REPEATS),
                        flush_l2=False,
                        lead_in=1,
                        progress=called.append,
                    )
            except Exception as error:
                if not called:
                    raise
                culprit = called[-1].partition(" ")[0]
                del self.lives[culprit]
                self.give_up(culprit, error)
            else:
                self.conclude(timings | once, stats.compilations)
                return
            free(self.device, *self.modules())

    def conclude(self, timings: dict[str, Timing], compilations: int) -> None:
        for variant, live in self.lives.items():
            own = {pass_: timings[f"{variant} {pass_}"] for pass_ in self.passes}
            for pass_ in self.passes:
                measures = live.checked.measures | live.measures[pass_]
                measures |= self.concluded(pass_, own)
                measures["compilations_while_timing_all"] = compilations
                self.findings.append(Finding(variant, "ok", None, measures, pass_))


@contextmanager
def _young_objects_alone() -> Iterator[None]:
    """Garbage collections inside look at no object made before: each would take a third of a
    second, twice a variant."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
