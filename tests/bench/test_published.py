"""The suite of published results, tiny, with stand-ins for the packages of FlashAttention."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flexvarlen.bench.suites.attention import published
from flexvarlen.bench.suites.attention.inputs import Prepared
from flexvarlen.bench.suites.attention.packed import PACKAGES
from flexvarlen.bench.suites.attention.published import FORCED, KERNELS, ORDERED, SUITE
from flexvarlen.report.records import Record
from flexvarlen.runner.run import records_of
from tests.bench.quick import QUICK
from tests.planted import with_gradient

STAND_INS = [name for kernel in PACKAGES for name in KERNELS[kernel]]


def flash_attn_func(q, k, v, causal=False, deterministic=False):
    """`[B, S, H, D]`; other bits in every backward that is not asked to be deterministic."""
    noisy = with_gradient(lambda gradient, x: gradient * (1 + 1e-7 * torch.rand_like(gradient)))
    out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    return (out if deterministic else noisy(out)).transpose(1, 2)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal=False,
    deterministic=False,
):
    assert cu_seqlens_q.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_k.diff().max())
    pieces = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)), strict=True)
    out = [flash_attn_func(*(x[None] for x in one), causal, deterministic)[0] for one in pieces]
    return torch.cat(out)


PACKAGE = SimpleNamespace(
    flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
)


@pytest.fixture(scope="module")
def records():
    with pytest.MonkeyPatch.context() as patch:
        for name in PACKAGES.values():
            patch.setitem(sys.modules, name, PACKAGE)
        return records_of(SUITE, QUICK)


def of_part(records, part):
    return {(r.case["variant"], r.case["pass"]): r for r in records if r.case["part"] == part}


def test_whatever_is_installed_is_timed_and_the_rest_has_a_reason(records):
    missing = {"raw:varlen", f"raw:varlen{ORDERED}", "sdpa:efficient", "sdpa:cudnn"}
    missing |= {f"padded:transformers:flash_attention_{x}" for x in (2, 3)}
    for record in records:
        expected = "unsupported" if record.case["variant"] in missing else "ok"
        assert record.status == expected, record
        assert bool(record.reason) == (expected == "unsupported")


def test_a_deterministic_backward_repeats_its_bits(records):
    found = of_part(records, "overhead")
    assert len(found) == 2 * 2 * (len(STAND_INS) + 2)
    for name in STAND_INS:
        assert found[name + ORDERED, "backward"].measures["same_bits"] is True
        assert found[name, "backward"].measures["same_bits"] is False


def test_a_deterministic_backward_that_does_not_is_named(records):
    name = f"raw:fa3{ORDERED}"
    wrong = [
        dataclasses.replace(r, measures=r.measures | {"same_bits": False})
        if r.case["variant"] == name and r.case["pass"] == "forward"
        else r
        for r in records
    ]
    assert f"deterministic backward: {name}." in SUITE.section(wrong)
    assert "deterministic backward: none." in SUITE.section(records)


def test_the_peak_of_a_backward_includes_its_forward(monkeypatch):
    log, seen = [], []
    noted = with_gradient(lambda gradient, x: log.append("backward") or gradient)

    def growth(call, device):
        log.clear()
        call()
        seen.append(list(log))
        return 1.0

    def prepare(inputs, needs_grad):
        leaves = inputs.leaves(needs_grad)
        forward = lambda: log.append("forward") or noted(leaves[0])  # noqa: E731
        return Prepared(forward, leaves[:1], inputs.grad_out)

    monkeypatch.setattr(published, "memory_growth_mib", growth)
    published.observed(prepare, None, SUITE.cases(QUICK)[0].inputs(QUICK.device), True)
    assert seen == [["forward"], ["forward", "backward"]]


def test_steps_and_forwards_of_a_model_are_told_apart(records):
    found = of_part(records, "llama")
    eager = [found["padded:transformers:eager", x].measures for x in ("training", "inference")]
    assert ["grad_error" in x for x in eager] == [True, False]
    assert all(x["ms_p50"] > 0 and x["error"] < 1e-5 for x in eager)


def test_the_default_of_sdpa_is_found_by_its_bits(records):
    found = of_part(records, "sdpa")
    unequal = {x: found[x, "forward"].measures.get("unequal") for x in ("sdpa:default", *FORCED)}
    assert unequal["sdpa:default"] == unequal["sdpa:flash"] == 0
    assert unequal["sdpa:math"] > 0
    assert "The default has the bits of `sdpa:flash`." in SUITE.section(records)


# --- sentences -----------------------------------------------------------------------------------


def timed(part, times, **measures):
    """Records of a GPU: milliseconds by variant and pass."""
    shape = {"batch": 4, "max_length": 8192, "num_heads": 16, "embedding": 2048, "causal": True}
    case = {"part": part, "dtype": "bfloat16", **shape}
    return [
        Record(
            "published",
            case | {"variant": variant, "pass": pass_},
            "ok",
            None,
            {"device_ms_p50": ms} | {x: y[variant] for x, y in measures.items()},
            {"gpu": "NVIDIA H200"},
        )
        for (variant, pass_), ms in times.items()
    ]


def test_a_kernel_of_another_run_keeps_its_line():
    """FA4 is measured by a run of its own where it cannot be installed beside the others."""
    every = {(f"{x}:{name}", "forward"): 2.0 for x in ("fixed", "raw") for name in ("fa2", "fa4")}
    first = timed("overhead", every)
    own = {x: 4.0 for x in every if "fa4" in x[0]}
    later = [
        dataclasses.replace(r, environment=r.environment | {"started_utc": "2026"})
        for r in timed("overhead", own)
    ]
    (table,) = SUITE.tables(first + later)
    shown = {line[1]: line[2] for line in table.lines}
    assert (shown["fa2"], shown["fa4"]) == ("550/550, +0.0%", "275/275, +0.0%")


def test_a_sentence_without_its_numbers_is_left_out():
    times = {("standard", "forward"): 60.0, ("fixed:fa2", "forward"): 6.0}
    (table,) = SUITE.tables(timed("memory", times))
    assert table.notes == ()
    (table,) = SUITE.tables(timed("overhead", {("raw:fa2", "forward"): 1.0}))
    assert table.notes == ()
