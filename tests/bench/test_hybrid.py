"""The suite "hybrid": leaks of recurrent layers are seen, and what ran is in the records."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch.nn.functional import conv1d, silu
from transformers.models.qwen3_5 import modeling_qwen3_5

from flexvarlen.bench.suites.model import recurrences
from flexvarlen.bench.suites.model.geometries import GeometryCase
from flexvarlen.bench.suites.model.hybrid import SUITE, VARIANTS, HybridSteps, split_variant
from flexvarlen.bench.suites.model.recurrences import kernels_of, refusals
from flexvarlen.measure import watch_compilation
from flexvarlen.reference.recurrences import DELTA_RULE
from flexvarlen.runner.failures import Unsupported
from flexvarlen.verify.experiment.variant import Sizes
from tests.bench.quick import CPU, ON_A_GPU, QUICK, records_of

EAGER, COMPILED, PADDED, _ = SUITE.cases(QUICK)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Of the kinds that run eagerly."""
    folder = tmp_path_factory.mktemp("hybrid")
    records = records_of(SUITE, folder, cases="eager|padded")
    return {(r.case["kind"], r.case["variant"]): r for r in records}


# --- what is measured ----------------------------------------------------------------------------


def test_every_variant_has_a_record_that_says_what_ran(records):
    expected = {(c.kind, v) for c in (EAGER, PADDED) for v in SUITE.variants(c, QUICK)}
    assert set(records) == expected
    for record in records.values():
        m = record.measures
        if record.status == "ok":
            assert m["tokens_per_s"] == pytest.approx(record.case["tokens"] / m["ms_p50"] * 1e3)
            assert m["graphs"] == 0
            assert 0 < m["error_over_allowed"] <= 1
            assert "plain torch" in m["delta_rule"]


def test_transformers_own_layers_leak_or_refuse(records):
    leaking = records["eager", "transformers:sdpa"]
    assert leaking.status == "wrong"
    assert leaking.measures["error_over_allowed"] > 100
    assert "ms_p50" not in leaking.measures
    both = records["eager", "transformers:sdpa@both"]
    assert both.status in ("unsupported", "wrong")  # transformers 5.23, and before
    assert records["eager", "auto"].status == "ok"


def test_padded_batches_compute_more_positions_than_tokens(records):
    ratios = {
        variant: record.measures["positions_per_token"]
        for (kind, variant), record in records.items()
        if kind == "padded"
    }
    assert ratios.pop("auto") == 1
    assert ratios
    assert min(ratios.values()) > 1


@pytest.mark.slow  # of attention alone: test_bench_compile.py
def test_other_packings_are_run_and_the_last_is_checked(tmp_path):
    (record,) = records_of(SUITE, tmp_path, cases="packings")
    m = record.measures
    assert record.status == "ok"
    assert m["graphs"] > 0
    assert (m["other_packings"], m["recompilations"]) == (2, 0)
    assert m["error_last_packing"] < 1e-5


def test_a_packed_row_as_one_document_is_wrong():
    steps = HybridSteps(EAGER, QUICK)
    assert steps.check("sdpa").wrong is None
    steps.row = replace(steps.row, lengths=(EAGER.tokens,))
    steps.sizes = Sizes.of(steps.row)
    assert steps.check("sdpa").wrong.startswith("outputs")


# --- the functions of recurrent layers -----------------------------------------------------------


def test_the_convolution_of_fla_stands_in_for_transformers_own(monkeypatch):
    seen = []

    def causal_conv1d(x, weight, bias, activation, cu_seqlens):
        seen.append((x.shape, cu_seqlens))
        padded = conv1d(x.mT, weight[:, None], bias, padding=3, groups=len(weight))
        assert activation == "silu"
        return silu(padded[..., : x.shape[1]]).mT, None

    module = ModuleType("fla.modules.causal_conv1d")
    module.causal_conv1d = causal_conv1d
    for name in ("fla", "fla.modules"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(recurrences, "why_not_fla", lambda x: None)
    checked = HybridSteps(PADDED, QUICK).check("padded:transformers:sdpa+fla-conv")
    assert checked.wrong is None
    channels = (2 + 2 + 4) * 64  # heads of queries, keys and values
    assert {(shape[-1], ends) for shape, ends in seen} == {(channels, None)}


def test_a_refusal_is_unsupported_and_any_other_error_is_not():
    with pytest.raises(Unsupported, match="apart"), refusals():
        raise ValueError("it cannot keep packed sequences apart")
    with pytest.raises(RuntimeError, match="shape"), refusals():
        raise RuntimeError("shape mismatch")


def test_records_say_which_kernels_ran(monkeypatch):
    monkeypatch.setattr(recurrences, "version", lambda package: "0.6.0")
    monkeypatch.setattr(recurrences, "why_not_fla", lambda x: None)
    model = GeometryCase("qwen3.5-tiny", None, dtype="float32").new_base_model(CPU)
    ours = kernels_of(model, theirs=False, fla_convolution=False)
    assert ours == {"delta_rule": "fla-core 0.6.0", "convolution": "plain torch"}
    theirs = kernels_of(model, theirs=True, fla_convolution=False)
    assert theirs == {"delta_rule": "fla-core 0.6.0", "convolution": "causal-conv1d 0.6.0"}


def test_a_variant_names_batches_attention_and_convolution():
    found = split_variant("padded-sorted:transformers:flash_attention_3+fla-conv")
    assert found == ("padded-sorted", "transformers:flash_attention_3", True)


def test_transformers_delta_rule_is_in_no_graph(monkeypatch):
    traced, rule = [], modeling_qwen3_5.torch_chunk_gated_delta_rule

    @functools.wraps(rule)
    def noting(*args, **kwargs):
        traced.append(torch.compiler.is_compiling())
        return rule(*args, **kwargs)

    monkeypatch.setattr(modeling_qwen3_5, DELTA_RULE, noting)
    checked = HybridSteps(COMPILED, QUICK).check("transformers:sdpa")
    assert checked.measures["graphs"] > 0
    with watch_compilation() as stats:
        checked.call()
    assert (stats.compilations, stats.recompilations) == (0, 0)
    assert traced
    assert not any(traced)


def test_variants_of_a_gpu_are_known():
    cases = SUITE.cases(ON_A_GPU)
    assert {case.kind for case in cases} == set(VARIANTS)
    for case in cases:
        for variant in SUITE.variants(case, ON_A_GPU):
            split_variant(variant)
