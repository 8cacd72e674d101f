"""Find the module that leaks, once source, target and layer are known; classify modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from flexvarlen.patches.isolation.model_run import IsolationRun
from flexvarlen.patches.isolation.report import (
    OTHER_REMEDY,
    PATCHED,
    PATCHED_KINDS,
    REMEDIES,
    IsolationError,
)
from flexvarlen.patches.isolation.trace import Call, TensorId, Trace, changed_tokens
from flexvarlen.patches.state import ATTRIBUTE

Side = Literal["in", "out"]
Kept = Mapping[TensorId, Tensor]

KINDS: tuple[tuple[str, str], ...] = (
    ("norm", "norm"),
    ("rotary embedding", "rotary|rope$"),
    (
        "linear attention",
        "delta|linear_?attn|linear_?attention|lightning|retention|rwkv|gatedlinear",
    ),
    ("layer", "(decoder|encoder|hybrid|^bert|albert)layer$"),
    ("convolution", "conv"),
    ("state space", "(mamba|ssm).*(layer|mixer)$"),
    ("MoE router", "router|topkgate|^gate$"),
    ("MoE experts", "experts?$|moe|sparse"),
    ("layer", "block$"),
    ("state space", "mamba|ssm|rglru|recurrent"),
    ("attention", "attention|attn"),
    ("MLP", "mlp|feed_?forward|ffn?$|intermediate"),
    ("embeddings", "embed|^wte$|^wpe$"),
    ("layer", "layer$"),
)
"""Kinds, and a pattern for the class or else the last part of the dotted name; the first match
counts."""


def kind_of(module: nn.Module, name: str) -> str:
    """What a module is, by its class, else by its dotted name.

    >>> kind_of(nn.Conv1d(2, 2, 3), "layers.0.mixer.conv1d"), kind_of(nn.Linear(2, 2), "mlp.gate")
    ('convolution', 'MoE router')
    """
    called = name.rpartition(".")[2].lower()
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":  # GPT-2's is linear
        return "MoE router" if called in {"gate", "router"} else "linear"
    for text in (type(module).__name__.lower(), called):
        for kind, pattern in KINDS:
            if re.search(pattern, text):
                return kind
    return "module"


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The model's layers (blocks) by dotted name, in the order in which they are registered.

    They are the elements of the outermost ModuleLists whose elements contain modules; if there are
    none, of the outermost ModuleDicts and Sequentials.

    >>> layers_of(nn.ModuleDict({"h": nn.ModuleList([nn.Sequential(nn.ReLU())])})).keys()
    dict_keys(['h.0'])
    """
    for kinds in ((nn.ModuleList,), (nn.ModuleDict, nn.Sequential)):
        found: dict[str, nn.Module] = {}
        outer: list[str] = []
        for name, module in model.named_modules():
            if not name or any(inside(name, other) for other in outer):
                continue
            children = dict(module.named_children())
            if isinstance(module, kinds) and any(list(c.children()) for c in children.values()):
                outer.append(name)
                found |= {f"{name}.{child}": inner for child, inner in children.items()}
        if found:
            return found
    return {}


def inside(name: str, layer: str) -> bool:
    """Whether the module of that name is the layer, or inside it."""
    return name == layer or name.startswith(f"{layer}.")


