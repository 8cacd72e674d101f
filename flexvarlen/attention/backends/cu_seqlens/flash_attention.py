"""What `fa2`, `fa3` and `fa4` share: an installed package, else a kernel of the Hub.

The kernel is found once per process. Its features are read from the parameters of its functions.
Sinks are never passed to it: `kernel.py` applies them, so that they have gradients, which some
kernels of the Hub lack.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch

from flexvarlen.attention.backends.cu_seqlens import hub
from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.call import AttentionCall


class Kernel(NamedTuple):
    """The functions of a FlashAttention package or kernel; backward: None if it has none."""

    forward: Any
    backward: Any
    origin: str


class FlashAttentionBackend(CuSeqlensBackend):
    """A FlashAttention package over cu_seqlens. Subclasses say where its functions are."""

    package: str
    """The name of the package in messages."""
    install: str
    """How to install it, as the end of a sentence."""
    hub_path: str
    """Where the module of the Hub's kernel has the functions."""
    functions: tuple[str, str]
    """The names of the forward and the backward."""

    def __init__(self) -> None:
        super().__init__()
        self._kernel: Kernel | None = None

    def installed(self, device: torch.device) -> Any:
        """Return the object with the installed package's functions, or a str why there is none."""
        raise NotImplementedError

    def from_hub(self, device: torch.device) -> hub.HubKernel | hub.NotLoaded:
        """Return the kernel of the Hub that is on disk."""
        return hub.on_disk(self.name)

    def kernel(self, device: torch.device) -> Kernel:
        """Return the kernel, which is found at the first call.

        Raises:
            NotImplementedError: there is no kernel.
        """
        found = self._kernel or self._find(device)
        if isinstance(found, str):
            raise NotImplementedError(found)
        self._kernel = found
        return found

    def why_missing(self, device: torch.device) -> str | None:
        """Require an installed package, or a kernel of the Hub on disk."""
        found = self._kernel or self._find(device)
        return found if isinstance(found, str) else None

    def _find(self, device: torch.device) -> Kernel | str:
        """The kernel, or a sentence why there is none."""
        holder, origin = self.installed(device), self.package
        if isinstance(problem := holder, str):
            kernel = self.from_hub(device)
            if isinstance(kernel, hub.NotLoaded):
                return (
                    f"{self.name} needs {self.package}, or the Hub's "
                    f"{hub.REPOSITORIES[self.name].name}: {problem}, and {kernel.reason}; "
                    f"{kernel.remedy}, or {self.install}"
                )
            holder, origin = kernel
            for name in self.hub_path.split("."):
                holder = getattr(holder, name, None)
        forward, backward = (getattr(holder, name, None) for name in self.functions)
        if forward is None:
            return f"{self.name} finds no {self.functions[0]} in {origin}; {self.install}"
        return Kernel(_plain(forward), _plain(backward), origin)

    def why_lacking(self, call: AttentionCall) -> str | None:
        """Refuse features for which the functions of this kernel have no parameter."""
        forward, backward, origin = self.kernel(call.device)
        if call.needs_grad and backward is None:
            return f"{origin} has no backward; use torch.no_grad(), or backend='flex'."
        wanted = ["softcap"] * (call.softcap is not None)
        wanted += ["window_size_left"] * (call.spec.left >= 0 or call.spec.right > 0)
        in_backward = ["deterministic"] * call.ordered_backward
        lacking = set(wanted) - _parameters(forward)
        if call.needs_grad:
            lacking |= {*wanted, *in_backward} - _parameters(backward)
        if lacking:
            return f"{origin} has no parameter {min(lacking)}; use backend='flex'."
        return None


def _plain(function: Any) -> Any:
    """The function to call for an operator, as this code already runs inside one."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        return function.default
    return getattr(function, "_init_fn", function)


def _parameters(function: Any) -> set[str]:
    if isinstance(function, torch._ops.OpOverload):
        return {argument.name for argument in function._schema.arguments}
    return set(inspect.signature(function).parameters)
