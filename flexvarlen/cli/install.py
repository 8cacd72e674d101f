"""The best kernel for this machine: whether it is installed, and how to install it."""

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
        name: name of the backend.
        reason: why it cannot be used yet; None: it is installed.
    """

    name: str
    reason: str | None

    def sentences(self) -> list[str]:
        """The best backend here, and the command that installs it."""
        if self.reason is None:
            origin = hub.origin(self.name) or "an installed package"
            return [f"The best kernel for this machine is ready: {self.name}, from {origin}."]
        if not self.can_be_installed:
            return [f"The best kernel for this machine cannot be used: {self.reason}"]
        repository = hub.REPOSITORIES[self.name]
        download = f"downloads {repository} from the Hub"
        copy = f"set LOCAL_KERNELS={repository.name}=FOLDER to a copy of that repository"
        if hub.problem_of_kernels(self.name) is not None:
            download = f"installs {hub.requirement(self.name)} with pip and {download}"
            copy = f"install {hub.requirement(self.name)} and {copy}"
        missing = f"The best kernel for this machine is {self.name}, which is not installed."
        what = f"This {download}; nothing is compiled."
        if hub.is_offline():
            unset = f"To get it, unset HF_HUB_OFFLINE and run: {hub.DOCTOR}"
            return [missing, unset, what, f"Without a network, {copy}."]
        return [missing, f"To get it, run: {hub.DOCTOR}", what]

    @property
    def can_be_installed(self) -> bool:
        """Whether `--install` can download it; not if LOCAL_KERNELS names a copy that fails."""
        return self.reason is not None and hub.DOCTOR in self.reason


def best(device: torch.device) -> Best | None:
    """The best backend for the device's machine; None if torch's own kernels are the best."""
    machine = machines.machine_of(device)
    for name in _BEST_FIRST:
        row = machines.row_of(name, machine)
        if row is not None and row.refusal is None and not isinstance(row.gradients, str):
            return Best(name, _why_not(name, device))
    return None


def advice(device: torch.device) -> list[str]:
    """A few sentences on the best backend for the device's machine and how to install it."""
    found = best(device)
    if found is None:
        return [f"Nothing to install: torch's own kernels are the best on {device.type}."]
    return found.sentences()


def install(device: torch.device) -> list[str]:
    """Install `kernels` if needed, download the best kernel from the Hub, and return `advice`.

    Raises:
        OSError: HF_HUB_OFFLINE is set, or pip failed.
        NotImplementedError: the kernel cannot be used, for another reason.
    """
    wanted = best(device)
    if wanted is None or wanted.reason is None:
        return advice(device)
    name = wanted.name
    if not wanted.can_be_installed:
        raise NotImplementedError(wanted.reason)
    if hub.is_offline():
        raise OSError(
            "--install needs the network; unset HF_HUB_OFFLINE, or set LOCAL_KERNELS="
            f"{hub.REPOSITORIES[name].name}=FOLDER to a copy of that repository."
        )
    if hub.problem_of_kernels(name) is not None:
        command = [sys.executable, "-m", "pip", "install", hub.requirement(name)]
        if subprocess.run(command).returncode != 0:
            raise OSError(
                f"pip could not install {hub.requirement(name)}; see above. If there is no such "
                "version, run pip install '.[kernels]' in flexvarlen's checkout, which also "
                "installs a compatible release of transformers."
            )
        invalidate_caches()
    hub.download(name)
    reason = _why_not(name, device)
    if reason is not None:
        raise NotImplementedError(reason)
    return advice(device)


def _why_not(name: str, device: torch.device) -> str | None:
    return why_not(name, device=device, dtype=torch.bfloat16, **HEADS)