class Blame:
    """A leak from one document, or segment of a tree, into another.

    Args:
        run: the model and the batch.
        layers: dotted names of the model's layers.
        source, target: indices in `run.units`.
    """

    def __init__(self, run: IsolationRun, layers: Sequence[str], source: int, target: int) -> None:
        self.run, self.layers = run, layers
        self.source, self.target = source, target
        self.modules = dict(run.inner.named_modules())

    def forward(self, layer: int | None, name: str | None) -> IsolationError:
        """The error that names the first module whose output changes and whose inputs do not.

        Args:
            layer, name: the first layer whose output changes; None: only the model's outputs do.
        """
        before, after = self._trace(name), self._trace(name)
        self.run([], [self.target], before)
        self.run([self.source], [self.target], after)
        # What is inside a module ends before it.
        found = first_leak(after.completed, before.kept, after.kept, clean="in", leaky="out")
        module, change = found or ("", None)
        sentence = (
            f"with other tokens in {self.run.name(self.source)}, the output of "
            f"{self._what(module)} changes{_by(change)} for {self.run.name(self.target)}, and what "
            "goes into it does not"
        )
        return self._error(layer, module, change, sentence)

    def backward(self, calls: Sequence[str], by_loss: bool) -> IsolationError:
        """The error that names the last module whose input's gradient is the first to change.

        Args:
            calls: the names of the layers, in the order in which they ran.
            by_loss: the source's loss reaches the target's gradient; else its tokens do.
        """
        layers = {name: self.modules[name] for name in calls}
        leaky = self._backward_leak(self._new_trace(layers, gradients=True), by_loss)
        name = None if leaky is None else leaky[0]
        found = self._backward_leak(self._trace(name, gradients=True), by_loss)
        module, change = found or ("", None)
        layer = None
        if name is not None and inside(module, name):
            layer = len(calls) - 1 - list(reversed(calls)).index(name)
        cause = "a loss" if by_loss else "other tokens"
        sentence = (
            f"with {cause} in {self.run.name(self.source)} alone, the gradient that "
            f"{self._what(module)} hands down for {self.run.name(self.target)} changes"
            f"{_by(change)}, and the one it gets does not"
        )
        return self._error(layer, module, change, sentence, "backward")

    def _backward_leak(self, after: Trace, by_loss: bool) -> tuple[str, float] | None:
        before: Kept = {}  # if only the source has a loss, the target's gradient must be zero
        if by_loss:
            self.run([], [self.source], after)
        else:
            losses = self.run.outside([self.source])
            unchanged = self._new_trace(after.modules, gradients=True)
            self.run([], losses, unchanged)
            self.run([self.source], losses, after)
            before = unchanged.gradients
        # What is inside a module begins after it.
        calls = reversed(after.entered)
        return first_leak(calls, before, after.gradients, clean="out", leaky="in")

    def _trace(self, layer: str | None, *, gradients: bool = False) -> Trace:
        """A trace of all modules in the layer and outside all layers, except the model itself."""
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
            tokens=self.run.units[self.target].tokens,
            inputs=True,
            gradients=gradients,
        )

    def _error(
        self,
        layer: int | None,
        name: str,
        change: float | None,
        sentence: str,
        direction: Literal["forward", "backward"] = "forward",
    ) -> IsolationError:
        kind = kind_of(self.modules[name], name)
        where = "outside all layers" if layer is None else f"in layer {layer}"
        return IsolationError(
            f"{self._tokens(self.source)} leaks into {self._tokens(self.target)} in the "
            f"{direction}, first {where}: {sentence}; {self._remedy(kind)}.",
            layer=layer,
            module=name,
            kind=kind,
            source=self.source,
            target=self.target,
            direction=direction,
            change=change,
        )

    def _what(self, name: str) -> str:
        module = self.modules[name]
        return f"{name or 'the model itself'} ({type(module).__name__}, {kind_of(module, name)})"

    def _remedy(self, kind: str) -> str:
        if kind in PATCHED_KINDS and ATTRIBUTE in self.run.inner.__dict__:
            return PATCHED
        return REMEDIES.get(kind, OTHER_REMEDY)

    def _tokens(self, unit: int) -> str:
        found = self.run.units[unit]
        return f"{self.run.name(unit)} (tokens {found.start} to {found.end - 1})"


def first_leak(
    calls: Iterable[Call], before: Kept, after: Kept, *, clean: Side, leaky: Side
) -> tuple[str, float] | None:
    """The first call that changes on the leaky side and not on the clean one, and by how much."""
    for call in calls:
        change = largest_change(before, after, call, leaky)
        if change is not None and largest_change(before, after, call, clean) is None:
            return call.name, change
    return None


def largest_change(before: Kept, after: Kept, call: Call, side: Side) -> float | None:
    """The largest change on one side of a call, or None; missing tensors count as zero."""
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


def _by(change: float | None) -> str:
    return "" if change is None else f" by up to {change:.2g}"
