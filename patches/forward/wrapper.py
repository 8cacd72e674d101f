"""Wrap and unwrap the `forward` of a module instance.

Not a hook, as PEFT's tuners call `model.forward`, and not a closure over the module, as a deep
copy must run its own weights.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

WRAPPER_MARK = "_flexvarlen_wraps"
"""Attribute of our function (copied by functools.wraps): the name under which its module stores the
wrapped `forward`."""

_INNER = "_flexvarlen_forward_"  # plus a number, as wrappers may be nested
_NUMBERS = [str(number) for number in range(100)]  # maximum nesting depth
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OUR_CODE: set[CodeType] = set()  # of the functions that `wrap_forward` makes


def call_own(module: nn.Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the instance's `forward`, or the class's current one, which Liger may have replaced."""
    if own is None:
        own, args = type(module).forward, (module, *args)
    return own(*args, **kwargs)


class Steps(NamedTuple):
    """What runs around a module's own forward.

    Attributes:
        before: gets the module and all arguments by name; returns new arguments, or None to leave
            the call unchanged and skip `after`.
        after: gets the module, its new arguments and its outputs.
        reads: names to add to the signature of the class, whose `forward` must then take
            `**kwargs`.
        call: calls the module's own forward, as `call_own` does.
    """

    before: Callable[[nn.Module, dict[str, Any]], dict[str, Any] | None]
    after: Callable[[nn.Module, dict[str, Any], Any], None] | None = None
    reads: tuple[str, ...] = ()
    call: Callable[..., Any] = call_own


def unchanged(module: nn.Module, inputs: dict[str, Any]) -> None:
    """`Steps.before` where only the call itself is another."""


@dataclass(eq=False)
class _InstanceForward:
    """The instance `forward` that a module had before, if any (accelerate sets one).

    A bound method is stored unbound: accelerate's `compile_regions` creates a second module
    with the same attributes, on which the method must run. A deep copy of the module gets a copy
    bound to itself. A pickle drops it, as it drops our wrapper.
    """

    forward: Callable[..., Any] | None = None
    is_method: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> _InstanceForward:
        """Read the module's current instance `forward`."""
        forward = module.__dict__.get("forward")
        if isinstance(forward, MethodType) and forward.__self__ is module:
            return cls(forward.__func__, is_method=True)
        return cls(forward)

    def on(self, module: nn.Module) -> Callable[..., Any] | None:
        """Return it bound to this module."""
        if self.is_method and self.forward is not None:
            return MethodType(self.forward, module)
        return self.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> _InstanceForward:
        return _InstanceForward(copy.deepcopy(self.forward, memo), self.is_method)

    def __reduce__(self) -> tuple[type[_InstanceForward], tuple[()]]:
        return _InstanceForward, ()


class _Calls(threading.local):
    """The stack of eager calls of wrapped modules in this thread, with their arguments."""

    def __init__(self) -> None:
        self.open: list[tuple[nn.Module, dict[str, Any]]] = []


_calls = _Calls()


def arguments_of_running_call(module: nn.Module | None = None) -> dict[str, Any]:
    """The arguments of the innermost eager call of a wrapped module in this thread, or {}.

    Args:
        module: the one whose call is meant; None: any.
    """
    calls = reversed(_calls.open)
    return next((given for called, given in calls if module in (None, called)), {})


def running_calls() -> list[dict[str, Any]]:
    """The arguments of all eager calls of wrapped modules that run in this thread."""
    return [given for _, given in _calls.open]


