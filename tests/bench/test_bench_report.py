"""Pages of tables, figures and claims, from rows alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from flexvarlen.bench import report as report_module
from flexvarlen.bench.claims import Claim, Cost, Found, Within
from flexvarlen.bench.claims_tables import CLAIM_SUITES, claims_section, published, sentence
from flexvarlen.bench.report import SECTIONS, report, section_of
from flexvarlen.bench.series import measured_cases
from flexvarlen.bench.suite import SUITES, Options, suite_of
from flexvarlen.drift.report.files import SUITES as DRIFTS
from flexvarlen.rows import Row, append_rows
from tests.drift.drift_rows import every_row

ROOT = Path(__file__).resolve().parents[2]
GPU = {"gpu": "NVIDIA H200", "device": "cuda", "torch": "2.11", "started_utc": "1"}


class Fake:
    """A suite whose tables are its rows' names, and whose figures are one empty file."""

    def __init__(self, name):
        self.name = name

    def section(self, rows):
        return f"{self.name} of {', '.join(row.case['variant'] for row in rows)}"

    def figures(self, rows, folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}-g.png"
        path.write_bytes(b"")
        return [path]


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    monkeypatch.setattr(report_module, "suite_of", Fake)
    monkeypatch.setattr(report_module, "claims_section", lambda rows: f"{len(rows)} rows")
    monkeypatch.setattr(report_module, "summary_section", lambda rows: f"{len(rows)} in short")

    def write(*suites):
        path = tmp_path / "rows.jsonl"
        append_rows(path, [Row(suite, {"variant": "fa2"}, "ok", None, {}, GPU) for suite in suites])
        return path

    return write


def page_with(path, *names):
    text = "".join(f"# {x}\n<!-- bench:{x} begin -->old<!-- bench:{x} end -->\n" for x in names)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "the end\n")
    return path


def between(path, name):
    found = re.search(rf"<!-- bench:{name} begin -->\n(.*?)\n<!-- bench:{name} end -->",
                      path.read_text(), re.DOTALL)  # fmt: skip
    return found and found[1]


def test_each_page_gets_what_it_has_markers_for(rows_of, tmp_path):
    readme = page_with(tmp_path / "README.md", "padding", "scaling")
    page = page_with(tmp_path / "docs" / "page.md", "padding", "claims", "kernels")
    text = report([rows_of("padding", "mask-build")], pages=[readme, page])
    assert text == "padding of fa2\n\nmask-build of fa2"
    assert between(readme, "padding") == between(page, "padding") == "padding of fa2"
    assert between(page, "claims") == "2 rows"
    assert "scaling begin -->old<" in readme.read_text()  # no rows: left as it is
    assert "kernels begin -->old<" in page.read_text()
    assert readme.read_text().endswith("the end\n")


def test_figures_are_linked_from_where_the_page_stands(rows_of, tmp_path):
    page = page_with(tmp_path / "docs" / "page.md", "padding-figures", "scaling-figures")
    report([rows_of("padding")], pages=[page], figures=tmp_path / "results")
    assert (tmp_path / "results" / "padding-g.png").exists()
    assert between(page, "padding-figures") == "![padding: padding-g](../results/padding-g.png)"
    assert "scaling-figures begin -->old<" in page.read_text()
    report([rows_of("padding")], pages=[page_with(page, "padding")])
    assert between(page, "padding") == "padding of fa2"


def test_claims_are_left_alone_by_rows_that_say_nothing_of_them(rows_of, tmp_path):
    page = page_with(tmp_path / "page.md", "claims", "kernels")
    report([rows_of("kernels")], pages=[page])
    assert "claims begin -->old<" in page.read_text()


def test_a_summary_is_of_all_its_suites_or_left_alone(rows_of, tmp_path, monkeypatch):
    monkeypatch.setattr(report_module, "SUMMARIES", {"padding": None, "mask-build": None})
    page = page_with(tmp_path / "page.md", "summary", "padding")
    report([rows_of("padding", "kernels")], pages=[page])
    assert "summary begin -->old<" in page.read_text()
    report([rows_of("mask-build")], pages=[page])  # beside the rows that are there
    assert between(page, "summary") == "3 in short"


def test_a_page_without_a_place_for_anything_is_an_error(rows_of, tmp_path):
    page = page_with(tmp_path / "page.md", "scaling")
    with pytest.raises(ValueError, match=r"page\.md must hold the markers of one of padding"):
        report([rows_of("padding")], pages=[page])
    page.write_text("<!-- bench:padding begin -->")
    with pytest.raises(ValueError, match="once each"):
        report([rows_of("padding")], pages=[page])
    assert page.read_text() == "<!-- bench:padding begin -->"


def test_an_unknown_suite_is_an_error():
    with pytest.raises(ValueError, match=r"suite must be one of .*'unheard-of'"):
        section_of("unheard-of", [])
    assert not set(SECTIONS) & set(SUITES)


