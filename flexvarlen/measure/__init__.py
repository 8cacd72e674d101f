"""Measurements that all records use, so that their numbers are comparable.

| file | measures |
|---|---|
| `timing.py` | times of several interleaved variants, on the host and on the device |
| `compilation.py` | graph breaks, recompilations, seconds of torch.compile |
| `memory.py` | peak memory of a call |
| `machine.py` | hardware, versions and commit |
"""

from flexvarlen.measure.compilation import CompileStats, watch_compilation
from flexvarlen.measure.machine import environment
from flexvarlen.measure.memory import memory_meaning, peak_memory_mib
from flexvarlen.measure.timing import (
    HostAndDevice,
    Timing,
    summarize,
    time_host_and_device,
    time_interleaved,
)

__all__ = [
    "CompileStats",
    "HostAndDevice",
    "Timing",
    "environment",
    "memory_meaning",
    "peak_memory_mib",
    "summarize",
    "time_host_and_device",
    "time_interleaved",
    "watch_compilation",
]
