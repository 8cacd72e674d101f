"""`measure_each`, `measure_passes`: a finding for each variant of a case, even if it fails."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence

import torch

from flexvarlen.measure.timing import synchronize
from flexvarlen.runner.failures import is_lost, status_of
from flexvarlen.runner.suite import DeviceLost, Finding


def measure_each(
    where: str,
    variants: Sequence[str],
    measure: Callable[[str], Finding],
    device: torch.device,
    *,
    pass_: str = "",
    before: Sequence[Finding] = (),
) -> list[Finding]:
    """Measure variants one after another; an exception becomes the variant's finding.

    Args:
        where: the case, for the message.
        measure: makes the finding of a variant.
        pass_: the pass of the findings.
        before: findings of the case's other passes; they come first.

    Raises:
        DeviceLost: a variant broke the device; with the findings so far.
    """
    findings = list(before)
    for name in variants:
        try:
            finding = measure(name)
            synchronize(device)  # an error of the device is this variant's, not the next one's
        except Exception as error:  # compilers of kernels raise types of their own
            status, reason = status_of(error)
            lost = is_lost(error, device)
            finding = Finding(name, status, reason, {"fatal": True} if lost else {}, pass_)
            if lost:
                message = f"{name} lost the device in {where}: {reason}"
                raise DeviceLost(message, [*findings, finding]) from error
        findings.append(finding)
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return findings


def measure_passes(
    case: str,
    variants: Sequence[str],
    passes: Mapping[str, Callable[[str], Finding]],
    device: torch.device,
) -> list[Finding]:
    """`measure_each` of each pass, by its name."""
    found: list[Finding] = []
    for name, measure in passes.items():
        where = f"{case}, {name}"
        found = measure_each(where, variants, measure, device, pass_=name, before=found)
    return found
