"""The convolution and the scans of recurrent layers, over documents and trees.

Each takes the function of transformers that it replaces, in plain torch, and that function's
arguments. A scan uses fla's kernel if possible, else that plain torch function, one document or
segment after another. The convolution is our own.

Shapes: B rows of S tokens, T = B·S; C channels; W = width of the convolution; H heads of queries
and keys, HV of values; K, V their head_dim; G groups and N state size of Mamba-2.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flexvarlen.layout.row_split import BoundaryLinks
from flexvarlen.layout.running_part import expects_backward
from flexvarlen.recurrent import fla_kernels
from flexvarlen.recurrent.adjacent_ranks import receive_state, send_state
from flexvarlen.recurrent.convolution import causal_convolution
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.recurrent.fla_kernels.check import OPERATORS, why_wrong
from flexvarlen.recurrent.fla_kernels.levels import Boundaries
from flexvarlen.recurrent.tree_parts import load_state, store_states


def convolve(
    plain_torch: Callable[..., Any],
    documents: RecurrentDocuments,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Replace `causal_conv1d_fn`: a depthwise causal convolution.

    Args:
        hidden_states: `[B, C, S]`.
        weight: `[C, W]`.
        bias: `[C]`.
        activation: "silu" or None.

    Returns:
        `[B, C, S]` in the dtype of hidden_states, zeros at padding.

    Raises:
        NotImplementedError: the activation is not supported.

    No sync; traces under `fullgraph=True`.
    """
    batch, channels, row_tokens = hidden_states.shape
    x_TC = hidden_states.transpose(1, 2).reshape(batch * row_tokens, channels)
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(
            "the convolution's activation must be silu or None in a packed row, got "
            f"{activation!r}; use the model's own implementation, one document per row."
        )
    out = causal_convolution(x_TC, weight, bias, activation is not None, documents)
    out = documents.zero_padding(out[None])
    return out.view(batch, row_tokens, channels).transpose(1, 2)


