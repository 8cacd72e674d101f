"""One cell of the kernel grid: its variants prepared, judged and timed, all in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.backends import BACKENDS, get_backend, why_not
from flexvarlen.bench.kernels_accuracy import Oracle
from flexvarlen.bench.kernels_cells import Cell
from flexvarlen.bench.mask_build_accuracy import Answer
from flexvarlen.bench.mask_build_run import ERRORS, Wrong
from flexvarlen.bench.raw_kernels import RAW, Inputs, Prepared, behind_varlen
from flexvarlen.bench.variants import Unsupported
from flexvarlen.mask import DocumentMask
from flexvarlen.measure import BUSY_MS, time_host_and_device
from flexvarlen.rows import Status, one_line

if TYPE_CHECKING:
    from flexvarlen.bench.kernels_run import Run

PASSES = ("forward", "backward")
RAW_PREFIX = "raw:"

MAX_REPEATS, MIN_REPEATS = 30, 5
LEAD_IN = 1  # an untimed call before a timed one: other variants' drove its code from caches
LEAD_IN_BELOW_MS = 2.0  # longer device work hides the host's time


@dataclass
class Live:
    """A variant on its way to the clock; a pass that is not to be timed has no call."""

    variant: str
    calls: dict[str, Callable[[], object]]
    measures: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    timed: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a variant gave on one pass, before it is a row."""

    status: Status
    reason: str | None = None
    measures: Mapping[str, Any] = field(default_factory=dict)


