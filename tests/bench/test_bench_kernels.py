"""The kernel grid, tiny: nothing wrong is timed, nothing done is done again, tables render."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import types

import pytest
import torch

from flexvarlen.attention.backends.reference import ReferenceBackend
from flexvarlen.attention.backends.sdpa import SdpaBackend
from flexvarlen.bench import report
from flexvarlen.bench.attention import accuracy, kernels
from flexvarlen.bench.attention import engine as attention
from flexvarlen.bench.attention import kernels_figure as figure_kernels
from flexvarlen.bench.attention import kernels_tables as report_kernels
from flexvarlen.bench.attention.accuracy import LONGEST_SAMPLE, Oracle, alone, sampled_spans
from flexvarlen.bench.attention.kernels import SUITE, KernelCase
from flexvarlen.bench.attention.kernels_cells import SUBSETS, Cell
from flexvarlen.bench.attention.raw_kernels import RAW, Inputs, behind_varlen
from flexvarlen.bench.mask_build.accuracy import Answer
from flexvarlen.bench.mask_build.accuracy import alone as by_autograd
from flexvarlen.bench.runner import Run, row_case, run_suite
from flexvarlen.bench.suite import DeviceLost, Finding, Options
from flexvarlen.rows import Row, append_row, read_rows

CPU = torch.device("cpu")
ONE_CELL = "causal-t256-short"


def run(out, cells=ONE_CELL, only=("sdpa", "reference", "auto"), said=None, **more):
    say = (lambda line: None) if said is None else said.append
    options = Options(CPU, quick=True, variants=tuple(only), seconds=0.1, say=say)
    run_suite(SUITE, options, Run(out=out, cases=cells, **more))
    return read_rows([out]) if out.exists() else []


def statuses(rows, variant):
    return {row.case["pass"]: row.status for row in rows if row.case["variant"] == variant}


# --- cells ---------------------------------------------------------------------------------------


def test_readme_subset_is_about_forty_cells_of_the_grid():
    subset, grid = SUBSETS["readme"](), SUBSETS["grid"]()
    assert 35 <= len(subset) <= 45
    assert len({cell.name for cell in subset}) == len(subset)
    assert set(subset) <= set(grid)
    assert len({cell.name for cell in grid}) == len(grid)
    assert {cell.head_dim for cell in subset} == {64, 128}
    assert {cell.tokens for cell in subset} == {256, 1024, 4096, 8192, 32_768, 131_072}
    assert {(cell.num_heads, cell.causal) for cell in subset} >= {(32, True), (32, False), (16, 1)}


def test_no_two_cells_of_a_kind_hold_the_same_documents():
    for _, group in itertools.groupby(SUBSETS["grid"](), key=lambda c: (c.kind, c.tokens)):
        cells = list(group)
        assert len({cell.lengths() for cell in cells}) == len(cells)
        for cell in cells:
            assert sum(cell.lengths()) == cell.tokens
            assert cell.documents != "log-normal" or len(cell.lengths()) > 1
            assert cell.documents != "short" or max(cell.lengths()) <= 128


def test_the_readmes_cells_come_first_those_of_one_kind_together_and_small_ones_first():
    cases = SUITE.cases(Options(CPU))
    subsets = {name: list(group) for name, group in itertools.groupby(cases, lambda c: c.subset)}
    assert list(subsets) == ["readme", "grid"]
    assert {case.cell for case in subsets["readme"]} == set(SUBSETS["readme"]())
    assert {case.cell for case in cases} == set(SUBSETS["grid"]())
    assert len({case.name for case in cases}) == len(cases) == len(SUBSETS["grid"]())
    for found in subsets.values():
        kinds = [case.cell.kind for case in found]
        assert len(list(itertools.groupby(kinds))) == len(set(kinds))
        for _, group in itertools.groupby(found, key=lambda case: case.cell.kind):
            tokens = [case.cell.tokens for case in group]
            assert tokens == sorted(tokens)


def test_a_name_that_is_no_backend_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"variants must be of .* got 'fa9'; choose"):
        run(tmp_path / "rows.jsonl", only=("sdpa", "fa9"))


# --- accuracy ------------------------------------------------------------------------------------


def test_blocks_of_queries_give_the_gradients_that_autograd_gives():
    torch.manual_seed(0)
    q, g = (torch.randn(50, 3, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(50, 1, 8, dtype=torch.float64) for _ in range(2))
    expected = by_autograd((q, k, v), g, torch.float64, gradients=True)
    for name, found in alone((q, k, v), g, torch.float64, causal=True, block=16).items():
        torch.testing.assert_close(found, expected[name])


def test_full_attention_is_the_softmax_over_all_keys():
    torch.manual_seed(0)
    q, g = (torch.randn(20, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = torch.nn.functional.scaled_dot_product_attention(*(q.transpose(0, 1)[None],) * 3)
    found = alone((q, q, q), g, torch.float64, causal=False, block=7)
    torch.testing.assert_close(found["out"], out[0].transpose(0, 1))
    (expected,) = torch.autograd.grad(out[0].transpose(0, 1), q, g)
    torch.testing.assert_close(found["dq"] + found["dk"] + found["dv"], expected)


@pytest.mark.parametrize("lengths", [[3, 5, 40, 200, 16], [7, 2], [LONGEST_SAMPLE * 4]])
def test_samples_are_documents(lengths):
    spans = sampled_spans(lengths)
    ends = list(itertools.accumulate(lengths))
    assert spans
    assert all(end in ends and start == ([0, *ends])[ends.index(end)] for start, end in spans)


def test_an_error_outside_the_samples_is_found_and_no_other_variant_blamed():
    """Also of the first variant: none is the truth for the others."""
    lengths = [20, 17, 30, 18, 25, 19, 40, 16]
    inputs = Inputs.random(lengths, (2, 1), 8, torch.float32, CPU, causal=True)
    qkv = (inputs.q, inputs.k, inputs.v)
    oracle = Oracle(qkv, inputs.cotangent, lengths, True, "forward")
    ends = list(itertools.accumulate(lengths))
    spans = zip([0, *ends], ends, strict=False)
    out = torch.cat(
        [
            alone(
                (inputs.q[a:b], inputs.k[a:b], inputs.v[a:b]),
                inputs.cotangent[a:b],
                torch.float32,
                causal=True,
            )["out"]
            for a, b in spans
        ]
    )
    sampled = {rows.start for where, _ in oracle.samples for rows, _ in where.values()}
    start = next(a for a in [0, *ends[:-1]] if a not in sampled)
    bad = out.clone()
    bad[start] += 0.1
    said = "another answer than torch's SDPA of each document alone"
    assert said in oracle.judge(Answer([bad]))[1]
    assert oracle.judge(Answer([out]))[1] is None
    bad[start] = float("nan")
    assert "nan" in oracle.judge(Answer([bad]))[1]


@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_row_is_each_document_alone(causal):
    lengths = [20, 1, 30]
    inputs = Inputs.random(lengths, (4, 2), 8, torch.float64, CPU, causal)
    qkv = (inputs.q, inputs.k, inputs.v)
    plain = accuracy.plain_row(qkv, inputs.cotangent, lengths, causal, gradients=True).named()
    for head in (0, 1):
        own, group, rows = slice(head, head + 1), slice(2 * head, 2 * head + 2), slice(21, 51)
        one = (inputs.q[rows, group], inputs.k[rows, own], inputs.v[rows, own])
        exact = alone(one, inputs.cotangent[rows, group], torch.float64, causal)
        for name, expected in exact.items():
            heads = group if name in ("out", "dq") else own
            torch.testing.assert_close(plain[name][rows, heads], expected)


def test_a_plain_row_that_is_wrong_is_no_truth(monkeypatch):
    monkeypatch.setattr(accuracy, "plain_row", lambda qkv, *rest: Answer([1.1 * qkv[0]]))
    inputs = Inputs.random([20, 30], (2, 1), 8, torch.float32, CPU, causal=True)
    with pytest.raises(RuntimeError, match="each document alone is wrong"):
        Oracle((inputs.q, inputs.k, inputs.v), inputs.cotangent, [20, 30], True, "forward")


# --- rows ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("kernels") / "rows.jsonl"
    only = ("sdpa", "reference", "flex", "raw:flex", "fa3", "raw:fa3", "auto")
    return run(out, cells="h2x2", only=only, commit="x")


def test_every_variant_and_pass_has_a_row(measured):
    ran = ("sdpa", "reference", "flex", "raw:flex", "fa3", "raw:fa3", "auto")
    assert {(r.case["variant"], r.case["pass"]) for r in measured} == set(
        itertools.product(ran, ("forward", "backward"))
    )
    for row in measured:
        assert row.environment["git_commit"] == "x"
        assert "flash_attn_3" in row.environment
        assert Cell.of(row.case) in SUBSETS["quick"]()


def test_a_plain_run_measures_each_backend_on_each_cell_and_flex_once():
    options = Options(CPU, quick=True)
    found = [SUITE.variants(case, options) for case in SUITE.cases(options)]
    assert all({"sdpa", "reference", "auto", "raw:fa2", "fa2"} <= set(one) for one in found)
    assert sum("flex" in one for one in found) == sum("raw:flex" in one for one in found) == 1


def test_what_is_right_is_timed(measured):
    for row in measured:
        if row.status != "ok":
            assert row.reason
            assert "device_ms_p50" not in row.measures
            continue
        m = row.measures
        assert 0 < m["device_ms_p20"] <= m["device_ms_p50"] <= m["device_ms_p80"]
        assert m["tflops"] > 0
        errors = [name for name in m if name.startswith("error_")]
        backward = row.case["pass"] == "backward"
        assert errors == [f"error_{x}" for x in (("dq", "dk", "dv") if backward else ("out",))]
    assert statuses(measured, "sdpa") == {"forward": "ok", "backward": "ok"}
    auto = next(row for row in measured if row.case["variant"] == "auto")
    assert auto.measures["resolved"] == "sdpa"
    assert auto.measures["capacity"] >= auto.measures["num_docs"]


def test_what_is_refused_is_a_row_with_its_reason(measured):
    for variant in ("flex", "raw:flex"):  # no backward on the CPU
        assert statuses(measured, variant) == {"forward": "ok", "backward": "unsupported"}
    for variant in ("fa3", "raw:fa3"):
        assert statuses(measured, variant) == {"forward": "unsupported", "backward": "unsupported"}


def scaled(attend):
    def wrong(self, *args):
        out, lse = attend(self, *args)
        return out * 1.01, lse

    return wrong


def test_a_wrong_kernel_is_marked_and_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(SdpaBackend, "attend", scaled(SdpaBackend.attend))
    rows = run(tmp_path / "rows.jsonl", only=("sdpa", "reference"))
    assert statuses(rows, "sdpa") == {"forward": "wrong", "backward": "wrong"}
    assert statuses(rows, "reference") == {"forward": "ok", "backward": "ok"}
    for row in rows:
        if row.case["variant"] == "sdpa":
            assert "relative error of out" in row.reason
            assert not any("_ms_p" in name for name in row.measures)


def test_out_of_memory_is_a_row(tmp_path, monkeypatch):
    def attend(self, *args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ReferenceBackend, "attend", attend)
    rows = run(tmp_path / "rows.jsonl")
    assert statuses(rows, "reference") == {"forward": "oom", "backward": "oom"}
    assert statuses(rows, "auto") == {"forward": "ok", "backward": "ok"}


def test_auto_measures_into_a_fresh_folder(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setenv(kernels.CACHE, "mine")
    attend = SdpaBackend.attend

    def noting(self, *args):
        seen.append(os.environ[kernels.CACHE])
        return attend(self, *args)

    monkeypatch.setattr(SdpaBackend, "attend", noting)
    run(tmp_path / "rows.jsonl", only=("auto",))
    assert set(seen)
    assert "mine" not in seen
    assert os.environ[kernels.CACHE] == "mine"


def test_what_auto_takes_is_said(tmp_path):
    said = []
    run(tmp_path / "rows.jsonl", only=("auto",), said=said)
    (line,) = said
    assert line.startswith("quick/d16-h4x2-causal-t256-short: auto takes sdpa (")


def test_a_cell_that_the_file_holds_is_not_measured_again(tmp_path):
    """Rows of the command before it was one of the runner's count too."""
    out = tmp_path / "rows.jsonl"
    run(out, only=("sdpa",))
    before = out.read_text()
    assert run(out, only=("sdpa",))[0].case == row_case(
        KernelCase(SUBSETS["quick"]()[-2], ""), Finding("sdpa", "ok", pass_="forward")
    )
    assert out.read_text() == before


