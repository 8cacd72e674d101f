"""Suites leaks, families and capabilities: known leaks are seen, and ours is right everywhere."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers

from flexvarlen.bench.suites.contract import capabilities, families, forms, leaks
from flexvarlen.bench.suites.contract.batch_forms import FORMS, LENGTHS
from flexvarlen.bench.suites.contract.forms import FormsCase
from flexvarlen.report.records import Record, append_records, read_records
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.run import RunRequest, run_suite
from flexvarlen.runner.suite import Options

OPTIONS = Options(torch.device("cpu"), quick=True)
LLAMA = FormsCase("llama", "float32", 16)

# Forms in which plain transformers, eager and sdpa, is right.
RIGHT_IN_PLAIN = {
    "position_ids, use_cache=False",
    "position_ids, cu_seq_lens_*, max_length_* and seq_idx",
    "two packed rows",
    "first document continues at position 100",
    "a later document starts at position 2",
    "right padding",
    "left padding",
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    out = tmp_path_factory.mktemp("leaks") / "records.jsonl"
    request = RunRequest(out, cases="^(llama|qwen3)$")
    run_suite(leaks.SUITE, Options(torch.device("cpu")), request)
    return read_records([out])


def of(records, variant):
    return [r for r in records if r.case["variant"] == variant]


def test_ours_is_right_in_every_form_or_refuses_its_cache(records):
    ours = of(records, "flexvarlen:sdpa")
    assert len(ours) == len(FORMS) * 2
    cached = {form.name for form in FORMS if form.cached}
    refused = [r for r in ours if r.status == "unsupported"]
    assert {r.case["pass"] for r in refused} == cached
    right = [r for r in ours if r not in refused]
    assert {(r.status, r.measures["leaks"]) for r in right} == {("ok", 0)}


@pytest.mark.parametrize("variant", ["transformers:eager", "transformers:sdpa"])
def test_known_leaks_of_plain_transformers_are_seen(records, variant):
    theirs = of(records, variant)
    assert {r.case["pass"] for r in theirs if r.status == "ok"} == RIGHT_IN_PLAIN
    wrong = [r for r in theirs if r.case["pass"] not in RIGHT_IN_PLAIN]
    assert all(r.status == "wrong" and r.measures["error"] > 1 for r in wrong)


def test_a_missing_kernel_has_its_record_and_reason(records):
    flash = of(records, "transformers:flash_attention_2")
    assert len(flash) == len(FORMS) * 2
    assert all(r.status == "unsupported" and r.reason for r in flash)


def test_the_table_of_leaks_has_every_form_and_marks_leaks(records):
    text = leaks.SUITE.section(records)
    assert all(f"| {form.name} |" in text for form in FORMS)
    (line,) = [x for x in text.splitlines() if x.startswith("| 2D mask of document ids")]
    assert line.count("**") == 4  # eager and sdpa
    assert "refused (1)" in line
    for elsewhere in ({"gpu": "NVIDIA H200"}, {"transformers": "5.17.0"}):
        there = [replace(r, environment=r.environment | elsewhere) for r in records]
        both = leaks.SUITE.section([*records, *there])
        assert both == "\n\n".join([text, leaks.SUITE.section(there)])


def test_versions_of_transformers_have_records_in_one_file_and_columns_of_their_own(
    records, tmp_path
):
    here, out = transformers.__version__, tmp_path / "records.jsonl"
    assert {r.case["transformers"] for r in records} == {here}
    older = []
    for r in of(records, "transformers:sdpa"):
        case = r.case | {"transformers": "5.0.0"}
        r = replace(r, case=case, environment=r.environment | {"transformers": "5.0.0"})
        leaks_there = case["model"] == "llama" and case["pass"] == "two packed rows"
        changed = {"status": "wrong", "measures": r.measures | {"leaks": 7}} if leaks_there else {}
        older.append(replace(r, **changed))
    append_records(out, [*records, *older])
    both = read_records([out])
    assert len(both) == len(records) + len(older)
    (page,) = leaks.SUITE.page_tables(both)
    assert page.header[1:3] == tuple(
        f"attention: transformers {x} `eager`, `sdpa`" for x in ("5.0.0", here)
    )
    assert "transformers 5.0.0" in page.title
    front = leaks.front_table(both)
    lines = {form: dict(zip(front.header[1:], cells, strict=True)) for form, *cells in front.lines}
    dense = "dense models, `eager`, `sdpa`"
    assert lines["two packed rows"][dense] == "**leaks** or right"
    assert lines["2D mask of document ids"] == {dense: "**leaks**", "flexvarlen": "right"}
    assert "left padding" not in lines
    count = len(FORMS) - len(RIGHT_IN_PLAIN)
    assert f"{count + 1} under 5.0.0 and {count} under {here} with {dense}; 0 under" in front.title


def test_a_kernel_that_measured_nothing_has_no_column_and_one_of_one_version_says_so(records):
    front = leaks.front_table(records)
    assert front.header[1:] == ("dense models, `eager`, `sdpa`", "flexvarlen")
    flash = [
        replace(r, environment=r.environment | {"transformers": "5.0.0"}, status="ok")
        for r in of(records, "transformers:flash_attention_2")
    ]
    flash = [replace(r, measures={"error": 1.0, "leaks": 0}) for r in flash]
    assert "0 under 5.0.0 with dense models, FA2" in leaks.front_table([*records, *flash]).title


@pytest.mark.parametrize("model", leaks.HYBRID)
def test_plain_hybrid_models_leak_in_every_packed_form_and_ours_in_none(model):
    """The cache that transformers documents for such a model leaks too; ours refuses it."""
    cached = next(form for form in FORMS if form.cached)
    models = forms.TinyModels(replace(LLAMA, model=model), torch.device("cpu"))
    assert models.recurrent
    shown = [cached, *(form for form in FORMS if form.name in forms.QUICK_FORMS)]
    for form in shown:
        found = leaks.SUITE.finding(models, form, "transformers:sdpa")
        packed = form.name != "left padding"
        assert found.status == ("wrong" if packed else "ok"), form.name
        assert (found.measures["leaks"] > 0) == packed
        if form is not cached:
            ours = leaks.SUITE.finding(models, form, "flexvarlen:sdpa")
            assert (ours.status, ours.measures["leaks"]) == ("ok", 0), form.name
    with pytest.raises(Unsupported, match="rows of one document each"):
        leaks.SUITE.finding(models, cached, "flexvarlen:sdpa")


def test_hybrid_models_have_a_table_of_their_own(records):
    hybrid = [replace(r, case=r.case | {"model": "lfm2"}) for r in records]
    text = leaks.SUITE.section([*records, *hybrid])
    assert text.count("**Largest error") == 2
    assert "random llama and qwen3 models" in text
    assert "random lfm2 models" in text


def test_the_page_shows_the_largest_error_of_ours_and_both_kinds_of_models(records):
    hybrid = [replace(r, case=r.case | {"model": "lfm2"}) for r in records]
    worse = replace(records[-1], case=records[-1].case | {"variant": "flexvarlen:flex"})
    worse = replace(worse, measures=worse.measures | {"error": 0.25})
    (table,) = leaks.SUITE.page_tables([*records, *hybrid, worse])
    lines = {form: dict(zip(table.header[1:], cells, strict=True)) for form, *cells in table.lines}
    assert list(lines) == [form.name for form in FORMS]
    assert lines[worse.case["pass"]]["attention: flexvarlen"] == "0.2"
    assert lines[worse.case["pass"]]["hybrid: flexvarlen"] != "0.2"
    here = transformers.__version__
    assert "**" in lines["2D mask of document ids"][f"hybrid: transformers {here} `eager`, `sdpa`"]


def test_the_page_counts_what_a_backend_serves_in_all_families():
    def record(model, form, status, **measures):
        case = {"model": model, "variant": "fa2", "pass": form}
        return Record("families", case, status, None, {"baseline_error": 1.0, **measures}, {})

    right = record("llama", "a", "ok", error=1.5, leaks=0)
    wrong = record("llama", "b", "wrong", error=4.0, leaks=3)
    refused = record("gemma2", "a", "unsupported")
    (table,) = families.SUITE.page_tables([right, wrong, refused])
    assert table.lines == (("CPU", "`fa2`", "1", "1 of 2", "4.00", "3"),)
    assert families.SUITE.page_tables([refused]) == []


def test_forms_cover_all_tokens():
    ids = torch.arange(sum(LENGTHS))
    for form in FORMS:
        batch = form.batch(ids)
        tokens = batch.inputs["input_ids"]
        found = torch.cat([tokens[row, span] for row, span in batch.slices])
        assert torch.equal(found, ids), form.name


def test_a_backend_is_right_or_refuses_in_each_family():
    found = {}
    for model in ("llama", "gemma2"):
        for finding in families.SUITE.measure(
            replace(LLAMA, model=model), ["sdpa", "reference"], OPTIONS
        ):
            found.setdefault((model, finding.variant), set()).add(finding.status)
    assert found == {
        ("llama", "sdpa"): {"ok"},
        ("llama", "reference"): {"ok"},
        ("gemma2", "sdpa"): {"unsupported"},  # softcap
        ("gemma2", "reference"): {"ok"},
    }


def test_an_unpatched_model_leaks(monkeypatch):
    monkeypatch.setattr(forms, "attending", lambda model, variant: nullcontext(model))
    found = families.SUITE.measure(LLAMA, ["sdpa"], OPTIONS)
    (leaky,) = [f for f in found if f.pass_ == "2D mask of document ids"]
    assert leaky.status == "wrong"
    assert leaky.measures["leaks"] > 0


@pytest.mark.parametrize("what", ["logits", "gradients"])
def test_an_error_is_wrong(monkeypatch, what):
    answer = forms.TinyModels.answer

    def scaled(self, model, batches, *, gradients):
        found = answer(self, model, batches, gradients=gradients)
        if len(batches) > 1:  # each document alone
            return found
        if what == "logits":
            return replace(found, logits=[0.5 * x for x in found.logits])
        return replace(found, gradients={k: 0.5 * x for k, x in found.gradients.items()})

    monkeypatch.setattr(forms.TinyModels, "answer", scaled)
    assert {f.status for f in families.SUITE.measure(LLAMA, ["sdpa"], OPTIONS)} == {"wrong"}


def test_every_backend_says_what_it_can_do(tmp_path):
    out = tmp_path / "records.jsonl"
    run_suite(capabilities.SUITE, OPTIONS, RunRequest(out))
    found = {r.case["variant"]: r for r in read_records([out])}
    assert set(found) == set(capabilities.BACKENDS)
    assert found["sdpa"].measures["why_not"]["sliding window"] is None
    assert found["fa2"].status == "unsupported"
    text = capabilities.SUITE.section(list(found.values()))
    assert "| `sdpa` | yes |" in text
    assert "| `fa2` | not here |" in text
