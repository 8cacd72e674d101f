"""Tables and figure of the mask-build benchmark, from rows that were made up."""

from __future__ import annotations

import dataclasses

import pytest

from flexvarlen.bench.mask_build import figure as figure_mask_build
from flexvarlen.bench.mask_build import tables as report_mask_build
from flexvarlen.rows import Row

WHERE = {"gpu": "G", "device": "cuda", "torch": "2", "started_utc": "1"}
STALE = {"git_commit": "0123456789abcdef", "git_dirty": True}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
COSTS = {"repeats": 200, "kernels": 1.0, "peak_mib": 1.0, "tables_mib": 0.5, "num_docs": 3}


def made(part, tokens=1024, wall=10.0, gpu=1.0, status="ok", where=WHERE, more=(), **case):
    walls = {f"wall_us_p{p}": wall for p in (20, 50, 80)}
    measures = COSTS | walls | {"gpu_us": gpu} | dict(more)
    case = {"part": part, "tokens": tokens, "mean_doc": 64, "sigma": 0.5, **case}
    return Row("mask-build", case, status, None, measures if status == "ok" else {}, where)


def line_of(section, *words):
    (line,) = (x for x in section.splitlines() if all(f"| {word} |" in x for word in words))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_only_the_builder_that_starts_alike_is_compared():
    walls = {
        "flexvarlen": 10.0,
        "flexvarlen from cu_seqlens": 20.0,
        "create_block_mask eager": 30.0,
        "create_block_mask compiled": 200.0,
        "create_block_mask(_compile=True)": 2000.0,
    }
    built = [made("build", wall=wall, builder=name) for name, wall in walls.items()]
    section = report_mask_build.mask_build_section(built)
    assert [line_of(section, name)[-2:] for name in walls] == [
        ["–", "–"],
        ["10.0", "100"],
        ["–", "–"],
        ["1.00", "–"],
        ["–", "1.00"],
    ]


def test_few_repeats_are_said():
    section = report_mask_build.build_table
    many, few = (made("build", variant="flexvarlen", more={"repeats": n}) for n in (20, 3))
    assert "repeats" not in section([many])
    assert "10.0 (10.0–10.0; 3 repeats)" in section([few])


def test_sigma_and_block_size_come_from_the_rows():
    old = made("build", variant="flexvarlen")
    new = made("build", variant="flexvarlen", block_size=256)
    assert "(sigma 0.5), block size –;" in report_mask_build.build_table([old])
    assert "(sigma 0.5), block size 256;" in report_mask_build.build_table([new])


def test_growth_says_the_gpus_growth_too():
    few = made("growth", wall=60.0, gpu=2.0, more={"blocks": 10}, series="tokens")
    many = made("growth", tokens=2048, wall=90.0, gpu=38.0, more={"blocks": 1000}, series="tokens")
    said = report_mask_build.growth_sentence([few, many])
    assert "100 × the blocks kept" in said
    assert "1.5 × the wall time (60.0 to 90.0 µs)" in said
    assert "19 × the GPU time (2.00 to 38.0 µs)" in said


def test_a_small_share_is_not_zero():
    more = {"layer_ms_p50": 6.0, "build_share_percent": 1.13, "gpu_share_percent": 0.0412}
    said = report_mask_build.share_sentences([made("share", geometry="g", more=more)])
    assert "1.1% (wall) and 0.041% (GPU)" in said


def test_digits_are_significant():
    shown = [report_mask_build._digits(x, 2) for x in (0.0, 0.0412, 9.96, 99.6, 1234.5)]
    assert shown == ["0", "0.041", "10", "100", "1,234"]
    assert [report_mask_build._mib(x) for x in (0.0047, 3.03, 136.1)] == ["0.0047", "3.03", "136"]


@pytest.mark.parametrize("part", ["build", "kinds", "growth", "share"])
def test_every_table_says_its_commit(part):
    case = {"builder": "flexvarlen", "kind": "k", "series": "tokens", "geometry": "g"}
    row = made(part, where=WHERE | STALE, more={"blocks": 1, "layer_ms_p50": 1.0}, **case)
    section = report_mask_build.mask_build_section
    assert "torch 2, commit 0123456 with uncommitted changes" in section([row])
    clean = dataclasses.replace(row, environment=WHERE | STALE | {"git_dirty": None})
    assert "with uncommitted" not in section([clean])


# --- figure --------------------------------------------------------------------------------------


@pytest.fixture
def draw():
    figures = []

    def drawn(rows):
        figures.append(figure_mask_build.drawn(rows))
        return figures[-1].axes

    yield drawn
    from matplotlib import pyplot

    for figure in figures:
        pyplot.close(figure)


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_what_failed_is_marked_above_the_axes_at_no_cost_of_its_own(draw):
    left, _ = draw(
        [
            made("build", builder="flexvarlen"),
            made("build", builder="create_block_mask eager", wall=500.0),
            made("build", tokens=4096, builder="create_block_mask eager", status="oom"),
            made("build", builder="attention-gym", status="unsupported"),
        ]
    )
    assert {"flexvarlen", "create_block_mask eager", "attention-gym"} <= set(legend_of(left))
    marks = [line for line in left.lines if line.get_marker() == "x"]
    assert {(*line.get_xdata(),) for line in marks} == {(1024,), (4096,)}
    assert len({(*line.get_ydata(),) for line in marks}) == 2
    for line in marks:
        assert line.get_transform() == left.get_xaxis_transform()
        assert line.get_ydata()[0] > 1
    said = {text.get_text() for text in left.texts}
    assert {"oom", "unsupported", "attention-gym", "create_block_mask eager"} <= said
    assert left.get_ylim()[1] < 1000


def test_rows_from_before_the_runner_and_after_it_read_alike():
    old = [
        made("build", builder="flexvarlen"),
        made("kinds", builder="flexvarlen", kind="cross", more={"blocks": 1}),
        made("attention", mask="flexvarlen", kernel="TRITON", **HEADS),
        made("long", **HEADS),
    ]
    variants = ["flexvarlen", "cross", "flexvarlen", "flex"]
    dropped = ("builder", "kind", "mask")
    new = [
        dataclasses.replace(
            row,
            case={k: v for k, v in row.case.items() if k not in dropped} | {"variant": variant},
        )
        for row, variant in zip(old, variants, strict=True)
    ]
    section = report_mask_build.mask_build_section
    assert section(old) == section(new)
    assert section(new).count("| tokens |") == len(new)


def test_a_figure_draws_one_environment_of_each_part(draw):
    def build(tokens, started):
        where = WHERE | {"started_utc": started, "cpu": f"cpu of run {started}"}
        return made("build", tokens, where=where, builder="flexvarlen")

    grown = made("growth", more={"blocks": 5}, series="tokens")
    rows = [build(1024, "1"), build(4096, "2"), build(2048, "1"), grown]
    (group,) = report_mask_build.mask_build_groups(rows)
    left, right = draw(group)
    assert [[*line.get_xdata()] for line in left.lines] == [[4096], [4096]]
    assert [[*line.get_xdata()] for line in right.lines] == [[5], [5]]


def test_growth_that_was_not_measured_is_in_the_legend(draw):
    rows = [
        made("growth", more={"blocks": 5}, series="tokens"),
        made("growth", tokens=2048, status="skipped", series="tokens"),
        made("growth", status="oom", series="documents"),
    ]
    left, right = draw(rows)
    assert [text.get_text() for text in left.texts] == ["not measured"]
    said = "".join(legend_of(right))
    assert "2,048: skipped" in said
    assert "64: oom" in said
