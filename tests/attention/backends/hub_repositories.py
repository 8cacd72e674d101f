"""Repositories of the Hub as they lie on a disk, with kernels in plain Python that run anywhere."""

from __future__ import annotations

import json
import re
import shutil
from itertools import count
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import flexvarlen as fv
from flexvarlen.attention import choose
from flexvarlen.attention.backends import machines
from flexvarlen.attention.backends.cu_seqlens import fa2, fa3, fa4, hub

KERNELS = Path(__file__).parent / "hub_kernels"
BACKENDS = {"fa2": fa2.BACKEND, "fa3": fa3.BACKEND, "fa4": fa4.BACKEND}
FILES = {
    "fa2": ("flash_attn2.py", "flash_attn_interface.py"),
    "fa3": ("vllm_flash_attn3.py", "_ops.py"),
    "fa4": ("flash_attn4.py", "interface.py"),
}
"""Of each backend: the kernel here, and where the Hub's module has it."""

_numbers = count()


def write_build(variant: Path, backend: str, version: int | None = None) -> None:
    """What is beside the code of a build: its metadata, with an id that is its own."""
    repository = hub.REPOSITORIES[backend]
    name = repository.name.partition("/")[2]
    metadata = {
        "id": f"_{re.sub('[^a-z0-9]', '_', name)}_test{next(_numbers)}",
        "name": name,
        "version": repository.version if version is None else version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda" if torch.cuda.is_available() else "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata))


def lay_out(folder: Path, backend: str, *changes: tuple[str, str], version=None) -> Path:
    """Write a repository with a universal build of the backend's kernel.

    Args:
        changes: texts to replace in its code, and by what; each must occur.
    """
    variant = folder / "build" / "torch-universal"
    variant.mkdir(parents=True)
    source, name = FILES[backend]
    shutil.copy(KERNELS / "attention.py", variant)
    shutil.copy(KERNELS / source, variant / name)
    (variant / "__init__.py").write_text(f"from . import {name.removesuffix('.py')}\n")
    for old, new in changes:
        (file,) = (x for x in variant.glob("*.py") if old in x.read_text())
        file.write_text(file.read_text().replace(old, new))
    write_build(variant, backend, version)
    return folder


@pytest.fixture
def local_kernels(monkeypatch, tmp_path):
    """A function that lays out a backend's repository and names it in LOCAL_KERNELS.

    The three backends serve the CPU here, find no installed package and have loaded nothing; what
    is found right or wrong is forgotten afterwards.
    """
    pytest.importorskip("kernels")
    rows = [machines.Row((name,), "cpu", (), None, machines.ANY_FLOAT) for name in BACKENDS]
    monkeypatch.setattr(machines, "TABLE", (*rows, *machines.TABLE))
    monkeypatch.setattr(hub, "_requirement", lambda: Requirement("kernels"))
    for backend in BACKENDS.values():
        monkeypatch.setattr(backend, "_kernel", None)
        monkeypatch.setattr(backend, "installed", lambda device: "it is not installed")
    for state in ("_loaded", "_not_downloaded"):
        monkeypatch.setattr(hub, state, {})
    monkeypatch.setattr(fa3, "_built_with_softcap", fa3._built_with_softcap.__wrapped__)
    monkeypatch.setenv("FLEXVARLEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    choose.clear_cache()

    def make(backend, *changes):
        folder = lay_out(tmp_path / f"{backend}-repository", backend, *changes)
        monkeypatch.setenv("LOCAL_KERNELS", f"{hub.REPOSITORIES[backend].name}={folder}")

    yield make
    choose.clear_cache()


def tensors(layout, *, sinks=False, dtype=torch.float32, device="cpu", head_dim=64):
    """q, k, v and perhaps sinks, which all require gradients."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(layout.total_tokens, heads, head_dim) for heads in (4, 2, 2)] + [(4,)] * sinks
    made = (torch.randn(x, generator=generator, device=device, dtype=dtype) for x in shapes)
    return [x.requires_grad_() for x in made]


def results(backend, layout, leaves, attend=fv.packed_attention, **options):
    """The output and the gradients of a loss that weighs each output."""
    q, k, v, *sinks = leaves
    options |= {"sinks": sinks[0]} if sinks else {}
    out = attend(q, k, v, layout, backend=backend, **options)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]
