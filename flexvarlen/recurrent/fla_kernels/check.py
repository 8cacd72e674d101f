"""Check fla's kernels against the recurrence, token by token, before a model runs them.

Triton has miscompiled them before (flash-linear-attention issue 640). The first use of each kind of
scan on a machine compares the last heads' outputs and gradients on a small row. A pass is stored in
the cache file of "auto"; a scan that fails runs in plain torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flexvarlen.attention.auto import cache_keys
from flexvarlen.attention.auto.cache_file import cache_path, read_entries, write_entries
from flexvarlen.attention.auto.candidate_call import (
    in_own_thread,
    in_own_threads,
    why_nothing_runs,
)
from flexvarlen.attention.auto.check_results import (
    TOLERANCE,
    CannotCheckError,
    WrongResultError,
    failure,
)
from flexvarlen.env import FLA_CONFIGS
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.recurrent.fla_configs import (
    fla_configs_are_used,
    let_fla_time_its_own,
    whose_configs,
)
from flexvarlen.recurrent.fla_kernels.decayed_scan import decayed_scan, decayed_scan_gradients
from flexvarlen.recurrent.fla_kernels.delta_rules import (
    gated_delta_rule,
    gated_delta_rule_gradients,
    kimi_delta_rule,
    kimi_delta_rule_gradients,
)
from flexvarlen.recurrent.fla_kernels.levels import Boundaries

OPERATORS: dict[str, Callable[..., list[Tensor]]] = {
    "gated delta rule": gated_delta_rule,
    "Kimi's delta rule": kimi_delta_rule,
    "Mamba-2's scan": decayed_scan,
}
GRADIENTS: dict[str, Callable[..., list[Tensor]]] = {
    "gated delta rule": gated_delta_rule_gradients,
    "Kimi's delta rule": kimi_delta_rule_gradients,
    "Mamba-2's scan": decayed_scan_gradients,
}
"""The functions that the backwards of `OPERATORS` call."""
NOTED = "fla's kernels, launch 2, are right: "
"""How the cache file records a scan, after the machine; the number changes with the kernels."""

LENGTHS, PARENTS = (66, 3, 1, 35), (-1, 0, 0, 2)
"""More than a chunk, less than a convolution, a single token; as documents, or as a tree."""
TUNED = (4096, 1024, 1024, 1024)
"""A row as in training, on which the kernels are tuned; as documents, or as a tree like that."""


class Scan(NamedTuple):
    """A kind of scan.

    Attributes:
        kind: a key of `OPERATORS`.
        heads: numbers of heads of queries and keys, and of values.
        head_dims: head_dim of queries and keys, and of values.
        dtype: dtype of all tensors except the decay.
        trees: whether slots start from states of other slots (segments of trees) or of other ranks.
    """

    kind: str
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    dtype: torch.dtype
    trees: bool

    @classmethod
    def of(cls, kind: str, q: Tensor, v: Tensor, boundaries: Boundaries) -> Scan:
        """The kind of scan of a call."""
        # index() specializes sizes that are dynamic to Dynamo, and adds a guard.
        heads, dims = ((index(q.shape[i]), index(v.shape[i])) for i in (2, 3))
        return cls(kind, heads, dims, v.dtype, boundaries.pass_states)

    def __str__(self) -> str:
        """The description that `doctor` shows."""
        dtype = str(self.dtype).removeprefix("torch.")
        heads, dims = ("/".join(map(str, x)) for x in (self.heads, self.head_dims))
        return f"{self.kind}{' of trees' * self.trees}, {heads} heads of {dims}, {dtype}"


def why_wrong(
    kind: str,
    q: Tensor,
    v: Tensor,
    boundaries: Boundaries,
    meanwhile: Callable[[], None] | None = None,
) -> str | None:
    """Why fla's kernels must not run this scan, or None.

    Checks them at the first call on this machine. They run unchecked while a CUDA graph is
    captured, inside a backward, and if memory is short. Traces to a constant.

    Args:
        meanwhile: other work to compile; if the scan is checked, both compile at the same time.
    """
    scan = Scan.of(kind, q, v, boundaries)
    if meanwhile is not None and not torch.compiler.is_compiling():
        return _check_once(scan, v.device, meanwhile)
    found: str | None = _why_wrong(*scan, v.device.index)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _why_wrong(
    kind: str,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    trees: bool,
    device_index: int,
) -> str | None:
    scan = Scan(kind, heads, head_dims, dtype, trees)
    return _check_once(scan, torch.device("cuda", device_index))


def _check_once(
    scan: Scan, device: torch.device, meanwhile: Callable[[], None] | None = None
) -> str | None:
    key = _key(scan, device)
    if key in _known:
        return _known[key]
    if key in read_entries(cache_path()):
        _known[key] = None
        return None
    if why_nothing_runs(device) is not None:
        return None
    try:
        # Before the threads start: while one compiles, `is_compiling` is true in all of them.
        lengths = (TUNED, LENGTHS)
        rows = in_own_thread(device, lambda: [_documents(scan, x, device) for x in lengths])
        works: list[Callable[[], Any]] = [
            partial(failure, partial(_tune_and_compare, scan, *rows)),
            *([] if meanwhile is None else [meanwhile]),
        ]
        why = in_own_threads(device, works)[0]
    except (CannotCheckError, torch.OutOfMemoryError):
        return None
    if why is not None and let_fla_time_its_own():
        warnings.warn(
            f"flexvarlen: fla's kernels failed a check of {scan} in flexvarlen's configurations "
            f"({why}), so fla times its own; {FLA_CONFIGS}=0 does so at once.",
            stacklevel=2,
        )
        return _check_once(scan, device)
    _known[key] = why and f"fla's kernels failed a check of {scan} ({why})"
    if why is None:
        write_entries(cache_path(), {key: {}})
    else:
        warnings.warn(f"flexvarlen: {_known[key]}, so plain torch runs it.", stacklevel=2)
    return _known[key]


def _key(scan: Scan, device: torch.device) -> str:
    return f"{cache_keys.machine(device)}; {NOTED}{scan}{whose_configs()}"


_known: dict[str, str | None] = {}


def is_first_forward(device: torch.device) -> bool:
    """Whether this is the first forward of the process that fla's kernels may be checked in."""
    if device.type != "cuda" or _asked or why_nothing_runs(device) is not None:
        return False
    _asked.append(device)
    return True


