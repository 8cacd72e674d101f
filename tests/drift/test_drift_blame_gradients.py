"""Bugs of the backward alone, planted in a real backend, are found and named by their row.

Shape legend: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import math

import pytest
import torch

from flexvarlen.attention.backends.reference import ReferenceBackend
from flexvarlen.drift.op.backend_run import BackendRun
from flexvarlen.drift.op.blame import blame
from flexvarlen.drift.op.cases import Inputs, OpCase
from flexvarlen.drift.op.exact import Answer
from flexvarlen.drift.op.judge import Truth, Verdict
from tests.drift.drift_ops import CAUSAL, SCALE, WINDOW, Kernel, dtypes, exact, named, put_kernel


@pytest.fixture
def plant(monkeypatch):
    """Put a kernel with these bugs in the place of `reference`; give the row that it gets."""

    def planted(case, dtype=torch.float32, **bugs):
        put_kernel(monkeypatch, **bugs)
        return exact(case, "reference", dtype)

    return planted


GRADIENTS = {
    "dk_without_scale": ({"k": lambda g: g / SCALE}, ["dk wrong", "dq and dv right", "is missing"]),
    "dq_scaled_twice": ({"q": lambda g: g * SCALE}, ["dq wrong", "is applied twice"]),
    "dv_halved": ({"v": lambda g: g / 2}, ["dv wrong", "the mean over the query heads"]),
    "dq_and_dk_by_ln_2": (
        {"q": lambda g: g * math.log(2), "k": lambda g: g * math.log(2)},
        ["dq and dk wrong, the forward and dv right", "multiplied by 0.693 (ln 2"],
    ),
    "dk_reversed": ({"k": lambda g: g.flip(1)}, ["dk wrong", "KV heads in reverse order"]),
    "dv_not_written": ({"v": torch.zeros_like}, ["dv wrong", "nothing is written"]),
}


@dtypes
@pytest.mark.parametrize("bug", GRADIENTS)
def test_gradient(plant, bug, dtype):
    change, words = GRADIENTS[bug]
    row = plant(CAUSAL, dtype, backward=change)
    named(row, *words)
    assert row.measures["ratio_out"] <= 1
    assert row.measures["ratio_lse"] <= 1


LOST = {"dq": "q", "dk": "k", "dv": "v"}
LONG_ROW = OpCase(
    "long row", (64, 1024, 300), causal=True, num_heads=2, num_kv_heads=1, head_dim=32
)


@pytest.mark.parametrize("tokens", [64, 128, 256])
@pytest.mark.parametrize("name", LOST)
def test_gradient_of_the_last_tokens_is_lost(plant, name, tokens):
    def lose(gradient):
        gradient = gradient.clone()
        gradient[1088 - tokens : 1088] = 0
        return gradient

    row = plant(LONG_ROW, torch.bfloat16, backward={LOST[name]: lose})
    assert row.status == "wrong"
    assert [x for x in ("dq", "dk", "dv") if row.measures[f"ratio_{x}"] > 1] == [name]


def test_a_lost_stretch_of_a_long_row_is_named():
    case = OpCase("packed", (1024, 2048), causal=True, num_heads=1, num_kv_heads=1, head_dim=32)
    truth = Truth.of(case, Inputs.random(case, torch.bfloat16, "cpu", 0), gradients=True)
    parts = {name: x.clone() for name, x in truth.peer.parts().items()}
    assert Verdict.of(Answer(**parts), truth).reason() is None
    parts["dv"][-512:] = 0
    answer = Answer(**parts)
    verdict = Verdict.of(answer, truth)
    assert verdict.wrong == ["dv"]
    if verdict.in_stretches:
        said = blame(truth, answer, verdict)
        assert "in 4 of 24 stretches of about 128 tokens, most in tokens" in said
        assert "of document 1" in said


STRETCHED = [
    OpCase("causal", (70, 1, 40, 90, 33), 8, 4, 32, True),
    OpCase("window", (70, 1, 300, 90, 33), 8, 4, 32, True, 16),
    OpCase("tiny ones", (1, 1, 2, 3, 400, 128), 4, 2, 32, True),
    OpCase("both ways", (199, 315), 2, 2, 32),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", STRETCHED, ids=lambda case: case.name)
def test_right_gradients_have_a_margin_in_every_stretch(case, dtype, seed):
    inputs = Inputs.random(case, dtype, "cpu", seed)
    truth = Truth.of(case, inputs, gradients=True)
    for backend in ("sdpa", "reference"):
        run = BackendRun(backend, case, inputs, lse=False, train=True, seed=0)
        for name in ("dq", "dk", "dv"):
            assert truth.stretches(name, run.batch.parts()[name]).most < 1.6


class _Detached(torch.autograd.Function):
    """K or V a query head; of a group's gradients only some reach it."""

    @staticmethod
    def forward(ctx, x, heads, take):
        ctx.shape, ctx.take = x.shape, take
        return x[:, heads]

    @staticmethod
    def backward(ctx, grad):
        return ctx.take(grad), None, None


