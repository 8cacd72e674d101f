"""`python -m flexvarlen.bench.model.compile_time`: compiling a model, whole and by layer.

By layer as accelerate does it, which compiles what surrounds the layers too, and the decoder layers
alone, which is one graph.

Each compilation has a process of its own: cold, with an empty cache folder (inductor's,
Triton's and FA4's), and then warm, with what the cold one left there. A last process takes the
compiled steps of all ways in turns, after holding their outputs and gradients against each document
alone.

Compile time is the wall time of the first compiled step (forward and backward) less that of the
fastest of the next three: whatever a user waits for, in Dynamo, AOTAutograd, inductor and Triton.
Two eager steps come before, and the first less the second is told apart: CUDA's start, and kernels
that a package compiles by itself (FA4's, which `auto` has compiled when it has timed them). None
before flex, whose eager call is compiled by inductor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from flexvarlen.bench.bench_run import BenchRun
from flexvarlen.bench.model.geometries import GEOMETRIES
from flexvarlen.env import FA4_FOLDER, FA4_KEEPS
from flexvarlen.rows import Status

SUITE = "compile"
SCOPES = ("layer", "decoder", "whole")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.model.compile_time", description=summary
    )
    add = parser.add_argument
    add("--geometry", choices=sorted(GEOMETRIES), default="qwen3-1.7b")
    add("--layers", type=int, help="default: the model's own number")
    add(
        "--backend",
        default="auto",
        help="auto is resolved before anything is compiled; transformers:NAME[@cu_seq_lens] is "
        "transformers' own, not patched",
    )
    add("--tokens", type=int, default=32_768, help="tokens of the packed row")
    add("--mean", type=int, default=2048, help="mean tokens of a document, log-normal")
    add("--sigma", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compiler", default="inductor", choices=["inductor", "aot_eager", "eager"])
    add("--repeats", type=int, default=15, help="timed steps of each way; 0: no steady part")
    add("--scopes", nargs="+", choices=SCOPES, default=list(SCOPES), help="what is compiled")
    add("--timeout", type=float, default=300.0, metavar="S", help="of each process")
    add("--commit", help="recorded in place of what git finds here")
    add("--out", type=Path, help="JSON lines to append to")
    add("--quick", action="store_true", help="a tiny model on few tokens, to see that all works")
    add("--child", choices=["resolve", "compile", "steady"], help=argparse.SUPPRESS)
    add("--scope", choices=SCOPES, default="whole", help=argparse.SUPPRESS)
    add("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.quick:
        args.geometry, args.layers, args.tokens, args.mean = "qwen3-tiny", 4, 256, 32
        args.repeats = min(args.repeats, 3)
        if torch.device(args.device).type == "cpu":
            args.dtype = "float32"
    return args


class Parent(BenchRun):
    """Starts the processes, one after another, and writes their rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(SUITE, args)
        self.backend = args.backend
        self.layers = args.layers or GEOMETRIES[args.geometry](None).num_hidden_layers

    def run(self) -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            home = Path(folder)
            if self.backend == "auto":
                answer = self.child("resolve", "whole", home / "resolve")
                if "backend" not in answer:
                    self.write("whole", "cold", answer)
                    return
                self.backend = answer["backend"]
            for scope in self.args.scopes:
                for cache in ("cold", "warm"):
                    self.write(scope, cache, self.child("compile", scope, home / scope))
            if self.args.repeats > 0:
                last = self.args.scopes[-1]
                found = self.child("steady", last, home / last)
                for scope in self.args.scopes:
                    self.write(scope, "steady", found.get(scope, found))

    def child(self, part: str, scope: str, cache: Path) -> dict[str, Any]:
        """What a process of its own measured, or why it did not ("status", "reason")."""
        cache.mkdir(exist_ok=True)
        answer = cache / f"{part}.json"
        answer.unlink(missing_ok=True)
        own = ["--child", part, "--scope", scope, "--answer", str(answer)]
        # The backend stands last, and wins: resolved by now.
        command = [
            sys.executable,
            "-m",
            "flexvarlen.bench.model.compile_time",
            *forwarded(self.args),
            *own,
        ]
        command += ["--backend", self.backend]
        where = {
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            FA4_KEEPS: "1",
            FA4_FOLDER: str(cache / "fa4"),
        }
        try:
            done = subprocess.run(
                command,
                env=os.environ | where,
                timeout=self.args.timeout,
                stdout=sys.stderr,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"status": "failed", "reason": f"not done within {self.args.timeout:g} s"}
        if answer.exists():
            found: dict[str, Any] = json.loads(answer.read_text())
            return found
        lines = done.stderr.strip().splitlines() or ["no message"]
        sys.stderr.write(done.stderr[-4000:] + "\n")
        return {"status": "failed", "reason": f"exit {done.returncode}: {lines[-1][:300]}"}

    def write(self, scope: str, part: str, found: dict[str, Any]) -> None:
        """One row."""
        args = self.args
        case = {
            "geometry": args.geometry,
            "layers": self.layers,
            "backend": args.backend,
            "scope": scope,
            "part": part,
            "tokens": args.tokens,
            "mean_doc": args.mean,
            "sigma": args.sigma,
            "seed": args.seed,
            "dtype": args.dtype,
            "compiler": args.compiler,
            "passes": "forward+backward",
        }
        status: Status = found.get("status", "ok")
        reason = found.get("reason")
        measures = {k: v for k, v in found.items() if k not in ("status", "reason")}
        measures["attends"] = self.backend
        self.say(f"{scope} {part}: {status} {reason or measures}")
        self.append(case, status, reason, measures)


def forwarded(args: argparse.Namespace) -> list[str]:
    """The arguments that a child needs, as on a command line."""
    names = ["geometry", "layers", "tokens", "mean", "sigma", "seed", "dtype", "device"]
    names += ["compiler", "repeats"]
    given = {name: getattr(args, name) for name in names}
    words = [
        word
        for name, value in given.items()
        if value is not None
        for word in (f"--{name}", str(value))
    ]
    return [*words, "--scopes", *args.scopes]


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.child is None:
        Parent(args).run()
        return
    from flexvarlen.bench.model.compile_time_child import Child

    found = getattr(Child(args), args.child)()
    args.answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
