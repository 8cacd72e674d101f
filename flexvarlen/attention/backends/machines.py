"""Which backend serves which machine: a table by backend, vendor, capability, dtype and head_dim.

The table is consulted first; the backend then checks the rest of a call. `flexvarlen doctor` and
docs/backends.md show the table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flexvarlen.attention.backends.limits import FA4_GRADIENTS, fa4_gradient_refusal
from flexvarlen.attention.call import AttentionCall

VENDORS = {"nvidia": "NVIDIA", "rocm": "ROCm", "xpu": "XPU", "mps": "MPS", "cpu": "CPU"}
"""Vendors of devices, as the table names them; `torch.version.hip` tells the first two apart."""

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF)
ANY_FLOAT = (torch.float64, *FLOATS)

_OTHER_DTYPE = {
    HALF: "convert the model or use backend='flex'",
    FLOATS: "use backend='sdpa' or 'reference'",
    ANY_FLOAT: "convert the tensors",
}


class Machine(NamedTuple):
    """A device's vendor and major compute capability (0 if it has none)."""

    vendor: str
    major: int = 0

    @property
    def is_tried(self) -> bool:
        """Whether this project has been tried on such a machine: NVIDIA GPUs and CPUs."""
        return self.vendor in ("cpu", "nvidia")


class HeadDims(NamedTuple):
    """Head dims: multiples of `multiple` from `least` to `most`, and the dims in `also`."""

    multiple: int = 1
    most: int | None = None
    least: int = 1
    also: tuple[int, ...] = ()

    def has(self, head_dim: int) -> bool:
        """Whether the head_dim is among these."""
        if head_dim in self.also:
            return True
        within = self.least <= head_dim and (self.most is None or head_dim <= self.most)
        return within and head_dim % self.multiple == 0

    @property
    def span(self) -> str:
        """The head dims for a table cell, as "8–256 by 8"."""
        if self.most is None:
            return "any" if self.least == 1 else f"from {self.least}"
        step = f"{max(self.multiple, self.least)}–{self.most} by {self.multiple}"
        return ", ".join([step, *map(str, self.also)])

    def __str__(self) -> str:
        words = [f"a multiple of {self.multiple}"] * (self.multiple > 1)
        words += [f"at least {self.least}"] * (self.least > self.multiple)
        words += [f"at most {self.most}"] * (self.most is not None)
        return " and ".join(words) + "".join(f", or {x}" for x in self.also) or "any"


class Row(NamedTuple):
    """What some backends can do on some machines.

    Attributes:
        backends, vendor: names; vendor "": all vendors.
        majors: major compute capabilities; empty: all that no earlier row has.
        refusal: why they cannot run there at all, as a sentence without the backend's name.
        dtypes, head_dims: supported dtypes and head dims.
        gradients: the number that head_dim must be a multiple of for gradients; None: gradients
            only need `head_dims`; or a sentence why there is no backward.
        tried: whether this project has run them on such a machine, or on a similar one.
    """

    backends: tuple[str, ...]
    vendor: str
    majors: tuple[int, ...] = ()
    refusal: str | None = None
    dtypes: tuple[torch.dtype, ...] = HALF
    head_dims: HeadDims = HeadDims(8, 256)
    gradients: int | str | None = None
    tried: bool = True


_CUDA_ONLY = ("flex_fa4", "varlen", "cudnn", "nested", "fa2", "fa3", "fa4")
_TORCH = ("reference", "sdpa")
_OLD = "needs compute capability 8.0 (Ampere) or newer; use backend='flex' or 'sdpa'."
_NO_BACKWARD = "has no backward on compute capability 8.x; use backend='fa2', or torch.no_grad()."
_CUDNN = "is forward-only: its packed backward gives NaN in torch 2.11; use backend='varlen', or "
_CUDNN += "torch.no_grad()."
_FLEX: dict[str, Any] = {"dtypes": FLOATS, "head_dims": HeadDims(least=16)}
_NO_CPU_BACKWARD = "has no backward on the CPU; use backend='sdpa' there, or torch.no_grad()."
_HOPPER = "needs a Hopper GPU (compute capability 9.0); use backend='fa2' or 'flex'."
_UNTRIED_FA4: dict[str, Any] = {"gradients": FA4_GRADIENTS, "tried": False}
_BLACKWELL_DIMS = HeadDims(8, 128, also=(256,))
_NVIDIA = "needs an NVIDIA GPU; use backend='fa2' or 'flex'."


def _cuda_gpu(vendor: str) -> str:
    return f"needs a CUDA GPU, got {vendor}; use backend='sdpa'."


