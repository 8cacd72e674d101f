"""What this machine can run, as data: versions, the GPU, and each backend with its reason."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from flexvarlen.attention.backends.machines import machine_of, row_of
from flexvarlen.attention.backends.registry import BACKENDS, IMPLEMENTATIONS, why_not
from flexvarlen.attention.explain import BackendReport, explain
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.measure.machine import environment
from flexvarlen.recurrent import fla_kernels
from flexvarlen.recurrent.fla_configs import (
    fla_configs_are_wanted,
    fla_variables_are_set,
)
from flexvarlen.recurrent.fla_kernels.check import noted

HEADS: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
"""The call for which backends are checked: the attention of Llama-3.1-8B."""

TYPICAL_ROWS = ((8_192, 512), (32_768, 2_048))
"""Tokens of a row and the mean length of its documents, for which kernels are timed."""

DECODING = (
    "Decoding (a non-empty cache) is not packed: a patched model leaves it to transformers' own "
    "sdpa and mask."
)


@dataclass(frozen=True)
class BackendState:
    """What a backend can do here.

    Attributes:
        name: name of the backend.
        implementation: its `attn_implementation` name in transformers, or "none".
        can: "train and run", "run only" or "nothing".
        head_dims: head dims that it supports on such a machine; "" if it cannot run at all.
        reason: a sentence on what it cannot do, and what to do instead, or None.
    """

    name: str
    implementation: str
    can: str
    head_dims: str
    reason: str | None

    @property
    def needs_gpu(self) -> bool:
        """Whether it can do nothing because there is no CUDA device."""
        return self.can == "nothing" and "CUDA" in (self.reason or "")


def backend_states(device: torch.device | str, dtype: torch.dtype) -> list[BackendState]:
    """The state of every backend on a device, in a dtype."""
    implementations = {backend: name for name, backend in reversed(IMPLEMENTATIONS.items())}
    states = []
    for name in BACKENDS:
        training = why_not(name, device=device, dtype=dtype, **HEADS)
        running = why_not(name, device=device, dtype=dtype, needs_grad=False, **HEADS)
        can = "nothing" if running else "run only" if training else "train and run"
        row = row_of(name, machine_of(torch.device(device)))
        dims = "" if row is None or row.refusal else row.head_dims.span
        implementation = implementations.get(name, "none")
        states.append(BackendState(name, implementation, can, dims, running or training))
    return states


def not_tried(device: torch.device | str) -> str | None:
    """A sentence for machines on which flexvarlen's tests have not run; None on others."""
    if machine_of(torch.device(device)).is_tried:
        return None
    return (
        "flexvarlen's tests have not run on such a machine: each backend is checked against the "
        "reference before its first use."
    )


def version_problems() -> list[str]:
    """One sentence for each dependency that is missing or outside the supported range."""
    try:
        requirements = requires("flexvarlen") or []
    except PackageNotFoundError:  # a checkout on the path
        return ["flexvarlen is not installed, so versions are not checked; run: pip install -e ."]
    problems = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None:  # an extra
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed; install {requirement}.")
            continue
        if not requirement.specifier.contains(Version(found).base_version, prereleases=True):
            problems.append(
                f"{requirement.name} {found} is outside the tested range "
                f"{requirement.specifier}; install {requirement}."
            )
    return problems


PACKAGES = (
    *("accelerate", "trl", "peft", "liger-kernel"),
    *("fla-core", "mamba-ssm"),  # kernels of recurrent layers
    "kernels",
)
"""Packages used in training."""


def facts(device: torch.device | str) -> dict[str, str]:
    """Hardware and versions; first the versions of the training stack."""
    found = environment(device)
    kernels = ("triton", "flash_attn", "flash_attn_3", "flash_attn_4")
    first = {"flexvarlen": found["flexvarlen"], "torch": found["torch"]}
    first |= {"transformers": found["transformers"]} | {x: _version(x) for x in PACKAGES}
    shown = first | {x: found[x] for x in (*kernels, "gpu", "cuda", "cpu", "python")}
    return {name: "none" if fact is None else str(fact) for name, fact in shown.items()}


def fla_configs() -> str | None:
    """A sentence on the configurations of fla's kernels; None if fla is not installed."""
    if _version("fla-core") is None:
        return None
    if fla_configs_are_wanted():
        return "fla's kernels run with the configurations found on an H200."
    if fla_variables_are_set():
        return "fla's own environment variables choose the configurations of its kernels."
    return (
        "fla times its kernels for minutes at their first use. FLEXVARLEN_FLA_CONFIGS=1 gives "
        "them the configurations found on an H200, which may be slow on other GPUs."
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def chosen_by_auto(device: torch.device | str, dtype: torch.dtype) -> str:
    """What "auto" chooses for training on a typical row; no kernel runs."""
    tokens, mean = TYPICAL_ROWS[0]
    layout = PackedLayout.from_lengths(log_normal_lengths(tokens, mean), device=device)
    return explain(layout, dtype=dtype, **HEADS).sentence()


def checked_scans(device: torch.device | str) -> str | None:
    """Which of fla's scans passed the check on this machine; None if fla cannot run."""
    device = torch.device(device)
    if fla_kernels.why_not(torch.empty(0, device=device, dtype=torch.bfloat16)) is not None:
        return None
    found = noted(device)
    if not found:
        return "fla's scans are checked at their first use; on this machine, none has run yet."
    return f"fla's scans that passed the check on this machine: {'; '.join(found)}."


def parse_heads(text: str) -> tuple[int, int]:
    """Parse query and KV heads, written as "32/8".

    Raises:
        ValueError: the text has another form, or query heads are not a multiple of KV heads.

    >>> parse_heads("32/8")
    (32, 8)
    """
    query, _, kv = text.partition("/")
    if (
        not (query.isdecimal() and kv.isdecimal())
        or min(int(query), int(kv)) < 1
        or int(query) % int(kv)
    ):
        raise ValueError(
            f"heads must be query heads/KV heads, the first a multiple of the second, got {text!r};"
            " write 32/8."
        )
    return int(query), int(kv)


def log_normal_lengths(tokens: int, mean: int, seed: int = 0) -> list[int]:
    """Log-normal document lengths, as in texts (sigma 1), that fill a row of `tokens` tokens.

    >>> sum(log_normal_lengths(1000, 100))
    1000
    """
    pick = random.Random(seed)
    lengths: list[int] = []
    left = tokens
    while left:
        # exp(mu + sigma²/2) is the mean of a log-normal.
        length = int(pick.lognormvariate(math.log(mean) - 0.5, 1.0))
        lengths.append(max(1, min(length, left)))
        left -= lengths[-1]
    return lengths


def measured(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    tokens: int | None,
    mean: int | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> Iterator[BackendReport]:
    """Time the kernels for training and inference, on one row or, by default, on typical rows."""
    rows: tuple[tuple[int, int], ...] = TYPICAL_ROWS
    if tokens is not None or mean is not None:
        row_tokens = tokens or TYPICAL_ROWS[0][0]
        rows = ((row_tokens, mean or min(TYPICAL_ROWS[0][1], row_tokens)),)
    for row_tokens, row_mean in rows:
        lengths = log_normal_lengths(row_tokens, row_mean)
        layout = PackedLayout.from_lengths(lengths, device=device)
        for needs_grad in (True, False):
            yield explain(
                layout,
                dtype=dtype,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                needs_grad=needs_grad,
                measure=True,
            )
