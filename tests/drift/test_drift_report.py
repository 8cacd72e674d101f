"""Reports of drift from rows made by hand: sentences, tables, plots, the page, files."""

from __future__ import annotations

import base64
import io
import math
import platform
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from typer import Exit
from typer.testing import CliRunner

from flexvarlen.cli import app
from flexvarlen.cli_drift_run import Place, finish
from flexvarlen.drift.grid import Grid
from flexvarlen.drift.report import page
from flexvarlen.drift.report.figures import pictures
from flexvarlen.drift.report.files import DriftReport
from flexvarlen.drift.report.journal import Journal
from flexvarlen.drift.report.thresholds import OP_MEASURES, parse_thresholds
from flexvarlen.drift.report.verdicts import plain_sentences
from flexvarlen.measure import environment
from flexvarlen.rows import Row, append_row, append_rows
from tests.drift.drift_rows import every_row, model_rows, op_row, share_row, training_rows

CPU = torch.device("cpu")


def here(row):
    """As measured on this machine."""
    return replace(row, environment=environment(CPU))


def report():
    return DriftReport(tuple(every_row()))


@cache
def html():
    return report().html()


@cache
def drawn():
    return pictures(every_row())


# ---- sentences ----


def test_sentences_say_who_is_exact():
    said = plain_sentences(every_row())
    (batch,) = [text for text in said if "in one call, against one call" in text]
    assert "the same bits, forward and backward: fa3;" in batch
    assert "the same bits forward, not backward: fa2 (dq by 2.0e-04 relative in 64,64)" in batch
    assert "other bits: flex (out by 1.0e-03 relative in 64,64)" in batch
    (worst,) = [text for text in said if "against fp64" in text]
    assert "80%" in worst
    assert "of fa2 in 64,64" in worst  # the wrong one is told of apart
    assert said[0].startswith("flex is wrong: out wrong")


def test_sentences_name_the_first_layer_and_attentions_share():
    said = " ".join(plain_sentences(every_row()))
    assert "fa3: the same bits, forward and backward; fa2: they part first in block 1" in said
    assert "of the drift of logits, attention alone 70%, matmuls alone 40%, norms alone 0%" in said
    assert (
        "with everything batch invariant, packed and alone: logits, hidden states and own "
        "gradients of 1 of 2 documents have the same bits; a step takes 1.50 times as long." in said
    )
    assert "fa2 against unpacked: within seed noise" in said


def test_sentence_leaves_the_error_of_the_serial_answer_out():
    row = op_row("fa2", "batch-serial", out=0.0)
    row = replace(row, measures=row.measures | {"serial_ratio_out": 0.9})
    (said,) = [text for text in plain_sentences([*every_row(), row]) if "against fp64" in text]
    assert "90%" in said
    assert "out, one call a document, of fa2 in 64,64" in said
    (grid,) = [g for g in DriftReport((row,)).grids() if "Attention alone" in g.title]
    assert grid.rows[0][2] == "90%"


def test_one_inexact_case_hides_behind_exact_ones():
    exact = {"out": 0.0, "dq": 0.0}
    rows = [op_row("fa2", "batch-serial", name=name, **exact) for name in ("1", "2", "3")]
    assert "the same bits, forward and backward: fa2" in plain_sentences(rows)[0]
    rows.append(op_row("fa2", "batch-serial", name="4", out=0.0, dq=math.nan))
    said = plain_sentences(rows)[0]
    assert "not backward: fa2 (dq by nan relative in 4)" in said
    assert "4 cases" in said


def test_forward_alone_is_called_exact_backward():
    said = plain_sentences([op_row("varlen", "batch-serial", out=0.0)])[0]
    assert "the same bits forward (no backward compared): varlen" in said


def test_no_rows_is_no_crash():
    empty = DriftReport(())
    assert empty.sentences() == ["Nothing was compared."]
    assert empty.passed
    assert "Nothing was compared" in empty.html()


