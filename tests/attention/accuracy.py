"""Attention and its gradients against the oracle's, by the acceptance rule.

Shape legend: T, Tk = tokens of the query and the key row, H = num_heads, D = head_dim.
"""

from __future__ import annotations

from functools import partial

import torch

from tests.oracle import assert_as_accurate, differentiate

assert_same_bits = partial(torch.testing.assert_close, rtol=0, atol=0)


def assert_right(ours, plain, inputs, grad, *, has_backward=True, blank=None, blank_keys=None):
    """`ours` is as accurate as `plain` is in the same dtype, both against `plain` in float64.

    Args:
        ours, plain: functions of the inputs, which return the output.
        inputs: q, k, v and perhaps sinks.
        has_backward: whether gradients are compared too.
        blank: bool `[T]`, the queries whose output and gradient must be exactly zero.
        blank_keys: bool `[Tk]`, the keys of which the same holds; default: `blank`.
    """
    exact, exact_grads = differentiate(plain, [x.double() for x in inputs], grad.double())
    baseline, baseline_grads = differentiate(plain, inputs, grad)
    if has_backward:
        out, grads = differentiate(ours, inputs, grad)
    else:
        out, grads, exact_grads, baseline_grads = ours(*inputs), [], [], []
    names = "qkvs"[: len(grads)]
    for name, mine, good, coarse in zip(names, grads, exact_grads, baseline_grads, strict=True):
        if name == "s":
            assert_sink_gradient(mine, good, exact, grad)
        else:
            assert_as_accurate(mine, good, coarse, 3, f"gradient of {name}")
    assert_as_accurate(out, exact, baseline, 2)
    if blank is not None:
        blank_keys = blank if blank_keys is None else blank_keys
        for name, x in zip(("output", *names[:3]), (out, *grads[:3]), strict=True):
            zeros = x[blank_keys if name in ("k", "v") else blank]
            assert (zeros == 0).all(), f"{name}: padding, or a token outside the mask, is not 0"


def assert_sink_gradient(mine, exact, out_THD, grad_THD):
    """It sums `grad * out` over the whole row: a baseline of few numbers may be right by chance.

    Every kernel has only the rounded output: three times what that is expected to cost.
    """
    rounding_THD = torch.finfo(grad_THD.dtype).eps / 2 * grad_THD.double() * out_THD
    rounding_H = rounding_THD.transpose(0, 1).flatten(1).norm(dim=1)
    assert (mine.double() - exact).abs().le(3 * rounding_H + 1e-6).all()
