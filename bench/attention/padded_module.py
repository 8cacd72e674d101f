"""A whole attention module on padded and on packed tokens: projections, attention, projection.

What the source of the suite "padding" has in its test: one linear layer for q, k and v, one for the
output, no bias, no positions. The output's is orthogonal, so that what attention gave can be had
back from the module's output and held against fp64 like any other.

Shapes: T = tokens of the row, E = embedding, H = num_heads, D = head_dim = E / H, B = documents,
S = tokens of a line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

import flexvarlen as fv
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.bench.attention.engine import Inputs, Prepare, Prepared, ours
from flexvarlen.bench.attention.rectangle import Rectangle, future_of
from flexvarlen.mask.document_mask import DocumentMask


@dataclass(frozen=True)
class Module:
    """The weights of a module, and the tokens that it is given.

    Attributes:
        x: `[T, E]`, packed.
        qkv: `[3 · E, E]`.
        out: `[E, E]`, orthogonal before it was rounded.
        undo: float64 `[E, E]`, what takes an output back to what attention gave.
        num_heads: H.
    """

    x: Tensor
    qkv: Tensor
    out: Tensor
    undo: Tensor
    num_heads: int

    @classmethod
    def random(
        cls,
        tokens: int,
        embedding: int,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> Module:
        """Standard normal tokens; weights that keep queries, keys and values so."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator)

        qkv = normal(3 * embedding, embedding) * embedding**-0.5
        out = torch.linalg.qr(normal(embedding, embedding)).Q.to(dtype)
        undo: Tensor = torch.linalg.inv(out.double()).T
        return cls(normal(tokens, embedding).to(dtype), qkv.to(dtype), out, undo, num_heads)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v `[..., H, D]` of tokens `[..., E]`: views of one tensor."""
        q, k, v = linear(x, self.qkv).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        return q, k, v

    def inputs(self, lengths: tuple[int, ...], causal: bool) -> Inputs:
        """q, k and v as attention gets them; a cotangent of zeros, since no backward follows."""
        q, k, v = (x.contiguous() for x in self.project(self.x))
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
        return Inputs(q, k, v, torch.zeros_like(q), lengths, ends, causal)

    def attended(self, output: Tensor) -> Tensor:
        """What attention gave, `[T, H, D]`, of the module's output `[T, E]`."""
        found: Tensor = output.double() @ self.undo
        rounded: Tensor = found.to(output.dtype)
        return rounded.view(-1, self.num_heads, self.x.shape[1] // self.num_heads)


def packed_module(module: Module, name: str) -> Prepare:
    """The module on the packed row, attention by `packed_attention`, its plan made ahead."""

    def prepare(inputs: Inputs, needs_grad: bool) -> Prepared:
        refused_or_not = ours(name)(inputs, needs_grad)  # raises the backend's own sentence
        layout = fv.PackedLayout.from_lengths(inputs.lengths, device=inputs.q.device)
        plan = get_backend(name).plan(DocumentMask.of(layout, causal=inputs.causal))
        x = module.x.detach().requires_grad_(needs_grad)

        def forward() -> Tensor:
            out = fv.packed_attention(
                *module.project(x), layout, causal=inputs.causal, backend=name, plan=plan
            )
            assert isinstance(out, Tensor)
            return linear(out.flatten(-2), module.out)

        return replace(refused_or_not, forward=forward, leaves=[x], as_THD=module.attended)

    return prepare


def padded_module(module: Module, width: int, *, masked: bool) -> Prepare:
    """The module on lines of `width` tokens, attention by SDPA; arguments as in `padded.sdpa`."""

    def prepare(inputs: Inputs, needs_grad: bool) -> Prepared:
        device = inputs.q.device
        rectangle = Rectangle.of(inputs.lengths, device, width)
        x_BSE = rectangle.pad(module.x).detach().requires_grad_(needs_grad)
        mask = rectangle.real(device)[:, None, None] if masked else None
        if mask is not None and inputs.causal:
            mask = mask & ~future_of(width, device)
        causal = inputs.causal and mask is None

        def forward() -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in module.project(x_BSE))
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
            return linear(out.transpose(1, 2).flatten(-2), module.out)

        def as_THD(output: Tensor) -> Tensor:
            return module.attended(rectangle.gather(output))

        return Prepared(forward, [x_BSE], rectangle.pad(inputs.cotangent), as_THD)

    return prepare
