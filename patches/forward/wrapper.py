"""A module's `forward` wrapped on the instance, and unwrapped.

Not a hook (PEFT's tuners call `model.forward`), and no closure over the module: a deep copy of it
must run its own weights.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any, NoReturn

import torch
import torch._dynamo
from torch import nn

from flexvarlen.patches.attention.own_guards import drop_own_guards
from flexvarlen.patches.batch.keywords import with_keywords

OURS = "_flexvarlen_wraps"  # on our function: where its module keeps the `forward` it wraps
PLACE = "_flexvarlen_forward_"  # and a number: somebody may wrap ours, and we that
MARK = "_flexvarlen_wrapped"  # on the attention layers below a wrapped module
CALLER = "_flexvarlen_caller"  # on a wrapped base model: the wrapped model with the head

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OUR_CODE: set[CodeType] = set()  # of the functions that `wrap_forward` makes


class _InstanceForward:
    """The `forward` that a module had of its own, if any, kept on the module: accelerate sets one.

    A method of the module is kept without it: accelerate's `compile_regions` makes a second module
    of the same attributes, on which the method must run. A deep copy of the module gets a copy,
    bound to itself. A pickle leaves it out, as pickle leaves out our own.
    """

    def __init__(self, forward: Callable[..., Any] | None = None, is_method: bool = False) -> None:
        self._forward = forward
        self._is_method = is_method

    @classmethod
    def of(cls, module: nn.Module) -> _InstanceForward:
        """What the module has now."""
        forward = module.__dict__.get("forward")
        if isinstance(forward, MethodType) and forward.__self__ is module:
            return cls(forward.__func__, is_method=True)
        return cls(forward)

    def on(self, module: nn.Module) -> Callable[..., Any] | None:
        """What it is on this module."""
        if self._is_method and self._forward is not None:
            return MethodType(self._forward, module)
        return self._forward

    def __deepcopy__(self, memo: dict[int, Any]) -> _InstanceForward:
        return _InstanceForward(copy.deepcopy(self._forward, memo), self._is_method)

    def __reduce__(self) -> tuple[type[_InstanceForward], tuple[()]]:
        return _InstanceForward, ()


class _Calls(threading.local):
    """The calls of wrapped modules that a thread is in, eagerly, with their keyword arguments."""

    def __init__(self) -> None:
        self.open: list[tuple[nn.Module, dict[str, Any]]] = []


_calls = _Calls()


class _Running:
    """For the length of a `with` block, one of `_calls`."""

    def __init__(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        self._call = module, arguments

    def __enter__(self) -> None:
        _calls.open.append(self._call)

    def __exit__(self, *error: object) -> None:
        _calls.open.pop()


def arguments_of_caller(base: nn.Module) -> dict[str, Any] | None:
    """Those that a base model's head is running with, eagerly and in this thread; or None."""
    caller: Caller | None = base.__dict__.get(CALLER)
    return None if caller is None else _running_with(caller.module)


def _running_with(module: nn.Module | None) -> dict[str, Any] | None:
    return next((given for called, given in reversed(_calls.open) if called is module), None)


def wrap_forward(
    module: nn.Module,
    before: Callable[[nn.Module, dict[str, Any]], dict[str, Any] | None],
    after: Callable[[dict[str, Any], Any], None],
    reads: tuple[str, ...] = (),
) -> None:
    """Call `before` with the module and the arguments, `after` with these and the outputs.

    Args:
        before: gets all arguments by name; returns those to call with, or None to leave the call as
            it is, without `after`.
        reads: names that the signature shows beside those of the class, whose `forward` then must
            take `**kwargs`.
    """
    of_class = type(module).forward
    signature = inspect.signature(of_class)
    parameters = [x.name for x in signature.parameters.values() if x.kind in _POSITIONAL]
    names = tuple(parameters)[1:]
    place = next(name for name in map(PLACE.__add__, _NUMBERS) if name not in vars(module))

    def run(
        self: nn.Module, own: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        named = kwargs
        if args:
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            if len(named) != len(args) + len(kwargs):  # too many, or one of them twice
                signature.bind(self, *args, **kwargs)  # raises what Python would
        inputs = before(self, dict(named))
        if inputs is not None:
            args, kwargs = (), inputs
        # Of the class as it is now: Liger may have set another there since.
        if torch.compiler.is_compiling():
            out = type(self).forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)
        else:
            with _Running(self, kwargs):
                out = (
                    type(self).forward(self, *args, **kwargs)
                    if own is None
                    else own(*args, **kwargs)
                )
        if inputs is not None:
            after(inputs, out)
        if torch.compiler.is_compiling():
            drop_own_guards()
        return out

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, self.__dict__[place].on(self), args, kwargs)

    def bare(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, None, args, kwargs)

    for ours in (forward, bare):
        functools.update_wrapper(ours, of_class)
        attributes = vars(ours)
        # Which Trainer and generate look at.
        attributes["__signature__"] = with_keywords(signature, reads) if reads else signature
        attributes[OURS] = place
        _OUR_CODE.add(ours.__code__)
        del attributes["__wrapped__"]
    # What accelerate's unwrap_model finds below us: its own wrappers off, ours still on.
    vars(forward)["__wrapped__"] = bare
    setattr(module, place, _InstanceForward.of(module))
    module.forward = MethodType(forward, module)
    if _refuse_forward_of_another not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_refuse_forward_of_another)


