"""The suites varlen-study and varlen-overhead: their cases, rows, tables and figures."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch

from flexvarlen.attention.backends.sdpa import SdpaBackend
from flexvarlen.bench.attention import raw_kernels, varlen_forms, varlen_overhead, varlen_study
from flexvarlen.bench.attention.varlen_forms import DETERMINISTIC, fixed_deterministic
from flexvarlen.bench.attention.varlen_study import FA2, SDPA_SERIAL, SDPA_VARLEN, SERIAL
from flexvarlen.bench.runner import Run, row_case, run_suite
from flexvarlen.bench.suite import Finding, Options
from flexvarlen.rows import Row, read_rows

CPU = torch.device("cpu")
QUICK = Options(CPU, quick=True, seconds=0.01, say=lambda line: None)
GPU = Options(torch.device("cuda"))
PASSES = ("forward", "backward")
SUITES = (varlen_study.SUITE, varlen_overhead.SUITE)


def run(suite, out, variants=None, cases=None):
    options = Options(CPU, True, variants, 0.01, say=lambda line: None)
    run_suite(suite, options, Run(out=out, cases=cases))
    return read_rows([out])


@pytest.fixture(scope="module", params=SUITES, ids=[suite.name for suite in SUITES])
def ran(request, tmp_path_factory):
    suite = request.param
    return suite, run(suite, tmp_path_factory.mktemp(suite.name) / "rows.jsonl")


# --- both, on the CPU ----------------------------------------------------------------------------


def test_every_variant_and_pass_of_every_case_has_a_row(ran):
    suite, rows = ran
    expected = [
        row_case(case, Finding(variant, "ok", pass_=pass_))
        for case in suite.cases(QUICK)
        for variant in suite.variants(case, QUICK)
        for pass_ in PASSES
    ]
    assert [row.case for row in rows] == expected
    assert {row.status for row in rows} == {"ok", "unsupported"}
    for row in rows:
        timed = {"device_ms_p50", "tflops"} <= set(row.measures)
        assert timed == (row.status == "ok") == (row.reason is None)


def test_the_cpus_kernels_are_timed(ran):
    suite, rows = ran
    timed = {row.case["variant"] for row in rows if row.status == "ok"}
    expected = {
        "varlen-study": {"sdpa", "reference", f"sdpa{SERIAL}", f"reference{SERIAL}", SDPA_SERIAL},
        "varlen-overhead": {
            name + form
            for name in ("sdpa", "sdpa:default", "sdpa:flash")
            for form in ("", DETERMINISTIC)
        },
    }
    assert timed == expected[suite.name]


def test_tables_and_figures_are_made_from_rows(ran, tmp_path):
    suite, rows = ran
    text = suite.section(rows)
    assert str(rows[0].environment["cpu"]) in text
    assert "No module named 'flash_attn'" in text
    (path,) = suite.figures(rows, tmp_path)
    assert path.name == f"{suite.name}-cpu.png"
    assert path.stat().st_size > 10_000


def test_a_wrong_kernel_is_not_timed(ran, tmp_path, monkeypatch):
    suite, _ = ran
    attend = SdpaBackend.attend

    def wrong(self, *args):
        out, lse = attend(self, *args)
        return out * 1.01, lse

    monkeypatch.setattr(SdpaBackend, "attend", wrong)
    rows = run(suite, tmp_path / "rows.jsonl", variants=("sdpa", "raw:fa2"))
    own = [row for row in rows if row.case["variant"] == "sdpa"]
    assert {row.status for row in own} == {"wrong"}
    assert "wrong (" in suite.section(rows)


def test_a_name_that_is_no_variant_is_refused(ran, tmp_path):
    suite, _ = ran
    with pytest.raises(ValueError, match="got 'fa9'"):
        run(suite, tmp_path / "rows.jsonl", variants=("fa9",))


def test_no_room_for_the_inputs_is_said_of_all(ran, monkeypatch):
    suite, _ = ran

    def no_room(self, device):
        raise torch.OutOfMemoryError("no room")

    case = suite.cases(QUICK)[0]
    monkeypatch.setattr(type(case), "inputs", no_room)
    findings = suite.measure(case, ("sdpa", "raw:fa2"), QUICK)
    assert [(x.variant, x.pass_, x.status) for x in findings] == [
        (variant, pass_, "oom") for variant in ("sdpa", "raw:fa2") for pass_ in PASSES
    ]


# --- the study -----------------------------------------------------------------------------------


def test_the_study_has_its_13_cases():
    cases = varlen_study.SUITE.cases(GPU)
    assert len(cases) == 13
    for case in cases:
        op = case.op
        assert (op.num_heads, op.num_kv_heads, op.head_dim, op.causal) == (24, 24, 128, False)
        assert case.dtype == "bfloat16"
    lengths = {case.op.lengths for case in cases}
    assert lengths >= {(256,), (319,), (299, 1115), (1088, 4160), (4160,) * 8}
    assert set(varlen_study.CLAIMED_MS) <= lengths


def test_both_kernels_of_the_study_and_all_others_run_in_batch_and_serial():
    one, several = (
        next(case for case in varlen_study.SUITE.cases(GPU) if case.op.lengths == lengths)
        for lengths in ((256,), (320, 320))
    )
    found = varlen_study.SUITE.variants(several, GPU)
    assert found[:2] == [FA2, SDPA_VARLEN]
    for name in (FA2, SDPA_VARLEN, "raw:fa3", "raw:fa4", "raw:flex", "raw:nested", "fa3", "sdpa"):
        assert name in found
        assert f"{name}{SERIAL}" in found
    alone = varlen_study.SUITE.variants(one, GPU)
    assert [name for name in alone if name.endswith(SERIAL)] == [SDPA_SERIAL]
    assert set(alone) < set(found)


def study_rows(device, host):
    """Of a GPU; SDPA varlen takes `device` (and `host`) times what FA2 takes."""
    rows = []
    where = {"gpu": "NVIDIA H200", "torch": "2.11.0", "started_utc": "2026-01-01"}
    for case in varlen_study.SUITE.cases(GPU):
        for variant in varlen_study.SUITE.variants(case, GPU):
            for pass_ in PASSES:
                name = variant.removesuffix(SERIAL)
                row = row_case(case, Finding(variant, "ok", pass_=pass_))
                if name not in (FA2, SDPA_VARLEN):
                    refused = Row("varlen-study", row, "unsupported", f"no {name}", {}, where)
                    rows.append(refused)
                    continue
                calls = len(case.op.lengths) if variant.endswith(SERIAL) else 1
                times = (device, host) if name == SDPA_VARLEN else (1.0, 1.0)
                measures = {"tflops": 1.0}
                for at in ("p20", "p50", "p80"):
                    tokens = sum(case.op.lengths)
                    measures[f"device_ms_{at}"] = times[0] * 1e-4 * tokens * calls
                    measures[f"host_ms_{at}"] = times[1] * 0.06 * calls
                rows.append(Row("varlen-study", row, "ok", None, measures, where))
    return rows


def test_the_study_tells_both_clocks_apart():
    """Of 256 tokens a call takes what the host takes, which alone makes the study's claim hold.

    Whether it holds is said by `claims_tables`.
    """
    text = varlen_study.SUITE.section(study_rows(device=1.0, host=0.5))
    tables = [part for part in text.split("\n\n") if part.startswith("| documents | pass | FA2")]
    device, call = (
        next(line for line in table.splitlines() if line.startswith("| 256 | forward"))
        for table in tables
    )
    assert device == "| 256 | forward | 0.0256 | – | 0.0256 | – | 1.00 | – | 0.51 |"
    assert call == "| 256 | forward | 0.0600 | – | 0.0300 | – | 0.50 | – | 0.51 |"


def test_the_studys_tables_say_who_is_faster():
    text = varlen_study.SUITE.section(study_rows(device=1.2, host=1.0))
    assert "Forward, batch, device time: SDPA varlen is faster in 0 of 13 cases, 1.20 to" in text
    assert "| 4160×8 | backward | 3.33 | 26.6 | 3.99 | 31.9 | 1.20 | 1.20 |  |" in text


def test_the_studys_figure_marks_what_has_no_time(tmp_path):
    rows = study_rows(device=1.2, host=1.0)
    (path,) = varlen_study.SUITE.figures(rows, tmp_path)
    assert path.name == "varlen-study-nvidia-h200.png"
    points = varlen_study._points(varlen_study.sorted_cases(rows), "forward", one_by_one=True)
    assert {point.status for point in points if point.variant == "raw:sdpa"} == {"unsupported"}
    assert [p.x for p in points if p.variant == "raw:fa2"] == sorted(
        sum(case.op.lengths) for case in varlen_study.SUITE.cases(GPU) if len(case.op.lengths) > 1
    )
    for row in rows:
        row.measures["host_bound"] = row.case["variant"] == SDPA_VARLEN + SERIAL
    points = varlen_study._points(varlen_study.sorted_cases(rows), "forward", one_by_one=True)
    assert {(p.y, p.status) for p in points if p.variant == SDPA_VARLEN} == {(None, "host-bound")}
    assert {p.status for p in points if p.variant == FA2} == {"ok"}


# --- the overhead --------------------------------------------------------------------------------


def test_the_overheads_cases_are_the_claimed_ones():
    full, causal = varlen_overhead.SUITE.cases(GPU)
    assert (full.causal, causal.causal) == (False, True)
    for case in (full, causal):
        shape = (case.head_dim, case.seqlen, case.batch, case.num_heads, case.dtype)
        assert shape == (128, 8192, 4, 16, "bfloat16")
        found = varlen_overhead.SUITE.variants(case, GPU)
        for kernel in ("fa2", "fa3", "fa4", "flex"):
            for name in (f"fixed:{kernel}", f"raw:{kernel}", kernel):
                assert found[found.index(name) + 1] == name + DETERMINISTIC


def package(seen, *, deterministic):
    """A FlashAttention package of one document's softmax, with or without the argument."""

    def attend(q, k, v, causal):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
        )
        return out.transpose(1, 2)

    def fixed(q, k, v, causal=False):
        seen.append(("fixed", False))
        return attend(q, k, v, causal)

    def fixed_asked(q, k, v, causal=False, deterministic=False):
        seen.append(("fixed", deterministic))
        return attend(q, k, v, causal)

    def varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, **asked
    ):
        seen.append(("varlen", asked.get("deterministic", False)))
        ends = cu_seqlens_q.tolist()
        rows = [slice(a, b) for a, b in itertools.pairwise(ends)]
        return torch.cat([attend(q[r][None], k[r][None], v[r][None], causal)[0] for r in rows])

    def varlen_asked(
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
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return varlen(q, k, v, *ends, causal, deterministic=deterministic)

    module = types.ModuleType("flash_attn")
    module.flash_attn_func = fixed_asked if deterministic else fixed
    module.flash_attn_varlen_func = varlen_asked if deterministic else varlen
    return module


@pytest.mark.parametrize("takes", [True, False])
def test_determinism_is_asked_for_where_the_function_takes_it(tmp_path, monkeypatch, takes):
    seen = []
    monkeypatch.setitem(sys.modules, "flash_attn", package(seen, deterministic=takes))
    variants = ("raw:fa2", f"raw:fa2{DETERMINISTIC}")
    rows = run(varlen_overhead.SUITE, tmp_path / "rows.jsonl", variants=variants, cases="causal")
    found = {(row.case["variant"], row.case["pass"]): row for row in rows}
    assert found["raw:fa2", "backward"].status == "ok"
    asked = found[f"raw:fa2{DETERMINISTIC}", "backward"]
    assert set(seen) == ({("varlen", False), ("varlen", True)} if takes else {("varlen", False)})
    if takes:
        assert asked.measures["bits_equal"] is True
    else:
        assert asked.status == "unsupported"
        assert "takes no `deterministic`" in asked.reason


@pytest.mark.parametrize("takes", [True, False])
def test_fixed_lengths_are_asked_for_determinism_too(monkeypatch, takes):
    seen = []
    module = package(seen, deterministic=takes)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    inputs = varlen_overhead.SUITE.cases(QUICK)[1].inputs(CPU)

    def on_any_device(name, inputs, needs_grad):
        shape = (len(inputs.lengths), inputs.longest, *inputs.q.shape[1:])
        leaves = [x.view(shape) for x in inputs.leaves(needs_grad)]
        return raw_kernels.Prepared(
            lambda: module.flash_attn_func(*leaves, causal=inputs.causal), leaves, leaves[0]
        )

    monkeypatch.setattr(varlen_forms, "fixed_packaged", on_any_device)
    if not takes:
        with pytest.raises(raw_kernels.Unsupported, match="takes no `deterministic`"):
            fixed_deterministic("fa2", inputs, True)
        return
    prepared = fixed_deterministic("fa2", inputs, True)
    assert prepared.deterministic
    prepared.forward()
    assert seen == [("fixed", True)]


def test_torchs_own_kernels_run_under_its_switch_and_leave_it_as_it_was(tmp_path, monkeypatch):
    seen, filled = [], []
    attend = SdpaBackend.attend

    def noting(self, *args):
        seen.append(torch.are_deterministic_algorithms_enabled())
        filled.append(torch.utils.deterministic.fill_uninitialized_memory)
        return attend(self, *args)

    monkeypatch.setattr(SdpaBackend, "attend", noting)
    for variant, expected in (("sdpa", {False}), (f"sdpa{DETERMINISTIC}", {True})):
        seen.clear()
        filled.clear()
        run(varlen_overhead.SUITE, tmp_path / f"{variant}.jsonl", variants=(variant,))
        assert set(seen) == expected
        assert set(filled) == {not on for on in expected}  # filling is no part of determinism
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory


def test_flex_knows_no_determinism_to_ask_for(tmp_path):
    variants = tuple(x for x in varlen_forms.ways_of_kernel("flex") if x != f"flex{DETERMINISTIC}")
    rows = run(varlen_overhead.SUITE, tmp_path / "rows.jsonl", variants=variants, cases="causal")
    found = {(row.case["variant"], row.case["pass"]): row for row in rows}
    for name in ("fixed:flex", "raw:flex", "flex"):
        assert found[name, "forward"].status == "ok"
        assert "no backward on the CPU" in found[name, "backward"].reason
    for name in ("fixed:flex", "raw:flex"):
        assert "takes no `deterministic`" in found[name + DETERMINISTIC, "backward"].reason


def overhead_rows(varlen, deterministic):
    """Of a GPU; FA3's varlen takes `varlen` times its fixed lengths, and so on."""
    rows = []
    where = {"gpu": "NVIDIA H200", "torch": "2.11.0", "started_utc": "2026-01-01"}
    for case in varlen_overhead.SUITE.cases(GPU):
        for variant in varlen_overhead.SUITE.variants(case, GPU):
            for pass_ in PASSES:
                row = row_case(case, Finding(variant, "ok", pass_=pass_))
                name = variant.removesuffix(DETERMINISTIC)
                if name not in ("fixed:fa3", "raw:fa3", "fa3"):
                    gone = Row("varlen-overhead", row, "unsupported", f"no {name}", {}, where)
                    rows.append(gone)
                    continue
                ms = (1.0 if pass_ == "forward" else 2.5) * (1.0 if ":" in name else 1.01)
                ms *= 1.0 if name == "fixed:fa3" else varlen
                ms *= deterministic if variant.endswith(DETERMINISTIC) else 1.0
                measures = {f"device_ms_{at}": ms for at in ("p20", "p50", "p80")}
                measures |= {"tflops": 500.0 / ms}
                if pass_ == "backward":
                    measures["bits_equal"] = variant.endswith(DETERMINISTIC)
                rows.append(Row("varlen-overhead", row, "ok", None, measures, where))
    return rows


def test_the_overheads_tables_answer_what_varlen_and_determinism_cost():
    text = varlen_overhead.SUITE.section(overhead_rows(varlen=1.02, deterministic=1.25))
    cells = "500 (1.00) | 490 (1.02) | 485 (1.03) | +2.0% | +3.0% |  |"
    assert f"| full | forward | `fa3` | {cells}" in text
    assert "| causal | `fa3` | varlen | 196 (2.55) | 157 (3.19) | +25.0% | others |" in text
    assert "(1) no fixed:fa2" in text


def test_speeds_of_a_device_that_waits_for_the_host_are_not_told():
    rows = overhead_rows(varlen=1.02, deterministic=1.25)
    for row in rows:
        if row.case["variant"] == "raw:fa3" and row.case["pass"] == "forward":
            row.measures["host_bound"] = True
    text = varlen_overhead.SUITE.section(rows)
    assert "| full | forward | `fa3` | 500 (1.00) | – (1.02)† | 485 (1.03) | – | +3.0% |" in text
    (each, _) = varlen_overhead.measured_cases(rows)
    points = {point.variant: point for point in varlen_overhead._points(each, "forward")}
    assert (points["raw:fa3"].y, points["raw:fa3"].status) == (None, "host-bound")


def test_the_overheads_figure_marks_what_has_no_time(tmp_path):
    rows = overhead_rows(varlen=1.02, deterministic=1.25)
    (path,) = varlen_overhead.SUITE.figures(rows, tmp_path)
    assert path.name == "varlen-overhead-nvidia-h200.png"
    (each, _) = varlen_overhead.measured_cases(rows)
    points = {point.variant: point for point in varlen_overhead._points(each, "backward")}
    assert points["fixed:fa2"].status == "unsupported"
    assert points["fixed:fa2"].y is None
    assert points["fixed:fa3"].y == pytest.approx(200)
    assert points["raw:fa3@deterministic"].y == pytest.approx(200 / 1.02 / 1.25)
