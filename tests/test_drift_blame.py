"""Each bug, planted in a real backend, is found by `operator_drift` and named by its row.

Shape legend: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import math

import pytest
import torch

from flexvarlen.backends import sdpa
from flexvarlen.backends.reference import ReferenceBackend
from flexvarlen.drift.op.backend_run import BackendRun
from flexvarlen.drift.op.blame import blame
from flexvarlen.drift.op.cases import Inputs, OpCase
from flexvarlen.drift.op.comparisons import operator_drift
from flexvarlen.drift.op.exact import Answer
from flexvarlen.drift.op.judge import Truth, Verdict

LENGTHS = (70, 1, 40, 90, 33)
HEADS = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
CAUSAL = OpCase("causal", LENGTHS, causal=True, **HEADS)
BOTH_WAYS = OpCase("both ways", LENGTHS, **HEADS)
WINDOW = OpCase("window", LENGTHS, causal=True, window=16, **HEADS)
WINDOW_BOTH_WAYS = OpCase("window both ways", LENGTHS, window=16, **HEADS)
SCALE = 32**-0.5

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Kernel:
    """Dense attention in fp32, with bugs to order; sums and softmax as a fused kernel's."""

    def __init__(self, **bugs):
        self.bugs = bugs

    def __call__(self, backend, q, k, v, mask, plan, options):
        bugs, dtype = self.bugs, q.dtype
        if "backward" in bugs:
            q, k, v = (
                _Backward.apply(x, bugs["backward"].get(n))
                for n, x in zip("qkv", (q, k, v), strict=True)
            )
        repeats = q.shape[1] // k.shape[1]
        heads = torch.arange(q.shape[1])
        k_heads = bugs.get("k_heads", lambda h: h // repeats)(heads)
        v_heads = bugs.get("v_heads", lambda h: h // repeats)(heads)
        q, k, v = q.float(), k.float()[:, k_heads], v.float()[:, v_heads]
        scale = options.scale * bugs.get("scale", 1.0)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        seen = self.seen(mask)
        scores = scores.masked_fill(~seen, -1e30)
        lse = scores.logsumexp(-1)
        p = (scores - lse[..., None]).exp() * seen
        out = bugs.get("product", lambda p, v: torch.einsum("hqk,khd->qhd", p, v))(p, v)
        lse = bugs.get("lse", lambda lse: lse)(lse)
        out = bugs.get("out", lambda out: out)(out)
        return out.to(dtype), lse if options.return_lse else None

    def seen(self, mask):
        lengths = self.bugs.get("lengths", lambda lengths: lengths)(mask.layout.lengths)
        document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        place = torch.arange(len(document))
        behind = place[:, None] - place
        spec = mask.spec
        left = math.inf if spec.left < 0 else spec.left
        right = math.inf if spec.right < 0 else spec.right
        left, right = self.bugs.get("sides", lambda a, b: (a, b))(left, right)
        return (document[:, None] == document) & (behind <= left) & (-behind <= right)


class _Backward(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.change is None else ctx.change(grad), None


@pytest.fixture
def plant(monkeypatch):
    """Put a kernel with these bugs in the place of `reference`; give the row that it gets."""

    def planted(case, dtype=torch.float32, **bugs):
        kernel = Kernel(**bugs)
        monkeypatch.setattr(ReferenceBackend, "attend", lambda self, *args: kernel(self, *args))
        return exact(case, "reference", dtype)

    return planted


def exact(case, backend, dtype=torch.float32):
    (row,) = operator_drift([case], [backend], device="cpu", dtypes=[dtype], comparisons=["exact"])
    return row


def named(row, *words):
    assert row.status == "wrong", (row.status, row.reason, row.measures)
    blame = row.measures["blame"]
    for word in words:
        assert word in blame, f"{word!r} not in {blame!r}"
    assert blame in row.reason
    assert "no hypothesis" not in blame


@dtypes
@pytest.mark.parametrize(
    "case", [CAUSAL, BOTH_WAYS, WINDOW, WINDOW_BOTH_WAYS], ids=lambda c: c.name
)
def test_what_is_right_is_not_blamed(plant, case, dtype):
    row = plant(case, dtype)
    assert (row.status, row.reason, row.measures["blame"]) == ("ok", None, None)
    assert {f"ratio_{name}" for name in ("out", "lse", "dq", "dk", "dv")} <= set(row.measures)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@dtypes
def test_a_real_backend_is_not_blamed(backend, dtype):
    for case in (CAUSAL, WINDOW_BOTH_WAYS):
        row = exact(case, backend, dtype)
        assert row.status == "ok", row.reason


MASKS = {
    "diagonal_hidden": (CAUSAL, lambda a, b: (a, -1), ["mask off by one", "own token"]),
    "diagonal_ahead": (CAUSAL, lambda a, b: (a, 1), ["mask off by one", "the token after it"]),
    "causal_missing": (CAUSAL, lambda a, b: (a, math.inf), ["causal mask is missing"]),
    "causal_added": (BOTH_WAYS, lambda a, b: (a, 0), ["causal mask is added"]),
    "window_wide": (WINDOW, lambda a, b: (a + 1, b), ["mask off by one", "17 in place of 16"]),
    "window_narrow": (WINDOW, lambda a, b: (a - 1, b), ["mask off by one", "15 in place of 16"]),
    "window_missing": (WINDOW, lambda a, b: (math.inf, b), ["window is missing"]),
    "window_wide_ahead": (
        WINDOW_BOTH_WAYS,
        lambda a, b: (a, b + 1),
        ["mask off by one", "17 in place of 16", "ahead"],
    ),
    "window_narrow_both_ways": (
        WINDOW_BOTH_WAYS,
        lambda a, b: (a - 1, b - 1),
        ["mask off by one", "15 in place of 16", "both ways"],
    ),
}


@dtypes
@pytest.mark.parametrize("bug", MASKS)
def test_mask(plant, bug, dtype):
    case, sides, words = MASKS[bug]
    named(plant(case, dtype, sides=sides), *words)


BOUNDARIES = {
    "one_ignored": (lambda n: (*n[:2], n[2] + n[3], *n[4:]), "documents 2 and 3 see each other"),
    "all_ignored": (lambda n: (sum(n),), "all documents see each other"),
    "one_token_late": (lambda n: (n[0] + 1, *n[1:-1], n[-1] - 1), "one token too late"),
    "one_token_early": (lambda n: (n[0] - 1, *n[1:-1], n[-1] + 1), "one token too early"),
}


@dtypes
@pytest.mark.parametrize("case", [CAUSAL, BOTH_WAYS], ids=lambda c: c.name)
@pytest.mark.parametrize("bug", BOUNDARIES)
def test_boundary(plant, bug, case, dtype):
    lengths, words = BOUNDARIES[bug]
    named(plant(case, dtype, lengths=lengths), words, "boundar")


@dtypes
def test_boundaries_ignored_under_another_mask(plant, dtype):
    row = plant(BOTH_WAYS, dtype, lengths=lambda n: (sum(n),), sides=lambda a, b: (a, 0))
    named(row, "all documents see each other, and a causal mask is added")


SCALES = {
    "half_head_dim": (0.5**0.5, "1/√2"),
    "ln_2": (math.log(2), "ln 2"),
    "log2_e": (1 / math.log(2), "log2 e"),
    "twice": (2.0, "twice"),
    "applied_twice": (SCALE, "the scale twice"),
    "missing": (1 / SCALE, "no scale at all"),
    "some_other": (1.234, "×1.234"),
}


@dtypes
@pytest.mark.parametrize("bug", SCALES)
def test_scale(plant, bug, dtype):
    factor, word = SCALES[bug]
    named(plant(CAUSAL, dtype, scale=factor), "wrong scale", f"should be {SCALE:.4g}", word)


def test_scale_in_sdpa(monkeypatch):
    right = sdpa._one_document

    def wrong(q, k, v, prefix, spec, scale):
        return right(q, k, v, prefix, spec, scale * 0.5**0.5)

    monkeypatch.setattr(sdpa, "_one_document", wrong)
    named(exact(CAUSAL, "sdpa"), "wrong scale: 0.125 should be 0.1768, ×0.7071 (1/√2")


HEAD_MAPS = {
    "interleaved": (lambda h: h % 4, "interleaved, h % 4 in place of h // 2"),
    "reversed": (lambda h: 3 - h // 2, "in reverse order"),
    "first": (lambda h: 0 * h, "all to KV head 0"),
    "rotated": (lambda h: (h // 2 + 1) % 4, "one KV head too far"),
}


@dtypes
@pytest.mark.parametrize("which", ["K", "V", "K and V"])
@pytest.mark.parametrize("bug", HEAD_MAPS)
def test_heads(plant, bug, which, dtype):
    mapping, words = HEAD_MAPS[bug]
    maps = {f"{x.lower()}_heads": mapping for x in which.split(" and ")}
    named(plant(CAUSAL, dtype, **maps), "heads are mapped wrongly", f"those of {which} {words}")


LSES = {
    "minus_ln_2": (lambda lse: lse - math.log(2), "constant: -0.6931 (-ln 2)"),
    "plus_ln_2": (lambda lse: lse + math.log(2), "constant: +0.6931 (ln 2)"),
    "some_constant": (lambda lse: lse + 0.25, "constant: +0.2500"),
    "base_2": (lambda lse: lse / math.log(2), "multiplied by 1.443 (a factor of log2 e"),
    "too_natural": (lambda lse: lse * math.log(2), "multiplied by 0.6931 (a factor of ln 2"),
}


@dtypes
@pytest.mark.parametrize("bug", LSES)
def test_lse(plant, bug, dtype):
    change, words = LSES[bug]
    row = plant(CAUSAL, dtype, lse=change)
    named(row, words, "while the output is right")
    assert row.measures["ratio_out"] <= 1 < row.measures["ratio_lse"]


# --- low precision -------------------------------------------------------------------------------

LONG = OpCase("long", (16, 33, 128, 512), causal=True, num_heads=4, num_kv_heads=4, head_dim=32)
EVEN = OpCase("even", (256, 256), num_heads=4, num_kv_heads=4, head_dim=32)


def accumulated_in(dtype, block=8):
    """P @ V, a block of keys after another, into an accumulator of a low precision."""

    def product(p, v):
        total = torch.zeros(p.shape[1], p.shape[0], v.shape[2])
        for first in range(0, p.shape[2], block):
            keys = slice(first, first + block)
            total = (total + torch.einsum("hqk,khd->qhd", p[..., keys], v[keys])).to(dtype).float()
        return total

    return product


def rounded_to(dtype):
    return lambda p, v: torch.einsum("hqk,khd->qhd", p.to(dtype).to(p.dtype), v)


def test_accumulation_in_bfloat16(plant):
    row = plant(LONG, torch.float32, product=accumulated_in(torch.bfloat16))
    named(row, "rounding: errors are", "grow with the keys seen", "accumulation")
    assert "do not grow" not in row.measures["blame"]


@pytest.mark.parametrize("causal", [True, False])
def test_accumulation_in_bfloat16_of_bfloat16(plant, causal):
    case = OpCase("one long", (1024,), 2, 2, 32, causal)
    row = plant(case, torch.bfloat16, product=accumulated_in(torch.bfloat16, block=2))
    named(row, "rounding: errors are", "accumulation")
    assert plant(case, torch.bfloat16).status == "ok"


def test_probabilities_in_bfloat16(plant):
    named(plant(EVEN, torch.float32, product=rounded_to(torch.bfloat16)), "rounding: errors are")


def test_probabilities_in_float8(plant):
    row = plant(EVEN, torch.bfloat16, product=rounded_to(torch.float8_e4m3fn))
    named(row, "rounding: errors are", "lower precision than float32")


def test_output_in_bfloat16_does_not_grow(plant):
    row = plant(LONG, torch.float32, out=lambda out: out.bfloat16().float())
    named(row, "rounding: errors are", "do not grow")


# --- the rest of the output ----------------------------------------------------------------------


def test_output_by_a_factor(plant):
    named(plant(CAUSAL, out=lambda out: out * 0.5), "every output is multiplied by 0.5 (half)")


def test_rows_that_are_not_written(plant):
    def unwritten(out):
        out = out.clone()
        out[71:75] = math.nan
        return out

    named(plant(CAUSAL, out=unwritten), "not finite, first at token 0 of document 2")


def test_what_nobody_thought_of_is_said_to_be_unknown(plant):
    row = plant(CAUSAL, out=lambda out: out.flip(-1))
    assert row.status == "wrong"
    assert "no hypothesis fits" in row.measures["blame"]
    assert "furthest off at token" in row.measures["blame"]


# --- gradients alone -----------------------------------------------------------------------------

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
    "long row", (64, 1024, 300), causal=True, num_heads=2, num_kv_heads=1, head_dim=64
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
    OpCase("tiny ones", (1, 1, 2, 3, 700, 128), 4, 2, 64, True),
    OpCase("both ways", (299, 515), 2, 2, 64),
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

    def attend(self, q, k, v, mask, plan, options):
        heads = torch.arange(8) // 2
        k, v = (_Detached.apply(x, heads, take) for x in (k, v))
        return right(self, q, k, v, mask, plan, options)

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
    def forward(ctx, right, wrong, q, k, v, mask, plan, options):
        out, lse = right(None, q, k, v, mask, plan, options)
        ctx.save_for_backward(q, k, v, out, lse, wrong.seen(mask))
        ctx.scale = options.scale
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
        return None, None, dq.to(dtype), dk.to(dtype), dv.to(dtype), None, None, None
