"""The picture and the table of a comparison, from records made by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from flexvarlen.report.figure import chart
from flexvarlen.report.records import Record
from flexvarlen.verify.compare.figure import draw_errors, draw_speeds
from flexvarlen.verify.compare.report import BASELINE, FORWARD_NOTE, Report, forward_only


def record(variant, speed=1000.0, error=1e-5, passes="forward+backward", **measures):
    case = {"model": "m", "passes": "forward+backward", "compiled": False, "documents": 3}
    found = {"verdict": "right", "passes": passes, "tokens_per_s": speed, "logits_max": error}
    found |= {"logits_limit": 2e-5, "peak_mib": 7.0}
    return Record("compare", case | {"variant": variant}, "ok", None, found | measures, {})


FLEX = record("flex", 9000.0, passes="forward")


def test_speed_of_a_forward_alone_is_written_but_has_no_bar():
    axes = Figure().subplots()
    draw_speeds(axes, [record("sdpa"), FLEX], forward_only)
    assert [bar.get_width() for bar in axes.patches] == [1000.0, 0.0]
    assert [text.get_text() for text in axes.texts] == ["1,000", "forward alone: 9,000"]


def test_speed_and_memory_of_a_forward_alone_are_marked_in_the_table():
    table = Report((record("sdpa"), FLEX)).table()
    sdpa, flex = (dict(zip(table.header, line, strict=True)) for line in table.lines)
    assert (sdpa["tokens/s"], sdpa["peak MiB"]) == ("1,000", "7")
    assert (flex["tokens/s"], flex["peak MiB"]) == ("9,000†", "7†")
    assert table.notes == (FORWARD_NOTE,)
    assert Report((record("sdpa"),)).table().notes == ()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_each_model_has_a_table_that_fits_the_terminal(width):
    times = {"ms_p50": 20.25, "ms_p20": 18.0, "ms_p80": 22.0, "gradient_max": 1e-7}
    names = ("flex", "transformers:flash_attention_2")
    own = [record(name, argmax_agreement=1.0, leaked_documents=0, **times) for name in names]
    other = [replace(r, case=r.case | {"model": "n"}) for r in own]
    tables = Report((*own, *other)).tables(width)
    assert [table.title for table in tables] == ["m", "n"]
    assert all(table.width <= width for table in tables)
    assert tables[0].header[:3] == ("backend", "verdict", "leaks")
    assert [note[:9] for note in tables[0].notes] == ["Not shown"] * (width < 140)


@pytest.mark.parametrize("factor", [1.0, 51.0, 8e5, 3e9])
def test_tick_labels_do_not_overlap_and_texts_stay_in_the_picture(factor):
    figure, (left, axes) = chart("title", "caption", panels=2)
    worst = record("transformers:sdpa", error=1e-5 * factor, verdict="leaks")
    draw_speeds(left, [record(BASELINE), worst], forward_only)
    draw_errors(axes, [record(BASELINE), worst])
    figure.draw_without_rendering()
    labels = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    left, right = axes.bbox.x0, axes.bbox.x1
    shown = sorted(
        (box for box in labels if left <= box.x0 and box.x1 <= right), key=lambda b: b.x0
    )
    assert shown
    assert all(before.x1 + 5 < after.x0 for before, after in pairwise(shown))
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in axes.texts)
