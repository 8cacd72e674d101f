"""A model's recurrent layers in plain torch.

transformers' layers call a short convolution and a scan of their modeling module. Where fla,
causal-conv1d or mamba-ssm are installed these run a kernel, in low precision; the functions in
plain torch behind them compute in fp32, or in fp64 within `Float64`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

CONVOLUTION = "causal_conv1d_fn"
DELTA_RULE = "torch_chunk_gated_delta_rule"
FUNCTIONS = (
    CONVOLUTION,
    DELTA_RULE,
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba2_split_conv1d_scan_combined",
)

Function = Callable[..., Any]
Replacements = dict[str, Callable[[Function], Function]]
"""By a function's name, the function that makes its replacement."""


@contextmanager
def plain_recurrences(model: nn.Module) -> Iterator[None]:
    """Run recurrent layers of the model's classes in plain torch inside the block.

    Other models of these classes do too: the functions belong to the modeling module.
    """
    with replaced(model, {name: _plain for name in FUNCTIONS}):
        yield


@contextmanager
def replaced(model: nn.Module, replacements: Replacements) -> Iterator[None]:
    """Replace functions of the model's modeling modules inside the block."""
    before = []
    for module in {type(layer).__module__ for layer in model.modules()}:
        names = vars(sys.modules[module])
        for name in replacements.keys() & names.keys():
            before.append((names, name, names[name]))
            names[name] = replacements[name](names[name])
    try:
        yield
    finally:
        for names, name, function in before:
            names[name] = function


def _plain(function: Function) -> Function:
    """Call the plain torch function without keywords that it does not accept."""
    torch_function = inspect.unwrap(function)
    known = inspect.signature(torch_function).parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        return torch_function(*args, **{k: v for k, v in kwargs.items() if k in known})

    return call
