"""Processes of this machine that run the cases which tests ask of them, as ranks of one group.

A case that raises, dies or hangs fails those tests alone that ask for it, with what its ranks
printed; the next case runs in new processes.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

# Far above what any case needs, as the cores may be shared, and below pytest's own limit.
CASE_S = 480.0
COLLECTIVE_S = 300.0
END_S = 20.0  # that a rank may outlive another: gloo tells it at once
LINES = 60  # of a rank's output in an error

IMPORTED = ("torch._inductor.compile_fx", "transformers.trainer", "trl", "datasets")
"""What cases use, imported once for all ranks of all tests: in each it took five seconds."""

Join = Callable[[int, int, str], None]


def forking_context(module: str) -> Any:
    """multiprocessing's "forkserver", whose process imports what cases use if it starts now.

    It has one thread: a lock that another holds during a fork stays locked in the child.
    """
    multiprocessing.set_forkserver_preload([module, *IMPORTED])
    one_thread = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    with mock.patch.dict(os.environ, one_thread):  # of numpy's BLAS, and of pyarrow's jemalloc
        ensure_running()
    return multiprocessing.get_context("forkserver")


class RanksError(RuntimeError):
    """A case ended on some rank without a result."""


class _Rank(NamedTuple):
    process: BaseProcess
    connection: Connection
    output: Path

    def result(self) -> Any:
        """What it sent, as bytes; None if it has ended without."""
        with suppress(EOFError, OSError):
            if self.connection.poll():
                return self.connection.recv_bytes()
        return None

    def how_it_ended(self, wait_s: float) -> str:
        """In words; a process that still runs after `wait_s` dumps its threads, and is killed."""
        self.process.join(wait_s)
        code = self.process.exitcode
        if code is None:
            os.kill(self.process.pid or 0, signal.SIGABRT)
            self.process.join(END_S)
            self.process.kill()
            self.process.join()
            return "did not end"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def last_lines(self) -> str:
        """Of what it printed in this case."""
        lines = self.output.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LINES:])


class Ranks:
    """`world` processes, started at the first case. Close them, by `with`.

    Args:
        join: `join(rank, world, init_method)` initializes the process group.
        method: "forkserver", or "spawn" on GPUs, as CUDA has no forks.
        case_s: the seconds that a case may take, with the start of its processes.
    """

    def __init__(
        self,
        world: int = 2,
        join: Join | None = None,
        *,
        method: str = "forkserver",
        case_s: float = CASE_S,
    ) -> None:
        self.world, self.method, self.case_s = world, method, case_s
        self._join = join or join_by_gloo
        self._ranks: list[_Rank] = []
        self._made: dict[bytes, list[Any] | str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.connection.close()  # at which it leaves
        for rank in self._ranks:
            rank.how_it_ended(END_S)
        self._folder.cleanup()

    def run(self, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `case(*arguments)` returns on each rank; it runs once for all who ask.

        Raises:
            RanksError: a rank raised, died or did not end; the message has what each printed.
        """
        task = pickle.dumps((case, arguments))
        if task not in self._made:
            self._made[task] = self._run(task, case)
        made = self._made[task]
        if isinstance(made, str):
            raise RanksError(made)
        return made

    def _run(self, task: bytes, case: Callable[..., Any]) -> list[Any] | str:
        """The results of all ranks, or why there are none."""
        deadline = time.monotonic() + self.case_s
        if not all(rank.process.is_alive() for rank in self._ranks):  # of no case: all had returned
            warnings.warn(self._failure("between cases", {}), stacklevel=3)
        if not self._ranks:
            self._start(case.__module__)
        for rank in self._ranks:
            with suppress(OSError):  # a rank that has ended is seen below
                rank.connection.send_bytes(task)
        results: dict[int, Any] = {}
        waiting = dict(enumerate(self._ranks))
        while waiting and (left := deadline - time.monotonic()) > 0:
            ends = {x: i for i, r in waiting.items() for x in (r.connection, r.process.sentinel)}
            for number in {ends[end] for end in wait([*ends], min(left, 1.0))}:
                results[number] = waiting.pop(number).result()
                if results[number] is None:
                    deadline = min(deadline, time.monotonic() + END_S)
        if len(results) == self.world and None not in results.values():
            made = (io.BytesIO(results[number]) for number in range(self.world))
            return [torch.load(each, weights_only=False) for each in made]
        return self._failure(case.__qualname__, results)

    def _failure(self, case: str, results: dict[int, Any]) -> str:
        """How each rank of the case ended, and what it printed; all have ended then."""
        printed, ends = [], []
        for number, rank in enumerate(self._ranks):
            returned = results.get(number) is not None
            wait_s = END_S if number in results else 0.0  # its pipe closes shortly before it ends
            ends.append(f"rank {number} {'returned' if returned else rank.how_it_ended(wait_s)}")
            printed.append(f"---- rank {number} printed ----\n{rank.last_lines()}")
        for rank in self._ranks:
            rank.process.kill()
            rank.connection.close()
        self._ranks = []
        return "\n".join([f"{case} on {self.world} ranks: {', '.join(ends)}", *printed])

    def _start(self, module: str) -> None:
        context: Any = multiprocessing.get_context("spawn")
        if self.method == "forkserver":
            context = forking_context(module)
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            output = folder / f"{rank}.txt"
            output.touch()
            process = context.Process(
                target=_serve_and_leave,
                args=(theirs, output, self._join, rank, self.world, f"file://{folder}/meet"),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, output))


def _serve_and_leave(connection: Connection, output: Path, *joining: Any) -> None:
    """Run cases until no more come, or one raises.

    The process leaves without destructors, as all results are sent: DDP may wait there for a thread
    of gloo that waits for the GIL, and gloo may abort ("terminate called without an active
    exception").
    """
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(2)
    status = 1
    try:
        _serve(connection, *joining)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve(connection: Connection, join: Join, rank: int, world: int, init_method: str) -> None:
    join(rank, world, init_method)
    while True:
        try:
            case, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:  # closed by `Ranks`, or with the process of the tests
            return
        os.ftruncate(2, 0)  # what the cases before printed
        made = io.BytesIO()
        torch.save(case(*arguments), made)
        connection.send_bytes(made.getvalue())


def join_by_gloo(rank: int, world: int, init_method: str) -> None:
    """The process group, and the environment that torchrun would give the rank."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # of a group that exists: nothing connects to it
        ACCELERATE_USE_CPU="true",
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=init_method,  # a file: a port that was free may be taken before it is used
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )


# ---- in a case ----


def world() -> int:
    """The number of processes, also of one alone."""
    return dist.get_world_size() if dist.is_initialized() else 1


def of_all_ranks(mine: Any) -> list[Any]:
    """What each has, by rank."""
    every: list[Any] = [mine] * world()
    if dist.is_initialized():
        dist.all_gather_object(every, mine)
    return every
