"""Save and restore the state of random generators."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import torch


class RandomState:
    """The current random state of Python, NumPy, and torch on the CPU and on all GPUs.

    Args:
        devices: other devices whose state is saved too.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._cpu = torch.get_rng_state()
        kept = {device for device in devices if device.type not in ("cpu", "meta")}
        if torch.cuda.is_initialized():
            kept |= {torch.device("cuda", index) for index in range(torch.cuda.device_count())}
        self._devices = {each: torch.get_device_module(each).get_rng_state(each) for each in kept}

    def restore(self) -> None:
        """Restore the saved state; may be called several times."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