@pytest.mark.parametrize(
    ("row", "passed"),
    [
        (op_row("flex", "exact", status="wrong", reason="x"), False),
        (op_row("flex", "place", status="failed", reason="x"), False),
        (op_row("flex", "place", status="unsupported", reason="x"), True),
        (op_row("transformers:sdpa", "place", status="failed", reason="x"), True),
        (training_rows(2.0)[-1], False),
        (training_rows(1.0)[-1], True),
    ],
)
def test_wrong_backend_of_ours_does_not_pass(row, passed):
    assert DriftReport((row,)).passed == passed


# ---- tables ----


def printed(report, width):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(report.table(width))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 100, 160])
def test_table_loses_a_cell(width):
    text = printed(report(), width)
    for cell in ("fa3", "fa2", "2.0e-04", "97.00%", "within", "noise", "70.00%"):
        assert cell in text, cell
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_wide_table_is_turned():
    wide = Grid("t", ("a", *"bcdefgh"), (("x", *["1234567890"] * 7),))
    assert wide.table(200).row_count == 1
    assert wide.table(40).row_count == 7
    tall = Grid("t", ("a",), tuple(("x",) for _ in range(50)))
    assert tall.width == 3
    assert tall.table(2).row_count == 50


def test_markdown_says_a_number_twice():
    """One rendering of a row: the tables in short are not made again for the details."""
    lines = [line for line in report().markdown().splitlines() if line.startswith("| ")]
    rows = [line for line in lines if "---" not in line]
    models = [line for line in rows if line.startswith("| packed-alone | fa2 |")]
    assert len(models) == 2  # outputs and gradients
    shares = [line for line in rows if line.startswith("| fa3 | attention |")]
    assert len(shares) == 1
    titles = [grid.title for grid in report().grids()]
    assert len(set(titles)) == len(titles)
    assert not {t for t in titles for text in report().details() if f"**{t}**" in text}


def test_line_without_numbers_has_its_status_and_the_report_says_why():
    case = model_rows("fa2", 0.0)[0].case
    rows = [
        Row("drift-model", case | {"comparison": "dtype", "other_dtype": "float32"}, status, why)
        for status, why in (("failed", "KernelError: broke"),)
    ]
    skipped = Row("drift-model", case | {"backend": "flex"}, "skipped", "it takes too long.")
    found = DriftReport((*rows, skipped))
    (grid,) = found.grids()
    assert [line[:3] for line in grid.rows] == [
        ("dtype", "fa2", "failed"),
        ("packed-alone", "flex", "skipped"),
    ]
    assert grid.bad == {0}
    text = found.markdown()
    assert "fa2 failed: KernelError: broke" in text
    assert "flex, skipped: it takes too long." in text


def test_markdown_says_what_where_and_why_not():
    text = report().markdown()
    assert "NVIDIA H200; torch 2.11.0+cu130, transformers 5.17.0, flash_attn 2.8.3" in text
    assert "commit 0123456" in text
    assert "fa4, unsupported: fa4 is not installed; install it." in text
    assert "| comparison | backend | parts first in |" in text
    for line in text.splitlines():  # a | in a reason would add a column
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\| ", line)) + 1


# ---- plots ----


def test_every_plot_is_drawn_and_is_svg():
    made = drawn()
    titles = " ".join(picture.title for picture in made)
    for words in ("Error against fp64", "Drift by layer", "log-prob", "Whose drift", "Training"):
        assert words in titles
    for picture in made:
        assert ET.fromstring(picture.svg).tag.endswith("svg")
        assert b"/work" not in picture.svg
        assert b"<dc:date" not in picture.svg
        assert len(picture.alt) > 20
    assert [p.svg for p in pictures(every_row())] == [p.svg for p in made]  # same rows, same bytes


def test_alt_text_holds_the_numbers():
    alts = " ".join(picture.alt for picture in drawn())
    assert "fa3 at most 0.5, fa2 at most 0.8, flex at most 7" in alts
    assert "fa2, bfloat16 2.0e-03" in alts
    assert "fa3 attention 70%" in alts
    assert "fa2 within seed noise" in alts


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, 1e-30, 1e30])
def test_plot_of_odd_numbers_raises(monkeypatch, value):
    rows = [
        op_row("fa3", "exact", ratio=value, out=value),
        *model_rows("fa3", value),
        share_row("attention", value),
        *training_rows(value),
    ]
    made = pictures(rows)
    assert len(made) == 5
    monkeypatch.setattr(page, "pictures", lambda _: made)
    assert DriftReport(tuple(rows)).html()


