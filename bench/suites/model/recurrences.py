"""Which functions a hybrid model's recurrent layers call.

transformers' layers call functions of their modeling module: a short convolution, and a scan as the
gated delta rule. transformers takes those of fla, causal-conv1d and mamba-ssm where they are
installed, else its own in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flexvarlen.layout.boundaries import HAS_TRITON
from flexvarlen.recurrent.fla_kernels import why_not as why_not_fla
from flexvarlen.reference.recurrences import Function
from flexvarlen.report.records import one_line
from flexvarlen.runner.failures import Unsupported

PLAIN = "plain torch"
OWN = "flexvarlen"
BY_DOCUMENT = "plain torch, one document at a time"

_REFUSAL = "packed sequences apart"  # transformers 5.23, without the kernels' packages


@cache
def untraced(function: Function) -> Function:
    """The function, which torch.compile leaves out of its graphs.

    transformers' `torch_chunk_gated_delta_rule` calls fla's kernel, unless the model is exported.
    In torch 2.11 each compiled graph counts as exported (pytorch issue 176347). What runs instead,
    in plain torch, mixes documents, and its loop over chunks compiles for minutes.
    """
    found: Function = torch.compiler.disable(function)
    return found


def convolution_of_fla(model: PreTrainedModel) -> Function:
    """fla's public convolution with the arguments of transformers' `causal_conv1d_fn`.

    Not traced by torch.compile, as the rest of fla's public functions.

    Raises:
        Unsupported: fla is not installed, or there is no GPU.
    """
    reason = why_not_fla(torch.empty(0, device=model.device, dtype=model.dtype))
    if reason is not None:
        raise Unsupported(reason)
    from fla.modules.causal_conv1d import causal_conv1d

    def convolve(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        x = hidden_states.transpose(1, 2)
        out, _ = causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=cu_seq_lens_q)
        convolved: Tensor = out.transpose(1, 2)
        return convolved

    return untraced(convolve)


@contextmanager
def refusals() -> Iterator[None]:
    """What transformers raises where it refuses packed rows is `Unsupported`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if _REFUSAL in str(error):
            raise Unsupported(one_line(error)) from error
        raise


def kernels_of(model: PreTrainedModel, *, theirs: bool, fla_convolution: bool) -> dict[str, str]:
    """What computes a variant's gated delta rule and convolutions, for its record."""
    fla, package = _installed("fla-core"), _installed("causal-conv1d")
    if theirs:
        own = fla if fla_convolution else package
        return {"delta_rule": fla or PLAIN, "convolution": own or PLAIN}
    no_fla = why_not_fla(torch.empty(0, device=model.device, dtype=model.dtype)) is not None
    convolution = OWN if model.device.type == "cuda" and HAS_TRITON else PLAIN
    return {"delta_rule": BY_DOCUMENT if no_fla else str(fla), "convolution": convolution}


def _installed(package: str) -> str | None:
    """Name and version, or None."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None