def gated_delta_rule(
    plain_torch: Callable[..., Any],
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
    """Replace `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`.

    Args:
        query, key: `[B, S, H, K]`.
        value: `[B, S, HV, V]`.
        g: log of the decay, `[B, S, HV]`; Kimi's has one for each channel, `[B, S, HV, K]`.
        beta: `[B, S, HV]`.

    Returns:
        The output `[B, S, HV, V]` in value's dtype, zeros at padding, and None for the state.

    Raises:
        NotImplementedError: an initial state is given, or the final state is requested.

    With fla, does not sync and traces under `fullgraph=True`; else it loops over the documents.
    """
    _refuse_states(initial_state, output_final_state)
    shape = value.shape
    rows = [x.reshape(1, -1, *x.shape[2:]) for x in (query, key, value, g, beta)]
    why = fla_kernels.why_not(value)
    if why is None and not use_qk_l2norm_in_kernel:
        why = "fla's kernel normalizes queries and keys, which this layer does not"
    boundaries = Boundaries.of(documents)
    kind = "gated delta rule" if g.ndim == 3 else "Kimi's delta rule"
    if why is None:
        why = why_wrong(kind, rows[0], rows[2], boundaries, documents.meanwhile)
    if why is None:
        rows[3] = rows[3].float()
        out = _run_fla(kind, rows, boundaries)
    else:

        def run(state: Tensor | None, keep: bool, *row: Tensor) -> Any:
            q, k, v, g, beta = row
            given = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            given |= {"initial_state": state, "output_final_state": keep}
            return plain_torch(q, k, v, **given)

        state = _State((1, value.shape[2], query.shape[3], value.shape[3]))
        out = _loop_over_documents(run, documents, rows, rows[2], state, why=why)
    return documents.zero_padding(out).view(shape), None


def mamba2_scan(
    plain_torch: Callable[..., Any],
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
    """Replace `mamba2_chunk_scan`.

    Args:
        hidden_states: `[B, S, H, V]`.
        dt: `[B, S, H]`.
        A: `[H]`.
        B, C: `[B, S, G, N]`.
        D: `[H]`, weight of the input in the output.

    Returns:
        The output `[B, S, H, V]`, zeros at padding.

    Raises:
        NotImplementedError: an initial state or z is given, or the final state is requested.

    fla has no such scan, but linear attention with a decay: its query is C, its key B, its value
    `dt * hidden_states`, and the log of its decay `dt * A`.
    """
    _refuse_states(initial_states, return_final_states)
    if z is not None:
        raise NotImplementedError("mamba2_scan takes no z; the layer gates its output itself.")
    x, dt, B, C = (y.reshape(1, -1, *y.shape[2:]) for y in (hidden_states, dt, B, C))
    fixed: dict[str, Any] = {"chunk_size": chunk_size, "D": D, "dt_bias": dt_bias}
    fixed |= {"dt_softplus": dt_softplus, "dt_limit": dt_limit}
    why, boundaries = fla_kernels.why_not(x), Boundaries.of(documents)
    if why is None:
        why = why_wrong("Mamba-2's scan", C, x, boundaries, documents.meanwhile)
    if why is None:
        dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        v, g = (x * dt[..., None]).to(x.dtype), dt * A.float()
        out = _run_fla("Mamba-2's scan", [C, B, v, g], boundaries)
        out = out if D is None else out + (x * D[:, None]).to(x.dtype)
    else:

        def run(state: Tensor | None, keep: bool, *row: Tensor) -> Any:
            x, dt, B, C = row
            initial = None if state is None else state.mT
            given = fixed | {"initial_states": initial, "return_final_states": keep}
            found = plain_torch(x, dt, A, B, C, **given)
            return (found[0], found[1].mT) if keep else (found, None)

        weights = [x for x in (A, D, dt_bias) if x is not None]
        state = _State((1, x.shape[2], B.shape[3], x.shape[3]), weights)
        out = _loop_over_documents(run, documents, [x, dt, B, C], x, state, why=why)
    return documents.zero_padding(out).view(hidden_states.shape)


def _run_fla(kind: str, inputs: Sequence[Tensor], boundaries: Boundaries) -> Tensor:
    """The output of fla's kernels."""
    boundaries = boundaries._replace(expects_backward=expects_backward(inputs))
    return OPERATORS[kind](*inputs, *boundaries)[0]


def _refuse_states(initial: Tensor | None, final: bool) -> None:
    if initial is not None or final:
        raise NotImplementedError(
            "packed documents start from an empty state and return none, got a cache; pass "
            "use_cache=False."
        )


# ---- plain torch, one document at a time ----


_Scan = Callable[..., tuple[Tensor, Tensor | None]]
"""(state, keep, *tensors) -> the outputs of one document, and its final state if kept."""


class _State(NamedTuple):
    """The state of a scan.

    Attributes:
        shape: shape of one document's state, `[1, HV, K, V]`, as of fla's kernels.
        weights: inputs of the scan besides the rows.
    """

    shape: tuple[int, ...]
    weights: Sequence[Tensor] = ()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _loop_over_documents(
    run: _Scan,
    documents: RecurrentDocuments,
    rows: list[Tensor],
    like: Tensor,
    of_state: _State,
    *,
    why: str,
) -> Tensor:
    """Call `run` with each document's part `[1, length, ...]` of the rows; zeros at padding.

    A segment of a tree starts from the final state of its parent. A document that continues from
    the previous rank starts from the state there, after all others. Syncs for trees, and if only
    the device knows the documents. Warns once of the cost, with the reason.
    """
    if documents.over_ranks and like.is_cuda:
        raise NotImplementedError(
            "recurrent layers over ranks need fla's kernels on a GPU, as ranks with different "
            f"kernels would wait for each other, but {why}; give each rank its own rows."
        )
    _warn_of_loop(why)
    layout, branches = documents.layout, documents.branches
    links = BoundaryLinks.of(documents.links)
    host = None if branches else layout.cu_seqlens_host
    ends: list[int] = (documents.cu_seqlens[:-2] if host is None else host).tolist()
    parents: list[int] = branches.parents.tolist() if branches else []
    with_children, dtype = set(parents), torch.promote_types(like.dtype, torch.float32)
    carry, above = documents.carry, None
    if carry is not None:
        slots = [each.slot for each in carry.part.continued]
        above = load_state(carry, [*rows, *of_state.weights])
        with_children |= set(slots)
    states: dict[int, Tensor | None] = {}
    outs: dict[int, Tensor] = {}
    waiting = range(links.continues_from_previous)
    for slot in (*range(len(waiting), len(ends) - 1), *waiting):
        start, end = ends[slot : slot + 2]
        state = states[parents[slot]] if parents and parents[slot] >= 0 else above
        if slot in waiting:
            sources = [*rows, *of_state.weights]
            state = receive_state(of_state.shape, dtype, documents.group, sources)
        if end > start:
            continues = bool(links.continues_on_next) and slot == links.last_slot
            row = (x[:, start:end] for x in rows)
            out, state = run(state, continues or slot in with_children, *row)
            if continues:
                assert state is not None
                out = send_state(out, state.to(dtype), documents.group)
            outs[slot] = out.to(like.dtype)
        states[slot] = state
    if not outs and layout.total_tokens:  # padding alone: DDP waits for every gradient
        outs[0] = run(None, False, *(x[:, :1] for x in rows))[0].to(like.dtype)
    in_row = [outs[slot] for slot in sorted(outs)]
    padding = layout.total_tokens - sum(out.shape[1] for out in in_row)
    found = torch.cat([*in_row, like.new_zeros(1, padding, *like.shape[2:])], dim=1)
    if carry is None:
        return found
    left = [states[slot] for slot in slots]
    return store_states(carry, found, [x for x in left if x is not None])


@cache
def _warn_of_loop(why: str) -> None:
    warnings.warn(
        "flexvarlen: recurrent layers run one document after another in plain torch, which is "
        f"correct but slow: {why}.",
        stacklevel=2,
    )