def test_line_without_a_style_is_left_out():
    made, *_ = pictures(model_rows("a kernel of the future", 1e-3))
    assert b"a kernel of the future" in made.svg  # a comment beside its paths
    assert "a kernel of the future" in made.alt


# ---- the page ----


class Page(HTMLParser):
    """What a page holds: attributes by tag, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = set(), [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_data(self, data):
        self.text += data


def test_page_needs_something_outside_itself():
    read = Page(html())
    assert not read.tags & {"script", "link", "iframe", "object"}
    assert "<script" not in html()
    links = [(tag, value) for tag, name, value in read.attributes if name in ("src", "href")]
    assert links
    assert all(value.startswith("data:image/svg+xml;base64,") for _, value in links)
    assert "http" not in html()
    assert "@import" not in html()
    assert "url(" not in html()
    for _, value in links:
        ET.fromstring(base64.b64decode(value.partition(",")[2]))


def test_page_tells_of_the_machine_it_was_made_on():
    text = html() + report().markdown()
    assert "/usr/lib" not in text
    assert "kernel.so" in text
    assert "24/24 heads" in text
    assert platform.node() not in text
    assert "/work" not in text


def test_page_takes_a_reason_for_markup():
    read = Page(html())
    assert "no <b>scale</b> in kernel.so" in read.text
    assert "li" in read.tags
    assert "b" not in read.tags


def test_every_plot_has_alt_text():
    read = Page(html())
    images = [value for tag, name, value in read.attributes if (tag, name) == ("img", "src")]
    alts = [value for tag, name, value in read.attributes if (tag, name) == ("img", "alt")]
    assert len(images) == len(alts) == len(drawn())
    assert all(len(alt) > 20 for alt in alts)


def test_verdicts_come_before_plots_and_tables():
    text = html()
    assert text.index("NVIDIA H200") < text.index("In words") < text.index("part first in block 1")
    assert text.index("part first in block 1") < text.index("<img") < text.index("<table")


# ---- files ----


def test_save_writes_rows_that_read_back(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "pictures", lambda _: drawn())
    saved = report()
    for _ in range(2):
        paths = saved.save(tmp_path)
    assert [path.name for path in paths] == ["rows.jsonl", "report.md", "report.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.name for p in paths)
    assert DriftReport.read(tmp_path).rows == saved.rows
    assert len(paths[0].read_text().splitlines()) == len(saved.rows)


def test_rerun_appends_twice(tmp_path):
    one, other = here(op_row("fa2", "place", out=0.0)), here(op_row("fa3", "place", out=0.0))
    first = Journal(tmp_path, CPU, resume=False)
    assert first.note is None
    first.append(replace(one, case=one.case | {"name": "of the first run alone"}))
    first.append(one)
    again = Journal(tmp_path, CPU, resume=False)
    assert "replaced" in again.note
    assert len(DriftReport.read(tmp_path).rows) == 2  # kept until there is a new one
    assert again.report().rows == ()
    assert not again.has("drift-op", backend="fa2")
    again.append(other)
    again.append(one)
    assert again.report().rows == (other, one)
    resumed = Journal(tmp_path, CPU, resume=True)
    assert resumed.note.startswith("2 rows of an earlier run are kept, 2 of them of this kind")
    assert resumed.has("drift-op", backend="fa2", comparison="place")
    assert not resumed.has("drift-op", backend="fa2", comparison="exact")
    newer = here(op_row("fa2", "place", out=1.0))
    resumed.append(newer)
    assert resumed.report().rows == (other, newer)


@pytest.mark.parametrize("key", ["gpu", "torch"])
def test_rows_of_another_machine_are_kept_and_count_as_none(tmp_path, key):
    there = here(op_row("fa2", "place", out=0.0))
    append_row(tmp_path / "rows.jsonl", replace(there, environment=there.environment | {key: "x"}))
    resumed = Journal(tmp_path, CPU, resume=True)
    assert "1 rows of an earlier run are kept, 0 of them of this kind" in resumed.note
    assert not resumed.every("drift-op")
    assert len(resumed.report().rows) == 1
    assert not resumed.measured_here().rows
    append_row(tmp_path / "rows.jsonl", there)
    assert Journal(tmp_path, CPU, resume=True).has("drift-op", backend="fa2")


def test_one_report_of_several_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "pictures", lambda _: drawn())
    rows = every_row()
    for name, own in (("a", rows[::2]), ("b", rows[1::2])):
        (tmp_path / name).mkdir()
        append_rows(tmp_path / name / "rows.jsonl", own)
    folders = [str(tmp_path / name) for name in "ab"]
    done = CliRunner().invoke(app, ["drift", "report", *folders, "--out", str(tmp_path / "all")])
    assert done.exit_code == 0, done.output
    found = DriftReport.read(tmp_path / "all")
    assert {str(row) for row in found.rows} == {str(row) for row in rows}
    assert (tmp_path / "all" / "report.md").read_text() == found.markdown()
    again = CliRunner().invoke(app, ["drift", "report", *folders, "--out", str(tmp_path / "all")])
    assert again.exit_code == 0, again.output  # its rows are theirs
    missing = CliRunner().invoke(app, ["drift", "report", str(tmp_path / "none")])
    assert missing.exit_code != 0
    assert "folder must hold rows.jsonl" in " ".join(missing.output.split())


def test_a_report_replaces_no_rows_that_it_does_not_have(monkeypatch, tmp_path):
    """The default --out is where runs write."""
    monkeypatch.chdir(tmp_path)
    for name, backend in (("drift", "fa2"), ("other", "fa3")):
        (tmp_path / name).mkdir()
        append_row(tmp_path / name / "rows.jsonl", op_row(backend, "place", out=0.0))
    refused = CliRunner().invoke(app, ["drift", "report", "other"])
    assert refused.exit_code != 0
    assert "out must hold no rows but those of the folders" in " ".join(refused.output.split())
    assert [row.case["backend"] for row in DriftReport.read("drift").rows] == ["fa2"]


def test_times_of_two_gpus_are_never_divided_by_each_other():
    here = op_row("fa2", "runtime")
    there = op_row("flex", "runtime")
    there = replace(there, environment=there.environment | {"gpu": "NVIDIA A100"})
    found = DriftReport((here, there))
    assert "×)" not in found.markdown()
    assert "×)" in DriftReport((here, op_row("flex", "runtime"))).markdown()
    assert any(text.startswith("## NVIDIA A100: Attention alone: time") for text in found.details())
    titles = [grid.title for grid in found.grids()]
    assert [title.split(":")[0] for title in titles] == ["NVIDIA H200", "NVIDIA A100"]


@pytest.mark.parametrize("row", ["failed", "past the limit"])
def test_a_run_is_judged_by_what_its_own_machine_measured(monkeypatch, tmp_path, row):
    monkeypatch.setattr(page, "pictures", lambda _: [])
    failed = op_row("fa2", "exact", status="failed", reason="broke")
    bad = here(failed if row == "failed" else op_row("fa2", "place", out=1.0))
    append_row(
        tmp_path / "rows.jsonl", replace(bad, environment=bad.environment | {"gpu": "NVIDIA A100"})
    )
    limits = tuple(parse_thresholds(["out_relative=0.5"], OP_MEASURES))
    journal = Journal(tmp_path, CPU, resume=True)
    place = Place(CPU, (torch.float32,), tmp_path, journal, limits, None, "drift-op")
    journal.append(here(op_row("fa3", "place", out=0.0)))
    finish(place, whole=True)
    journal.append(bad)
    with pytest.raises(Exit):
        finish(place, whole=True)


def test_journal_in_a_files_place(tmp_path):
    append_row(tmp_path / "x", op_row("fa2", "place"))
    with pytest.raises(ValueError, match="out must be a folder"):
        Journal(tmp_path / "x", CPU, resume=False)
