"""Find the routers of a mixture's layers, and the rule by which each makes weights of logits.

A router returns its logits `[T, E]`, and of the K experts that it chooses for each token their
weights `[T, K]` and indices `[T, K]`. A rule computes the weights of any experts from the logits.
It serves a router if it gives the router's own weights, to the bit, for the router's own choice.

Shapes: T tokens, E experts of a layer, K of them for each token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexvarlen.patches.models.layers import attention_layers, recurrent_layers

_NAMES = ("gate", "router")  # of the module in a mixture, beside its `experts`
_TOKENS = 256  # of the random input
_LARGE = 64.0  # by which half of the input is multiplied

Rule = Callable[[Tensor, Tensor], Tensor]
"""Logits `[T, E]` and indices `[T, K]` -> weights `[T, K]`. Differentiable in the logits."""


class FoundRouter(NamedTuple):
    """A router of a model.

    Attributes:
        module: the router.
        mixers: the children of its layer that mix tokens, which get the layer's keywords.
    """

    module: nn.Module
    mixers: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Routers:
    """What is known of a model's routers when it is patched; no modules.

    Attributes:
        rules: of each router, in the order of the layers.
        num_experts, top_k: E and K of all of them.
        why_not: why they cannot replay another choice of experts, or None; the others are then
            without meaning.
    """

    rules: tuple[Rule, ...] = ()
    num_experts: int = 0
    top_k: int = 0
    why_not: str | None = None


def find_routers(tower: nn.Module) -> list[FoundRouter]:
    """The routers of a text tower, in the order of its layers."""
    found = []
    mixing = {*attention_layers(tower), *recurrent_layers(tower)}
    for layer in _layers(tower):
        mixers = tuple(x for x in layer.children() if not mixing.isdisjoint(x.modules()))
        for mixture in layer.modules():
            if "experts" in mixture._modules:
                named = (mixture._modules.get(name) for name in _NAMES)
                found += [FoundRouter(module, mixers) for module in named if module is not None]
    return found


def routers_of(tower: nn.Module, hidden_size: int) -> Routers | None:
    """What is known of the routers of a text tower; None if it has none."""
    rules: list[Rule] = []
    sizes: set[tuple[int, int]] = set()
    known: dict[Any, tuple[Rule | None, int, int]] = {}
    for module, mixers in find_routers(tower):
        key = _settings(module)
        if key not in known:
            known[key] = _rule_of(module, hidden_size)
        rule, num_experts, top_k = known[key]
        if rule is None:
            why = f"routers of class {type(module).__name__}, whose weights follow no known rule"
            return Routers(why_not=why)
        if not mixers:
            return Routers(why_not=f"{type(module).__name__} in layers without attention")
        rules.append(rule)
        sizes.add((num_experts, top_k))
    if not rules:
        return None
    if len(sizes) > 1:
        return Routers(why_not="layers with different numbers of experts")
    num_experts, top_k = sizes.pop()
    return Routers(tuple(rules), num_experts, top_k)


def _layers(tower: nn.Module) -> Iterator[nn.Module]:
    lists = (x for x in tower.children() if isinstance(x, nn.ModuleList))
    return (layer for layers in lists for layer in layers)


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What a router's rule may depend on: its class, its numbers, and its tensors' shapes."""
    numbers = {k: x for k, x in vars(module).items() if isinstance(x, int | float | str)}
    numbers.pop("training", None)
    tensors = [(k, x.shape, x.dtype) for k, x in _tensors(module)]
    return type(module), tuple(sorted(numbers.items())), tuple(tensors)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*_held(module._parameters), *_held(module._buffers)]


# ---- rules ----


def _softmax_of_all(logits: Tensor, indices: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=dtype).gather(-1, indices)


