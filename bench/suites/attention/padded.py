"""Variants that take a padded batch: standard attention, transformers' eager, SDPA, fixed lengths.

The padded batch is made beforehand, as it stands in a padded model.

Shapes: T = tokens of the row, B = documents, S = padded length, H = num_heads, D = head_dim.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from flexvarlen.bench.suites.attention.inputs import Inputs, Prepare, Prepared
from flexvarlen.bench.suites.attention.packed import first_of
from flexvarlen.runner.failures import Unsupported


@dataclass(frozen=True)
class Padding:
    """Where the tokens of a packed row stand in a padded batch `[B, S]`.

    Attributes:
        shape: B and S.
        index: int64 `[T]`, each token's index in the flattened batch.
        real: bool `[B, S]`, False at padding.
    """

    shape: tuple[int, int]
    index: Tensor
    real: Tensor

    @classmethod
    def of(cls, inputs: Inputs, length: int | None = None) -> Padding:
        """Padded to the longest document, or to `length`."""
        shape = (len(inputs.lengths), inputs.longest if length is None else length)
        position = torch.arange(shape[1], device=inputs.q.device)
        real = position < inputs.cu_seqlens.diff()[:, None]
        return cls(shape, real.flatten().nonzero()[:, 0], real)

    def pad(self, x: Tensor) -> Tensor:
        """`[T, ...]` as `[B, S, ...]`, with zeros at padding."""
        flat = x.new_zeros((self.shape[0] * self.shape[1], *x.shape[1:]))
        return flat.index_copy_(0, self.index, x).view(*self.shape, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """`[B, S, ...]` as `[T, ...]`."""
        return x.reshape(-1, *x.shape[2:])[self.index]


@dataclass(frozen=True)
class HeadsFirst:
    """q, k, v as leaves `[B, H, S, D]`: views of `[B, S, H, D]`, as a model's projections are."""

    padding: Padding
    leaves: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor

    @classmethod
    def of(cls, inputs: Inputs, needs_grad: bool, length: int | None = None) -> HeadsFirst:
        padding = Padding.of(inputs, length)
        q, k, v = (
            padding.pad(x).transpose(1, 2).detach().requires_grad_(needs_grad)
            for x in (inputs.q, inputs.k, inputs.v)
        )
        return cls(padding, (q, k, v), padding.pad(inputs.grad_out).transpose(1, 2))

    def prepared(self, forward: Callable[[], Tensor], **measures: Any) -> Prepared:
        """A call on the leaves, whose output is `[B, H, S, D]`."""

        def as_THD(x_BHSD: Tensor) -> Tensor:
            return self.padding.unpad(x_BHSD.transpose(1, 2))

        return Prepared(forward, self.leaves, self.grad_out, as_THD, measures)


def require_equal_lengths(inputs: Inputs) -> None:
    if len(set(inputs.lengths)) > 1:
        raise Unsupported("a fixed-length call takes documents of one length only")


def future_of(tokens: int, device: torch.device) -> Tensor:
    """bool `[tokens, tokens]`: True on keys after the query."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


def standard(inputs: Inputs, needs_grad: bool) -> Prepared:
    """What papers call standard attention: matmul, softmax, matmul in the inputs' dtype."""
    require_equal_lengths(inputs)
    batch = HeadsFirst.of(inputs, needs_grad)
    scale = inputs.q.shape[2] ** -0.5
    future = future_of(inputs.longest, inputs.q.device) if inputs.causal else None

    def forward() -> Tensor:
        q, k, v = batch.leaves
        scores = (q * scale) @ k.mT
        if future is not None:
            scores.masked_fill_(future, float("-inf"))
        out: Tensor = scores.softmax(-1) @ v
        return out

    return batch.prepared(forward)


