"""The mask-build benchmark, tiny: rows are honest, what is wrong is never timed, tables render."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flexvarlen as fv
from flexvarlen.bench import report
from flexvarlen.bench.mask_build import attention as mask_build_attention
from flexvarlen.bench.mask_build import builders as mask_build_builders
from flexvarlen.bench.mask_build.accuracy import (
    Answer,
    alone,
    sampled_errors,
    sampled_spans,
    why_wrong,
)
from flexvarlen.bench.mask_build.builders import BUILDERS, COMPILED, KINDS, document_mask_mod
from flexvarlen.bench.mask_build.check import difference, expected_tables, held_bytes
from flexvarlen.bench.mask_build.run import PackedRow, TooLarge
from flexvarlen.bench.mask_build.run import Run as Findings
from flexvarlen.bench.mask_build.suite import PARTS, QUICK, SUITE, MaskCase
from flexvarlen.bench.runner import Run, run_suite
from flexvarlen.bench.suite import DeviceLost, Options, suite_of
from flexvarlen.plotstyle import STYLES
from flexvarlen.rows import append_row, read_rows

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
OPTIONS = Options(CPU, quick=True, say=lambda line: None)
BUILD = MaskCase("build", *QUICK.build[0])


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("mask-build") / "rows.jsonl"
    torch._dynamo.reset()
    ended = run_suite(suite_of("mask-build"), OPTIONS, Run(out=out, commit="x"))
    assert ended.left == 0
    return read_rows([out])


def of(rows, part, **case):
    return [r for r in rows if r.case["part"] == part and case.items() <= r.case.items()]


def measured(*variants):
    return {finding.variant: finding for finding in SUITE.measure(BUILD, variants, OPTIONS)}


def test_every_variant_of_every_part_has_its_row(rows):
    for part in PARTS:
        assert of(rows, part), part
    assert {row.case["variant"] for row in of(rows, "build")} == set(BUILDERS)
    assert [row.case["variant"] for row in of(rows, "kinds")] == list(KINDS)
    for row in rows:
        there = row.case["variant"] not in COMPILED
        assert row.status == ("ok" if there else "unsupported")
        assert there or row.reason


def test_builds_are_timed_and_counted(rows):
    for row in [*of(rows, "build"), *of(rows, "kinds"), *of(rows, "growth")]:
        m = row.measures
        if row.status != "ok":
            assert m == {}
            continue
        assert 0 < m["wall_us_p20"] <= m["wall_us_p50"] <= m["wall_us_p80"]
        assert m["host_us_p50"] <= m["wall_us_p50"]
        assert m["gpu_us"] is m["kernels"] is m["peak_mib"] is None  # nothing to measure on a CPU
        assert m["blocks"] == m["partial_blocks"] + m["full_blocks"] > 0
        assert m["compilations_while_timing_all"] == 0
        assert 0 < m["tables_mib"] < 1
    one, other = (row.measures for row in of(rows, "build", tokens=1000)[-2:])
    assert one["blocks"] == other["blocks"]  # ours and create_block_mask's


def test_rows_say_block_size_and_the_commit_that_was_given(rows):
    assert {row.case["block_size"] for row in rows} == {128}
    where = rows[0].environment
    assert (where["git_commit"], where["git_dirty"]) == ("x", None)


def test_attention_and_share_and_long_rows(rows):
    for row in of(rows, "attention"):
        assert row.measures["forward_ms_p50"] > 0
        assert "backward_ms_p50" not in row.measures  # flex has none on the CPU
    (theirs,) = of(rows, "attention", variant="create_block_mask")
    assert theirs.measures["max_difference"] < 1e-5
    (share,) = of(rows, "share")
    assert share.measures["build_share_percent"] > 0
    (long,) = of(rows, "long")
    assert long.measures["samples"] == 6
    assert why_wrong(long.measures, torch.float32) is None


def test_a_mask_of_other_documents_is_wrong_and_its_attention_not_timed(monkeypatch):
    case = MaskCase("attention", 512, 64, (("kernel", "dense"),))
    plain = fv.document_block_mask
    monkeypatch.setattr(fv, "document_block_mask", lambda layout: plain(layout, causal=False))
    findings = SUITE.measure(case, SUITE.variants(case, OPTIONS), OPTIONS)
    found = {finding.variant: finding for finding in findings}
    assert found["create_block_mask"].status == "ok"
    ours = found["flexvarlen"]
    assert ours.status == "wrong"
    assert ours.reason.startswith("relative error of out")
    assert "forward_ms_p50" not in ours.measures


def test_another_answer_than_under_our_mask_is_wrong(monkeypatch):
    case = MaskCase("attention", 512, 64, (("kernel", "dense"),))
    monkeypatch.setattr(mask_build_attention, "why_wrong", lambda measures, dtype: None)
    plain = fv.document_block_mask
    monkeypatch.setattr(fv, "document_block_mask", lambda layout: plain(layout, causal=False))
    findings = SUITE.measure(case, SUITE.variants(case, OPTIONS), OPTIONS)
    found = {finding.variant: finding for finding in findings}
    assert found["create_block_mask"].status == "wrong"
    assert "another answer" in found["create_block_mask"].reason


def test_flash_says_what_it_needs():
    case = MaskCase("attention", 512, 64, (("kernel", "FLASH"),))
    (finding,) = SUITE.measure(case, ["flexvarlen"], OPTIONS)
    assert (finding.status, finding.reason) == ("unsupported", "BACKEND='FLASH' needs CUDA")


def test_a_builder_of_another_mask_is_wrong_and_not_timed(monkeypatch):
    def not_causal(run, row):
        return lambda: fv.document_block_mask(row.layout, causal=False)

    monkeypatch.setitem(BUILDERS, "flexvarlen", not_causal)
    found = measured("flexvarlen", "flexvarlen from cu_seqlens")
    assert [finding.status for finding in found.values()] == ["wrong", "ok"]
    assert "tables" in found["flexvarlen"].reason
    assert "wall_us_p50" not in found["flexvarlen"].measures


def test_what_a_builder_raises_is_its_row_and_the_others_go_on(monkeypatch):
    def too_large(run, row):
        raise torch.OutOfMemoryError("CUDA out of memory\nmuch text")

    def broken(run, row):
        raise KeyError("what a compiler raises")

    monkeypatch.setitem(BUILDERS, "attention-gym", too_large)
    monkeypatch.setitem(BUILDERS, "create_block_mask compiled", broken)
    found = measured("attention-gym", "create_block_mask compiled", "flexvarlen", "unheard-of")
    assert {name: finding.status for name, finding in found.items()} == {
        "unheard-of": "unsupported",
        "attention-gym": "oom",
        "create_block_mask compiled": "failed",
        "flexvarlen": "ok",
    }
    assert found["attention-gym"].reason == "OutOfMemoryError: CUDA out of memory"
    assert "no variant of part build" in found["unheard-of"].reason


def test_a_builder_that_kills_the_device_ends_the_run_and_is_marked(monkeypatch):
    def deadly(run, row):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setitem(BUILDERS, "attention-gym", deadly)
    with pytest.raises(DeviceLost, match="attention-gym killed the device") as caught:
        measured("attention-gym", "flexvarlen")
    (finding,) = caught.value.findings
    assert (finding.status, finding.measures) == ("failed", {"fatal": True})


DEAD = RuntimeError("an illegal memory access was encountered")
THREE = ("flexvarlen", "attention-gym", "flexvarlen from cu_seqlens")


def dies_when_timed(run, row):
    """A builder that is right when it is checked and tried out, and then kills the device."""
    calls = []

    def build():
        calls.append(None)
        if len(calls) > 3:
            raise DEAD
        return fv.document_block_mask(row.layout)

    return build


def test_the_device_that_is_lost_in_timing_is_the_fault_of_who_was_on_it(monkeypatch):
    monkeypatch.setitem(BUILDERS, "attention-gym", dies_when_timed)
    with pytest.raises(DeviceLost, match=r"^attention-gym killed the device") as caught:
        measured(*THREE)
    (finding,) = caught.value.findings
    assert (finding.variant, finding.status) == ("attention-gym", "failed")
    assert finding.measures["fatal"]
    assert finding.measures["blocks"] > 0


def test_a_run_goes_on_with_all_but_the_builder_that_killed_the_device(monkeypatch, tmp_path):
    monkeypatch.setitem(BUILDERS, "attention-gym", dies_when_timed)
    out = tmp_path / "rows.jsonl"
    options = dataclasses.replace(OPTIONS, variants=THREE)
    with pytest.raises(DeviceLost):
        run_suite(SUITE, options, Run(out, cases="^build"))
    assert run_suite(SUITE, options, Run(out, cases="^build")).left == 0
    latest = {row.case["variant"]: row for row in read_rows([out])}
    assert {name: row.status for name, row in latest.items()} == {
        "flexvarlen": "ok",
        "attention-gym": "failed",
        "flexvarlen from cu_seqlens": "ok",
    }


@pytest.mark.parametrize("culprit", ["flexvarlen", "create_block_mask"])
def test_the_mask_whose_attention_kills_the_device_in_timing_is_marked(monkeypatch, culprit):
    plain = mask_build_attention.Attention.prepare

    def prepare(self, name, *rest):
        live = plain(self, name, *rest)
        if name == culprit:
            live.forward = dead
        return live

    def dead():
        raise DEAD

    monkeypatch.setattr(mask_build_attention.Attention, "prepare", prepare)
    case = MaskCase("attention", 512, 64, (("kernel", "dense"),))
    with pytest.raises(DeviceLost, match=rf"^{culprit} killed the device") as caught:
        SUITE.measure(case, SUITE.variants(case, OPTIONS), OPTIONS)
    assert [(x.variant, x.measures["fatal"]) for x in caught.value.findings] == [(culprit, True)]


def test_what_raises_while_timing_is_a_row_of_each(monkeypatch):
    def raises(self, builds, progress):
        raise KeyError("out of patience")

    monkeypatch.setattr(Findings, "time_builds", raises)
    found = measured("flexvarlen", "flexvarlen from cu_seqlens")
    assert {finding.status for finding in found.values()} == {"failed"}
    assert all(finding.measures["blocks"] > 0 for finding in found.values())


def test_a_million_tokens_are_not_evaluated_pair_by_pair():
    row = dataclasses.replace(PackedRow.of(512, 64, CPU), tokens=2**20)
    with pytest.raises(TooLarge, match=r"10,240 GiB"):
        BUILDERS["create_block_mask eager"](Findings(OPTIONS), row)


def test_a_builder_that_would_take_minutes_is_not_timed(monkeypatch):
    plain = Findings.seconds

    def slow(self, call):
        return plain(self, call) + 25.6

    monkeypatch.setattr(Findings, "seconds", slow)
    monkeypatch.setattr(mask_build_builders, "MOST_BUILDER_S", 250.0)
    (finding,) = measured("create_block_mask eager").values()
    assert finding.status == "unsupported"
    assert "26 s a build" in finding.reason
    assert "wall_us_p50" not in finding.measures


# --- equal blocks --------------------------------------------------------------------------------


@pytest.fixture
def both():
    row = PackedRow.of(2000, 300, CPU)
    mod = document_mask_mod(row.cu_seqlens, row.tokens)
    theirs = create_block_mask(mod, None, None, row.tokens, row.tokens, device="cpu")
    return theirs, expected_tables(row.layout)


def test_create_block_mask_lists_the_same_blocks_in_any_order(both):
    theirs, expected = both
    assert difference(theirs, expected) is None
    counts = expected.full_kv_num_blocks
    row = int(counts.argmax())
    listed = expected.full_kv_indices[0, 0, row, : counts[0, 0, row]]
    assert listed.numel() > 1
    listed.copy_(listed.flip(0))
    assert difference(theirs, expected) is None


@pytest.mark.parametrize("name", ["kv", "full_kv", "q", "full_q"])
def test_a_block_that_differs_is_seen(both, name):
    theirs, expected = both
    counts = getattr(expected, f"{name}_num_blocks")
    row = int(counts.argmax())
    getattr(expected, f"{name}_indices")[0, 0, row, 0] += 1
    assert f"1 of 16 rows of the {name} tables list" in difference(theirs, expected)
    counts[0, 0, row] -= 1
    assert f"1 of 16 rows of the {name} tables count" in difference(theirs, expected)


# --- memory held ---------------------------------------------------------------------------------


def test_tables_of_q_and_of_kv_have_widths_of_their_own():
    queries = fv.PackedLayout.from_lengths([300, 100], device=CPU)
    keys = fv.PackedLayout.from_lengths([900, 500], device=CPU)
    mask = fv.document_block_mask(queries, layout_k=keys, causal=False)
    rows_q, rows_k = 4, 11
    elements = 4 * rows_q * rows_k + 2 * (rows_q + rows_k) + 2 * 400
    assert held_bytes(mask) == 4 * elements


def test_views_of_one_storage_count_once_and_document_ids_count():
    storage, ids = torch.zeros(100, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    tables = {f"{name}_{what}": storage[start:] for name in ("kv", "full_kv", "q", "full_q")
              for start, what in enumerate(("num_blocks", "indices"))}  # fmt: skip

    def inner(b, h, q, kv):
        return ids[q] == ids[kv]

    mask = types.SimpleNamespace(**tables, mask_mod=lambda *at: inner(*at))
    assert held_bytes(mask) == 4 * 107


# --- errors --------------------------------------------------------------------------------------


def test_samples_lie_at_start_middle_and_end():
    assert sampled_spans([5, 100, 5000, 30, 40, 3]) == [(5, 105), (5105, 5135), (5135, 5175)]
    assert sampled_spans([20]) == [(0, 20)]


@pytest.mark.parametrize("broken", [None, "out", "dq", "dk", "dv"])
def test_one_wrong_token_of_a_sample_is_seen(broken):
    lengths = [20, 40, 33]
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(93, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2, 4)
    )
    answer = [torch.empty_like(x) for x in (q, q, k, v)]
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(2):
            heads, one = slice(2 * head, 2 * head + 2), slice(head, head + 1)
            found = alone((q[rows, heads], k[rows, one], v[rows, one]), grad[rows, heads],
                          torch.bfloat16, True)  # fmt: skip
            for whole, part, own in zip(answer, found.values(), (heads, heads, one, one),
                                        strict=True):  # fmt: skip
                whole[rows, own] = part
        start += length
    if broken is not None:
        answer[["out", "dq", "dk", "dv"].index(broken)][92] += 1
    measures = sampled_errors(Answer(answer), (q, k, v), grad, lengths)
    reason = why_wrong(measures, torch.bfloat16)
    assert reason is None if broken is None else f"relative error of {broken}" in reason


# --- report --------------------------------------------------------------------------------------


def test_report_fills_the_readme_and_draws(rows, tmp_path):
    path, readme = tmp_path / "rows.jsonl", tmp_path / "README.md"
    for row in rows:
        append_row(path, row)
    readme.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    told = report.report([path], pages=[readme], figures=tmp_path / "figures")
    text = readme.read_text()
    assert "| 1,000 | 11 (128) | flexvarlen |" in text
    assert "unsupported (1)" in text
    assert "largest difference from ours" in told
    (png,) = (tmp_path / "figures").glob("mask-build-cpu.png")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_machines_versions_and_commits_are_never_mixed_in_one_table(rows):
    built = of(rows, "build")

    def elsewhere(**where):
        return [dataclasses.replace(row, environment=row.environment | where) for row in built]

    tables = SUITE.section(built).count("| tokens |")
    assert SUITE.section([*built, *elsewhere(torch="0")]).count("| tokens |") == 2 * tables
    resumed = elsewhere(started_utc="2")  # a run that was stopped goes on as one
    assert SUITE.section([*built[:3], *resumed[3:]]).count("| tokens |") == tables


def test_every_builder_has_a_style_of_its_own():
    from flexvarlen.bench.mask_build.figure import BUILDER_STYLES

    assert set(BUILDER_STYLES) == set(BUILDERS)
    assert len({STYLES[name] for name in BUILDER_STYLES.values()}) == len(BUILDERS)
