"""Tables, sentences and limits of drift, from records made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flexvarlen.report.records import Record
from flexvarlen.verify.compare.drift_report import DriftReport, Threshold
from flexvarlen.verify.compare.drift_tables import section

H200 = {"gpu": "NVIDIA H200", "torch": "2.11.0", "transformers": "5.17.0"}


def op_record(variant, comparison, status="ok", reason=None, name="64,64", **measures):
    case = {"name": name, "dtype": "bfloat16", "comparison": comparison, "variant": variant}
    return Record("drift-op", case, status, reason, measures, H200)


def model_record(variant, comparison="packed-alone", status="ok", reason=None, **measures):
    case = {"model": "m", "dtype": "bfloat16", "tokens": 8192, "comparison": comparison}
    measures = {"logits_relative": 0.01, "logits_equal": 0.1, "first_part": "block 0"} | measures
    measures |= {"documents": 10}
    return Record("drift-model", case | {"variant": variant}, status, reason, measures, H200)


OPS = (
    op_record("fa3", "exact", ratio_out=0.2, out_relative=2e-3),
    op_record("fa3", "exact", name="7", ratio_out=0.4, serial_ratio_dq=0.5),
    op_record("fa3", "batch-serial", out_relative=0.0, lse_relative=0.0, dq_relative=3e-5),
    op_record("cudnn", "exact", "unsupported", "needs a newer GPU"),
)


def test_operators_are_a_line_each_with_their_largest_error():
    (table,) = DriftReport(OPS).tables()
    assert table.header[:4] == ("backend", "dtype", "status", "error / allowed")
    assert "2 cases" in table.title
    assert "NVIDIA H200" in table.title
    lines = {line[0]: dict(zip(table.header, line, strict=True)) for line in table.lines}
    assert lines["fa3"]["error / allowed"] == "50.00%"
    assert lines["fa3"]["batch-serial fwd"] == "0"
    assert lines["fa3"]["batch-serial bwd"] == "3.0e-05"
    assert "cudnn" not in lines


def test_backend_that_could_not_run_at_all_is_a_sentence_and_no_line():
    here = op_record("cudnn", "exact", name="7", ratio_out=0.1)
    assert DriftReport(OPS).sentences()[-1] == "Not run: cudnn: needs a newer GPU"
    report = DriftReport((*OPS, here))
    assert "Not run" not in " ".join(report.sentences())
    (table,) = report.tables()
    assert [line[:3] for line in table.lines][1] == ("cudnn", "bfloat16", "unsupported (1)")
    assert table.notes == ("(1) needs a newer GPU",)


def test_sentence_names_the_largest_error_and_passes():
    report = DriftReport(OPS)
    assert report.passed
    sentence, _ = report.sentences()
    assert "within the acceptance rule" in sentence
    assert "50.00%" in sentence
    assert "dq of fa3: 7, bfloat16, exact" in sentence


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_finding_passes_or_is_repeated(status):
    bad = [op_record("fa3", c, status, "out: too far.", name=n) for c in "ab" for n in "xy"]
    report = DriftReport((*OPS, *bad))
    assert not report.passed
    sentence, others, _ = report.sentences()
    assert others.startswith("3 comparisons of attention")
    assert sentence.startswith("fa3 is wrong" if status == "wrong" else "fa3 failed")
    assert sentence.count("out: too far.") == 1
    assert sentence.endswith("(x, bfloat16, a; y, bfloat16, a; x, bfloat16, b; y, bfloat16, b)")
    assert report.tables()[0].bad == {0}


LINES = {
    "flex": model_record("flex", status="wrong", reason="logits: too far."),
    "transformers:sdpa": model_record(
        "transformers:sdpa@default_cache", status="wrong", reason="logits: too far."
    ),
    "fa2": model_record("fa2", "dtype", "oom", "no room"),
    "fa3": model_record("fa3", "dtype", "unsupported", "no such head_dim"),
    "fa3 elsewhere": model_record("fa3"),
    "transformers:eager": model_record("transformers:eager", logits_relative=0.4),
    "gradients": model_record("sdpa", gradient_relative=0.7),
}


def test_sentences_cover_every_line_of_the_table():
    """Also what transformers' own attention does, and what did not fit or run."""
    report = DriftReport(tuple(LINES.values()))
    assert not report.passed
    (table,) = report.tables()
    assert len(table.lines) == len(LINES)
    assert report.sentences() == [
        "flex is wrong: logits: too far. (m, bfloat16, packed-alone)",
        "transformers:sdpa@default_cache is wrong: logits: too far. (m, bfloat16, packed-alone)",
        "fa2 did not fit: no room (m, bfloat16, dtype)",
        "fa3 did not run: no such head_dim (m, bfloat16, dtype)",
        "3 comparisons of models within the acceptance rule: relative logits differ by at most "
        "4.0e-01 (transformers:eager: m, bfloat16, packed-alone), gradients differ by at most "
        "7.0e-01 (sdpa: m, bfloat16, packed-alone).",
    ]


