"""Record inputs and outputs of a model's modules, token by token, and their gradients.

Shapes: B rows of S tokens, T = B·S; `x_TN` has N numbers per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

CHUNK = 1024  # tokens compared at once: a mask of all logits would be as large as they are

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Call(NamedTuple):
    """The `number`-th call of a module in one forward, from 0."""

    name: str
    number: int


class TensorId(NamedTuple):
    """An input or output tensor of a call."""

    call: Call
    side: Literal["in", "out"]
    which: int


def by_token(x: Tensor, batch: int, row_tokens: int) -> Tensor | None:
    """A tensor's values for each token, `[T, N]`; None if it is not laid out by tokens.

    Recognized are `[B, S, …]`, `[T, …]` and `[B, …, S, …]` (heads or channels first); of several
    axes of size S the first counts.
    """
    tokens = batch * row_tokens
    if x.ndim >= 2 and x.shape[:2] == (batch, row_tokens):
        return x.reshape(tokens, -1)
    if x.ndim >= 1 and x.shape[0] == tokens:
        return x.reshape(tokens, -1)
    if x.ndim >= 3 and x.shape[0] == batch and row_tokens in x.shape[2:]:
        return x.movedim(x.shape[2:].index(row_tokens) + 2, 1).reshape(tokens, -1)
    return None


def changed_tokens(old_TN: Tensor, new_TN: Tensor) -> Tensor:
    """Tokens whose bits differ, bool `[T]`. Signs of zeros are ignored: x * 0 has the sign of x."""
    return torch.cat(
        [
            _differ(old, new).any(-1)
            for old, new in zip(old_TN.split(CHUNK), new_TN.split(CHUNK), strict=True)
        ]
    )


def _differ(old: Tensor, new: Tensor) -> Tensor:
    differ = old != new
    if old.is_floating_point():  # NaN equals itself only as bits
        bits = INTEGERS[old.element_size()]
        differ &= old.contiguous().view(bits) != new.contiguous().view(bits)
    return differ


class Trace:
    """Records the outputs of some modules in one forward; a context manager that hooks them.

    With `against`, only the differences in bits from that trace are kept, else the outputs. Calls
    are numbered by module, since which modules run may depend on the tokens (experts).

    Args:
        modules: the modules by dotted name.
        batch, row_tokens: B and S.
        tokens: keep only these of the T tokens.
        inputs: also keep the inputs of modules.
        gradients: keep the gradients of all tensors kept; each module's inputs get separate views,
            so that a gradient is that of one consumer.
        against: an earlier trace that contains everything to compare with.

    Attributes:
        entered, completed: calls, in the order in which they began and ended.
        kept, gradients: tensors `[tokens, N]` by `TensorId`.
        changed: bool tensors `[tokens]` by `TensorId`.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        batch: int,
        row_tokens: int,
        *,
        tokens: slice | None = None,
        inputs: bool = False,
        gradients: bool = False,
        against: Trace | None = None,
    ) -> None:
        self.modules, self.batch, self.row_tokens = modules, batch, row_tokens
        self.tokens, self.inputs, self.with_gradients = tokens, inputs, gradients
        self.against = against
        self.entered: list[Call] = []
        self.completed: list[Call] = []
        self.kept: dict[TensorId, Tensor] = {}
        self.gradients: dict[TensorId, Tensor] = {}
        self.changed: dict[TensorId, Tensor] = {}
        self._numbers: Counter[str] = Counter()
        self._handles: list[RemovableHandle] = []
        self._recording = False

    def __enter__(self) -> Trace:
        for name, module in self.modules.items():
            self._hook(name, module)
        self._recording = True
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for handle in self._handles:
            handle.remove()

    def stop(self) -> None:
        """Record no more calls: in a backward, checkpointed layers run again."""
        self._recording = False

    def outputs_changed(self, call: Call) -> Tensor | None:
        """Tokens that differ from the other trace, bool `[tokens]`; None if not comparable."""
        found = [x for tensor_id, x in self.changed.items() if tensor_id[:2] == (call, "out")]
        return torch.stack(found).any(0) if found else None

    def _hook(self, name: str, module: nn.Module) -> None:
        def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not self._recording:
                return None
            call = Call(name, self._numbers[name])
            self.entered.append(call)
            if not self.inputs:
                return None
            if self.with_gradients and torch.is_grad_enabled():
                args = tuple(_own_view(x) for x in args)
                kwargs = {key: _own_view(x) for key, x in kwargs.items()}
            for which, x in enumerate(tensors_in((args, kwargs))):
                self._note(TensorId(call, "in", which), x, module)
            return args, kwargs

        def after(_: nn.Module, args: Any, output: Any) -> None:
            if not self._recording:
                return
            call = Call(name, self._numbers[name])
            self._numbers[name] += 1
            self.completed.append(call)
            for which, x in enumerate(tensors_in(output)):
                self._note(TensorId(call, "out", which), x, module)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))

    def _note(self, tensor_id: TensorId, x: Tensor, module: nn.Module) -> None:
        padded = isinstance(module, nn.Conv1d) and x.ndim == 3 and tensor_id.side == "out"
        rows = self._rows(x, padded)
        if rows is None:
            return
        if self.against is None:
            self.kept[tensor_id] = rows.detach().clone()
        elif tensor_id in self.against.kept and self.against.kept[tensor_id].shape == rows.shape:
            self.changed[tensor_id] = changed_tokens(self.against.kept[tensor_id], rows.detach())
        if self.with_gradients and x.requires_grad:

            def keep(gradient: Tensor) -> None:
                found = self._rows(gradient, padded)
                if found is not None:
                    self.gradients[tensor_id] = found.detach().clone()

            x.register_hook(keep)

    def _rows(self, x: Tensor, padded: bool) -> Tensor | None:
        # A causal Conv1d pads at both ends; its caller cuts off the outputs past the row.
        rows = by_token(x[..., : self.row_tokens] if padded else x, self.batch, self.row_tokens)
        return rows if rows is None or self.tokens is None else rows[self.tokens]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and mappings (transformers' outputs are mappings)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors_in(inner)


def _own_view(x: Any) -> Any:
    return x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x