def unwrap_forward(module: nn.Module) -> None:
    """Undo the last `wrap_forward`, unless somebody has wrapped the wrapper since."""
    forward = module.__dict__.get("forward")
    # A wrapper made by functools (accelerate's hooks) bears our attributes, too.
    if not isinstance(forward, MethodType) or OURS not in vars(forward.__func__):
        return
    place: str = getattr(forward, OURS)
    del module.__dict__["forward"]
    own: Callable[..., Any] | None = module.__dict__.pop(place).on(module)
    is_bare = not hasattr(forward, "__wrapped__")  # somebody took off what was below us
    if own is not None and not is_bare:
        module.forward = own
    if "forward" not in vars(module) or has_forward_of_class(module):  # nobody can call the rest
        for name in [name for name in vars(module) if name.startswith(PLACE)]:
            del module.__dict__[name]
    if not any(name.startswith(PLACE) for name in vars(module)):
        _remove_hook(module)


def has_forward_of_class(module: nn.Module) -> bool:
    """Whether no wrapper is there: a pickle leaves it out."""
    return bool(module.forward == MethodType(type(module).forward, module))


def has_our_forward(module: nn.Module) -> bool:
    """Whether the module's `forward` is our wrapper itself, with nothing on it."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, MethodType) and forward.__func__.__code__ in _OUR_CODE


def reaches_ours(module: nn.Module) -> bool:
    """Whether a call of the module's `forward` comes to our wrapper, under whatever was put on it.

    Looked for in what a function wraps, closes over or has as a default. A pickle leaves it out,
    and so does who assigns another `forward`.
    """
    first = module.__dict__.get("forward")
    todo: list[Any] = [first]
    seen: set[int] = set()
    while todo and len(seen) < _MOST_WRAPPERS:
        found = todo.pop()
        if id(found) in seen or not callable(found):
            continue
        seen.add(id(found))
        if isinstance(found, nn.Module):  # accelerate's hook has the module, and on it the forward
            todo.append(vars(found).get("_old_forward"))
            continue
        function = found.__func__ if isinstance(found, MethodType) else found
        if getattr(function, "__code__", None) in _OUR_CODE:
            return True
        todo += [*_held_by(function), getattr(found, "__self__", None)]
    return False


_NUMBERS = [str(number) for number in range(100)]  # nobody wraps more often
_MOST_WRAPPERS = 100  # as a bound on the search


def _held_by(function: Any) -> list[Any]:
    """What a function or another callable object could call."""
    held = list(getattr(function, "__dict__", {}).values())
    if isinstance(function, functools.partial):
        return [*held, function.func, *function.args, *function.keywords.values()]
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                held.append(cell.cell_contents)
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return held


def _remove_hook(module: nn.Module) -> None:
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _refuse_forward_of_another]:
        del hooks[key]


def _refuse_forward_of_another(module: nn.Module, args: Any) -> None:
    """Raise if the module's wrapped `forward` is another's, of other submodules.

    A hook is the only one to know which module was called: the wrapper sees the other alone.
    """
    if torch.compiler.is_compiling():
        return
    forward = module.__dict__.get("forward")
    if not isinstance(forward, MethodType) or not hasattr(forward, OURS):
        return
    other: Any = forward.__self__
    if other is module or other._modules is module._modules:  # copy.copy runs the same layers
        return
    raise RuntimeError(
        "a patched model must run its own layers, got a copy whose forward runs the model that it "
        "was made of: compile_regions of accelerate before 1.15 makes such a copy, and would run "
        "the uncompiled model; install accelerate>=1.15, or call compile_regions before "
        "patch_model. So does DataParallel; use DistributedDataParallel."
    )


# Of a compiled model Dynamo would make a graph of the hook alone, in which it refuses nothing, and
# check its guards each call.
_skip_code = getattr(torch._dynamo.eval_frame, "skip_code", None)
if _skip_code is not None:
    _skip_code(_refuse_forward_of_another.__code__)


class Caller:
    """The wrapped module whose forward calls this one, or none.

    Held weakly. A deep copy has the copy of that module, if it is copied too; a pickle has none.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)

    @property
    def module(self) -> nn.Module | None:
        """None where there is none, or it is gone."""
        return None if self._module is None else self._module()

    # Inside a compiled graph asked while tracing, of the module as it is then.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def is_bypassed(self) -> bool:
        """Whether the module's own `forward` does not come to our wrapper any more."""
        module = self.module
        return module is not None and not reaches_ours(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Caller:
        return Caller(memo.get(id(self.module)))

    def __reduce__(self) -> tuple[type[Caller], tuple[()]]:
        return Caller, ()


class _Mark:
    """That a forward reaches a layer through our wrapper, as long as nobody pickles the layer.

    A deep copy keeps the wrapper and gets such a mark; what a pickle makes of it says lost.
    """

    def __init__(self, lost: bool = False, caller: Caller | None = None) -> None:
        self.lost = lost
        self.caller = Caller() if caller is None else caller

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mark:
        return _Mark(self.lost, copy.deepcopy(self.caller, memo))

    def __reduce__(self) -> tuple[type[_Mark], tuple[bool]]:
        return _Mark, (True,)


def mark_layers(model: nn.Module, base: nn.Module) -> None:
    """Let the attention layers know that their model and its base are wrapped, and the base too."""
    mark = _Mark(caller=Caller(base))
    for layer in model.modules():
        if "is_causal" in layer.__dict__:
            layer.__dict__[MARK] = mark
    if base is not model:
        base.__dict__[CALLER] = Caller(model)


def unmark_layers(model: nn.Module) -> None:
    """Undo `mark_layers`."""
    for module in model.modules():
        module.__dict__.pop(MARK, None)
        module.__dict__.pop(CALLER, None)


def refuse_bypassed_caller(base: nn.Module) -> None:
    """Raise if a base model that nobody handed documents has a head whose wrapper is gone.

    Raises:
        ValueError: it has.
    """
    caller: Caller | None = base.__dict__.get(CALLER)
    if caller is not None and caller.is_bypassed():
        raise ValueError(_BYPASSED)


_BYPASSED = (
    "a patched model's forward must stay the one that patch_model wrapped, got another that was "
    "set since (by a library, or by taking hooks off), under which labels cross documents and the "
    "layers do not get theirs; call patch_model again, after all else that changes forward, or, as "
    "Trainer's use_liger_kernel changes it when training starts, apply Liger to the model before "
    "patch_model and leave use_liger_kernel out."
)


def refuse_replica(layer: nn.Module) -> None:
    """Raise in a replica of DataParallel, which cuts the documents' boundaries like a batch.

    Raises:
        NotImplementedError: the layer is one.
    """
    if getattr(layer, "_is_replica", False):
        raise NotImplementedError(
            "cu_seq_lens cannot come through DataParallel, which cuts them in pieces as if they "
            "were rows; start a process for each GPU (torchrun, accelerate launch), or show this "
            "one a single GPU with CUDA_VISIBLE_DEVICES=0."
        )


def refuse_lost_patch(layer: nn.Module) -> None:
    """Raise if the wrapper that should have handed the layer its documents is gone.

    Raises:
        ValueError: it is: a pickle left it out, another forward took its place, or one between the
            running base model and the layer dropped what it handed on (seen eagerly). Not where a
            layer that is patched is called on its own.
    """
    mark: _Mark | None = layer.__dict__.get(MARK)
    if mark is None:
        return
    if mark.caller.is_bypassed():
        raise ValueError(_BYPASSED)
    if mark.lost:
        raise ValueError(
            "this model was patched when it was pickled, and a pickle leaves the wrapper out, and "
            "with it the promises, the mapping and the masked labels; call patch_model on the "
            "loaded model, or unpatch_model to attend without."
        )
    base = mark.caller.module
    if base is not None and not torch.compiler.is_compiling() and _running_with(base) is not None:
        refuse_dropped_documents(layer)


def refuse_dropped_documents(layer: nn.Module) -> NoReturn:
    """Raise for a layer below a patched base model to which the documents did not come."""
    raise ValueError(
        "a patched model's base model and layers must hand their **kwargs on, as the documents "
        f"come to attention by them, got none in {type(layer).__name__}; take **kwargs in each "
        "forward above it, and pass them on."
    )
