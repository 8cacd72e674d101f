"""The forms of one kernel: fixed lengths, varlen, ours; and each with a deterministic backward.

Determinism is asked for as each kernel wants it: by an argument of the function, of torch's own
kernels by torch's switch for the whole process.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexvarlen.bench.attention.inputs import Inputs, Prepare, Prepared
from flexvarlen.bench.attention.padded import FIXED, fixed_packaged
from flexvarlen.bench.attention.raw_kernels import deterministic_argument, first_of
from flexvarlen.bench.attention.sdpa_ways import FORCED, sdpa
from flexvarlen.bench.attention.ways import RAW_PREFIX, ours, raw
from flexvarlen.equivalence.variants import Unsupported

DETERMINISTIC = "@deterministic"
ON_CPU = "sdpa"


@dataclass(frozen=True)
class Forms:
    """The variants that run one kernel: fixed lengths, varlen, ours; None where there is none."""

    fixed: str
    varlen: str | None
    ours: str

    def named(self) -> dict[str, str]:
        """By what a table calls them."""
        found = {"fixed": self.fixed, "varlen": self.varlen, "flexvarlen": self.ours}
        return {form: name for form, name in found.items() if name is not None}


KERNELS: dict[str, Forms] = {
    **{
        name: Forms(f"fixed:{name}", RAW_PREFIX + name, name)
        for name in ("fa2", "fa3", "fa4", "flex")
    },
    "varlen": Forms("sdpa:flash", f"{RAW_PREFIX}varlen", "varlen"),
    ON_CPU: Forms("sdpa:default", None, ON_CPU),
}
"""By the name of the backend; `varlen` and `sdpa:flash` are the FlashAttention that torch ships."""

PACKAGES = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}


def ways_of_kernel(kernel: str) -> dict[str, Prepare]:
    """Every form of a kernel, each ordinary and then deterministic."""
    forms = KERNELS[kernel]
    by_argument = kernel in (*PACKAGES, "flex")
    fixed = FIXED.get(forms.fixed) or partial(sdpa, backend=FORCED[forms.fixed])
    deterministic_fixed = (
        partial(fixed_deterministic, kernel) if by_argument else under_switch(fixed)
    )
    ways: dict[str, tuple[Prepare, Prepare]] = {forms.fixed: (fixed, deterministic_fixed)}
    if forms.varlen is not None:
        asked = raw(kernel, deterministic=True) if by_argument else under_switch(raw(kernel))
        ways[forms.varlen] = (raw(kernel), asked)
    asked = ours(kernel, deterministic=True)
    ways[forms.ours] = (ours(kernel), asked if by_argument else under_switch(asked))
    found: dict[str, Prepare] = {}
    for name, (ordinary, deterministic) in ways.items():
        found |= {name: ordinary, name + DETERMINISTIC: deterministic}
    return found


def fixed_deterministic(kernel: str, inputs: Inputs, needs_grad: bool) -> Prepared:
    """The fixed-length function of a kernel, asked for a deterministic backward.

    Raises:
        Unsupported: it takes no such argument.
    """
    if kernel not in PACKAGES:
        raise Unsupported(f"the fixed-length function of {kernel} takes no `deterministic`")
    ordinary = fixed_packaged(PACKAGES[kernel], inputs, needs_grad)
    function = importlib.import_module(PACKAGES[kernel]).flash_attn_func
    argument = deterministic_argument(function)
    leaves, causal = ordinary.leaves, inputs.causal
    return dataclasses.replace(
        ordinary,
        forward=lambda: first_of(function(*leaves, causal=causal, **argument)),
        deterministic=True,
    )


def under_switch(prepare: Prepare) -> Prepare:
    """The same calls under `torch.use_deterministic_algorithms(True)`, each for itself.

    The switch costs the host some microseconds.
    """

    def prepare_deterministic(inputs: Inputs, needs_grad: bool) -> Prepared:
        with deterministic_switch():
            ordinary = prepare(inputs, needs_grad)

        def forward() -> Any:
            with deterministic_switch():
                return ordinary.forward()

        return _UnderSwitch(
            forward,
            ordinary.leaves,
            ordinary.cotangent,
            deterministic=True,
            measures=ordinary.measures,
            ordinary=ordinary,
        )

    return prepare_deterministic


@dataclass(frozen=True)
class _UnderSwitch(Prepared):
    ordinary: Prepared = field(kw_only=True)

    def backward(self, out: Any) -> tuple[Tensor, ...]:
        with deterministic_switch():
            return self.ordinary.backward(out)

    def answer(self, out: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
        return self.ordinary.answer(out, gradients)


@contextmanager
def deterministic_switch() -> Iterator[None]:
    """Torch's switch is on meanwhile, for the whole process; then as it was.

    Without the filling of uninitialized memory that comes with it by default: a kernel's
    determinism does not need it, and it takes time.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