def _softmax_of_chosen(logits: Tensor, indices: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.softmax(logits.gather(-1, indices), dim=-1, dtype=dtype)


def _sigmoid(logits: Tensor, indices: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.sigmoid(logits if dtype is None else logits.to(dtype)).gather(-1, indices)


@dataclass(frozen=True)
class _MakesWeights:
    """Scores of the chosen experts, divided by their sum, times a factor.

    Attributes:
        scores: of logits and indices, computed in a dtype.
        computed_in: this dtype; None: that of the logits.
        added: to the sum by which scores are divided; None: they are not divided.
        factor: on the weights.
    """

    scores: Callable[[Tensor, Tensor, torch.dtype | None], Tensor]
    computed_in: torch.dtype | None
    added: float | None
    factor: float

    def __call__(self, logits: Tensor, indices: Tensor) -> Tensor:
        weights = self.scores(logits, indices, self.computed_in)
        if self.added is not None:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self.added)
        return weights if self.factor == 1.0 else weights * self.factor


_SCORES = (_softmax_of_all, _softmax_of_chosen, _sigmoid)
_ADDED = (None, 0.0, 1e-20, 1e-6)  # 0: Mixtral; 1e-20: DeepSeek-V3, GLM-4-MoE; 1e-6: LFM2-MoE
_FACTOR = "routed_scaling_factor"  # DeepSeek-V3, GLM-4-MoE, LFM2-MoE
_PROBE_ERRORS = (TypeError, AttributeError, LookupError, ValueError, RuntimeError)


def _rules(module: nn.Module) -> Iterator[Rule]:
    """The rules that a router may follow: Qwen3-MoE's, gpt-oss's, DeepSeek-V3's and others'."""
    own = vars(module).get(_FACTOR)
    factors = sorted({1.0, float(own)}) if isinstance(own, int | float) else [1.0]
    dtypes = (torch.float32, None)
    return starmap(_MakesWeights, product(_SCORES, dtypes, _ADDED, factors))


def _rule_of(module: nn.Module, hidden_size: int) -> tuple[Rule | None, int, int]:
    """The rule of a router, E and K; None and zeros if none that we know gives its weights."""
    rules, experts, chosen = list(_rules(module)), 0, 0
    if isinstance(module, nn.Linear) or module._modules or not any(_held(module._parameters)):
        return None, 0, 0
    for autocast in (False, True):  # which tell the dtypes of rules apart
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            try:
                outputs = _run_on_random_input(module, hidden_size)
            except _PROBE_ERRORS:  # of a class that is another kind of router
                outputs = None
            if outputs is None:
                return None, 0, 0
            logits, weights, indices = outputs
            experts, chosen = logits.shape[1], indices.shape[1]
            rules = [
                rule
                for rule in rules
                if torch.equal(rule(logits, indices).to(weights.dtype), weights)
            ]
    return next(iter(rules), None), experts, chosen


def _run_on_random_input(
    module: nn.Module, hidden_size: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """What the router's class returns with random weights, on the CPU; None if no such triple.

    Half of the logits are so large that a rule which is only nearly right differs in its rounding.
    """
    rng = torch.Generator().manual_seed(0)

    def random(x: Tensor, scale: float) -> Tensor:
        return (torch.randn(x.shape, generator=rng) * scale).to(x.dtype)

    if not all(x.is_floating_point() for _, x in _tensors(module)):  # quantized
        return None
    probe = copy.copy(module)  # shares no tensor with the model, and has none of its hooks
    own = {k: random(x, hidden_size**-0.5) for k, x in _held(module._parameters)}
    probe._parameters = {k: nn.Parameter(x, requires_grad=False) for k, x in own.items()}
    probe._buffers = {k: random(x, 0.1) for k, x in _held(module._buffers)}
    first = next(iter(own.values()))  # [E, hidden_size]
    x = torch.randn(_TOKENS, hidden_size, generator=rng)
    x[::2] *= _LARGE
    biases = [random(first[:, 0], 0.1) for _ in [*inspect.signature(module.forward).parameters][1:]]
    outputs = type(module).forward(probe, x.to(first.dtype), *biases)
    if not isinstance(outputs, tuple) or len(outputs) != 3:
        return None
    logits, weights, indices = outputs
    is_triple = all(isinstance(x, Tensor) and x.ndim == 2 for x in outputs)
    if not is_triple or indices.is_floating_point() or weights.shape != indices.shape:
        return None
    return logits, weights, indices.long()


def _held(tensors: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name, x) for name, x in tensors.items() if x is not None)
