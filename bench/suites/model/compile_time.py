"""Suite "compile": what the first compiled step takes, of a whole model and layer by layer.

By layer as accelerate does it, which compiles what surrounds the layers too, and the decoder layers
alone, which is one graph. Each compilation has a process of its own: cold, with empty cache folders
(inductor's, Triton's and FA4's), then warm, with what the cold process left there. The warm process
also compares a step with the reference and times more of them.

Compile time is the wall time of the first compiled step (forward and backward) less that of the
fastest of the next three: all that a user waits for. Two eager steps come before, and the first
less the second is reported apart: CUDA's start, and kernels that a package compiles by itself. None
comes before flex, whose eager call inductor compiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexvarlen.bench.suites.model import tables
from flexvarlen.bench.suites.model.geometries import GEOMETRIES
from flexvarlen.bench.suites.model.packings import RowCase, rows_of
from flexvarlen.env import FA4_FOLDER, FA4_KEEPS
from flexvarlen.measure import time_interleaved, watch_compilation
from flexvarlen.measure.timing import wall_seconds
from flexvarlen.report.records import Record, by_machine, grouped
from flexvarlen.report.table import NOTHING, Column, Notes, Table
from flexvarlen.runner.failures import status_of
from flexvarlen.runner.suite import Finding, Findings, Options, Suite
from flexvarlen.verify.experiment.alone import Alone, gradients_of
from flexvarlen.verify.experiment.experiment import Experiment
from flexvarlen.verify.experiment.inputs import packed
from flexvarlen.verify.experiment.step import base_step
from flexvarlen.verify.experiment.variant import Sizes, Variant, make_variant, require_known

SCOPES = {
    "whole": "the whole model",
    "layer": "layer by layer, and what surrounds them",
    "decoder": "decoder layers alone",
}
COLD, WARM = "cold", "warm"
STEPS_AFTER, TIMED_STEPS = 3, 15
TIMEOUT_S = 300.0  # of a process
CHILD = "from flexvarlen.bench.suites.model.compile_time import child; child()"


@dataclass(frozen=True)
class CompileCase(RowCase):
    scope: str = "whole"

    @property
    def name(self) -> str:
        return f"{self.geometry}-{self.scope}"


class CompileTime(Suite[CompileCase]):
    """Processes, one after another; of "auto", name the backend that it takes."""

    name: ClassVar[str] = "compile"

    def cases(self, options: Options) -> Sequence[CompileCase]:
        if options.is_small:
            case = CompileCase("qwen3-tiny", 4, 256, 32, options.compiler, dtype=options.dtype)
        else:
            layers = GEOMETRIES["qwen3-1.7b"](None).num_hidden_layers
            case = CompileCase("qwen3-1.7b", layers, 32_768, 2048)
        return [replace(case, scope=scope) for scope in SCOPES]

    def variants(self, case: CompileCase, options: Options) -> Sequence[str]:
        if not options.on_gpu:
            return ("sdpa",)
        return ("fa3", "fa4", "transformers:flash_attention_2@cu_seq_lens")

    def measure(self, case: CompileCase, variants: Sequence[str], options: Options) -> Findings:
        found: list[Finding] = []
        for variant in variants:
            require_known(variant)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                for part in (COLD, WARM):
                    answer = in_process(case, variant, part, options.device, Path(folder))
                    status, reason = answer.pop("status", "ok"), answer.pop("reason", None)
                    found.append(Finding(variant, status, reason, answer, part))
        return found

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return map(_table, by_machine(records))

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return self.tables([r for r in records if r.case["scope"] != "decoder"])


def in_process(
    case: CompileCase, variant: str, part: str, device: torch.device, folder: Path
) -> dict[str, Any]:
    """What a process with its caches in `folder` measured, or "status" and "reason"."""
    path = folder / f"{part}.json"
    task = {"case": case.data(), "variant": variant, "part": part, "device": str(device)}
    command = [sys.executable, "-c", CHILD, json.dumps(task | {"answer": str(path)})]
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        FA4_KEEPS: "1",
        FA4_FOLDER: str(folder / "fa4"),
    }
    try:
        done = subprocess.run(
            command,
            env=os.environ | caches,
            timeout=TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not done within {TIMEOUT_S:g} s"}
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"status": "failed", "reason": f"exit {done.returncode}: {last[:300]}"}


# --- in the process ------------------------------------------------------------------------------


def child() -> None:
    """The process: the last argument says what to measure, and where to write the answer."""
    task = json.loads(sys.argv[-1])
    try:
        case, device = CompileCase(**task["case"]), torch.device(task["device"])
        answer = measured(case, task["variant"], task["part"], device)
    except Exception as error:  # kernel packages assert, and raise types of their own
        status, reason = status_of(error)
        answer = {"status": status, "reason": reason}
    Path(task["answer"]).write_text(json.dumps(answer))


def measured(case: CompileCase, name: str, part: str, device: torch.device) -> dict[str, Any]:
    """Two eager steps, the first compiled one, and those after it."""
    base, (row,), grad_output = rows_of(case, case.packings(1), device)

    def step_of(variant: Variant) -> Callable[[], Tensor]:
        forwards = packed(row, variant.inputs(row), grad_output)
        return lambda: base_step(variant, forwards, parameters_of=base, keep=True)[0]

    def new_variant() -> Variant:
        return make_variant(name, base, Sizes.of(row))

    found: dict[str, Any] = {"attends": name}
    if "flex" not in name:
        eager = step_of(new_variant())
        found["eager_start_s"] = wall_seconds(eager, device) - wall_seconds(eager, device)
    variant, found["how"] = compiled(new_variant(), case.compiler, case.scope)
    step = step_of(variant)
    with watch_compilation() as stats:
        first = wall_seconds(step, device)
    with watch_compilation() as after:
        rest = [wall_seconds(step, device) for _ in range(STEPS_AFTER)]
    if not stats.compilations:
        reason = (
            f"nothing was compiled ({found['how']}), so the steps ran eagerly; accelerate before "
            "1.15 compiles nothing of a model that was patched first: use a newer one, or "
            "compile_regions first."
        )
        return found | {"status": "failed", "reason": reason}
    found |= {
        "compile_wall_s": first - min(rest),
        "first_step_s": first,
        "step_s": min(rest),
        "compile_s": stats.compile_s,
        "graphs": stats.compilations,
        "graph_breaks": stats.graph_breaks,
        "graphs_later": after.compilations,
    }
    if part == COLD:
        return found
    alone = Experiment(base, [row], grad_output=grad_output).alone
    return found | checked(step, alone, base)


def checked(step: Callable[[], Tensor], alone: Alone, base: PreTrainedModel) -> dict[str, Any]:
    """A step compared with the reference, and timed if it is right."""
    found, wrong = alone.check(step(), gradients_of(base))
    if wrong is not None:
        return found | {"status": "wrong", "reason": wrong}
    timed = time_interleaved({"": step}, device=base.device, repeats=TIMED_STEPS, flush_l2=False)
    return found | asdict(timed[""])


def compiled(variant: Variant, compiler: str, scope: str) -> tuple[Variant, str]:
    """A variant compiled in one of `SCOPES`, and by what."""
    settings: dict[str, Any] = {"backend": compiler, "fullgraph": not variant.theirs}
    if scope == "layer":
        from accelerate.utils import compile_regions

        regions = compile_regions(variant.model, **settings)
        return replace(variant, call=regions), "accelerate.utils.compile_regions"
    if scope == "decoder":
        layers: nn.Module = variant.model.get_submodule("layers")
        for layer in layers.children():
            layer.compile(**settings)
        return variant, "Module.compile"
    return replace(variant, call=torch.compile(variant.model, **settings)), "torch.compile"


# --- the table -----------------------------------------------------------------------------------


Line = Mapping[str, Record]
"""Records of one attention and scope, by pass."""


def _table(records: Sequence[Record]) -> Table:
    """One machine: an attention and a scope a line."""
    notes = Notes()
    lines: list[Line] = [
        {r.case.get("pass", ""): r for r in own if r.case["scope"] == scope}
        for own in grouped(records, "variant").values()
        for scope in SCOPES
    ]

    def compiling(part: str, name: str = "compile_wall_s") -> Callable[[Line], str]:
        def text(line: Line) -> str:
            found = tables.value(line.get(part), name)
            return tables.cell(line.get(part), None if found is None else f"{found:.1f}", notes)

        return text

    def attention(line: Line) -> str:
        return tables.attention_title(_any(line).case["variant"], tables.took(line.values()))

    def count(name: str) -> Callable[[Line], str]:
        return lambda line: str(NOTHING if (x := tables.value(line.get(COLD), name)) is None else x)

    columns = [
        Column("attention", attention),
        Column("compiled", lambda line: SCOPES[_any(line).case["scope"]]),
        Column("cold s", compiling(COLD)),
        Column("warm s", compiling(WARM)),
        Column("eager start s", compiling(COLD, "eager_start_s")),
        Column("graphs", count("graphs")),
        Column("graph breaks", count("graph_breaks")),
        Column("step ms (p20–p80)", _step_ms),
    ]
    case = records[0].case
    title = (
        f"{tables.model_title(records[0])}, one row of {case['tokens']:,} tokens, documents of "
        f"mean {case['mean_doc']:,}; {case['passes']}; {tables.where(records)}"
    )
    return Table.of([line for line in lines if line], columns, title, notes=notes)


def _any(line: Line) -> Record:
    return next(iter(line.values()))


def _step_ms(line: Line) -> str:
    """Older records have their timed steps in a pass of its own, "steady"."""
    return next((x for r in line.values() if (x := tables.spread(r)) is not None), NOTHING)


SUITE = CompileTime()
