"""Reports of drift from rows made by hand: sentences, tables, plots, the page, limits."""

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
from rich.console import Console

from flexvarlen.drift.difference import Difference
from flexvarlen.drift.grid import Grid
from flexvarlen.drift.report.figures import pictures
from flexvarlen.drift.report.files import DriftReport
from flexvarlen.drift.report.journal import Journal
from flexvarlen.drift.report.thresholds import (
    COMPARE_MEASURES,
    MODEL_MEASURES,
    OP_MEASURES,
    TRAINING_MEASURES,
    Measured,
    broken_limits,
    measured,
    parse_thresholds,
)
from flexvarlen.drift.report.verdicts import plain_sentences
from flexvarlen.drift.training.verdict import verdict_row
from flexvarlen.equivalence.report import Row as CompareRow
from flexvarlen.rows import Row, append_row

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0+cu130",
    "transformers": "5.17.0",
    "flash_attn": "2.8.3",
    "flexvarlen": "0.1.0",
    "git_commit": "0123456789abcdef",
    "git_dirty": False,
}


def difference(prefix, relative):
    equal = 1.0 if relative == 0 else 0.5
    size = math.nan if relative != relative else relative
    return Difference(size, size / 10, relative, 3 * size, size, equal, 100).measures(prefix)


def op_row(backend, comparison, *, status="ok", reason=None, name="64,64", ratio=None, **parts):
    case = {"name": name, "lengths": [64, 64], "num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
    case |= {"causal": False, "window": None, "dtype": "bfloat16"}
    case |= {"backend": backend, "comparison": comparison, "other": None}
    measures = {}
    for part, relative in parts.items():
        measures |= difference(part, relative)
        if ratio is not None:
            measures |= difference(f"peer_{part}", 0.5) | {f"ratio_{part}": ratio}
    if comparison == "exact":
        measures["blame"] = reason
    if comparison == "runtime":
        measures |= {"ms_p20": 1.0, "ms_p50": 2.0, "ms_p80": 3.0, "serial_ms_p50": 4.0}
    return Row("drift-op", case, status, reason, measures, ENVIRONMENT)


def model_case(comparison, backend, scope, index=None):
    case = {"model": "llama 1b", "comparison": comparison, "backend": backend, "other": None}
    case |= {"dtype": "bfloat16", "other_dtype": None, "tokens": 64, "documents": 2, "seed": 0}
    return case | {"scope": scope, "index": index}


def model_rows(backend, relative, *, first=0, comparison="packed-alone"):
    layers = [0.0] * (first + 1) + [relative] * (3 - first)
    measures = difference("logits", relative) | {
        "logprob_mean_abs": relative,
        "logprob_max_abs": relative,
        "logprob_p50": relative,
        "logprob_p99": relative,
        "logprob_histogram": {
            "edges": [-1.0, -1e-4, 1e-4, 1.0],
            "counts": [0 if relative == 0 else 3, 0, 0 if relative == 0 else 5],
            "zeros": 8,
            "nans": 0,
        },
        "kl_mean": relative,
        "kl_max": relative,
        "top1": 1.0 if relative == 0 else 0.97,
        "top5": 1.0,
        "loss": 7.0,
        "other_loss": 7.0,
        "loss_difference": -relative,
        "gradient_cosine": 1.0,
        "gradient_relative": relative,
        "worst_parameter": None,
        "worst_parameter_relative": relative,
        "first_layer": None if relative == 0 else first,
        "first_part": None if relative == 0 else f"block {first}",
        "worst_tokens": [],
    }
    rows = [Row("drift-model", model_case(comparison, backend, "batch"), "ok", None, measures)]
    for index, one in enumerate(layers):
        case = model_case(comparison, backend, "layer", index - 1)
        rows.append(Row("drift-model", case, "ok", None, difference("hidden", one)))
    document = difference("logits", relative) | {"kl_mean": 0.0, "kl_max": 0.0, "top1": 1.0}
    case = model_case(comparison, backend, "document", 0)
    return [*rows, Row("drift-model", case, "ok", None, document | {"length": 32})]


def share_row(what, share, **more):
    case = {"model": "llama 1b", "backend": "fa3", "dtype": "bfloat16", "tokens": 64}
    case |= {"documents": 2, "seed": 0, "what": what}
    measures = difference("logits", share) | difference("hidden", share)
    measures |= {"gradient_relative": share, "share": share, "ms_p50": 12.0, "cost": 1.5}
    return Row("drift-attribution", case, "ok", None, measures | more, ENVIRONMENT)


def training_rows(loss=1.0):
    rows = []
    runs = [("unpacked", 0, 1.0), ("unpacked", 1, 1.1), ("unpacked", 2, 1.2)]
    for variant, seed, last in [*runs, ("rounding", 0, 1.0), ("fa2", 0, loss)]:
        case = {"model": "llama 1b", "variant": variant, "seed": seed, "steps": 8, "tokens": 64}
        measures = {"baseline": "unpacked", "losses": [2.0] * 6 + [last] * 2}
        if variant != "unpacked":
            measures |= {"angles": [0.1, 0.2], "angle_steps": [0, 4]}
        rows.append(
            Row("drift-training", case | {"dtype": "bfloat16"}, "ok", None, measures, ENVIRONMENT)
        )
    return [*rows, verdict_row(rows)]


def every_row():
    forward, backward = {"out": 0.0, "lse": 0.0}, {"dq": 0.0, "dk": 0.0, "dv": 0.0}
    wrong = "out wrong: no <b>scale</b> in /usr/lib/python3/kernel.so | of 24/24 heads"
    return [
        op_row("fa3", "exact", ratio=0.5, out=1e-3, lse=1e-4, dq=2e-3, dk=2e-3, dv=1e-3),
        op_row("fa3", "batch-serial", **forward, **backward),
        op_row("fa3", "runtime"),
        op_row("fa2", "exact", ratio=0.8, out=1e-3, dq=2e-3, dk=2e-3, dv=1e-3),
        op_row("fa2", "batch-serial", **forward, dq=2e-4, dk=0.0, dv=0.0),
        op_row("flex", "exact", status="wrong", reason=wrong, ratio=7.0, out=0.7),
        op_row("flex", "batch-serial", out=1e-3),
        op_row("fa4", "exact", status="unsupported", reason="fa4 is not installed; install it."),
        *model_rows("fa3", 0.0),
        *model_rows("fa2", 2e-3, first=1),
        *model_rows("transformers:sdpa", 0.9),
        share_row("all", 1.0),
        share_row("attention", 0.7),
        share_row("matmuls", 0.4),
        share_row("norms", 0.0),
        _invariant_row(),
        *training_rows(),
    ]


def _invariant_row():
    row = share_row("invariant", 0.0)
    equal = {"equal_logits": 1.0, "equal_hidden": 1.0, "equal_gradients": 1.0}
    measures = row.measures | equal | {"gradient_documents": [0], "share": None}
    return Row(row.suite, row.case, "ok", None, measures, ENVIRONMENT)


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
def test_plot_of_odd_numbers_raises(value):
    rows = [
        op_row("fa3", "exact", ratio=value, out=value),
        *model_rows("fa3", value),
        share_row("attention", value),
        *training_rows(value),
    ]
    assert len(pictures(rows)) == 5
    assert DriftReport(tuple(rows)).html()


def test_line_without_a_style_is_left_out():
    rows = model_rows("a kernel of the future", 1e-3)
    assert b"a kernel of the future" in pictures(rows)[0].svg  # a comment beside its paths
    assert "a kernel of the future" in pictures(rows)[0].alt


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
    page = Page(html())
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert "<script" not in html()
    links = [(tag, value) for tag, name, value in page.attributes if name in ("src", "href")]
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
    page = Page(html())
    assert "no <b>scale</b> in kernel.so" in page.text
    assert "li" in page.tags
    assert "b" not in page.tags


def test_every_plot_has_alt_text():
    page = Page(html())
    images = [value for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    alts = [value for tag, name, value in page.attributes if (tag, name) == ("img", "alt")]
    assert len(images) == len(alts) == len(drawn())
    assert all(len(alt) > 20 for alt in alts)


def test_verdicts_come_before_plots_and_tables():
    text = html()
    assert text.index("NVIDIA H200") < text.index("In words") < text.index("part first in block 1")
    assert text.index("part first in block 1") < text.index("<img") < text.index("<table")


# ---- files ----


def test_save_writes_rows_that_read_back(tmp_path):
    saved = report()
    for _ in range(2):
        paths = saved.save(tmp_path)
    assert [path.name for path in paths] == ["rows.jsonl", "report.md", "report.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.name for p in paths)
    assert DriftReport.read(tmp_path).rows == saved.rows
    assert len(paths[0].read_text().splitlines()) == len(saved.rows)


def test_rerun_appends_twice(tmp_path):
    one, other = op_row("fa2", "place", out=0.0), op_row("fa3", "place", out=0.0)
    first = Journal(tmp_path, resume=False)
    assert first.note is None
    first.append(replace(one, case=one.case | {"name": "of the first run alone"}))
    first.append(one)
    again = Journal(tmp_path, resume=False)
    assert "replaced" in again.note
    assert len(DriftReport.read(tmp_path).rows) == 2  # kept until there is a new one
    assert again.report().rows == ()
    assert not again.has("drift-op", backend="fa2")
    again.append(other)
    again.append(one)
    assert again.report().rows == (other, one)
    resumed = Journal(tmp_path, resume=True)
    assert resumed.note.startswith("2 rows of an earlier run are kept")
    assert resumed.has("drift-op", backend="fa2", comparison="place")
    assert not resumed.has("drift-op", backend="fa2", comparison="exact")
    newer = op_row("fa2", "place", out=1.0)
    resumed.append(newer)
    assert resumed.report().rows == (other, newer)


def test_journal_in_a_files_place(tmp_path):
    append_row(tmp_path / "x", op_row("fa2", "place"))
    with pytest.raises(ValueError, match="out must be a folder"):
        Journal(tmp_path / "x", resume=False)


# ---- limits ----


def limits(text, rows, known=OP_MEASURES):
    return broken_limits(parse_thresholds([text], known), measured(rows))


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("dq_relative=1e-2", None),
        (
            "dq_relative=1e-3",
            "dq_relative is 0.002 in drift-op name=64,64 dtype=bfloat16 backend=fa",
        ),
        ("relative=1", None),
        ("relative=0.1", "out_relative is 0.7 in drift-op name=64,64 dtype=bfloat16 backend=flex"),
        ("ratio_out=1", "ratio_out is 7 in"),
        ("max_ulps=0", "out_max_ulps is 2.1 in"),
    ],
)
def test_limit_is_passed_or_not(text, broken):
    said = limits(text, [row for row in every_row() if row.suite == "drift-op"])
    assert (said == []) if broken is None else (broken in said[0])


def test_peers_error_is_taken_for_ours():
    row = op_row("fa3", "exact", ratio=0.1, out=1e-3)
    assert row.measures["peer_out_relative"] == 0.5
    assert limits("relative=0.01", [row]) == []


def test_nan_is_below_a_limit():
    assert "nan" in limits("relative=1", [op_row("fa3", "place", out=math.nan)])[0]
    assert limits("relative=1", [op_row("fa3", "place", out=1.0)]) == []


def test_negative_difference_is_below_a_limit():
    assert limits("loss_difference=1e-3", model_rows("fa3", 2e-3), MODEL_MEASURES)
    assert not limits("loss_difference=1e-2", model_rows("fa3", 2e-3), MODEL_MEASURES)


def test_list_is_held_to_its_largest():
    rows = [Measured("run", {"angles": [1.0, 3.0, 2.0]})]
    assert "3" in broken_limits(parse_thresholds(["angles=2.5"], ["angles"]), rows)[0]
    assert broken_limits(parse_thresholds(["angles=3"], ["angles"]), rows) == []


def test_rounding_twin_is_held_to_a_limit():
    rows = training_rows()
    moved = replace(rows[3], measures=rows[3].measures | {"angles": [9.0]})
    assert rows[3].case["variant"] == "rounding"
    rows = [*rows[:3], moved, *rows[4:]]
    assert limits("angles=1", rows, TRAINING_MEASURES) == []
    assert limits("angles=0.15", rows, TRAINING_MEASURES)


def test_limit_on_nothing_passes():
    said = limits("dq_relative=1", [op_row("fa3", "place", out=0.0)])
    assert said == ["fail-above dq_relative=1: no row has such a measure."]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dq_relative", "must be MEASURE=VALUE"),
        ("=1", "must name a measure"),
        ("relativ=1", "got 'relativ'; choose among out_max_abs"),
        ("kl_mean=1", "must name a measure of this command"),
        ("equal=1", "must name a measure"),
        ("relative=", "must have a value of at least 0"),
        ("relative=-1", "must have a value of at least 0"),
        ("relative=nan", "must have a value of at least 0"),
    ],
)
def test_bad_limit_is_a_sentence(text, words):
    with pytest.raises(ValueError, match=words):
        parse_thresholds([text], OP_MEASURES)


def test_known_measures_are_those_of_the_rows():
    """A name that no row ever has could never fail."""
    ops = [row for row in every_row() if row.suite == "drift-op"]
    found = {name for row in ops for name in row.measures}
    assert set(OP_MEASURES) <= found
    models = {name for row in model_rows("x", 1.0) for name in row.measures}
    assert set(MODEL_MEASURES) <= models
    assert set(COMPARE_MEASURES) <= set(CompareRow.__dataclass_fields__)
