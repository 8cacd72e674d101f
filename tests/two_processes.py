"""Processes that meet by gloo on this machine: started once for all cases of a test module."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

WORLD = 2


def start(
    run: Callable[[int, int, str], None],
    folder: Path,
    world: int = WORLD,
    method: str = "forkserver",
) -> None:
    """`run(rank, port, folder)` in each process; returns when all have ended.

    `run` must not destroy the process group. On GPUs the method is "spawn", as CUDA has no forks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload([run.__module__])  # imported once for all
    torch.multiprocessing.start_processes(
        _run_and_leave, args=(port, str(folder), run), nprocs=world, start_method=method
    )


def _run_and_leave(rank: int, port: int, folder: str, run: Callable[[int, int, str], None]) -> None:
    """End without destructors: DDP may wait for a thread of gloo that waits for the GIL."""
    run(rank, port, folder)
    sys.stdout.flush()
    os._exit(0)


def meet(rank: int, port: int, *, timeout_s: int, world: int = WORLD) -> None:
    """Inside `run`: the process group, and the environment that torchrun would give the rank."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
