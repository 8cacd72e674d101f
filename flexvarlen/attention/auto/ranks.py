"""In a run of several ranks, rank 0 decides for all: one decision for each kind of call.

Without a collective: ranks may come to different kinds of calls in a different order, and a
broadcast would wait for ever. Rank 0 leaves its decision in the run's store; the others look there.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

BEGIN_S = 60.0
"""How long a rank waits for rank 0 to come to such a call at all."""

AGAIN_S = 1.0
"""The same for a rank that has waited in vain before: its calls are not those of rank 0."""

FINISH_S = 600.0
"""How long it waits once rank 0 has begun: it may have to compile every candidate."""

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
        """Whether this is still the run."""
        return self._group() is group

    @property
    def decides(self) -> bool:
        """Whether this process decides for all."""
        return not self.several or dist.get_rank() == 0

    def publish(self, kind: str, decide: Callable[[], str]) -> str:
        """On rank 0: the decision for a kind of call, left where the others look.

        Passes on what `decide` raises, after telling the others not to wait.
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
        """What rank 0 has decided already, or None; waits for nothing."""
        store = _store()
        if store is None or not store.check([_decided(kind)]):
            return None
        chosen = str(store.get(_decided(kind)).decode())
        return None if chosen == _NONE else chosen

    def ask(self, kind: str) -> str | None:
        """On the other ranks: what rank 0 decided; None, with a warning, if it does not say."""
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
                    "s, so this rank takes the static order's; call fv.explain() for such calls "
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
            f"flexvarlen: the ranks share no store to agree in ({str(error).splitlines()[0]}), so "
            "each chooses by itself; name a backend if all must take the same.",
            stacklevel=2,
        )
        return None
    return found


def _begun(kind: str) -> str:
    return f"begun: {kind}"


def _decided(kind: str) -> str:
    return f"decided: {kind}"
