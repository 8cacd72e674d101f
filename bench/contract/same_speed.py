"""Whether two versions of flexvarlen are equally fast: old and new take turns on one GPU.

    python bench/contract/same_speed.py --old FOLDER --new FOLDER --out speed.jsonl --part a

A process for each version, both alive at once; each figure is measured in turns, old and new, then
new and old, and again. Parts that the host decides are measured by several pairs of processes, as
one process may be slower than the next by itself. Parts:

    a  packed_attention, forward, and forward and backward: the device's time
    b  a training step of Qwen3-1.7B with 14 layers, eager and compiled
    c  a forward of Qwen3-1.7B on 1,024 tokens, eager
    d  document_block_mask: the device's time and the host's
    e  packed_attention on 256 tokens: the host's time
    f  compile time of a training step of 4 layers, nothing cached

Each figure is a JSON line: old, new and ratio (medians; below 1: new is faster) and the least and
greatest ratio of a turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

Figure = dict[str, Any]
PARTS = "abcdef"
PROCESSES = {"a": 1, "b": 1, "c": 3, "d": 3, "e": 3, "f": 3}
TURNS = {"a": 5, "b": 3, "c": 3, "d": 3, "e": 3, "f": 1}
"""In each pair of processes, which are `PROCESSES`: three pairs of turns or more in all."""
WIDTH = 60


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    add = parser.add_argument
    add("--old", type=Path, required=True, help="a checkout")
    add("--new", type=Path, required=True, help="another")
    add("--out", type=Path, required=True, help="JSON lines to append to")
    add("--part", default=PARTS, help="one of a to f, or several: abc; default: all")
    add("--only", default="", metavar="TEXT", help="figures whose names hold this")
    add("--processes", type=int, help="pairs of processes; default: 1 for a and b, else 3")
    add("--seconds", type=float, default=1e9, help="begin no figure later than this")
    add("--quick", action="store_true", help="tiny figures on the CPU, to see that all works")
    args = parser.parse_args(argv)
    if not set(args.part) <= set(PARTS):
        parser.error(f"--part must be letters of {PARTS}, got {args.part!r}")
    return args


# ---- figures ----


def log_normal_lengths(tokens: int, mean: float, seed: int = 6) -> list[int]:
    """Document lengths of one row as the benchmark of kernels draws them, sigma 1."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        draw = torch.randn((), generator=generator, dtype=torch.float64).item()
        lengths.append(min(left, max(1, round(math.exp(math.log(mean) - 0.5 + draw)))))
    return lengths


