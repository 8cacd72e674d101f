"""The functions through which tokens of a row meet in recurrent layers, run document by document.

Each takes `theirs`, transformers' function of the same name, and its arguments. fla's kernel runs
where it can, or that of causal-conv1d or mamba-ssm where they are installed, which take `seq_idx`.
Elsewhere transformers' plain torch runs once for each document; the convolution, which needs no
loop, is computed here.

Shapes: B rows of S tokens, T = B·S; C channels; W = width of the convolution; H heads of queries
and keys, HV of values; K, V their head_dim; G groups and N state size of Mamba-2.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flexvarlen.recurrent import fla
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.recurrent.fla.convolution import causal_convolution
from flexvarlen.recurrent.fla.decayed_scan import decayed_scan
from flexvarlen.recurrent.fla.delta_rules import gated_delta_rule as fla_gated_delta_rule
from flexvarlen.recurrent.fla.delta_rules import kimi_delta_rule

HAS_CAUSAL_CONV1D = find_spec("causal_conv1d") is not None
HAS_MAMBA_SSM = find_spec("mamba_ssm") is not None


class Theirs(NamedTuple):
    """A function of transformers.

    Attributes:
        installed: calls the kernel of the package that it is named after, if that is installed.
        plain: in plain torch; knows no documents.
    """

    installed: Callable[..., Any]
    plain: Callable[..., Any]


def convolve(
    theirs: Theirs,
    documents: RecurrentDocuments,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """`causal_conv1d_fn`: a depthwise convolution, hidden_states `[B, C, S]`, weight `[C, W]`."""
    batch, channels, row_tokens = hidden_states.shape
    x_TC = hidden_states.transpose(1, 2).reshape(1, batch * row_tokens, channels)
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(
            "the convolution's activation must be silu or None in a packed row, got "
            f"{activation!r}; use the model's own implementation, one document per row."
        )
    if fla.why_not(x_TC) is None:
        silu = None if activation is None else "silu"
        out = causal_convolution(
            x_TC, weight, bias, silu, documents.cu_seqlens, documents.chunk_indices
        )
    elif HAS_CAUSAL_CONV1D and x_TC.is_cuda:
        x_CT = x_TC.transpose(1, 2)
        out = theirs.installed(x_CT, weight, bias, activation, seq_idx=documents.seq_idx)
        out = out.transpose(1, 2)
    else:
        out = _convolve(x_TC[0], weight, bias, documents.offsets)[None]
        out = (out if activation is None else F.silu(out)).to(x_TC.dtype)
    out = documents.without_padding(out)
    return out.view(batch, row_tokens, channels).transpose(1, 2)


def _convolve(x_TC: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """A sum over shifted copies, each without the tokens that another document would lend."""
    x_TC = x_TC.to(weight.dtype)
    out = x_TC * weight[:, -1]
    for shift in range(1, weight.shape[1]):
        shifted = F.pad(x_TC, (0, 0, shift, 0))[: x_TC.shape[0]]
        out = out + torch.where(offsets[:, None] >= shift, shifted, 0) * weight[:, -1 - shift]
    return out if bias is None else out + bias


def gated_delta_rule(
    theirs: Theirs,
    documents: RecurrentDocuments,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, None]:
    """`chunk_gated_delta_rule`: query, key `[B, S, H, K]`, value `[B, S, HV, V]`.

    Args:
        g: log of the decay, `[B, S, HV]`; `[B, S, HV, K]` in `chunk_kda`.
        beta: `[B, S, HV]`.

    Returns:
        The output `[B, S, HV, V]`, and None for the final state.
    """
    _refuse_states(initial_state, output_final_state)
    shape = value.shape
    rows = [x.reshape(1, -1, *x.shape[2:]) for x in (query, key, value, g, beta)]
    if fla.why_not(value) is None and use_qk_l2norm_in_kernel:
        operator = fla_gated_delta_rule if g.ndim == 3 else kimi_delta_rule
        rows[3] = rows[3].float()
        out = operator(*rows, documents.cu_seqlens, documents.chunk_indices)[0]
    else:

        def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            alone: Tensor = theirs.plain(
                q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
            )[0]
            return alone

        out = _one_by_one(run, documents, rows, rows[2], why=fla.why_not(value))
    return documents.without_padding(out).view(shape), None


def mamba2_scan(
    theirs: Theirs,
    documents: RecurrentDocuments,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Tensor:
    """`mamba_chunk_scan_combined`: hidden_states `[B, S, H, V]`, dt `[B, S, H]`, A `[H]`.

    Args:
        B, C: `[B, S, G, N]`.
        D: `[H]`, weight of the input in the output.

    Returns:
        The output `[B, S, H, V]`.

    fla has no such scan, but linear attention with a decay: its query is C, its key B, its value
    `dt * hidden_states`, and the log of its decay `dt * A`.
    """
    _refuse_states(initial_states, return_final_states)
    if z is not None:
        raise NotImplementedError("mamba2_scan takes no z; the layer gates its output itself.")
    x, dt, B, C = (y.reshape(1, -1, *y.shape[2:]) for y in (hidden_states, dt, B, C))
    fixed: dict[str, Any] = {"chunk_size": chunk_size, "D": D, "dt_bias": dt_bias}
    fixed |= {"dt_softplus": dt_softplus, "dt_limit": dt_limit}
    if HAS_MAMBA_SSM and x.is_cuda and x.dtype != torch.float64:
        out = theirs.installed(x, dt, A, B, C, **fixed, seq_idx=documents.seq_idx)
    elif fla.why_not(x) is None:
        dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        q, k = (y.repeat_interleave(x.shape[2] // y.shape[2], dim=2) for y in (C, B))
        v = (x * dt[..., None]).to(x.dtype)
        out = decayed_scan(q, k, v, dt * A.float(), documents.cu_seqlens, documents.chunk_indices)[
            0
        ]
        out = out if D is None else out + (x * D[:, None]).to(x.dtype)
    else:

        def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
            alone: Tensor = theirs.plain(x, dt, A, B, C, **fixed)
            return alone

        out = _one_by_one(run, documents, [x, dt, B, C], x, why=fla.why_not(x))
    return documents.without_padding(out).view(hidden_states.shape)


def _refuse_states(initial: Tensor | None, final: bool) -> None:
    if initial is not None or final:
        raise NotImplementedError(
            "packed documents start from an empty state and leave none, got a cache; pack with "
            "use_cache=False."
        )


# ---- plain torch, one document at a time ----


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _one_by_one(
    run: Callable[..., Tensor],
    documents: RecurrentDocuments,
    rows: list[Tensor],
    like: Tensor,
    *,
    why: str | None,
) -> Tensor:
    """Call `run` with each document's part `[1, length, ...]` of the rows; zeros at padding.

    One sync if only the device knows the documents. Warns once of the cost, and says why.
    """
    _warn_of_loop(why)
    layout = documents.layout
    bounds = layout.cu_seqlens if layout.cu_seqlens_host is None else layout.cu_seqlens_host
    ends: list[int] = bounds.tolist()
    outs = [
        run(*(x[:, start:end] for x in rows)).to(like.dtype)
        for start, end in pairwise(ends)
        if end > start
    ]
    outs.append(like.new_zeros(1, layout.total_tokens - ends[-1], *like.shape[2:]))
    return torch.cat(outs, dim=1)


@cache
def _warn_of_loop(why: str | None) -> None:
    warnings.warn(
        f"flexvarlen: recurrent layers run one document after another in plain torch, which is "
        f"right but slow, as {why}.",
        stacklevel=2,
    )