def test_several_pages_are_written(rows_of, tmp_path):
    one, two = (page_with(tmp_path / name, "padding") for name in ("one.md", "two.md"))
    assert report_module.report([rows_of("padding")], pages=[one, two]) == "padding of fa2"
    assert between(one, "padding") == between(two, "padding") == "padding of fa2"


def test_the_page_has_a_place_for_every_suite():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in (*SUITES, "claims"):
        assert text.count(f"<!-- bench:{name} begin -->") == 1, name
        assert text.count(f"<!-- bench:{name} end -->") == 1, name
    for name in SUITES:
        assert name == "clock-check" or f"flexvarlen bench {name} --out" in text


# --- claims --------------------------------------------------------------------------------------


def timed(suite, variant, ms, pass_="forward", status="ok", where=GPU, host=None, **case):
    measures = {f"device_ms_p{p}": ms for p in (20, 50, 80)} if status == "ok" else {}
    if host is not None:
        measures |= {"host_ms_p50": host}
    reason = None if status == "ok" else f"it is {status}"
    case = {**case, "variant": variant, "pass": pass_}
    return Row(suite, case, status, reason, measures, where)


def study(variant, lengths, ms, host):
    return timed("varlen-study", variant, ms, host=host, lengths=lengths, causal=False)


def overhead(kernel, pass_, fixed, varlen, seqlen=8192):
    shape = {"causal": True, "seqlen": seqlen}
    return [
        timed("varlen-overhead", f"fixed:{kernel}", fixed, pass_, **shape),
        timed("varlen-overhead", f"raw:{kernel}", varlen, pass_, **shape),
    ]


def line_of(text, *words):
    lines = [x for x in text.splitlines() if x.startswith("|") and all(w in x for w in words)]
    assert len(lines) == 1, (words, lines)
    return [cell.strip() for cell in lines[0].strip("|").split("|")]


def bullet_of(text, start):
    (line,) = [x for x in text.splitlines() if x.startswith(f"- {start}")]
    return line


def test_every_claim_is_there_before_anything_is_measured():
    text = claims_section([])
    assert {each.suite for each in published()} == set(CLAIM_SUITES)
    assert text.count("| not measured yet |") == len(published())
    assert not [line for line in text.splitlines() if line.startswith("- ")]
    for figure in ("1.97×", "1.11×", "3.2×", "3.3×", "5.6×", "1.98×", "3%", "within 6%"):
        assert f"| {figure} |" in text


def test_every_claim_finds_its_rows_among_those_that_the_suites_make():
    """Fields, variants and sizes of the real suites, all of the same time."""
    options = Options(torch.device("cuda"))
    rows = []
    for name in CLAIM_SUITES:
        suite = suite_of(name)
        for case in suite.cases(options):
            for variant in suite.variants(case, options):
                for pass_ in ("forward", "backward"):
                    rows.append(timed(name, variant, 1.0, pass_, host=0.1, **case.data()))
    text = claims_section(rows)
    assert "not measured yet" not in text
    assert "nothing is known" not in text
    assert text.count("| 1.00×, NVIDIA H200 |") == len(published())
    for each in published():
        found = list(each.find(measured_cases([r for r in rows if r.suite == each.suite])))
        assert len({one.where for one in found}) == len(found) > 0, each.claim.what


def test_the_study_is_told_by_both_clocks():
    rows = [
        study("raw:fa2", [256], 0.010, 0.200), study("raw:varlen", [256], 0.011, 0.100),
        study("raw:fa2", [4160] * 8, 9.0, 0.1), study("raw:varlen", [4160] * 8, 10.0, 0.1),
    ]  # fmt: skip
    text = claims_section(rows)
    measured = line_of(text, "one document of 256")[5:]
    assert measured == ["0.91× to 2.00×, NVIDIA H200", "holds in 1 of 2"]
    said = bullet_of(text, "SDPA varlen over FA2, one document of 256")
    assert "it holds for call time (2.00×); it does not for device time (0.91×)" in said
    assert line_of(text, "8 documents of 4,160")[5:] == ["1.11×, NVIDIA H200", "holds"]


def test_varlen_costs_of_each_kernel():
    rows = [
        *overhead("fa4", "forward", 1.0, 1.035), *overhead("fa4", "backward", 1.0, 1.05),
        *overhead("fa2", "forward", 1.0, 1.0), *overhead("fa3", "forward", 1.0, 9.0, seqlen=64),
    ]  # fmt: skip
    text = claims_section(rows)
    fa4 = line_of(text, "fixed lengths, `fa4`")
    assert fa4[1:3] == ["3%", "B200"]
    assert fa4[5:] == ["1.03× to 1.05×, NVIDIA H200", "holds in 1 of 2"]
    assert line_of(text, "`fa2`, claimed of FA4")[6] == "holds where it was measured"
    assert line_of(text, "`fa3`, claimed of FA4")[5] == "not measured yet"  # another size


