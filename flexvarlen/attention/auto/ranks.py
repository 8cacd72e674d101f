"""In a run of several ranks, rank 0 decides for all: one decision for each kind of call.

No collective is used: ranks may meet kinds of calls in a different order, and a broadcast
would then hang. Rank 0 writes its decision to the process group's store; the others read it there.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

BEGIN_S = 60.0
"""How long a rank waits for rank 0 to start deciding."""

AGAIN_S = 1.0
"""As `BEGIN_S`, for a rank that has already timed out once: its calls differ from rank 0's."""

FINISH_S = 600.0
"""How long it waits after rank 0 has started, which may compile every candidate."""

_POLL_S = 0.02
_NONE = "none"  # rank 0 found no kernel for the call, and raised


def world() -> Any:
    """The run's process group, or None; a new run has another."""
    return dist.group.WORLD if dist.is_available() else None


class Run:
    """The ranks of one run; `Run(None)` is a process alone."""

    def __init__(self, group: Any) -> None:
        self._group = (lambda: None) if group is None else weakref.ref(group)
        self.several = group is not None and dist.get_world_size() > 1
        self._waited_in_vain = False

    def is_of(self, group: Any) -> bool:
        """Whether `group` is still the process group of this run."""
        return self._group() is group

    @property
    def decides(self) -> bool:
        """Whether this process decides for all."""
        return not self.several or dist.get_rank() == 0

    def publish(self, kind: str, decide: Callable[[], str]) -> str:
        """On rank 0: decide for a kind of call, and write the decision to the store.

        Reraises what `decide` raises, after telling the others not to wait.
        """
        store = _store()
        if store is None:
            return decide()
        if store.check([_decided(kind)]):
            already = str(store.get(_decided(kind)).decode())
            if already != _NONE:
                return already
        store.set(_begun(kind), "1")
        chosen = _NONE
        try:
            chosen = decide()
        finally:
            store.set(_decided(kind), chosen)
        return chosen

    def given(self, kind: str) -> str | None:
        """What rank 0 has already decided, or None; does not wait."""
        store = _store()
        if store is None or not store.check([_decided(kind)]):
            return None
        chosen = str(store.get(_decided(kind)).decode())
        return None if chosen == _NONE else chosen

    def ask(self, kind: str) -> str | None:
        """On other ranks: wait for rank 0's decision; None, with a warning, after a timeout."""
        store = _store()
        if store is None:
            return None
        begin = time.monotonic()
        while not store.check([_decided(kind)]):
            waited = time.monotonic() - begin
            patience = AGAIN_S if self._waited_in_vain else BEGIN_S
            if waited > FINISH_S or (waited > patience and not store.check([_begun(kind)])):
                self._waited_in_vain = True
                warnings.warn(
                    f"flexvarlen: rank 0 has not chosen a backend for {kind} within {waited:.0f} "
                    "s, so this rank uses the static order; call fv.explain() for such calls "
                    "on all ranks first, or name a backend.",
                    stacklevel=2,
                )
                return None
            time.sleep(_POLL_S)
        return self.given(kind)


def _store() -> Any:
    """The run's store, under a prefix of ours; None, with a warning, if it has none to look in."""
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    try:
        found = c10d.PrefixStore("flexvarlen/auto", store)
        found.check(["begun"])
    except (RuntimeError, TypeError) as error:  # the fake process group's, or MPI's None
        warnings.warn(
            f"flexvarlen: the ranks have no shared store ({str(error).splitlines()[0]}), so "
            "each chooses by itself; name a backend if all must take the same.",
            stacklevel=2,
        )
        return None
    return found


def _begun(kind: str) -> str:
    return f"begun: {kind}"


def _decided(kind: str) -> str:
    return f"decided: {kind}"
