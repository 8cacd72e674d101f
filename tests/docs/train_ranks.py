"""examples/train.py, noting the documents and gradients of its steps, and dying when told.

    torchrun --nproc-per-node 2 tests/docs/train_ranks.py NOTES DIE_AFTER [arguments of train.py]

A rank writes `NOTES-RANK.jsonl`: of each forward the optimizer steps before it and the tokens of
each document; rank 0 writes `NOTES.pt`: the gradients of its first step, before they are clipped.
Saving after optimizer step DIE_AFTER (0: never) every rank kills itself, once all is written and
before it is the checkpoint.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
import typer
from accelerate import Accelerator

import flexvarlen as fv

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train.py"


def run(notes, arguments, die_after=0):
    """`main` of the script in this process; a refusal is raised."""
    spec = importlib.util.spec_from_file_location("train", SCRIPT)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    rank = os.environ.get("RANK", "0")
    patch, clip, save = fv.patch_model, Accelerator.clip_grad_norm_, Accelerator.save_state
    find, log = train.find_checkpoint, train.log
    steps = 0

    def find_and_count(*arguments):
        nonlocal steps
        checkpoint, progress = find(*arguments)
        steps = progress["step"]
        return checkpoint, progress

    def patch_and_note(model, backend, **options):
        def note(module, args, kwargs):
            tokens = kwargs["input_ids"][0].tolist()
            ends = kwargs["packed_layout"].cu_seqlens.tolist()
            documents = [tokens[a:b] for a, b in pairwise(ends) if a < b]
            with Path(f"{notes}-{rank}.jsonl").open("a") as file:
                file.write(json.dumps({"step": steps, "documents": documents}) + "\n")

        patched = patch(model, backend, **options)
        patched.register_forward_pre_hook(note, with_kwargs=True)
        return patched

    def note_and_clip(accelerator, parameters, norm):
        parameters = list(parameters)
        if rank == "0" and not Path(f"{notes}.pt").exists():
            torch.save([p.grad for p in parameters], f"{notes}.pt")
        return clip(accelerator, parameters, norm)

    def log_and_count(accelerator, out, step, *rest):
        nonlocal steps
        end = log(accelerator, out, step, *rest)
        steps = step
        return end

    def save_or_die(accelerator, folder):
        save(accelerator, folder)
        if steps == die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    train.find_checkpoint, train.log = find_and_count, log_and_count
    with (
        mock.patch.object(fv, "patch_model", patch_and_note),
        mock.patch.object(Accelerator, "clip_grad_norm_", note_and_clip),
        mock.patch.object(Accelerator, "save_state", save_or_die),
    ):
        app = typer.Typer(add_completion=False)
        app.command()(train.main)
        app([str(argument) for argument in arguments], standalone_mode=False)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[3:], int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # all is written; gloo may abort in destructors, as tests/ranks.py says
