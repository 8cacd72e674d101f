"""What the suites of drift share: the name of a baseline."""

from __future__ import annotations

import torch

from flexvarlen.verify.experiment.variant import variant_names


def check_baseline(name: str) -> str:
    """The backend that is named; raises a ValueError for the name of none."""
    try:
        (found,) = variant_names([name], torch.device("cpu"))
    except ValueError as error:
        raise ValueError(str(error).replace("backends", "baseline", 1)) from error
    return found