def test_a_kernel_that_kills_the_device_ends_one_run_only(tmp_path, monkeypatch):
    def attend(self, *args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(ReferenceBackend, "attend", attend)
    with pytest.raises(DeviceLost, match="reference killed the device"):
        run(out)
    assert statuses(read_rows([out]), "reference") == {"forward": "failed", "backward": "failed"}
    rows = run(out)
    assert statuses(rows, "reference") == {"forward": "failed", "backward": "failed"}
    assert statuses(rows, "auto") == {"forward": "ok", "backward": "ok"}


def test_timing_that_kills_the_device_ends_one_run_only(tmp_path, monkeypatch):
    def dies(calls, *arguments, progress, **options):
        progress(next(name for name in calls if name.startswith("reference")))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    out = tmp_path / "rows.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(attention, "time_calls", dies)
        with pytest.raises(DeviceLost, match="killed the device in a call of reference"):
            run(out, cells="t256")
    (cell,) = {Cell.of(row.case) for row in read_rows([out])}
    rows = run(out, cells="t256")  # of this cell the others, and another
    assert len({Cell.of(row.case) for row in rows}) > 1
    dead = [row for row in rows if row.status == "failed"]
    assert {(Cell.of(row.case), row.case["variant"]) for row in dead} == {(cell, "reference")}
    here = [row for row in rows if Cell.of(row.case) == cell and row.status == "ok"]
    assert {"sdpa", "auto"} <= {row.case["variant"] for row in here}
    assert all(row.measures["fatal"] for row in dead)
    assert {row.status for row in rows if row not in dead} == {"ok"}


# --- raw kernels ---------------------------------------------------------------------------------


def stand_in(seen):
    """A FlashAttention package of per-document softmax, with the arguments of generation 3."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False
    ):
        seen.append((cu_seqlens_q.tolist(), max_seqlen_q, causal))
        pieces = []
        for a, b in itertools.pairwise(cu_seqlens_q.tolist()):
            one = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
            attention = torch.nn.functional.scaled_dot_product_attention
            pieces.append(attention(*one, is_causal=causal, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(pieces), None

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


@pytest.mark.parametrize("cells", [ONE_CELL, "h2x2-full"])
def test_raw_kernels_get_tight_boundaries_and_are_judged(tmp_path, monkeypatch, cells):
    seen: list[tuple[list[int], int, bool]] = []
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in(seen))
    rows = run(tmp_path / "rows.jsonl", cells=cells, only=("raw:fa3",))
    assert statuses(rows, "raw:fa3") == {"forward": "ok", "backward": "ok"}
    cell = Cell.of(rows[0].case)
    lengths = cell.lengths()
    assert set(map(repr, seen)) == {
        repr(([0, *itertools.accumulate(lengths)], max(lengths), cell.causal))
    }


def test_rows_of_varlen_say_what_torch_runs_for_it(monkeypatch):
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "_should_use_cudnn", lambda index: index == 3, raising=False)
    gpu = torch.device("cuda", 3)
    assert behind_varlen(gpu, raw=True)["prefers_cudnn"]
    assert not behind_varlen(gpu, raw=False)["prefers_cudnn"]  # it calls the flash kernel itself
    assert not behind_varlen(CPU, raw=True)["prefers_cudnn"]
    monkeypatch.delattr(varlen, "_should_use_cudnn")
    found = {"flash_attention_impl": None, "prefers_cudnn": False}
    assert behind_varlen(gpu, raw=True) == found


def test_every_wrapped_backend_has_its_raw_kernel_beside_it():
    variants = kernels.default_variants(on_cpu=False)
    for name in RAW:
        assert variants[variants.index(name) + 1] == f"raw:{name}"
    assert variants[-1] == "auto"


# --- report --------------------------------------------------------------------------------------


def case_of(cell, variant, pass_):
    return row_case(KernelCase(cell, ""), Finding(variant, "ok", pass_=pass_))


def gpu_row(cell, variant, pass_, ms, host=None, started="2025-01-01", **more):
    measures = {"num_docs": len(cell.lengths()), "tflops": 1e-9 / ms, "longest": 1} | more
    for clock, value in (("device", ms), ("host", host)):
        if value is not None:
            for at, factor in (("p20", 0.99), ("p50", 1.0), ("p80", 1.01)):
                measures[f"{clock}_ms_{at}"] = value * factor
    where = {"gpu": "NVIDIA H200", "torch": "2.11.0", "started_utc": started}
    case = case_of(cell, variant, pass_)
    return Row("kernels", case, "ok", None, measures, where)


@pytest.fixture
def gpu_rows():
    cells = [cell for cell in SUBSETS["readme"]() if cell.kind == (128, 32, 8, True)]
    rows = []
    for cell in cells:
        ms = cell.tokens / 1024
        small = cell.tokens <= 256
        for pass_, factor in (("forward", 1.0), ("backward", 2.0)):
            for variant, times in (
                ("fa2", 2.0),
                ("raw:fa2", 2.0),
                ("fa3", 1.0),
                ("raw:fa3", 1.0),
                ("auto", 1.0),
            ):
                took = ms * factor * times
                much_python = small and variant.endswith("fa3")
                more = {}
                if variant == "auto":
                    more = {"resolved": "fa2" if small else "fa3", "resolved_compiled": "fa3"}
                    took *= 2 if small else 1
                rows.append(
                    gpu_row(cell, variant, pass_, took, 1.9 if much_python else 0.3, **more)
                )
            case = case_of(cell, "flex", pass_)
            reason = "flex is not here"
            rows.append(Row("kernels", case, "unsupported", reason, {}, rows[-1].environment))
    return rows


def test_tables_mark_the_best_and_list_no_misses(gpu_rows):
    text = report_kernels.kernels_section(gpu_rows)
    first = next(line for line in text.splitlines() if line.startswith("| 128, 32/8, causal | 256"))
    assert "| 1.50 | **0.750** | – (1) | `fa3` | best | `fa2` | best |" in first
    assert "(1) flex is not here" in text
    assert "Not so" not in text
    assert "| `fa2` | 23 of 23 | – | 23 of 23 | – |" in text


def test_times_of_the_host_are_marked_and_never_the_best(gpu_rows):
    """In a table, beside the raw kernel and in the figure; also of rows that do not say it."""
    for row in gpu_rows:
        if row.case["tokens"] == 256 and row.case["variant"] in ("fa3", "auto"):
            row.measures["host_ms_p50"] = 9.0
        elif row.case["variant"] == "fa2":
            row.measures["timed_alone"] = True
    text = report_kernels.kernels_section(gpu_rows)
    first = next(line for line in text.splitlines() if line.startswith("| 128, 32/8, causal | 256"))
    assert "| **1.50‡** | 0.750† | – (1) | – |" in first
    assert "† the device waited for the host" in text
    assert "‡ timed alone" in text
    (each, *_) = report_kernels.measured_cells([r for r in gpu_rows if r.case["tokens"] == 256])
    assert each.best() == ("fa2", 1.5)
    figure = figure_kernels.drawn(gpu_rows)
    crosses = [x for axes in figure.axes for x in axes.lines if x.get_marker() == "x"]
    assert 256 in {x for line in crosses for x in line.get_xdata()}


def test_eagerly_the_layer_around_decides(gpu_rows):
    """At 256 tokens fa3 has the device's least time and much Python."""
    rows = [r for r in gpu_rows if r.case["tokens"] == 256]
    (each, *_) = report_kernels.measured_cells(rows)
    assert each.best("eager")[0] == "fa2"
    for row in rows:
        row.measures["layer_ms"] = [0.5, 40.0]
    (each, *_) = report_kernels.measured_cells(rows)
    assert each.best("eager") == each.best("device") == ("fa3", pytest.approx(0.75))
    assert "device time, of a whole decoder layer; " in report_kernels.kernels_section(rows)


def test_misses_are_listed(gpu_rows):
    def late(row, variant, factor):
        if row.case["variant"] != variant or row.case["tokens"] != 8192:
            return row
        measures = {k: v * factor if "_ms_" in k else v for k, v in row.measures.items()}
        return Row(row.suite, row.case, row.status, row.reason, measures, row.environment)

    rows = [late(row, "fa2", 1.03) for row in gpu_rows]
    for row in rows:
        if row.case["variant"] == "auto" and row.case["tokens"] == 8192:
            row.measures.update(resolved="fa2", resolved_compiled="fa2")
    text = report_kernels.kernels_section(rows)
    cells = sum(cell.tokens == 8192 for cell in SUBSETS["readme"]() if cell.kind[:2] == (128, 32))
    late = next(line for line in text.splitlines() if line.startswith("| `fa2` |"))
    assert late.count(f"| {23 - cells + 1} of 23 | +3.0%, +") == 2  # one of them is not causal
    assert text.count("device | `fa2` | 49,440 | `fa3` 24,000 | 2.060 |") == cells - 1
    assert text.count("eager | `fa2` | 49,440 | `fa3` 24,000 | 2.060 |") == cells - 1


def test_auto_is_judged_by_what_it_takes_and_its_own_call_beside(gpu_rows):
    """The host's clock is noisy: two timings of one kernel may be 20% apart."""
    own = [row for row in gpu_rows if row.case["variant"] == "auto"]
    for row in own:
        if row.case["tokens"] == 1024:
            row.measures["device_ms_p50"] *= 1.5
        elif row.case["tokens"] == 8192:
            row.measures["device_ms_p50"] *= 1.01
    text = report_kernels.kernels_section(gpu_rows)
    of_choice, of_calls = text.split("`auto` took the best backend")[1].split("An eager call of")
    assert "Not so" not in of_choice
    slow = sum(row.case["tokens"] == 1024 for row in own) // 2  # a row a pass
    assert f"by name: {len(own) // 2 - slow} of {len(own) // 2}. Not so" in of_calls
    assert of_calls.count("| `fa3` | 4,500 | 3,000 | 1.500 |") == slow
    assert of_calls.count("| `fa3` |") == slow


@pytest.mark.parametrize("broken", ["auto", "fa3"])
def test_auto_is_not_judged_where_it_or_what_it_took_has_no_time(gpu_rows, broken):
    rows = [
        dataclasses.replace(row, status="wrong", reason="far off", measures={})
        if (row.case["variant"], row.case["pass"]) == (broken, "backward")
        else row
        for row in gpu_rows
        if row.case["tokens"] == 8192
    ]
    cells = report_kernels.measured_cells(rows)
    assert [each.auto(clock) for each in cells for clock in ("device", "eager")] == [None] * (
        2 * len(cells)
    )
    assert "0 of 0" in report_kernels.auto_misses(cells)


def test_what_was_not_timed_is_counted_where_it_is_not_listed(gpu_rows):
    bad = [
        Row(row.suite, row.case, "failed", f"reason {i}", {}, row.environment)
        for i, row in enumerate(gpu_rows)
    ]
    said = report_kernels.accuracy_sentence(report_kernels.measured_cells(bad))
    assert said.startswith("Nothing was timed.")
    assert said.count("\n- ") == report_kernels.MOST_MISSES
    assert f"And {len(bad) - report_kernels.MOST_MISSES} more, in the rows." in said
    one = report_kernels.accuracy_sentence(report_kernels.measured_cells(gpu_rows))
    assert "All that was timed is right" in one
    assert "more, in the rows" not in one


def test_rows_of_two_runs_are_never_compared(gpu_rows):
    cell = Cell.of(gpu_rows[0].case)
    later = [gpu_row(cell, "fa2", pass_, 9.0, started="2025-02-01") for pass_ in ("forward",)]
    found = report_kernels.measured_cells([*gpu_rows, *later])
    again = next(each for each in found if each.cell == cell)
    assert set(again.rows) == {("fa2", "forward")}
    assert len(found) == len(report_kernels.measured_cells(gpu_rows))


def test_report_is_written_from_rows_alone(gpu_rows, tmp_path):
    path, readme = tmp_path / "rows.jsonl", tmp_path / "README.md"
    for row in gpu_rows:
        append_row(path, row)
    readme.write_text(
        "# x\n<!-- bench:kernels begin -->\nstale\n<!-- bench:kernels end -->\nrest\n"
    )
    figures = tmp_path / "figures"
    told = report.report([path], pages=[readme], figures=figures)
    text = readme.read_text()
    assert "stale" not in text
    assert text.endswith("rest\n")
    assert "auto eagerly | ÷ best" in text
    assert (figures / "kernels-nvidia-h200.png").stat().st_size > 10_000
    assert "Device ms" in told


def test_what_has_no_time_is_marked_in_the_figure(gpu_rows):
    """A cross at each length that failed; what served nowhere, flex, is not drawn."""

    def without(row):
        if row.case["variant"] != "fa2" or row.case["tokens"] != 8192:
            return row
        return Row(row.suite, row.case, "oom", "out of memory", {}, row.environment)

    figure = figure_kernels.drawn([without(row) for row in gpu_rows])
    axes = [one for one in figure.axes if one.lines]
    assert len(axes) == 5  # kinds of documents
    crosses = [line for line in axes[0].lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses if len(line.get_xdata())] == [[8192]]
    (legend,) = figure.legends
    assert "flex" not in [text.get_text() for text in legend.get_texts()]


def test_rows_of_a_real_run_render(measured):
    text = report_kernels.kernels_section(measured)
    assert "`sdpa`" in text
    assert "flex has no backward on the CPU" in text


def test_work_counts_unmasked_pairs(measured):
    row = next(r for r in measured if r.case["variant"] == "sdpa" and r.case["pass"] == "forward")
    cell = Cell.of(row.case)
    pairs = sum(n * n for n in cell.lengths())  # no causal mask
    work = 4 * pairs * cell.num_heads * cell.head_dim
    assert row.measures["tflops"] == pytest.approx(work / row.measures["device_ms_p50"] / 1e9)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_nested_tensors_are_made_ahead_of_what_is_timed(monkeypatch, kv_heads):
    """By the CPU's own kernel, which knows no causal mask."""
    inputs = Inputs.random((20, 33, 17), (4, kv_heads), 16, torch.float32, CPU, causal=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        prepared = RAW["nested"](inputs, True)
    grouped = kv_heads < 4
    assert [x.is_nested for x in prepared.leaves] == [True, not grouped, not grouped]
    out = prepared.forward()
    answer = Answer(prepared.answer(out, prepared.backward(out)))
    qkv = (inputs.q, inputs.k, inputs.v)
    oracle = Oracle(qkv, inputs.cotangent, inputs.lengths, False, "backward")
    assert oracle.judge(answer)[1] is None