def test_leak_of_transformers_own_fails():
    report = DriftReport((model_record("transformers:sdpa", status="wrong", reason="NaN"),))
    assert report.passed
    assert DriftReport(()).sentences() == ["Nothing was compared."]


def test_table_of_models_fits_a_narrow_terminal():
    record = model_record("transformers:sdpa", logprob_mean_abs=1.0, kl_mean=1.0, top1=0.5)
    report = DriftReport((record,))
    (whole,), (narrow,) = report.tables(), report.tables(70)
    assert whole.width > 70 >= narrow.width
    assert narrow.notes == ("Not shown in 70 columns: log-probability, KL.",)


def test_models_have_a_table_a_dtype_and_a_sentence():
    other = model_record("flex", logits_relative=0.02)
    wide = replace(other, case=other.case | {"dtype": "float32"})
    report = DriftReport((model_record("sdpa", logits_equal=1, first_part=None), other, wide))
    first, second = report.tables()
    assert "bfloat16, 8,192 tokens" in first.title
    assert [line[:4] for line in first.lines] == [
        ("packed-alone", "sdpa", "ok", "none"),
        ("packed-alone", "flex", "ok", "block 0"),
    ]
    assert "float32" in second.title
    assert report.sentences() == [
        "3 comparisons of models within the acceptance rule: relative logits differ by at most "
        "2.0e-02 (flex: m, bfloat16, packed-alone)."
    ]


def test_machines_share_a_table():
    here = replace(OPS[0], environment={"gpu": None, "cpu": "a CPU"})
    assert len(DriftReport((*OPS, here)).tables()) == 2


def test_report_has_a_path_of_the_machine(tmp_path):
    bad = op_record("fa3", "exact", "failed", "OSError: /usr/secret/lib.so is gone")
    DriftReport((bad,)).save(tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "lib.so is gone" in text
    assert "secret" not in text


def test_page_table_is_the_range_over_our_backends():
    leak = model_record("transformers:sdpa@default_cache", logits_relative=1.3)
    leak = (leak, model_record("transformers:sdpa", logits_relative=0.002))
    records = [model_record("sdpa", logits_relative=0.0), model_record("flex"), *leak]
    text = section(records)
    assert "a packed row of 8,192 tokens in 10 documents" in text
    assert "| packed against each document alone | 0 to 0.01 |" in text
    line = "| a leak: transformers' `sdpa` with its default cache, packed against alone | 1.3 |"
    assert line in text
    assert "| fa3 | bfloat16 | ok | 50.00% | 2.0e-03 |" in section(OPS)


# ---- limits ----

NAN = op_record("fa3", "exact", out_relative=math.nan)
LESS = model_record("fa3", loss_difference=-2e-3)
LAYERS, NO_LAYERS = (model_record("fa3", layers_relative=x) for x in ([0.0, 0.3], []))
UNKNOWN = "dq_relative=1: no record has such a measure, only ratio_out, out_relative."


@pytest.mark.parametrize(
    ("limit", "records", "broken"),
    [
        ("out_relative=1e-2", OPS, None),
        ("out_relative=1e-3", OPS, "out_relative is 0.002 in fa3: 64,64, bfloat16, exact."),
        ("relative=1e-3", OPS, "out_relative is 0.002 in fa3"),
        ("ratio_out=0.3", OPS, "ratio_out is 0.4 in fa3: 7"),
        ("relative=1", [NAN], "out_relative is nan"),
        ("loss_difference=1e-3", [LESS], "loss_difference is 0.002"),
        ("loss_difference=1e-2", [LESS], None),
        ("layers_relative=0.25", [LAYERS], "layers_relative is 0.3"),
        ("layers_relative=0.35", [LAYERS], None),
        ("dq_relative=1", OPS[:1], UNKNOWN),
        ("layers_relative=1", [NO_LAYERS], "no record has such a measure"),
    ],
)
def test_broken_limit_passes(limit, records, broken):
    said = DriftReport(tuple(records)).broken_limits([Threshold.of(limit)])
    assert (said == []) if broken is None else (broken in said[0])


@pytest.mark.parametrize("text", ["dq_relative", "=1", "relative=", "relative=-1", "relative=nan"])
def test_bad_limit_is_taken(text):
    with pytest.raises(ValueError, match="must be MEASURE=VALUE"):
        Threshold.of(text)
