"""What a torch.profiler trace saw on the device, an event a kernel, copy or fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceEvent:
    """One piece of work on the device; microseconds of the profiler's clock."""

    name: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def device_events(work: Callable[[], object], device: torch.device) -> list[DeviceEvent]:
    """All that ran on the device while `work` did, in order of start; syncs.

    Empty where the profiler saw nothing, which is no measurement of nothing.
    Source: CUPTI's activity records, as torch.profiler hands them on.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize(device)
    found = [
        DeviceEvent(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profile.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    return sorted(found, key=lambda event: event.start_us)