_asked: list[torch.device] = []


def noted(device: torch.device) -> list[str]:
    """The scans that the cache file records as right on this machine."""
    start = f"{cache_keys.machine(device)}; {NOTED}"
    return sorted(key[len(start) :] for key in read_entries(cache_path()) if key.startswith(start))


# ---- the check ----


def _tune_and_compare(scan: Scan, tuned: RecurrentDocuments, small: RecurrentDocuments) -> None:
    """Run the kernels on a row as in training, then compare them on the small row.

    Triton tunes a kernel at its first launch, for rows of all lengths, and fla stores the result on
    disk.
    """
    steps = [partial(_run_forward, scan, tuned), partial(_run_backward, scan, tuned)]
    if fla_configs_are_used():  # nothing is timed, so kernels can be compiled in parallel
        in_own_threads(tuned.layout.device, steps)
    else:
        for step in steps:
            step()
    _compare(scan, small)


def _run_forward(scan: Scan, documents: RecurrentDocuments) -> None:
    OPERATORS[scan.kind](*_inputs(scan, documents.layout), *Boundaries.of(documents))


def _run_backward(scan: Scan, documents: RecurrentDocuments) -> None:
    """Run the backward alone, as if the forward had returned zeros."""
    inputs = [x.detach() for x in _inputs(scan, documents.layout)]
    boundaries = Boundaries.of(documents)
    on_meta = (x.to("meta") if isinstance(x, Tensor) else x for x in (*inputs, *boundaries))
    outputs = [torch.zeros_like(x, device=inputs[0].device) for x in OPERATORS[scan.kind](*on_meta)]
    GRADIENTS[scan.kind](torch.zeros_like(outputs[0]), inputs, outputs, *boundaries)


