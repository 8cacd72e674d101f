"""The suite "sdpa-backends": what ran is seen, not guessed; refusals say why; equality is told."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend

from flexvarlen.bench.attention import scaling, sdpa_backends, sdpa_ways
from flexvarlen.bench.attention.engine import Inputs
from flexvarlen.bench.attention.sdpa_backends import DEFAULT, FA2, SDPA, SUITE, SdpaCase
from flexvarlen.bench.attention.sdpa_ways import noted_forward, sdpa, sdpa_kernel_of
from flexvarlen.bench.suite import DeviceLost, Options, suite_of
from flexvarlen.equivalence.variants import Unsupported
from flexvarlen.rows import read_rows
from tests.bench.suite_runs import CPU, ran, row_of, sizes_of, too_large, wrong

CUDA = Options(torch.device("cuda"))
QUICK = Options(CPU, quick=True)
ONE = "d16-causal"


def inputs_of(causal=True):
    return Inputs.random((24, 24), (2, 2), 16, torch.float32, CPU, causal)


# --- cases ---------------------------------------------------------------------------------------


def test_cases_are_equal_batches_of_1k_to_16k():
    cases = SUITE.cases(CUDA)
    assert suite_of("sdpa-backends") is SUITE
    assert len({case.name for case in cases}) == len(cases)
    kinds = {(case.tokens, case.head_dim, case.causal) for case in cases}
    tokens = (1024, 2048, 4096, 8192, 16_384)
    assert kinds == {(t, d, c) for t in tokens for d in (64, 128) for c in (False, True)}
    assert {case.dtype for case in cases} == {"bfloat16"}
    assert all(case.batch > 1 for case in cases)
    assert {case.num_heads * case.head_dim for case in cases} == {2048}


def test_every_kernel_is_forced_and_fa2_stands_beside():
    variants = SUITE.variants(SUITE.cases(CUDA)[0], CUDA)
    assert variants[:5] == [
        DEFAULT,
        "sdpa:flash",
        "sdpa:efficient",
        "sdpa:cudnn",
        "sdpa:math",
    ]
    assert {FA2, "varlen", "flex", "fa2", "fa3", "fa4", "cudnn"} < set(variants)


# --- which kernel --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "kernel"), [(DEFAULT, "flash"), ("sdpa:flash", "flash"), ("sdpa:math", "math")]
)
def test_the_kernel_is_seen_from_its_operator(variant, kernel):
    found, out = noted_forward(inputs_of(), SDPA[variant], needs_grad=True)
    assert found == kernel
    assert out.shape == (48, 2, 16)


def test_the_default_follows_what_torch_may_take():
    """Not what its name says: with flash switched off it takes another, and that is seen."""
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        assert noted_forward(inputs_of(), SDPA[DEFAULT], needs_grad=True)[0] == "math"


@pytest.mark.parametrize(
    ("operator", "kernel"),
    [
        ("_scaled_dot_product_efficient_attention", "efficient"),
        ("_scaled_dot_product_cudnn_attention", "cudnn"),
        ("_scaled_dot_product_flash_attention", "flash"),
    ],
)
def test_operators_that_only_a_gpu_runs_have_names(operator, kernel, monkeypatch):
    assert hasattr(torch.ops.aten, operator)
    name = operator.removeprefix("_scaled_dot_product_")
    assert sdpa_ways.KERNELS[name] == kernel
    seen = sdpa_ways._Operators()
    seen.__torch_dispatch__(_Named(f"aten.{operator}.default"), ())
    assert seen.attention == [name]


class _Named:
    def __init__(self, name):
        self.name = name

    def __str__(self):
        return self.name

    def __call__(self, *args, **kwargs):
        return None


def test_a_call_without_attention_s_operator_is_math():
    assert sdpa_kernel_of(lambda: torch.ones(2, 2) @ torch.ones(2, 2)) == "math"


# --- refusals ------------------------------------------------------------------------------------


def test_a_refused_kernel_says_what_torch_warned_of(monkeypatch):
    def refuse(*args, **kwargs):
        said = "cuDNN attention has been runtime disabled. (Triggered internally at x)"
        warnings.warn(said, stacklevel=2)
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(sdpa_ways, "scaled_dot_product_attention", refuse)
    prepared = SDPA["sdpa:cudnn"](inputs_of(), True)
    expected = "CUDNN_ATTENTION: No available kernel. Aborting execution. cuDNN attention has been"
    with (
        pytest.warns(UserWarning, match="runtime disabled"),
        pytest.raises(Unsupported, match=f"{expected} runtime disabled.$"),
    ):
        prepared.forward()


def test_an_error_that_is_no_refusal_stays_one(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("cuDNN Frontend error")

    monkeypatch.setattr(sdpa_ways, "scaled_dot_product_attention", fail)
    prepared = sdpa(inputs_of(), True, backend=SDPBackend.CUDNN_ATTENTION)
    with pytest.raises(RuntimeError, match="cuDNN Frontend error"):
        prepared.forward()


# --- rows ----------------------------------------------------------------------------------------


def test_a_run_has_a_row_of_every_variant_and_pass(tmp_path):
    rows = ran(SUITE, tmp_path)
    wanted = {
        (case.causal, variant, pass_)
        for case in SUITE.cases(QUICK)
        for variant in SUITE.variants(case, QUICK)
        for pass_ in ("forward", "backward")
    }
    found = [tuple(row.case[x] for x in ("causal", "variant", "pass")) for row in rows]
    assert set(found) == wanted
    assert len(found) == len(wanted)
    for variant in ("sdpa:efficient", "sdpa:cudnn"):
        refused = row_of(rows, variant, causal=True)
        assert refused.status == "unsupported"
        assert "No viable backend" in refused.reason
    flash, math = (row_of(rows, x, causal=True).measures for x in ("sdpa:flash", "sdpa:math"))
    assert (flash["sdpa_kernel"], math["sdpa_kernel"]) == ("flash", "math")
    assert flash["max_abs_difference"] == {
        DEFAULT: 0.0,
        "sdpa:math": math["max_abs_difference"]["sdpa:flash"],
    }
    assert 0 < flash["max_abs_difference"]["sdpa:math"] < 0.1
    assert 0 < math["max_abs_error"] < 0.05
    backward = row_of(rows, "sdpa:flash", "backward", causal=True).measures
    assert backward["sdpa_kernel"] == "flash"
    assert "max_abs_difference" not in backward
    text = SUITE.section(rows)
    assert "| `sdpa:flash` |" in text
    assert "hold" not in text  # whether a claim holds is said in one place
    (figure,) = SUITE.figures(rows, tmp_path)
    assert min(sizes_of(figure)) > 500


def test_what_is_wrong_is_neither_timed_nor_called_equal(tmp_path, monkeypatch):
    monkeypatch.setitem(SDPA, "sdpa:math", wrong(SDPA["sdpa:math"]))
    rows = ran(SUITE, tmp_path, variants=(DEFAULT, "sdpa:math", "sdpa:flash"), cases=ONE)
    bad = row_of(rows, "sdpa:math")
    assert bad.status == "wrong"
    assert not {"device_ms_p50", "max_abs_difference"} & set(bad.measures)
    assert row_of(rows, DEFAULT).measures["max_abs_difference"] == {"sdpa:flash": 0.0}


def test_out_of_memory_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setitem(SDPA, "sdpa:math", too_large)
    rows = ran(SUITE, tmp_path, variants=(DEFAULT, "sdpa:math"), cases=ONE)
    assert row_of(rows, "sdpa:math", "backward").status == "oom"
    assert row_of(rows, DEFAULT).status == "ok"
    assert "oom (1)" in SUITE.section(rows)
    assert SUITE.figures(rows, tmp_path)[0].is_file()


def test_inputs_that_do_not_fit_are_rows_of_every_variant(tmp_path, monkeypatch):
    monkeypatch.setattr(SdpaCase, "inputs", lambda self, device: too_large(self, device))
    rows = ran(SUITE, tmp_path, cases=ONE)
    assert {row.status for row in rows} == {"oom"}
    assert len(rows) == 2 * len(SUITE.variants(SUITE.cases(QUICK)[0], QUICK))


@pytest.mark.parametrize("module", [sdpa_backends, sdpa_ways])
def test_what_fails_behind_the_timing_is_a_note_and_costs_no_time(tmp_path, monkeypatch, module):
    """Of one variant alone, whatever it raises."""
    note = noted_forward

    def noting(inputs, prepare, *, needs_grad):
        if prepare is SDPA["sdpa:math"] or module is sdpa_ways:
            raise RuntimeError("cuDNN Frontend error")
        return note(inputs, prepare, needs_grad=needs_grad)

    monkeypatch.setattr(module, "noted_forward", noting)
    if module is sdpa_ways:
        rows = ran(scaling.SUITE, tmp_path, variants=(DEFAULT,), cases="^float16")
        kernel = row_of(rows, DEFAULT).measures["sdpa_kernel"]
        assert kernel == "not known: RuntimeError: cuDNN Frontend error"
        return
    rows = ran(SUITE, tmp_path, variants=(DEFAULT, "sdpa:math", "sdpa:flash"), cases=ONE)
    assert {row.status for row in rows} == {"ok"}
    failed = row_of(rows, "sdpa:math").measures
    assert failed["equality_failed"] == "RuntimeError: cuDNN Frontend error"
    assert failed["device_ms_p50"] > 0
    assert row_of(rows, DEFAULT).measures["max_abs_difference"] == {"sdpa:flash": 0.0}


def test_a_device_that_dies_behind_the_timing_leaves_the_times(tmp_path, monkeypatch):
    def dies(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(sdpa_backends, "noted_forward", dies)
    with pytest.raises(DeviceLost, match="behind the timing killed the device"):
        ran(SUITE, tmp_path, variants=(DEFAULT,), cases=ONE)
    rows = read_rows([tmp_path / "rows.jsonl"])
    assert [row.status for row in rows] == ["ok", "ok"]


def test_no_room_for_equality_leaves_the_times(tmp_path, monkeypatch):
    monkeypatch.setattr(sdpa_backends, "noted_forward", lambda *a, **k: too_large(None, None))
    rows = ran(SUITE, tmp_path, variants=(DEFAULT,), cases=ONE)
    found = row_of(rows, DEFAULT)
    assert found.status == "ok"
    assert "137.44 GB" in found.measures["equality_failed"]
    assert "device_ms_p50" in found.measures
    assert "| `sdpa:default` | – |" in SUITE.section(rows)
