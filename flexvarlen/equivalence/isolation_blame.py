"""Which module leaks, once the documents and the layer are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from flexvarlen.equivalence.isolation_modules import inside, kind_of
from flexvarlen.equivalence.isolation_report import OTHER_REMEDY, PATCHED, REMEDIES, IsolationError
from flexvarlen.equivalence.isolation_run import ModelRun
from flexvarlen.equivalence.isolation_trace import Call, Place, Trace, changed_tokens


class Blame:
    """A leak from one document into another.

    Args:
        run: of the model and batch.
        layers: their dotted names.
        source, target: the documents.
    """

    def __init__(self, run: ModelRun, layers: Sequence[str], source: int, target: int) -> None:
        self.run, self.layers = run, layers
        self.source, self.target = source, target
        self.modules = dict(run.inner.named_modules())

    def forward(self, layer: int | None, name: str | None) -> IsolationError:
        """The error that names the first module whose output changes and whose inputs do not.

        Args:
            layer, name: the first layer whose output changes; None: only the model's outputs do.
        """
        before = self._trace(name)
        self.run([], [self.target], before)
        after = self._trace(name)
        self.run([self.source], [self.target], after)
        for call in after.completed:  # what is inside a module ends before it
            change = _change(before.kept, after.kept, call, "out")
            if change is not None and _change(before.kept, after.kept, call, "in") is None:
                return self._error(layer, call.name, change, "forward")
        return self._error(layer, "", None, "forward")

    def backward(self, calls: Sequence[str], by_loss: bool) -> IsolationError:
        """The error that names the last module whose input's gradient is the first to change.

        Args:
            calls: the names of the layers, in the order in which they ran.
            by_loss: the source's loss reaches the target's gradient; else its tokens do.
        """
        name = self._last_leaking_layer(calls, by_loss)
        change: float | None = None
        culprit = ""
        after = self._trace(name, gradients=True)
        before = self._gradients(after, by_loss)
        for call in reversed(after.entered):  # what is inside a module begins after it
            change = _change(before, after.gradients, call, "in")
            if change is not None and (_change(before, after.gradients, call, "out") is None):
                culprit = call.name
                break
        layer = None
        if name is not None and inside(culprit, name):
            layer = len(calls) - 1 - list(reversed(calls)).index(name)
        return self._error(layer, culprit, change, "backward", by_loss)

    def _last_leaking_layer(self, calls: Sequence[str], by_loss: bool) -> str | None:
        layers = {name: self.modules[name] for name in calls}
        after = self._new_trace(layers, gradients=True)
        before = self._gradients(after, by_loss)
        for call in reversed(after.entered):
            if (
                _change(before, after.gradients, call, "in") is not None
                and _change(before, after.gradients, call, "out") is None
            ):
                return call.name
        return None

    def _gradients(self, trace: Trace, by_loss: bool) -> Mapping[Place, Tensor]:
        """Run the trace; return what its gradients must be for the target (nothing: zeros)."""
        if by_loss:  # only the source has a loss
            self.run([], [self.source], trace)
            return {}
        before = self._new_trace(trace.modules, gradients=True)
        self.run([], [self.target], before)
        self.run([self.source], [self.target], trace)
        return before.gradients

    def _trace(self, layer: str | None, *, gradients: bool = False) -> Trace:
        """Of all modules in the layer and outside all layers, but the model itself."""
        modules = {
            name: module
            for name, module in self.modules.items()
            if name
            and (
                (layer is not None and inside(name, layer))
                or not any(inside(name, other) for other in self.layers)
            )
        }
        return self._new_trace(modules, gradients=gradients)

    def _new_trace(self, modules: Mapping[str, nn.Module], *, gradients: bool) -> Trace:
        return Trace(
            modules,
            self.run.batch,
            self.run.row_tokens,
            tokens=slice(*self.run.spans[self.target]),
            inputs=True,
            gradients=gradients,
        )

    def _error(
        self,
        layer: int | None,
        name: str,
        change: float | None,
        direction: Literal["forward", "backward"],
        by_loss: bool = False,
    ) -> IsolationError:
        module = self.modules[name]
        kind = kind_of(module, name)
        source, target = self.source, self.target
        where = "outside all layers" if layer is None else f"in layer {layer}"
        what = f"{name or 'the model itself'} ({type(module).__name__}, {kind})"
        moved = "" if change is None else f" by up to {change:.2g}"
        if direction == "forward":
            how = (
                f"with other tokens in document {source}, the output of {what} changes{moved} for "
                f"document {target}, and what goes into it does not"
            )
        else:
            cause = "a loss" if by_loss else "other tokens"
            how = (
                f"with {cause} in document {source} alone, the gradient that {what} hands down for "
                f"document {target} changes{moved}, and the one it gets does not"
            )
        return IsolationError(
            f"{self._tokens(source)} leaks into {self._tokens(target)} in the {direction}, first "
            f"{where}: {how}; {self._remedy(kind)}.",
            layer=layer,
            module=name,
            kind=kind,
            source=source,
            target=target,
            direction=direction,
            change=change,
        )

    def _remedy(self, kind: str) -> str:
        from flexvarlen.patches.state import ATTRIBUTE

        if kind == "attention" and ATTRIBUTE in self.run.inner.__dict__:
            return PATCHED
        return REMEDIES.get(kind, OTHER_REMEDY)

    def _tokens(self, document: int) -> str:
        start, end = self.run.spans[document]
        return f"document {document} (tokens {start} to {end - 1})"


def _change(
    before: Mapping[Place, Tensor],
    after: Mapping[Place, Tensor],
    call: Call,
    side: Literal["in", "out"],
) -> float | None:
    """The largest change on one side of a call; None without one. What is missing is zero."""
    largest = None
    for place in [p for p in {*before, *after} if p[:2] == (call, side)]:
        new, old = after.get(place), before.get(place)
        if new is None or (old is not None and old.shape != new.shape):
            continue
        old = torch.zeros_like(new) if old is None else old
        if bool(changed_tokens(old, new).any()):
            found = float((new.double() - old.double()).abs().max())
            largest = found if largest is None else max(largest, found)
    return largest
