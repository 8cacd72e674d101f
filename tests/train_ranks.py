"""examples/train.py under torchrun, noting the documents of each step, and dying when told.

    torchrun --nproc-per-node 2 tests/train_ranks.py NOTES DIE_AFTER [arguments of train.py]

A rank writes `NOTES-RANK.jsonl`: of each forward the optimizer steps before it and a checksum of
each document. After optimizer step DIE_AFTER (0: never) every rank kills itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import typer

import flexvarlen as fv

notes, die_after, *arguments = sys.argv[1:]
rank = os.environ.get("RANK", "0")
spec = importlib.util.spec_from_file_location(
    "train", Path(__file__).parent.parent / "examples" / "train.py"
)
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)

patch_model, write = fv.patch_model, train.write
steps = 0


def patch_and_note(model, backend):
    def note(module, args, kwargs):
        layout, tokens = kwargs["packed_layout"], kwargs["input_ids"][0].numpy()
        ends = layout.cu_seqlens.tolist()
        sums = [
            zlib.crc32(tokens[start:stop].tobytes())
            for start, stop in pairwise(ends)
            if start < stop
        ]
        with Path(f"{notes}-{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": steps, "documents": sums}) + "\n")

    patched = patch_model(model, backend)
    patched.register_forward_pre_hook(note, with_kwargs=True)
    return patched


def write_or_die(accelerator, out, step, *rest):
    global steps
    write(accelerator, out, step, *rest)
    steps = step
    if step == int(die_after):
        os.kill(os.getpid(), signal.SIGKILL)


class Resumed(train.Progress):
    def load_state_dict(self, state):
        global steps
        super().load_state_dict(state)
        steps = self.step


fv.patch_model, train.write, train.Progress = patch_and_note, write_or_die, Resumed
sys.argv = ["train.py", *arguments]
typer.run(train.main)