SUMS = {
    "first_alone": (lambda g: g.unflatten(1, (4, 2))[:, :, 0], "of their first alone"),
    "last_alone": (lambda g: g.unflatten(1, (4, 2))[:, :, 1], "of their last alone"),
    "interleaved": (lambda g: g.unflatten(1, (2, 4)).sum(1), "interleaved, h % 4"),
}


@dtypes
@pytest.mark.parametrize("bug", SUMS)
def test_sum_over_a_group(monkeypatch, bug, dtype):
    take, words = SUMS[bug]
    right = ReferenceBackend.attend

    def attend(self, q, k, v, sinks, call, mask, plan):
        heads = torch.arange(8) // 2
        k, v = (_Detached.apply(x, heads, take) for x in (k, v))
        return right(self, q, k, v, sinks, call, mask, plan)

    monkeypatch.setattr(ReferenceBackend, "attend", attend)
    row = exact(CAUSAL, "reference", dtype)
    named(row, "dk and dv wrong, the forward and dq right", words)


@dtypes
def test_mask_of_the_backward_alone(monkeypatch, dtype):
    right, wrong = Kernel(), Kernel(sides=lambda a, b: (a - 1, b))

    def attend(self, *args):
        return _OtherBackward.apply(right, wrong, *args)

    monkeypatch.setattr(ReferenceBackend, "attend", attend)
    row = exact(WINDOW, "reference", dtype)
    named(
        row,
        "dq, dk and dv wrong, the forward right: in the backward alone, mask off by one: the "
        "window is 15 in place of 16 tokens, looking back",
    )


class _OtherBackward(torch.autograd.Function):
    """The outputs of one kernel, the backward of another, with a right LSE and delta."""

    @staticmethod
    def forward(ctx, right, wrong, q, k, v, sinks, call, mask, plan):
        out, lse = right(None, q, k, v, sinks, call, mask, plan)
        ctx.save_for_backward(q, k, v, out, lse, wrong.seen(mask))
        ctx.scale = call.scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad, _):
        q, k, v, out, lse, seen = (x.double() for x in ctx.saved_tensors)
        grad, repeats = grad.double(), q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        p = (torch.einsum("qhd,khd->hqk", q, k) * ctx.scale - lse[..., None]).exp() * seen
        delta = (grad * out).sum(-1).T[..., None]
        ds = p * (torch.einsum("qhd,khd->hqk", grad, v) - delta) * ctx.scale
        dq = torch.einsum("hqk,khd->qhd", ds, k)
        dk = torch.einsum("hqk,qhd->khd", ds, q).unflatten(1, (-1, repeats)).sum(2)
        dv = torch.einsum("hqk,qhd->khd", p, grad).unflatten(1, (-1, repeats)).sum(2)
        dtype = ctx.saved_tensors[0].dtype
        return None, None, dq.to(dtype), dk.to(dtype), dv.to(dtype), *[None] * 4