def eager(inputs: Inputs, needs_grad: bool) -> Prepared:
    """`eager_attention_forward` of transformers' Llama: softmax in fp32, an additive mask."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    require_equal_lengths(inputs)
    batch = HeadsFirst.of(inputs, needs_grad)
    module = SimpleNamespace(  # what the function reads of the layer that calls it
        num_key_value_groups=inputs.q.shape[1] // inputs.k.shape[1], training=needs_grad
    )
    mask = None
    if inputs.causal:
        future = future_of(inputs.longest, inputs.q.device)
        lowest = torch.finfo(inputs.q.dtype).min
        mask = inputs.q.new_zeros(future.shape).masked_fill_(future, lowest)
        mask = mask.repeat(len(inputs.lengths), 1, 1, 1)
    call = partial(
        eager_attention_forward,
        module,
        attention_mask=mask,
        scaling=inputs.q.shape[2] ** -0.5,
        dropout=0.0,
    )

    def forward() -> Tensor:
        q, k, v = batch.leaves
        out_BSHD: Tensor = call(query=q, key=k, value=v)[0]
        return out_BSHD.transpose(1, 2)

    return batch.prepared(forward)


def fixed_packaged(module: str, inputs: Inputs, needs_grad: bool) -> Prepared:
    """`flash_attn_func` of a FlashAttention package, on `[B, S, H, D]`."""
    function = importlib.import_module(module).flash_attn_func
    require_equal_lengths(inputs)
    padding = Padding.of(inputs)
    leaves = [
        padding.pad(x).detach().requires_grad_(needs_grad) for x in (inputs.q, inputs.k, inputs.v)
    ]
    return Prepared(
        lambda: first_of(function(*leaves, causal=inputs.causal)),
        leaves,
        padding.pad(inputs.grad_out),
        padding.unpad,
    )


# --- scaled_dot_product_attention ----------------------------------------------------------------


def sdpa(
    inputs: Inputs,
    needs_grad: bool,
    *,
    backend: SDPBackend | None = None,
    masked: bool = False,
    length: int | None = None,
) -> Prepared:
    """`scaled_dot_product_attention` on the padded batch; the measure `sdpa_kernel` is what ran.

    Args:
        backend: forced around each forward, which costs the host some microseconds; None: torch's
            choice.
        masked: with a boolean mask `[B, 1, 1, S]` of the real keys, or `[B, 1, S, S]` with the
            causal one. Without it padding is attended to unless a causal mask hides it.
        length: padded length; None: the longest document's.
    """
    batch = HeadsFirst.of(inputs, needs_grad, length)
    mask = batch.padding.real[:, None, None] if masked else None
    if mask is not None and inputs.causal:
        mask = mask & ~future_of(batch.padding.shape[1], inputs.q.device)
    attend = partial(
        scaled_dot_product_attention,
        *batch.leaves,
        attn_mask=mask,
        is_causal=inputs.causal and mask is None,
    )

    def forced() -> Tensor:
        with sdpa_kernel([] if backend is None else [backend]):
            return attend()

    forward = attend if backend is None else forced
    return batch.prepared(forward, sdpa_kernel=sdpa_kernel_of(forward))


class _Operators(TorchDispatchMode):
    """Notes the attention operators that reach the dispatcher, below autograd."""

    PREFIX = "aten._scaled_dot_product_"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(self.PREFIX):
            self.seen.append(str(func).removeprefix(self.PREFIX).partition(".")[0])
        return func(*args, **(kwargs or {}))


OPERATORS = {
    "flash_attention": "flash",
    "efficient_attention": "efficient",
    "cudnn_attention": "cudnn",
    "flash_attention_for_cpu": "flash",
}
"""Operators of SDPA without their prefix, and what users call them."""


def sdpa_kernel_of(call: Callable[[], object]) -> str:
    """Which kernel a call of SDPA runs; runs it once. "math" is made of matrix products.

    Raises:
        Unsupported: no kernel that was allowed can serve the call; with torch's reasons.
    """
    operators = _Operators()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with operators:
                call()
        except RuntimeError as error:
            if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                raise
            reasons = dict.fromkeys(str(x.message).partition(" (Triggered")[0] for x in caught)
            raise Unsupported(" ".join([str(error).partition("\n")[0], *reasons])[:600]) from error
    # Math is an operator made of several: those below it are seen too.
    found = [x for x in operators.seen if not x.startswith("attention_math")]
    return ", ".join(OPERATORS.get(x, x) for x in dict.fromkeys(found)) or "math"


SDPA: dict[str, Prepare] = {
    "sdpa:default": sdpa,
    "sdpa:flash": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa:efficient": partial(sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "sdpa:cudnn": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "sdpa:math": partial(sdpa, backend=SDPBackend.MATH),
}
"""SDPA with torch's choice of kernel, and with each forced."""

FIXED: dict[str, Prepare] = {
    "standard": standard,
    "eager": eager,
    "sdpa:default": sdpa,
    "fixed:fa2": partial(fixed_packaged, "flash_attn"),
    "fixed:fa3": partial(fixed_packaged, "flash_attn_interface"),
}
"""Attention of equally long documents, not packed."""