class MeasuredCell:
    """One cell: inputs, oracle, variants alive, what became of them."""

    def __init__(self, run: Run, cell: Cell) -> None:
        self.run, self.cell = run, cell
        self.outcomes: dict[tuple[str, str], Outcome] = {}
        self.lives: list[Live] = []

    def measure(self) -> None:
        cell, run = self.cell, self.run
        lengths = cell.lengths()
        dtype: torch.dtype = getattr(torch, cell.dtype)
        heads = (cell.num_heads, cell.num_kv_heads)
        try:
            self.inputs = Inputs.random(
                lengths, heads, cell.head_dim, dtype, run.device, cell.causal, cell.seed
            )
            self.layout = fv.PackedLayout.from_lengths(lengths, device=run.device)
            self.mask = DocumentMask.of(self.layout, causal=cell.causal)
            qkv = (self.inputs.q, self.inputs.k, self.inputs.v)
            self.oracle = Oracle(qkv, self.inputs.cotangent, lengths, cell.causal)
        except torch.OutOfMemoryError as error:
            for variant in run.variants:
                self.give_up(variant, "oom", one_line(error))
            return
        self.flops = {
            pass_: self.mask.flops(cell.head_dim, cell.num_heads, backward=pass_ == "backward")
            for pass_ in PASSES
        }
        # "auto" last: the kernels that it times are compiled by then.
        for variant in sorted(run.variants, key=lambda name: name == "auto"):
            self.attempt(variant)
        self.oracle.first = None
        self.time_all()

    # --- one variant -----------------------------------------------------------------------------

    def attempt(self, variant: str) -> None:
        """Prepare and judge; an outcome says why a variant does not go on."""
        killed = self.run.killed_by(self.cell, variant)
        if killed is not None:
            for pass_ in PASSES:
                self.outcomes[variant, pass_] = killed
            return
        try:
            self.prepare(variant)
        except Wrong as error:
            self.give_up(variant, "wrong", str(error), error.measures)
        except Unsupported as error:
            self.give_up(variant, "unsupported", str(error))
        except (NotImplementedError, ImportError) as error:
            self.give_up(variant, "unsupported", one_line(error))
        except torch.OutOfMemoryError as error:
            self.give_up(variant, "oom", one_line(error))
        except ERRORS as error:
            fatal = self._device_is_dead()
            self.give_up(variant, "failed", one_line(error), {"fatal": True} if fatal else {})
            if fatal:
                message = f"{variant} killed the device; run again to go on without it"
                raise SystemExit(message) from error
        else:
            return
        self.run.clean()

    def _device_is_dead(self) -> bool:
        try:
            self.run.synchronize()
        except RuntimeError:
            return True
        return False

    def give_up(
        self,
        variant: str,
        status: Status,
        reason: str,
        measures: Mapping[str, Any] | None = None,
    ) -> None:
        """The outcome of every pass that has none yet."""
        for pass_ in PASSES:
            self.outcomes.setdefault((variant, pass_), Outcome(status, reason, measures or {}))

    def prepare(self, variant: str) -> None:
        """The first call, its verdict, and seconds of a second one; raises what `attempt` knows."""
        if variant.startswith(RAW_PREFIX):
            prepared, measures = self.raw(variant.removeprefix(RAW_PREFIX))
        else:
            prepared, measures = self.ours(variant)
        if variant in ("varlen", RAW_PREFIX + "varlen"):
            measures |= behind_varlen(self.run.device, raw=variant != "varlen")
        needs_grad = prepared.leaves[0].requires_grad
        begin = time.perf_counter()
        out = prepared.forward()
        calls: dict[str, Callable[[], object]] = {"forward": prepared.forward}
        gradients: tuple[Tensor, ...] = ()
        if needs_grad:

            def backward() -> tuple[Tensor, ...]:
                return torch.autograd.grad(
                    out, prepared.leaves, prepared.cotangent, retain_graph=True
                )

            calls["backward"] = backward
            gradients = backward()
        self.run.synchronize()
        measures["first_call_s"] = time.perf_counter() - begin
        answer = Answer([prepared.as_THD(x.detach()) for x in (out, *gradients)])
        errors, reason = self.oracle.judge(variant, answer)
        measures |= errors
        if reason is not None:
            raise Wrong(reason, measures)
        live = Live(variant, calls, measures)
        for pass_, call in calls.items():
            live.seconds[pass_] = self.seconds(call)
        self.lives.append(live)

    def raw(self, name: str) -> tuple[Prepared, dict[str, Any]]:
        prepare = RAW.get(name)
        if prepare is None:
            raise Unsupported(f"no raw kernel is known for {name}")
        measures = {"num_docs": len(self.inputs.lengths), "longest": self.inputs.longest}
        if self.run.on_gpu:
            return prepare(self.inputs, True), measures
        try:
            return prepare(self.inputs, True), measures
        except Unsupported as error:
            prepared = prepare(self.inputs, False)
            self.outcomes[RAW_PREFIX + name, "backward"] = Outcome("unsupported", str(error))
            return prepared, measures

    def ours(self, name: str) -> tuple[Prepared, dict[str, Any]]:
        """`packed_attention`, its plan made ahead, as a model shares it among its layers."""
        measures: dict[str, Any] = {
            "num_docs": self.layout.num_docs,
            "longest": self.inputs.longest,
            "capacity": self.layout.capacity,
            "max_seqlen_bound": self.layout.max_seqlen_bound,
        }
        needs_grad = True
        if name != "auto":
            refusal = self.refusal(name, needs_grad=False)
            if refusal is not None:
                raise Unsupported(refusal)
            no_backward = self.refusal(name, needs_grad=True)
            if no_backward is not None:
                self.outcomes[name, "backward"] = Outcome("unsupported", no_backward)
                needs_grad = False
        leaves = self.inputs.leaves(needs_grad)
        resolved = name
        if name == "auto":
            begin = time.perf_counter()
            self.packed("auto", leaves, None)  # measures, if it has to
            self.run.synchronize()
            measures["auto_s"] = time.perf_counter() - begin
            resolved = self.chosen_by_auto(leaves)
            measures |= {"resolved": resolved, "resolved_compiled": self.chosen_in_a_graph()}
        plan = get_backend(resolved).plan(self.mask)
        if plan is not None:
            measures["plan_ms"] = 1e3 * self.seconds(lambda: get_backend(resolved).plan(self.mask))
        prepared = Prepared(lambda: self.packed(name, leaves, plan), leaves, self.inputs.cotangent)
        return prepared, measures

    def refusal(self, name: str, *, needs_grad: bool) -> str | None:
        if name not in BACKENDS:
            return f"flexvarlen has no backend {name}"
        return why_not(name, device=self.run.device, needs_grad=needs_grad, **self.kind_of_call())

    def kind_of_call(self) -> dict[str, Any]:
        """The cell as `why_not` and `explain` take it."""
        cell = self.cell
        heads = {"num_heads": cell.num_heads, "num_kv_heads": cell.num_kv_heads}
        size = {"head_dim": cell.head_dim, "dtype": self.inputs.q.dtype}
        return {**heads, **size, "causal": cell.causal}

    def packed(self, backend: str, leaves: list[Tensor], plan: Any) -> Tensor:
        out = fv.packed_attention(
            *leaves, self.layout, causal=self.cell.causal, backend=backend, plan=plan
        )
        assert isinstance(out, Tensor)
        return out

    def chosen_by_auto(self, leaves: list[Tensor]) -> str:
        """Which backend really ran, seen from below: the first whose `attend` is called."""
        called: list[str] = []
        with contextlib.ExitStack() as stack:
            for cls in {type(get_backend(name)) for name in BACKENDS}:
                stack.enter_context(mock.patch.object(cls, "attend", _noting(cls.attend, called)))
            self.packed("auto", leaves, None)
        return called[0]

    def chosen_in_a_graph(self) -> str:
        """What "auto" takes for such calls inside a compiled graph."""
        return fv.explain(self.layout, measure=False, **self.kind_of_call()).compiled

    def seconds(self, call: Callable[[], object]) -> float:
        """Wall seconds of one call, to the end of its device work."""
        self.run.synchronize()
        begin = time.perf_counter()
        call()
        self.run.synchronize()
        return time.perf_counter() - begin

    # --- timing ----------------------------------------------------------------------------------

    def time_all(self) -> None:
        """Device and host time of everything alive, interleaved."""
        if not self.lives:
            return
        try:
            self._time()
        except ERRORS as error:  # OutOfMemoryError is a RuntimeError
            if self._device_is_dead():
                # Which of them it was is not known: none is tried again in this cell.
                reason = f"timing killed the device: {one_line(error)}"
                for live in self.lives:
                    self.give_up(live.variant, "failed", reason, live.measures | {"fatal": True})
                raise SystemExit(f"{reason}; run again to go on with other cells") from error
            status: Status = "oom" if isinstance(error, torch.OutOfMemoryError) else "failed"
            for live in self.lives:
                self.give_up(live.variant, status, one_line(error), live.measures)
            return
        for live in self.lives:
            for pass_, timed in live.timed.items():
                milliseconds = timed["device_ms_p50"]
                timed["tflops"] = self.flops[pass_] / (milliseconds * 1e9)
                self.outcomes[live.variant, pass_] = Outcome("ok", None, live.measures | timed)

    def _time(self) -> None:
        calls, total_ms = {}, 0.0
        shortest_s = min(x for live in self.lives for x in live.seconds.values())
        lead_in = LEAD_IN if self.run.on_gpu and shortest_s * 1e3 < LEAD_IN_BELOW_MS else 0
        for live in self.lives:
            for pass_, call in live.calls.items():
                calls[f"{live.variant} {pass_}"] = call
                total_ms += live.seconds[pass_] * 1e3 * (lead_in + 1)
                total_ms += BUSY_MS if self.run.on_gpu else 0.0
        budget_ms = 1e3 * self.run.args.cell_seconds
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(budget_ms / total_ms)))
        with _no_collection():
            timings = time_host_and_device(
                calls, device=self.run.device, warmup=1, repeats=repeats, lead_in=lead_in
            )
        for live in self.lives:
            for pass_ in live.calls:
                both = timings[f"{live.variant} {pass_}"]
                timed = {f"device_{key}": x for key, x in dataclasses.asdict(both.device).items()}
                if self.run.on_gpu:  # on the CPU there is one clock
                    timed |= {f"host_{key}": x for key, x in dataclasses.asdict(both.host).items()}
                live.timed[pass_] = timed

    def summary(self) -> str:
        """Statuses, and what "auto" took, for the log."""
        counts = Counter(outcome.status for outcome in self.outcomes.values())
        said = [", ".join(f"{count} {status}" for status, count in counts.items())]
        auto = next((live for live in self.lives if live.variant == "auto"), None)
        if auto is not None and "resolved" in auto.measures:
            took = auto.measures["auto_s"]
            names = dict.fromkeys(auto.measures[x] for x in ("resolved_compiled", "resolved"))
            said.append(f"auto takes {', eagerly '.join(names)} ({took:.1f} s)")
        return "; ".join(said)


def _noting(attend: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(self.name)
        return attend(self, *args, **kwargs)

    return noted


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside a timed call."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
