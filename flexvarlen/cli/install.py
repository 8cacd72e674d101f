"""The best kernel of this machine that has to be installed: is it here, and how to get it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib import invalidate_caches

import torch

from flexvarlen.attention.backends import machines
from flexvarlen.attention.backends.cu_seqlens import hub
from flexvarlen.attention.backends.registry import why_not
from flexvarlen.cli.machine import HEADS

_BEST_FIRST = ("fa3", "fa4", "fa2")


@dataclass(frozen=True)
class Best:
    """The fastest backend that can train on a machine, among those that have to be installed.

    Attributes:
        name: of the backend.
        reason: why it cannot be used yet; None: it is here.
    """

    name: str
    reason: str | None

    def sentences(self) -> list[str]:
        """What is best here, and the one command to get it."""
        if self.reason is None:
            where = hub.origin(self.name) or "its package"
            return [f"The best kernel of this machine is here: {self.name}, of {where}."]
        steps = f"loads {hub.REPOSITORIES[self.name]} from the Hub"
        if hub.problem_of_kernels(self.name) is not None:
            steps = f"installs {hub.requirement(self.name)} with pip and {steps}"
        return [
            f"The best kernel of this machine is {self.name}, which is not here.",
            f"To get it, run: {hub.DOCTOR}",
            f"It {steps}; nothing is compiled.",
        ]


def best(device: torch.device) -> Best | None:
    """The best backend of the device's machine; None where torch's own kernels are the best."""
    machine = machines.machine_of(device)
    for name in _BEST_FIRST:
        row = machines.row_of(name, machine)
        if row is not None and row.refusal is None and not isinstance(row.gradients, str):
            return Best(name, _why_not(name, device))
    return None


def advice(device: torch.device) -> list[str]:
    """What is best on the device's machine, and how to get it, as a few sentences."""
    found = best(device)
    if found is None:
        return [f"Nothing to install: on {device.type} torch's own kernels are the best."]
    return found.sentences()


def install(device: torch.device) -> list[str]:
    """Get the best kernel: install `kernels` if need be, and load from the Hub. As `advice`.

    Raises:
        OSError: offline, or pip failed.
        NotImplementedError: the kernel cannot be used for another reason.
    """
    wanted = best(device)
    if wanted is None or wanted.reason is None:
        return advice(device)
    name = wanted.name
    if hub.problem_of_kernels(name) is not None:
        if hub.is_offline():
            raise OSError(f"--install needs the network: {wanted.reason}")
        command = [sys.executable, "-m", "pip", "install", hub.requirement(name)]
        if subprocess.run(command).returncode != 0:
            raise OSError(f"pip could not install {hub.requirement(name)}; see above.")
        invalidate_caches()
    hub.download(name)
    reason = _why_not(name, device)
    if reason is not None:
        raise NotImplementedError(reason)
    return advice(device)


def _why_not(name: str, device: torch.device) -> str | None:
    return why_not(name, device=device, dtype=torch.bfloat16, **HEADS)
