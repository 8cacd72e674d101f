"""Each bug, planted in a real backend, is found by `operator_drift` and named by its row.

Shape legend: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import math

import pytest
import torch

from flexvarlen.attention.backends import sdpa
from flexvarlen.drift.op.cases import OpCase
from tests.drift.drift_ops import (
    BOTH_WAYS,
    CAUSAL,
    SCALE,
    WINDOW,
    WINDOW_BOTH_WAYS,
    dtypes,
    exact,
    named,
    put_kernel,
)


@pytest.fixture
def plant(monkeypatch):
    """Put a kernel with these bugs in the place of `reference`; give the row that it gets."""

    def planted(case, dtype=torch.float32, train=True, **bugs):
        put_kernel(monkeypatch, **bugs)
        return exact(case, "reference", dtype, train=train)

    return planted


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
    row = plant(LONG, train=False, product=accumulated_in(torch.bfloat16))
    named(row, "rounding: errors are", "grow with the keys seen", "accumulation")
    assert "do not grow" not in row.measures["blame"]


@pytest.mark.parametrize("causal", [True, False])
def test_accumulation_in_bfloat16_of_bfloat16(plant, causal):
    case = OpCase("one long", (1024,), 2, 2, 32, causal)
    half = {"dtype": torch.bfloat16, "train": False}
    row = plant(case, **half, product=accumulated_in(torch.bfloat16, block=2))
    named(row, "rounding: errors are", "accumulation")
    assert plant(case, **half).status == "ok"


def test_probabilities_in_bfloat16(plant):
    row = plant(EVEN, train=False, product=rounded_to(torch.bfloat16))
    named(row, "rounding: errors are")


def test_probabilities_in_float8(plant):
    row = plant(EVEN, torch.bfloat16, train=False, product=rounded_to(torch.float8_e4m3fn))
    named(row, "rounding: errors are", "lower precision than float32")


def test_output_in_bfloat16_does_not_grow(plant):
    row = plant(LONG, train=False, out=lambda out: out.bfloat16().float())
    named(row, "rounding: errors are", "do not grow")


# --- the rest of the output ----------------------------------------------------------------------


def test_output_by_a_factor(plant):
    named(plant(CAUSAL, out=lambda out: out * 0.5), "every output is multiplied by 0.5 (half)")


def test_rows_that_are_not_written(plant):
    def unwritten(out):
        out = out.clone()
        out[41:45] = math.nan
        return out

    named(plant(CAUSAL, out=unwritten), "not finite, first at token 0 of document 2")


def test_what_nobody_thought_of_is_said_to_be_unknown(plant):
    row = plant(CAUSAL, out=lambda out: out.flip(-1))
    assert row.status == "wrong"
    assert "no hypothesis fits" in row.measures["blame"]
    assert "furthest off at token" in row.measures["blame"]