TABLE: tuple[Row, ...] = (
    Row(_TORCH, "", dtypes=ANY_FLOAT, head_dims=HeadDims()),
    # NVIDIA, as FlashAttention, torch and cuDNN say
    Row(_CUDA_ONLY, "nvidia", tuple(range(8)), refusal=_OLD),
    Row(("fa3",), "nvidia", (9,)),
    Row(("fa3",), "nvidia", refusal=_HOPPER),
    Row(("fa4",), "nvidia", (9,), gradients=FA4_GRADIENTS),
    Row(("fa4",), "nvidia", (10, 11), head_dims=_BLACKWELL_DIMS, **_UNTRIED_FA4),
    Row(("fa4",), "nvidia", (12,), head_dims=HeadDims(8, 128), **_UNTRIED_FA4),
    Row(("fa4",), "nvidia", (8,), head_dims=HeadDims(8, 128), gradients=_NO_BACKWARD, tried=False),
    Row(("fa4",), "nvidia", refusal="needs compute capability 8.x to 12.x; use backend='flex'."),
    Row(("flex_fa4",), "nvidia", (9, 10, 11), head_dims=HeadDims(32, 128)),
    Row(("flex_fa4",), "nvidia", refusal="needs a Hopper or Blackwell GPU; use backend='flex'."),
    Row(("cudnn",), "nvidia", head_dims=HeadDims(8, 128), gradients=_CUDNN),
    Row(("fa2", "varlen", "nested"), "nvidia"),
    Row(("flex",), "nvidia", **_FLEX),
    # ROCm: torch's FlexAttention and flash kernel, and flash-attn, run there. The kernel that
    # transformers loads from the Hub, aiter-flash-attn, returns no LSE.
    Row(("fa2", "varlen", "nested"), "rocm"),
    Row(("flex",), "rocm", **_FLEX),
    Row(_CUDA_ONLY, "rocm", refusal=_NVIDIA),
    # XPU: torch's FlexAttention, and the Hub's build of FlashAttention-2
    Row(("fa2",), "xpu"),
    Row(("flex",), "xpu", **_FLEX),
    Row(_CUDA_ONLY, "xpu", refusal=_NVIDIA),
    # MPS and the CPU: torch's own attention
    Row(("flex",), "mps", refusal="has no backward on MPS; use backend='sdpa'."),
    Row(("flex",), "cpu", dtypes=FLOATS, head_dims=HeadDims(), gradients=_NO_CPU_BACKWARD),
    *(Row(_CUDA_ONLY, vendor, refusal=_cuda_gpu(vendor)) for vendor in ("mps", "cpu")),
)

_NAMES = {name for row in TABLE for name in row.backends}


def machine_of(device: torch.device) -> Machine:
    """The machine of a device; the vendor of a CUDA device is "none" if torch finds no GPU."""
    if device.type != "cuda":
        return Machine(device.type)
    try:
        major = torch.cuda.get_device_capability(device)[0]
    except (AssertionError, RuntimeError):  # torch without CUDA, and without a driver
        return Machine("none")
    return Machine("nvidia" if torch.version.hip is None else "rocm", major)


def row_of(name: str, machine: Machine) -> Row | None:
    """The row about a backend on a machine; None: the machine cannot run it at all."""
    for row in TABLE:
        here = not row.majors or machine.major in row.majors
        if here and row.vendor in ("", machine.vendor) and name in row.backends:
            return row
    return None


def refusal(name: str, call: AttentionCall) -> str | None:
    """Why a backend cannot serve calls on such a machine, of this dtype and head_dim, or None."""
    if name not in _NAMES:
        return None
    machine = machine_of(call.device)
    row = row_of(name, machine)
    if row is None and machine.vendor == "none":
        return f"{name} needs a CUDA GPU, and torch finds none here; use device='cpu'."
    if row is None:
        return f"{name} {_cuda_gpu(machine.vendor)}"
    if row.refusal is not None:
        return f"{name} {row.refusal}"
    if call.dtype not in row.dtypes:
        names = [str(dtype).removeprefix("torch.") for dtype in row.dtypes]
        wanted = "a float dtype" if row.dtypes is ANY_FLOAT else _either(names)
        return f"{name} needs {wanted}, got {call.dtype}; {_OTHER_DTYPE[row.dtypes]}."
    if not row.head_dims.has(call.head_dim):
        other = "sdpa" if name == "flex" else "flex"
        return f"{name} needs head_dim {row.head_dims}, got {call.head_dim}; use backend='{other}'."
    if isinstance(row.gradients, str):
        return f"{name} {row.gradients}" if call.needs_grad else None
    return None if row.gradients is None else fa4_gradient_refusal(name, call)


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]])


def is_tried(name: str, device: torch.device) -> bool:
    """Whether this project has run a backend on such a machine.

    Elsewhere its results are compared with the reference before first use.
    """
    if name == "reference" or name not in _NAMES:
        return True
    machine = machine_of(device)
    row = row_of(name, machine)
    return machine.is_tried and (row is None or row.tried)


def where(name: str) -> str:
    """The machines that a backend runs on, each with its head_dims.

    >>> where("cudnn")
    'NVIDIA: 8–128 by 8, forward only'
    """
    found: dict[str, list[str]] = {}
    for row in TABLE:
        if name in row.backends and row.refusal is None:
            what = row.head_dims.span
            what += ", forward only" * isinstance(row.gradients, str)
            what += f", gradients by {row.gradients}" * isinstance(row.gradients, int)
            majors = " " + ", ".join(f"{major}.x" for major in row.majors)
            found.setdefault(what, []).append(VENDORS.get(row.vendor, "all") + majors.rstrip())
    return "; ".join(f"{', '.join(machines)}: {what}" for what, machines in found.items())
