"""The answers of two checkouts, held against each other."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tests.same_answers.child import GRADIENT, Tensors

Answers = dict[str, Any]
TIMES_NOISE = 3
"""What may differ by chance: as the acceptance rule has it for gradients."""


def differences(old: Answers, new: Answers, again: Answers | None = None) -> list[str]:
    """A line for each case that differs.

    Args:
        old, new: by the name of a case, its tensors or the sentence that it raised.
        again: a second run of the old checkout. Outputs and gradients may differ by
            `TIMES_NOISE` times what differs between its two runs; default: not at all. Whether a
            gradient repeats may be chance, so the median over the backend's cases counts too.
    """
    noise = {name: apart(old[name], (again or old)[name]) for name in old}
    of_backend = defaultdict(list)
    for name, (_, gradients) in noise.items():
        if any(tensor.startswith(GRADIENT) for tensor in old[name]):
            of_backend[backend_of(name)].append(gradients)
    lines = []
    for name, before in old.items():
        after = new[name]
        if isinstance(before, str) or isinstance(after, str):
            both = [x if isinstance(x, str) else "an answer" for x in (before, after)]
            why = "" if both[0] == both[1] else " became ".join(both)
        elif before.keys() != after.keys():
            why = f"only one has {', '.join(sorted(before.keys() ^ after.keys()))}"
        else:
            outputs, gradients = noise[name]
            gradients = max(gradients, median(of_backend[backend_of(name)] or [0.0]))
            why = what_differs(before, after, TIMES_NOISE * outputs, TIMES_NOISE * gradients)
        if why:
            lines.append(f"{name}: {why}")
    return lines


def what_differs(old: Tensors, new: Tensors, *allowed: float) -> str:
    """The tensors that differ by more than is allowed, of outputs and of gradients; or ""."""
    found = []
    for what, part, most in zip(("outputs", "gradients"), parts(old), allowed, strict=True):
        other = [name for name, x in part.items() if not same_bits(x, new[name])]
        error = max((relative(part, new, name) for name in other), default=0.0)
        if other and not error <= most:
            noise = f", {most:.1e} allowed" if most else ""
            names = ", ".join(other[:2])
            count = f"{len(other)} of {len(part)} {what}"
            found.append(f"{count} differ by {error:.1e}{noise} ({names})")
    return "; ".join(found)


def parts(answer: Tensors) -> tuple[Tensors, Tensors]:
    """Outputs, and gradients."""
    gradients = {name: x for name, x in answer.items() if name.startswith(GRADIENT)}
    return {name: x for name, x in answer.items() if name not in gradients}, gradients


def apart(a: Tensors | str, b: Tensors | str) -> list[float]:
    """The largest relative difference of outputs, and of gradients."""
    if isinstance(a, str) or isinstance(b, str):
        return [0.0, 0.0]
    return [max((relative(part, b, name) for name in part), default=0.0) for part in parts(a)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def relative(of: Tensors, others: Tensors, name: str) -> float:
    """The norm of the difference of one tensor, over its own, or a thousandth of the largest."""
    a, b = of[name].double(), others[name].double()
    if same_bits(of[name], others[name]):
        return 0.0
    if a.shape != b.shape or not (a - b).isfinite().all():
        return float("inf")
    largest = max(float(x.double().norm()) for x in of.values())
    return float((a - b).norm()) / max(float(a.norm()), 1e-3 * largest, 1e-30)


def backend_of(name: str) -> str:
    return name.rpartition(" | ")[2]
