"""How much later the first step of a fresh process ends with `auto` than with its choice by name.

    python -m tests.attention.auto.first_step

prints, on a GPU, the seconds of each process, and of patch_model and the first step, eager and
compiled, with all kernels and with torch's alone. Each process has an empty FLEXVARLEN_CACHE.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

ROUNDS = 3
LENGTHS = [2101, 700, 90, 1500, 31, 2600, 1170]  # 8,192 tokens
PACKAGES = ("fa2", "fa3", "fa4", "flex_fa4")


def child(backend: str, hidden: list[str], compiled: bool) -> dict[str, object]:
    """Build a model of four layers, run its first step; what was taken, and the seconds."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import flexvarlen as fv
    from flexvarlen.attention.backends.registry import get_backend

    for name in hidden:
        get_backend(name).why_not = lambda call: "hidden"
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 32_000}
    config = Qwen3Config(**heads, **sizes, num_hidden_layers=4)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    layout = fv.PackedLayout.from_lengths(LENGTHS, device="cuda")
    ids = torch.randint(0, 32_000, (1, layout.total_tokens), device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    fv.patch_model(model, backend=backend)  # imports the package of a kernel that is named
    run = torch.compile(model) if compiled else model
    run(input_ids=ids, packed_layout=layout).logits.float().square().mean().backward()
    torch.cuda.synchronize()
    step_s = time.perf_counter() - begin
    kind = {"dtype": torch.bfloat16, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
    found = fv.explain(layout, **kind)
    taken = found.compiled if compiled else found.chosen
    return {"taken": taken, "step_s": step_s}


def run(backend: str, hidden: tuple[str, ...], compiled: bool) -> dict[str, float]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-m", "tests.attention.auto.first_step", "--child", backend]
        call += ["--hidden", *hidden, *(["--compiled"] * compiled)]
        begin = time.perf_counter()
        environment = os.environ | {"FLEXVARLEN_CACHE": folder}
        done = subprocess.run(call, capture_output=True, text=True, env=environment, check=False)
        seconds = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1]) | {"process_s": seconds}


def later_s(hidden: tuple[str, ...] = (), compiled: bool = False) -> float:
    """By how much `auto` is later, a median of processes in turns; prints both."""
    name = run("auto", hidden, compiled)["taken"]  # fills the caches of compilers and files
    run(name, hidden, compiled)
    found: dict[str, list[dict[str, float]]] = {"auto": [], name: []}
    for _ in range(ROUNDS):
        for backend, runs in found.items():
            runs.append(run(backend, hidden, compiled))
    said = [
        f"{backend}: process {median(x['process_s'] for x in runs):.2f} s, "
        f"patched and first step {median(x['step_s'] for x in runs):.2f} s"
        for backend, runs in found.items()
    ]
    alone = f" without {', '.join(hidden)}" if hidden else ""
    print(f"{'compiled' if compiled else 'eager'}{alone}: " + "; ".join(said), flush=True)
    return median(a["step_s"] - b["step_s"] for a, b in zip(*found.values(), strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--child")
    parser.add_argument("--hidden", nargs="*", default=[])
    parser.add_argument("--compiled", action="store_true")
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(child(asked.child, asked.hidden, asked.compiled)))
    else:
        for packages in ((), PACKAGES):
            for graph in (False, True):
                print(f"auto is {later_s(packages, graph):+.2f} s later")