def qwen3(layers: int, *, tiny: bool = False) -> dict[str, Any]:
    """Qwen3-1.7B's numbers, with so many layers; or tiny ones."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144} | heads
    if tiny:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96} | heads
    return sizes | {
        "num_hidden_layers": layers,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    }


def figure(name: str, kind: str, of: Figure, clock: str, warmup: int, samples: int) -> Figure:
    """`clock`: "device" or "step", in ms, or "host", in µs, 200 calls a sample."""
    settings = {"name": name, "kind": kind, "of": of, "clock": clock}
    settings["unit"] = "µs" if clock == "host" else "ms"
    return settings | {"warmup": warmup, "samples": samples, "calls": 200}


def figures(part: str, quick: bool) -> list[Figure]:
    """Of one part, in the order in which they are measured."""
    rows = [(8192, 500), (32_768, 2048), (131_072, 16_384)]
    heads = {"heads": (32, 8), "head_dim": 128}
    kernels: tuple[str, ...] = ("fa3", "fa2", "varlen", "flex", "auto")
    row, inference = (32_768, 2048), (1024, 256)
    if quick:
        rows, heads = [(256, 50)], {"heads": (4, 2), "head_dim": 16}
        kernels, row, inference = ("sdpa",), (256, 50), (64, 16)
    found: list[Figure] = []
    if part == "a":
        for tokens, mean in rows:
            lengths = log_normal_lengths(tokens, mean)
            for backend in kernels:
                for passes in ("forward", "forward and backward"):
                    of = {"backend": backend, "lengths": lengths, "passes": passes, **heads}
                    name = f"{backend}, {tokens:,} tokens, {passes}"
                    found.append(figure(name, "attention", of, "device", 3, 20))
    elif part in ("b", "f"):
        layers = (2 if quick else 14) if part == "b" else (1 if quick else 4)
        for backend in ("sdpa",) if quick else ("fa3", "flex"):
            for how in ("eager", "compiled") if part == "b" else ("compiled",):
                of = {"config": qwen3(layers, tiny=quick), "backend": backend, "train": True}
                of |= {"lengths": log_normal_lengths(*row), "compiled": how == "compiled"}
                name = f"training step, {layers} layers, {backend}, {how}"
                found.append(figure(name, "model", of, "step", 2, 5))
    elif part == "c":
        for backend in ("sdpa",) if quick else ("fa3", "auto"):
            of = {"config": qwen3(2 if quick else 28, tiny=quick), "backend": backend}
            of |= {"lengths": log_normal_lengths(*inference), "train": False}
            found.append(figure(f"inference, {backend}, eager", "model", of, "step", 5, 20))
    elif part == "d":
        for tokens, mean in rows:
            of = {"lengths": log_normal_lengths(tokens, mean)}
            for clock in ("device", "host"):
                name = f"block mask, {tokens:,} tokens, {clock}"
                found.append(figure(name, "mask", of, clock, 5, 20 if clock == "device" else 5))
    elif part == "e":
        for backend in kernels if quick else ("fa2", "fa3", "varlen"):
            for passes in ("forward", "forward for a backward", "forward and backward"):
                of = {"backend": backend, "lengths": [128, 128], "passes": passes, **heads}
                name = f"host time, {backend}, {passes}"
                found.append(figure(name, "attention", of, "host", 20, 5))
    return found


# ---- processes ----


class Process:
    """A worker with one of the two versions."""

    def __init__(self, folder: Path, device: str, cache: Path) -> None:
        before = os.environ.get("PYTHONPATH")
        paths = [str(folder.resolve()), *([before] if before else [])]
        own = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        own |= {"FLEXVARLEN_CACHE": "auto"}
        env = os.environ | {name: str(cache / own[name]) for name in own}
        env |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        script = Path(__file__).with_name("same_speed_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder.resolve()), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            return {"status": "failed", "reason": f"the process ended with {code}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"op": op, **more}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"status": "failed", "reason": "the process has ended"}
        return self.answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def measure_pair(pair: dict[str, Process], figure: Figure, turns: int) -> dict[str, Any]:
    """Both versions of one figure, in turns; what `prepare` said and the value of each turn."""
    said = {name: process.ask("prepare", figure=figure) for name, process in pair.items()}
    values: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, float] = {}
    for turn in range(turns):
        if any("status" in found for found in said.values()):
            break
        for name in list(pair)[:: 1 if turn % 2 == 0 else -1]:
            found = pair[name].ask("measure")
            if "status" in found:
                said[name] = found
                break
            values[name].append(found["value"])
            peaks[name] = max(peaks.get(name, 0.0), found["peak_mib"])
    for process in pair.values():
        process.ask("release")
    return {"said": said, "values": values, "peaks": peaks}


def records(figure: Figure, runs: list[dict[str, Any]], machine: dict[str, Any]) -> list[Figure]:
    """The lines of one figure: its time, and of a compiled one its compile time."""
    base: Figure = {"name": figure["name"], "unit": figure["unit"], "status": "ok"}
    for run in runs:
        for name, found in run["said"].items():
            if "status" in found:
                return [base | {"of": name} | found | machine]
    said = runs[-1]["said"]
    values = [[x for run in runs for x in run["values"][name]] for name in ("old", "new")]
    made = [base | compared(*values)]
    pairs = [[run["said"][name] for name in ("old", "new")] for run in runs]
    made[0]["same_output"] = all(old["digest"] == new["digest"] for old, new in pairs)
    for key in ("chosen", "graphs", "graph_breaks", "recompilations"):
        if key in said["old"]:
            made[0][key] = [said["old"][key], said["new"][key]]
    made[0]["peak_mib"] = [max(run["peaks"][name] for run in runs) for name in ("old", "new")]
    if "compile_s" in said["old"]:
        seconds = [[pair[i]["compile_s"] for pair in pairs] for i in (0, 1)]
        title = {"name": f"{figure['name']}: compile time", "unit": "s", "status": "ok"}
        made.append(title | compared(*seconds))
    return [record | machine for record in made]


def compared(old: list[float], new: list[float]) -> Figure:
    """Medians, and the ratios of neighbouring turns."""
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    return {
        "old": statistics.median(old),
        "new": statistics.median(new),
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "turns": len(ratios),
    }


def run_part(part: str, args: argparse.Namespace, late: float) -> list[Figure]:
    """All figures of a part; each pair of processes goes through all of them."""
    wanted = [found for found in figures(part, args.quick) if args.only in found["name"]]
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    machine: dict[str, Any] = {}
    folders = {"old": args.old, "new": args.new}
    device = "cpu" if args.quick else "cuda"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kept:
        for number in range(args.processes or PROCESSES[part]) if wanted else ():
            cold = f"-{number}" if part == "f" else ""
            pair = {
                name: Process(folder, device, Path(kept) / f"{name}{cold}")
                for name, folder in folders.items()
            }
            machine = {name: process.answer() for name, process in pair.items()}["new"]
            for each in wanted:
                if time.monotonic() < late:
                    runs[each["name"]].append(measure_pair(pair, each, TURNS[part]))
            for process in pair.values():
                process.end()
    measured = [each for each in wanted if runs[each["name"]]]
    return [line for each in measured for line in records(each, runs[each["name"]], machine)]


def main() -> None:
    args = parse()
    late = time.monotonic() + args.seconds
    for part in args.part:
        for found in run_part(part, args, late):
            with args.out.open("a") as out:
                out.write(json.dumps({"part": part, **found}, ensure_ascii=False) + "\n")
            name = f"{part}  {found['name']}".ljust(WIDTH)
            if found["status"] != "ok":
                sys.stdout.write(f"{name} {found['status']} ({found.get('of')})\n")
                continue
            low, high = found["spread"]
            other = "" if found.get("same_output", True) else "  OTHER OUTPUT"
            sys.stdout.write(
                f"{name} {found['old']:10.3f} {found['new']:10.3f} {found['unit']}  "
                f"{found['ratio']:.3f} ({low:.3f} to {high:.3f}){other}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