def _compare(scan: Scan, documents: RecurrentDocuments) -> None:
    """Compare outputs and gradients.

    Raises:
        WrongResultError: they differ.
    """
    group = scan.heads[1] // scan.heads[0]
    inputs, grad, found = _run(scan, documents)
    last = [
        x.detach()[:, :, -(1 if i < 2 else min(group, x.shape[2])) :].float().requires_grad_()
        for i, x in enumerate(inputs)
    ]
    expected_out = _recurrence(*last, delta="delta" in scan.kind, documents=documents)
    grads = torch.autograd.grad(expected_out, last, grad[:, :, -group:].float())
    names = ("output", "dq", "dk", "dv", "dg", "dbeta")
    for name, x, expected in zip(names, found, [expected_out.detach(), *grads], strict=False):
        x = x[:, :, -expected.shape[2] :].float()
        error = float((x - expected).norm() / expected.norm().clamp(min=2**-7))
        if not error <= TOLERANCE[scan.dtype]:
            raise WrongResultError(f"its {name} is off by {error:.2g} times the reference's norm")


def _documents(scan: Scan, lengths: tuple[int, ...], device: torch.device) -> RecurrentDocuments:
    if scan.trees:
        return RecurrentDocuments(PackedLayout.from_tree(lengths, PARENTS, device=device))
    return RecurrentDocuments(PackedLayout.from_lengths(lengths, device=device))


def _run(scan: Scan, documents: RecurrentDocuments) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Inputs, a gradient of the output for the last heads, and the kernels' results."""
    inputs = _inputs(scan, documents.layout)
    out = OPERATORS[scan.kind](*inputs, *Boundaries.of(documents))[0]
    group = scan.heads[1] // scan.heads[0]
    grad = torch.zeros_like(out)
    generator = torch.Generator(out.device).manual_seed(1)
    grad[:, :, -group:].normal_(generator=generator)
    return inputs, grad, [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _inputs(scan: Scan, layout: PackedLayout) -> list[Tensor]:
    """q, k, v, the log of the decay, and beta of delta rules; leaves."""
    (heads, value_heads), (key_dim, value_dim) = scan.heads, scan.head_dims
    generator = torch.Generator(layout.device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = scan.dtype) -> Tensor:
        of_row = (1, layout.total_tokens, *shape)
        return torch.randn(of_row, generator=generator, device=layout.device, dtype=dtype)

    per_channel = (key_dim,) if scan.kind == "Kimi's delta rule" else ()
    decay = F.logsigmoid(normal(value_heads, *per_channel, dtype=torch.float32) + 3)
    found = [normal(heads, key_dim), normal(heads, key_dim), normal(value_heads, value_dim), decay]
    if "delta" in scan.kind:
        found.append(normal(value_heads).sigmoid())
    return [x.requires_grad_() for x in found]


def _recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    delta: bool,
    documents: RecurrentDocuments,
) -> Tensor:
    """The scan of one head of queries and keys, in fp32, token by token."""
    if delta:
        q, k = (F.normalize(x, dim=-1) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
    decays = g.exp()[..., None] if g.ndim == 4 else g.exp()[..., None, None]
    tokens: list[Tensor] = []
    states: dict[int, Any] = {-1: v.new_zeros(v.shape[2], q.shape[3], v.shape[3])}
    previous = documents.previous.tolist()
    for t, before in enumerate(previous):
        state = states[before] * decays[0, t]
        key, value = k[0, t][..., None], v[0, t]
        if beta is not None:
            value = (value - (state * key).sum(-2)) * beta[0, t][:, None]
        states[t] = state + key * value[:, None]
        tokens.append((states[t] * q[0, t][..., None]).sum(-2))
    return torch.stack(tokens)[None]
