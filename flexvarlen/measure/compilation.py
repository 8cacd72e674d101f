"""`watch_compilation`: graph breaks, compilations and recompilations, from torch's own counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from flexvarlen.measure.machine import without_paths

# Dynamo keeps the last 64 compilations by default; one model with 44 graph breaks makes more.
_METRICS_LIMIT = 65_536


@dataclass
class CompileStats:
    """What torch.compile did inside a `watch_compilation` block; filled in when the block ends."""

    graph_breaks: int = 0
    """Breaks met while tracing (0 under fullgraph=True, which raises instead)."""
    compilations: int = 0
    """Graphs compiled; a break makes two of one function, a recompilation one more."""
    recompilations: int = 0
    """Frames compiled again because a guard failed."""
    compile_s: float = 0.0
    """Wall seconds in which something was being compiled, backward graphs included."""
    reasons: list[str] = field(default_factory=list)
    """Why frames were compiled again, one sentence each, if this torch reports it."""
    break_reasons: dict[str, int] = field(default_factory=dict)
    """First line of each graph break's explanation -> how often it was met."""

    def first_reasons(self) -> tuple[str, ...]:
        """The first three `reasons`, shortened and without paths, as a record keeps them."""
        return tuple(without_paths(" ".join(why.split()))[:200] for why in self.reasons[:3])


@contextmanager
def watch_compilation() -> Iterator[CompileStats]:
    """Count graph breaks, compilations and recompilations inside the block.

    Reads torch's own counters (`torch._dynamo.utils.counters`, `get_compilation_metrics`), by
    difference, so blocks can follow one another and code that reads the counters elsewhere is not
    disturbed. Do not clear the counters inside the block; `torch._dynamo.reset()` is harmless.
    Verified on torch 2.13, by its source on 2.11; what a version lacks stays 0 or empty.

    Dynamo keeps its cache by code object, so the first compilation of a second model of the same
    class counts as a recompilation: reset before, or watch a block in which only the inputs change.

    >>> import torch
    >>> torch._dynamo.reset()
    >>> with watch_compilation() as stats:
    ...     _ = torch.compile(torch.sin, backend="eager")(torch.zeros(3))
    >>> stats.graph_breaks, stats.recompilations
    (0, 0)
    """
    from torch._dynamo import utils as dynamo_utils

    set_limit = getattr(dynamo_utils, "set_compilation_metrics_limit", None)
    if set_limit is not None:
        set_limit(_METRICS_LIMIT)
    breaks_before = dict(dynamo_utils.counters["graph_break"])
    graphs_before = dynamo_utils.counters["stats"]["unique_graphs"]
    metrics_before = {id(entry) for entry in dynamo_utils.get_compilation_metrics()}
    stats = CompileStats()
    try:
        yield stats
    finally:
        for reason, count in dict(dynamo_utils.counters["graph_break"]).items():
            new = count - breaks_before.get(reason, 0)
            if new > 0:
                line = without_paths(str(reason).partition("\n")[0])
                stats.break_reasons[line] = stats.break_reasons.get(line, 0) + new
        stats.graph_breaks = sum(stats.break_reasons.values())
        stats.compilations = dynamo_utils.counters["stats"]["unique_graphs"] - graphs_before
        entries = [
            entry
            for entry in dynamo_utils.get_compilation_metrics()
            if id(entry) not in metrics_before
        ]
        again = [entry for entry in entries if _is_recompilation(entry)]
        stats.recompilations = len(again)
        found = (getattr(entry, "recompile_reason", None) for entry in again)
        stats.reasons = [str(why) for why in found if why]
        stats.compile_s = _union_seconds(entries)


def _is_recompilation(entry: object) -> bool:
    """Whether a metric is of a frame compiled again (its id, "frame/attempt", has attempt > 0)."""
    if getattr(entry, "is_forward", True) is False or getattr(entry, "is_runtime", False):
        return False  # a backward graph, or run-time autotuning, of a frame with a separate entry
    identity = str(getattr(entry, "compile_id", None) or "")
    attempt = identity.rpartition("/")[2].partition("_")[0]
    return attempt.isdigit() and int(attempt) > 0


def _union_seconds(entries: Sequence[object]) -> float:
    """Seconds covered by the entries' spans; a backward compiled within a forward counts once."""
    spans = []
    for entry in entries:
        begin, end = getattr(entry, "start_time_us", None), getattr(entry, "end_time_us", None)
        if begin is not None and end is not None:
            spans.append((begin, end))
    total_us, covered_to = 0, 0
    for begin, end in sorted(spans):
        total_us += max(0, end - max(begin, covered_to))
        covered_to = max(covered_to, end)
    return total_us / 1e6
