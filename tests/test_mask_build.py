"""The mask-build benchmark, tiny: rows are honest, what is wrong is never timed, tables render."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flexvarlen as fv
from flexvarlen.bench import mask_build, mask_build_builders, report
from flexvarlen.bench.mask_build_accuracy import (
    Answer,
    alone,
    sampled_errors,
    sampled_spans,
    why_wrong,
)
from flexvarlen.bench.mask_build_builders import BUILDERS, COMPILED, document_mask_mod
from flexvarlen.bench.mask_build_check import difference, expected_tables, held_bytes
from flexvarlen.bench.mask_build_run import PackedRow, Run, TooLarge
from flexvarlen.plotstyle import STYLES
from flexvarlen.rows import append_row, read_rows

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run_parts(out, *parts, more=()):
    arguments = ["--quick", "--device", "cpu", "--out", str(out), "--parts", *parts]
    mask_build.main([*arguments, *more])
    return read_rows([out])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("mask-build") / "rows.jsonl"
    torch._dynamo.reset()
    return run_parts(out, *mask_build.PARTS, more=["--commit", "x"])


def of(rows, part, **case):
    return [r for r in rows if r.case["part"] == part and case.items() <= r.case.items()]


def test_every_builder_and_kind_has_its_row(rows):
    for tokens, _ in mask_build.QUICK.build:
        assert {r.case["builder"] for r in of(rows, "build", tokens=tokens)} == set(BUILDERS)
        assert len(of(rows, "kinds", tokens=tokens)) == 6
    for row in of(rows, "build"):
        there = row.case["builder"] not in COMPILED
        assert row.status == ("ok" if there else "unsupported")
        assert there or row.reason
    assert all(row.status == "ok" for row in of(rows, "kinds"))


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
        if row.case["kernel"] == "FLASH":
            assert row.status == "unsupported"
            continue
        assert row.status == "ok"
        assert row.measures["forward_ms_p50"] > 0
        assert "backward_ms_p50" not in row.measures  # flex has none on the CPU
    (theirs,) = of(rows, "attention", mask="create_block_mask", kernel="C++")
    assert theirs.measures["max_difference"] < 1e-5
    (share,) = of(rows, "share")
    assert share.status == "ok"
    (long,) = of(rows, "long")
    assert long.status == "ok"
    assert long.measures["samples"] == 6
    assert why_wrong(long.measures, torch.float32) is None


def test_a_builder_of_another_mask_is_wrong_and_not_timed(tmp_path, monkeypatch):
    def not_causal(run, row):
        return lambda: fv.document_block_mask(row.layout, causal=False)

    monkeypatch.setattr(mask_build_builders, "BUILDERS", {"flexvarlen": not_causal})
    found = of(run_parts(tmp_path / "rows.jsonl", "build"), "build")
    assert [row.status for row in found] == ["wrong", "wrong"]
    assert "tables" in found[0].reason
    assert "wall_us_p50" not in found[0].measures
    assert "wrong (1)" in report.SECTIONS["mask-build"](found)


def test_cases_begun_too_late_are_skipped(tmp_path):
    found = run_parts(tmp_path / "rows.jsonl", *mask_build.PARTS, more=["--start-until", "0"])
    assert {row.status for row in found} == {"skipped"}
    assert {row.case["part"] for row in found} == {*mask_build.PARTS, "kinds"}


def test_what_a_builder_raises_is_its_row_and_the_others_go_on(tmp_path, monkeypatch):
    def too_large(run, row):
        raise torch.OutOfMemoryError("CUDA out of memory\nmuch text")

    def broken(run, row):
        raise RuntimeError("broken")

    makers = {"a": too_large, "b": broken, "flexvarlen": BUILDERS["flexvarlen"]}
    monkeypatch.setattr(mask_build_builders, "BUILDERS", makers)
    found = of(run_parts(tmp_path / "rows.jsonl", "build"), "build", tokens=512)
    assert [row.status for row in found] == ["oom", "failed", "ok"]
    assert found[0].reason == "OutOfMemoryError: CUDA out of memory"


def test_a_million_tokens_are_not_evaluated_pair_by_pair():
    run = Run(mask_build.parse(["--device", "cpu"]))
    row = dataclasses.replace(PackedRow.of(512, 64, CPU), tokens=2**20)
    with pytest.raises(TooLarge, match=r"10,240 GiB"):
        BUILDERS["create_block_mask eager"](run, row)


def test_a_builder_that_would_take_minutes_is_skipped(tmp_path):
    run = Run(mask_build.parse(["--quick", "--device", "cpu", "--out", str(tmp_path / "r")]))
    builds = mask_build_builders.Builds(run)
    builds.took["create_block_mask eager"] = (64, 1.0)
    builds.causal(run.row(1024, 128))
    by_name = {row.case["builder"]: row for row in read_rows([tmp_path / "r"])}
    assert by_name["create_block_mask eager"].status == "skipped"
    assert "256 s a build" in by_name["create_block_mask eager"].reason
    assert by_name["flexvarlen"].status == "ok"


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


def test_report_fills_the_readme_and_draws(rows, tmp_path, capsys):
    path, readme = tmp_path / "rows.jsonl", tmp_path / "README.md"
    for row in rows:
        append_row(path, row)
    readme.write_text((ROOT / "README.md").read_text())
    report.main([str(path), "--readme", str(readme), "--figures", str(tmp_path / "figures")])
    text = readme.read_text()
    assert "| 1,000 | 11 (128) | flexvarlen |" in text
    assert "unsupported (1)" in text
    assert "largest difference from ours" in capsys.readouterr().out
    (png,) = (tmp_path / "figures").glob("mask-build-cpu.png")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_runs_are_never_mixed_in_one_table(rows):
    built = of(rows, "build")
    again = [
        dataclasses.replace(row, environment=row.environment | {"started_utc": "2"})
        for row in built
    ]
    section = report.SECTIONS["mask-build"]
    assert section([*built, *again]).count("| tokens |") == 2 * section(built).count("| tokens |")


def test_every_builder_has_a_style_of_its_own():
    from flexvarlen.bench.figure_mask_build import BUILDER_STYLES

    assert set(BUILDER_STYLES) == set(BUILDERS)
    assert len({STYLES[name] for name in BUILDER_STYLES.values()}) == len(BUILDERS)
