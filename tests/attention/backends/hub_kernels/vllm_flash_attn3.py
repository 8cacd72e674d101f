"""The operators of the Hub's vllm-flash-attn3, as far as flexvarlen calls them."""

from typing import NamedTuple

import torch

from . import attention

NAME = __name__.partition(".")[0]
COMMON = (
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, float softmax_scale = 0.0, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, float softcap = 0.0"
)
library = torch.library.Library(NAME, "DEF")
library.define(
    f"fwd(Tensor q, Tensor k, Tensor v, {COMMON}, int num_splits = 0, Tensor? s_aux = None)"
    " -> (Tensor, Tensor)"
)
library.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    f"Tensor(dq!) dq, Tensor(dk!) dk, Tensor(dv!) dv, {COMMON}, bool deterministic = False) -> ()"
)


class Common(NamedTuple):
    """What both operators take after their tensors, by its defaults."""

    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    longest_q: int | None = None
    longest_k: int | None = None
    scale: float = 0.0
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0

    @property
    def given(self):
        """The arguments of `attention`."""
        return self.cu_q, self.cu_k, *self[4:]


def fwd(q, k, v, *rest):
    assert len(rest) < 11 or rest[10] is None, "sinks get no gradient"
    return attention.forward(q, k, v, *Common(*rest[:9]).given)


def bwd(dout, q, k, v, out, lse, dq, dk, dv, *rest):
    found = attention.backward(dout, q, k, v, out, lse, *Common(*rest[:9]).given)
    for given, x in zip((dq, dk, dv), found, strict=True):
        given.copy_(x)


library.impl("fwd", fwd, "CompositeExplicitAutograd")
library.impl("bwd", bwd, "CompositeExplicitAutograd")
ops = getattr(torch.ops, NAME)
