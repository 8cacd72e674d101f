"""How much later the first step of a fresh process ends with `auto` than with its choice by name.

Each process has an empty FLEXVARLEN_CACHE; the child prints what was taken, and the seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

ROUNDS = 3
LENGTHS = [2101, 700, 90, 1500, 31, 2600, 1170]  # 8,192 tokens


def child(backend: str) -> dict[str, object]:
    """Build a model of four layers, run its first step; what was taken, and the seconds."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import flexvarlen as fv

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
    model(input_ids=ids, packed_layout=layout).logits.float().square().mean().backward()
    torch.cuda.synchronize()
    step_s = time.perf_counter() - begin
    kind = {"dtype": torch.bfloat16, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
    return {"taken": fv.explain(layout, **kind).chosen, "step_s": step_s}


def run(backend: str) -> dict[str, object]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.attention.auto.first_step", backend],
            capture_output=True,
            text=True,
            env=os.environ | {"FLEXVARLEN_CACHE": folder},
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def later_s() -> float:
    """By how much `auto` is later, a median of processes in turns."""
    name = run("auto")["taken"]  # fills the caches of compilers and files
    run(name)
    return median(run("auto")["step_s"] - run(name)["step_s"] for _ in range(ROUNDS))


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1])))