def test_rows_of_every_suite_of_drift_are_rendered(tmp_path):
    append_rows(tmp_path / "rows.jsonl", every_row())
    text = report([tmp_path / "rows.jsonl"])
    assert all(f"- {words}, " in text for words in DRIFTS.values())


def test_standard_attention_that_does_not_fit_is_no_speedup():
    shape = {"dtype": "bfloat16", "tokens": 8192, "causal": False}
    rows = [
        timed("scaling", "standard", 0.0, status="oom", **shape),
        timed("scaling", "fixed:fa2", 1.0, **shape),
        timed("scaling", "standard", 4.0, **shape | {"causal": True}),
        timed("scaling", "fixed:fa2", 1.0, **shape | {"causal": True}),
    ]
    text = claims_section(rows)
    assert line_of(text, "FA2 over standard", "H100")[6] == "holds where it was measured"
    said = [x for x in text.splitlines() if x.startswith("- FA2 over standard attention, claimed")]
    assert len(said) == 2  # of the H100 and of the A100
    assert "causal, 8,192 tokens (4.00×); nothing is known of full, 8,192 tokens" in said[0]
    assert "`standard` is oom (it is oom)" in said[0]


def test_padding_is_compared_with_the_call_that_is_right():
    shape = {"part": "attention", "causal": False, "max_length": 2048}
    rows = [
        timed("padding", "raw:varlen", 0.2, documents="multiples", **shape),
        timed("padding", "padded:masked", 0.6, documents="multiples", **shape),
        timed("padding", "padded:unmasked", 0.0, status="wrong", documents="multiples", **shape),
        timed("padding", "padded:unmasked", 0.3, documents="full-length", **shape),
    ]
    said = bullet_of(claims_section(rows), "Varlen over padded")
    assert "it holds for attention, masked SDPA (3.00×)" in said
    assert "it does not for attention, unmasked SDPA (1.50×)" in said


def test_a_claim_says_what_was_not_interleaved_and_takes_no_time_of_the_host():
    shape = {"dtype": "bfloat16", "tokens": 8192}
    rows = []
    for causal in (False, True):
        rows += [
            timed("scaling", "standard", 4.0, causal=causal, **shape),
            timed("scaling", "fixed:fa2", 1.0, causal=causal, host=3.0 * causal, **shape),
        ]
    rows[0].measures["timed_alone"] = True
    said = bullet_of(claims_section(rows), "FA2 over standard attention, claimed 3.2× on H100")
    assert "it holds for full, 8,192 tokens (4.00×, `standard` timed alone)" in said
    assert "nothing is known of causal, 8,192 tokens (the device waited for the host" in said


def test_many_cases_are_counted():
    rows = []
    for tokens, ms in zip(range(1, 11), (1.0, 1.02, 1.05, 1.1, 1.2) * 2, strict=True):
        shape = {"head_dim": 64, "causal": True, "batch": 1, "tokens": tokens}
        rows += [
            timed("sdpa-backends", "sdpa:default", ms, **shape),
            timed("sdpa-backends", "fixed:fa2", 1.0, **shape),
        ]
    text = claims_section(rows)
    said = bullet_of(text, "SDPA's time over FA2's")
    assert "it holds in 6 of 10, from head_dim 64, causal, 1 × 1 tokens, forward (1.00×) to" in said
    assert line_of(text, "SDPA's time")[5:] == ["1.00× to 1.20×, NVIDIA H200", "holds in 6 of 10"]


def test_a_cpu_says_nothing_and_each_gpu_speaks_for_itself():
    cpu = [study("raw:fa2", [256], 1.0, None), study("raw:varlen", [256], 0.1, None)]
    cpu = [Row(r.suite, r.case, r.status, None, r.measures, {"gpu": None}) for r in cpu]
    assert claims_section(cpu) == claims_section([])
    other = {"gpu": "NVIDIA A100", "started_utc": "1"}
    there = [
        Row(row.suite, row.case, row.status, None, row.measures, where)
        for where in (GPU, other)
        for row in cpu
    ]
    text = claims_section(there)
    assert line_of(text, "256 tokens", "NVIDIA H200")[6] == "holds"
    assert line_of(text, "256 tokens", "NVIDIA A100")[6] == "holds"


def test_what_holds():
    assert Claim("x", 2.0, "G", "s").holds(1.91)
    assert not Claim("x", 2.0, "G", "s").holds(1.89)
    assert Cost("x", 1.03, "G", "s").holds(0.5)
    assert not Cost("x", 1.03, "G", "s").holds(1.05)
    assert Within("x", 1.06, "G", "s").holds(1.05)
    assert not Within("x", 1.06, "G", "s").holds(0.9)
    nothing = Claim("x", 2.0, "G", "s")
    assert nothing.verdict([Found("a", None, "oom")]) == "could not be measured"
    assert sentence(nothing, [Found("a", None, "oom")], "G") == (
        "X, claimed 2× on G: on G nothing is known of a (oom)."
    )
