"""Suite preference, small on the CPU: what is checked, what is counted, and its table."""

from __future__ import annotations

import gc
import math
import re
import sys
from dataclasses import replace

import pytest
import torch

from flexvarlen.bench.report import report
from flexvarlen.bench.suites.training import preference, preference_trainers, texts
from flexvarlen.bench.suites.training.preference_tables import table
from flexvarlen.layout.token_map import Padding
from flexvarlen.report.records import Record, read_records
from flexvarlen.runner.run import RunRequest, run_suite
from flexvarlen.runner.suite import Options

pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")

OPTIONS = Options(torch.device("cpu"), quick=True, seconds=0.1, say=lambda line: None)
SUITE = preference.SUITE


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    """Twelve topics: a BPE of them is trained in no time."""
    some = tuple(sorted(texts.topics(), key=len)[:12])
    monkeypatch.setattr(texts, "topics", lambda: some)


def measured(folder, *variants, cases="dpo$"):
    out = folder / "records.jsonl"
    run_suite(SUITE, replace(OPTIONS, variants=variants or None), RunRequest(out, cases=cases))
    return read_records([out])


def test_every_trainer_gives_the_padded_runs_loss_and_gradients(tmp_path):
    eager = r"^(dpo|grpo|reward|classification)$"
    records = measured(tmp_path, "padded-sdpa", "auto", "padded-fa2", cases=eager)
    for task in preference_trainers.TASKS:
        found = {r.case["variant"]: r for r in records if r.case["task"] == task}
        assert [found[x].status for x in ("padded-sdpa", "auto")] == ["ok", "ok"]
        assert found["padded-fa2"].status == "unsupported"
        measures = found["auto"].measures
        assert measures["tokens_real"] < measures["tokens_padded"]
        assert measures["gradients"] == 14
        assert 0 < measures["gradient_error"] < 0.1
        assert measures["error_over_allowed"] <= 1
        if task == "dpo":
            assert measures["reference_loss"] == pytest.approx(math.log(2))
        assert measures["samples_per_s"] == pytest.approx(
            found["auto"].case["samples"] / measures["ms_p50"] * 1e3
        )


def test_shared_prompts_run_once(tmp_path):
    records = measured(
        tmp_path, "padded-sdpa", "auto+shared", cases="^(dpo|grpo|grpo-16|grpo-(hybrid|experts).*)$"
    )
    found = [r for r in records if r.case["variant"] == "auto+shared"]
    assert [r.status for r in found] == ["ok"] * 5
    for record in found:
        m, case = record.measures, record.case
        assert m["attends"] == "sdpa"
        group = case["group"] if case["task"] == "grpo" else 2
        rows = case["samples"] * (1 if case["task"] == "grpo" else 2)
        assert m["tokens_run"] == m["tokens_real"] - 40 * (rows - rows // group)
    assert "tokens run" in table(records[:2]).header


def test_a_table_compares_with_the_padded_run(tmp_path):
    records = measured(tmp_path, "padded-sdpa", "auto", "fa3")
    made = table(records)
    assert made.header == (
        "variant",
        "samples/s",
        "ms a step (p20–p80)",
        "peak GiB",
        "speed ÷ `padded-sdpa`'s",
        "share of the possible speedup",
        "error ÷ allowed",
    )
    lines = {line[0]: line[1:] for line in made.lines}
    assert lines["`padded-sdpa`"][3:5] == ("1.00×", "–")
    assert lines["`auto` (sdpa)"][4].endswith("%")
    assert lines["`fa3`"][0] == "unsupported (1)"
    assert "8 pairs a batch" in made.title
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:preference begin -->\n<!-- bench:preference end -->\n")
    report([tmp_path / "records.jsonl"], pages=[page])
    assert "| `auto` (sdpa) |" in page.read_text()


def test_the_page_has_a_line_for_each_eager_case_beside_padding(tmp_path):
    def records(mode, speeds):
        tokens = {"tokens_padded": 300.0, "tokens_real": 200.0, "tokens_run": 100, "peak_mib": 1024}
        case = {"task": "grpo", "mode": mode, "geometry": "qwen3-1.7b", "layers": 1, "dtype": "x"}
        case |= {"samples": 16, "group": 8, "prompt": 1024}
        for variant, speed in speeds.items():
            measures = tokens | {"samples_per_s": speed}
            yield Record("preference", case | {"variant": variant}, "ok", None, measures, {})

    eager = [*records("eager", {"padded-fa3": 2.0, "auto": 3.0, "auto+shared": 5.0})]
    (shown,) = SUITE.page_tables([*eager, *records("compiled", {"auto@1": 9.0})])
    (line,) = shown.lines
    assert line[0] == "GRPO, 16 completions, 8 a prompt, prompts of 1,024"
    assert line[1:] == ("2.00", "1.50× (3.00×)", "2.50× (3.00×)", "1.67×", "1.0, 1.0, 1.0")
    (without_padding,) = SUITE.page_tables(eager[1:])
    assert without_padding.lines == ((line[0], "1.67×", "–, 1.0, 1.0"),)
    assert SUITE.page_tables(eager[1:2]) == []
    (drawn,) = SUITE.figures(eager[:2], tmp_path)  # one case, whose prompts are not shared
    assert drawn.exists()


def test_a_row_that_gives_other_outputs_is_wrong(tmp_path, monkeypatch):
    def smaller(self, x, padding=0):
        found = whole(self, x, padding)
        return 0.8 * found if found.is_floating_point() else found

    whole = Padding.leave
    monkeypatch.setattr(Padding, "leave", smaller)
    found = {r.case["variant"]: r for r in measured(tmp_path, "padded-sdpa", "auto")}
    assert found["padded-sdpa"].status == "ok"
    assert found["auto"].status == "wrong"
    assert re.match("the (loss|gradient of .*): .* is more than", found["auto"].reason)
    assert "samples_per_s" not in found["auto"].measures


def test_a_wrong_reference_model_is_found(tmp_path):
    case = replace(SUITE.cases(OPTIONS)[0], shortest=128, longest=500, layers=2)
    run = preference._Run(case, OPTIONS, str(tmp_path))
    trainer = run.make("auto")
    assert run.verdict(run.eagerly(trainer)[0])[1] is None

    def smaller(module, args, output):
        output["last_hidden_state"] = 0.8 * output["last_hidden_state"]

    trainer.ref_model.base_model.register_forward_hook(smaller)
    assert "is more than" in run.verdict(run.eagerly(trainer)[0])[1]


def test_without_trl_the_cases_are_unsupported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    (record,) = measured(tmp_path, "auto", cases="reward")
    assert record.status == "unsupported"
    assert "trl" in record.reason
    assert "unsupported" in SUITE.section([record])


def test_an_unknown_variant_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"variants must be among padded-fa3, .*, got 'fa9'"):
        measured(tmp_path, "auto", "fa9@128")


def fp32_parameters():
    gc.collect()
    found = (x for x in gc.get_objects() if type(x) is torch.nn.Parameter)
    return sum(x.dtype == torch.float32 for x in found)


def test_the_reference_leaves_no_model_behind(tmp_path):
    before = fp32_parameters()
    run = preference._Run(SUITE.cases(OPTIONS)[0], OPTIONS, str(tmp_path))
    assert fp32_parameters() <= before
    assert len(run.reference.gradients) == 14


@pytest.mark.slow
def test_compiled_on_other_batches(tmp_path):
    (record,) = measured(tmp_path, "auto@128", cases="compiled")
    assert record.status == "ok"
    assert record.measures["compilations"] > 0
    assert "recompilations" in table([record]).header