def wrap_forward(module: nn.Module, steps: Steps) -> None:
    """Wrap `forward` in these steps.

    Does nothing if it is already wrapped, also below another functools.wraps wrapper.
    """
    if is_wrapped(module):
        return
    before, after, reads, call = steps
    of_class = type(module).forward
    signature = inspect.signature(of_class)
    parameters = [x.name for x in signature.parameters.values() if x.kind in _POSITIONAL]
    names = tuple(parameters)[1:]
    inner = next(name for name in map(_INNER.__add__, _NUMBERS) if name not in vars(module))

    def run(self: nn.Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = kwargs
        if args:
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            if len(named) != len(args) + len(kwargs):  # too many, or one of them twice
                signature.bind(self, *args, **kwargs)  # raises what Python would
        inputs = before(self, dict(named))
        if inputs is not None:
            args, kwargs = (), inputs
        # Not in `call`: where a graph breaks, Dynamo would compile that as a frame of its own.
        if torch.compiler.is_compiling():
            out = call(self, own, args, kwargs)
        else:
            _calls.open.append((self, kwargs))
            try:
                out = call(self, own, args, kwargs)
            finally:
                _calls.open.pop()
        if inputs is not None and after is not None:
            after(self, inputs, out)
        return out

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, self.__dict__[inner].on(self), args, kwargs)

    def bare(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, None, args, kwargs)

    for ours in (forward, bare):
        functools.update_wrapper(ours, of_class)
        attributes = vars(ours)
        # Trainer and generate inspect the signature.
        attributes["__signature__"] = _with_keywords(signature, reads) if reads else signature
        attributes[WRAPPER_MARK] = inner
        _OUR_CODE.add(ours.__code__)
        del attributes["__wrapped__"]
    # For accelerate's unwrap_model, which follows __wrapped__: removes its wrappers and keeps ours.
    vars(forward)["__wrapped__"] = bare
    setattr(module, inner, _InstanceForward.of(module))
    module.forward = MethodType(forward, module)


def _with_keywords(signature: inspect.Signature, names: tuple[str, ...]) -> inspect.Signature:
    """Add keyword-only parameters to the signature of a function that takes `**kwargs`."""
    *parameters, rest = signature.parameters.values()
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in names
        if name not in signature.parameters
    ]
    return signature.replace(parameters=[*parameters, *more, rest])


def unwrap_forward(module: nn.Module) -> None:
    """Undo the last `wrap_forward`, unless the wrapper itself was wrapped since."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, MethodType) and forward.__func__.__code__ in _OUR_CODE:
        del module.__dict__["forward"]
        own = module.__dict__.pop(getattr(forward, WRAPPER_MARK)).on(module)
        is_bare = not hasattr(forward, "__wrapped__")  # the inner wrapper was removed
        if own is not None and not is_bare:
            module.forward = own
    if module.forward == MethodType(type(module).forward, module):  # nobody can call what is kept
        for name in [name for name in vars(module) if name.startswith(_INNER)]:
            del module.__dict__[name]


def unwrap_marked(model: nn.Module, mark: str) -> None:
    """Unwrap the modules that have this attribute, also those wrapped since, and remove it."""
    for module in model.modules():
        if module.__dict__.pop(mark, None) is not None:
            unwrap_forward(module)


def is_wrapped(module: nn.Module) -> bool:
    """Whether a call of the module's `forward` reaches our wrapper.

    False after unpickling, or if another `forward` was set without functools.wraps.
    """
    return any(hasattr(forward, WRAPPER_MARK) for forward in of_wrappers(module.forward))


def has_fused_head_of_trl(module: nn.Module) -> bool:
    """Whether TRL set the module's `forward`, perhaps below wrappers of accelerate.

    It calls the `forward` that it replaced, or the base model, with labels from TRL's collators,
    which mask them at document boundaries.
    """
    return any(map(_is_fused_head, of_wrappers(module.forward)))


def scores_itself(module: nn.Module) -> bool:
    """Whether that function is outside ours, which then is not called for its scores."""
    functions = of_wrappers(module.forward)
    first = next((x for x in functions if _is_fused_head(x) or hasattr(x, WRAPPER_MARK)), None)
    return _is_fused_head(first)


def _is_fused_head(function: Any) -> bool:
    return "fused_lm_head" in (getattr(function, "__kwdefaults__", None) or {})


def has_forward_of_user(module: nn.Module, *, below: bool) -> bool:
    """Whether a `forward` of none of the libraries that keep outputs is set on the instance.

    Args:
        below: look below our wrapper; else around it.
    """
    mark = getattr(module.forward, WRAPPER_MARK, None)
    own = module.forward if mark is None or not below else vars(module)[mark].on(module)
    for function in of_wrappers(own):
        if getattr(function, "__code__", None) in _OUR_CODE:
            break
        while isinstance(function, functools.partial):
            function = function.func
        names = getattr(function, "__globals__", {"__name__": type(function).__module__})
        if names["__name__"].partition(".")[0] not in _LIBRARIES:
            return True
    return False


_LIBRARIES = ("flexvarlen", "transformers", "accelerate", "torch", "liger_kernel")


def of_wrappers(forward: Any) -> Iterator[Any]:
    """A function, and those that it wraps, from the outside in."""
    while forward is not None:
        yield forward
        forward = getattr(forward, "__wrapped__", None)
