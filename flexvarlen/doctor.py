"""What this machine can run, as data: versions, the GPU, and each backend with its reason.

Imports: backends, environment. A kernel package is imported only to see whether it imports.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from flexvarlen.backends import BACKENDS, why_not
from flexvarlen.environment import environment
from flexvarlen.patches import IMPLEMENTATIONS

HEADS: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
"""The call that backends are asked about: the attention of Llama-3.1-8B."""

DECODING = (
    "Decoding (a non-empty cache) is not packed: a patched model hands it to transformers' own "
    "sdpa, with transformers' own mask."
)


@dataclass(frozen=True)
class BackendState:
    """What a backend can do here.

    Attributes:
        name: of the backend.
        implementation: its `attn_implementation` name in transformers.
        can: "train and run", "run only" or "nothing".
        reason: one sentence why not more, and what to do, or None.
    """

    name: str
    implementation: str
    can: str
    reason: str | None


def backend_states(device: torch.device | str, dtype: torch.dtype) -> list[BackendState]:
    """Every backend, and what it can do on a device in a dtype."""
    implementations = {backend: name for name, backend in IMPLEMENTATIONS.items()}
    states = []
    for name in BACKENDS:
        training = why_not(name, device=device, dtype=dtype, **HEADS)
        running = why_not(name, device=device, dtype=dtype, needs_grad=False, **HEADS)
        can = "nothing" if running else "run only" if training else "train and run"
        states.append(BackendState(name, implementations[name], can, running or training))
    return states


def version_problems() -> list[str]:
    """One sentence for each dependency that is missing or outside the range that is supported."""
    try:
        requirements = requires("flexvarlen") or []
    except PackageNotFoundError:  # a checkout on the path
        return ["flexvarlen is not installed, so versions are not checked; pip install -e . it."]
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
                f"{requirement.name} {found} is outside {requirement.specifier}, which is what is "
                f"tested; install {requirement}."
            )
    return problems


def facts(device: torch.device | str) -> dict[str, str]:
    """What there is to know of the machine: hardware and versions."""
    found = environment(device)
    shown = ("gpu", "cpu", "torch", "cuda", "triton", "transformers", "flash_attn", "python")
    return {name: "none" if found[name] is None else str(found[name]) for name in shown}
