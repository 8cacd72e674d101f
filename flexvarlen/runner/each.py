"""`measure_each`: a finding for each variant of a case, whatever becomes of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from flexvarlen.measure.timing import synchronize
from flexvarlen.runner.failures import is_lost, status_of
from flexvarlen.runner.suite import DeviceLost, Finding


def measure_each(
    where: str,
    variants: Sequence[str],
    measure: Callable[[str], Finding],
    device: torch.device,
) -> list[Finding]:
    """Measure variants one after another; what one raises is its finding.

    Args:
        where: the case, for the message.
        measure: makes the finding of a variant.

    Raises:
        DeviceLost: a variant broke the device; with the findings so far.
    """
    findings: list[Finding] = []
    for name in variants:
        try:
            finding = measure(name)
            synchronize(device)  # an error of the device is this variant's, not the next one's
        except Exception as error:  # compilers of kernels raise types of their own
            status, reason = status_of(error)
            if is_lost(error, device):
                findings.append(Finding(name, "failed", reason, {"fatal": True}))
                raise DeviceLost(
                    f"{name} lost the device in {where}: {reason}", findings
                ) from error
            finding = Finding(name, status, reason)
        findings.append(finding)
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return findings
