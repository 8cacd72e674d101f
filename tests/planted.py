"""Bugs that tests plant, to see that a check finds them."""

from __future__ import annotations

from functools import partial

import torch

from flexvarlen.attention.backends.sdpa import SdpaBackend
from flexvarlen.mask.vectors import TreeBounds


def with_gradient(change):
    """The identity, whose backward returns `change(gradient, x)`; it may write to the gradient."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return change(gradient.clone(), *ctx.saved_tensors)

    return Changed.apply


def replace_output(module, change):
    """Its forward, then `change` of the output."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))


def ignore_branches(monkeypatch):
    """Let a token see all that stands before it in its tree."""
    monkeypatch.setattr(TreeBounds, "sees", lambda self, q, k: torch.ones_like(q * k, dtype=bool))


def plant(monkeypatch, change):
    """Make the `sdpa` backend call `change(attend, q, k, v, sinks, call, mask, plan)`."""
    attend = SdpaBackend.attend

    def wrong(self, *args):
        return change(partial(attend, self), *args)

    monkeypatch.setattr(SdpaBackend, "attend", wrong)
