"""In a run with several ranks, rank 0 decides for all ranks, once for each kind of call.

No collective is used, because ranks may reach the kinds of calls in a different order, and a
broadcast would then hang. Rank 0 writes its decision to the process group's store; others read it.
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
"""As `BEGIN_S`, for a rank that has already timed out once, as its calls differ from rank 0's."""

FINISH_S = 600.0
"""How long a rank waits once rank 0 has started deciding, which may compile every candidate."""

_POLL_S = 0.02
_NONE = "none"  # rank 0 raised, because no kernel supports the call


def world() -> Any:
    """Return the default process group of this run, or None. A new run has a new group."""
    return dist.group.WORLD if dist.is_available() else None


class RankGroup:
    """The ranks of one run; `RankGroup(None)` stands for a single process."""

    def __init__(self, group: Any) -> None:
        self._group = (lambda: None) if group is None else weakref.ref(group)
        self.several = group is not None and dist.get_world_size() > 1
        self._waited_in_vain = False

    def is_of(self, group: Any) -> bool:
        """Return whether `group` is the process group of this run."""
        return self._group() is group

    @property
    def decides(self) -> bool:
        """Whether this process decides for all ranks."""
        return not self.several or dist.get_rank() == 0

    def publish(self, kind: str, decide: Callable[[], str]) -> str:
        """On rank 0, decide for a kind of call and write the decision to the store.

        Re-raises what `decide` raises, after recording the failure so that no rank waits.
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
        """Return rank 0's decision if there is one already, or None, without waiting."""
        store = _store()
        if store is None or not store.check([_decided(kind)]):
            return None
        chosen = str(store.get(_decided(kind)).decode())
        return None if chosen == _NONE else chosen

    def ask(self, kind: str) -> str | None:
        """On other ranks, wait for rank 0's decision; after a timeout, warn and return None."""
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
    """Return the run's store under our prefix; None, with a warning, if it cannot be queried."""
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    try:
        found = c10d.PrefixStore("flexvarlen/auto", store)
        found.check(["begun"])
    except (RuntimeError, TypeError) as error:  # a fake process group's store, or None for MPI
        warnings.warn(
            f"flexvarlen: the ranks have no shared store ({str(error).splitlines()[0]}), so "
            "each chooses by itself; name a backend if all ranks must use the same one.",
            stacklevel=2,
        )
        return None
    return found


def _begun(kind: str) -> str:
    return f"begun: {kind}"


def _decided(kind: str) -> str:
    return f"decided: {kind}"
