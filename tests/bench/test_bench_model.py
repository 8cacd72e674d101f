"""The suite "model" on tiny models: right before timed, real tokens counted, all rows rendered."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flexvarlen.bench import series_figure
from flexvarlen.bench.model import compared
from flexvarlen.bench.model import figures as model_figures
from flexvarlen.bench.model import measure as model_measure
from flexvarlen.bench.model import step as model_step
from flexvarlen.bench.model import tables as model_tables
from flexvarlen.bench.model import train as model_train
from flexvarlen.bench.model.batches import Collection, padded_groups
from flexvarlen.bench.model.cases import MEASURED, WHOLE, ModelCase, split_variant, training_bytes
from flexvarlen.bench.model.documents import prompt_lengths, text_lengths
from flexvarlen.bench.model.generate import Generation
from flexvarlen.bench.model.geometries import new_causal_lm
from flexvarlen.bench.model.step import IGNORE_INDEX, next_token_gradient, outcome_of, repeats_for
from flexvarlen.bench.model.suite import SUITE
from flexvarlen.bench.model.train import Training
from flexvarlen.bench.model.variants import Unsupported, make_variant
from flexvarlen.bench.runner import Run, run_suite
from flexvarlen.bench.suite import DeviceLost, Options
from flexvarlen.equivalence import oracle
from flexvarlen.plotstyle import style_of
from flexvarlen.rows import Row, read_rows

QUICK = Options(torch.device("cpu"), quick=True, seconds=0.05, say=lambda line: None)
TEXT, LOG_NORMAL, COMPILED, GENERATE = SUITE.cases(QUICK)
ON_A_GPU = Options(torch.device("cuda"))
BASELINE = "padded:transformers:sdpa"


def measured(case: ModelCase, *variants: str):
    return {(f.variant, f.pass_): f for f in SUITE.measure(case, variants, QUICK)}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "rows.jsonl"
    ended = run_suite(SUITE, QUICK, Run(path, commit="x"))
    assert (ended.measured, ended.left) == (4, 0)
    return path


@pytest.fixture(scope="module")
def rows(path):
    return read_rows([path])


# --- what a run gives ----------------------------------------------------------------------------


def test_every_variant_has_a_row_of_every_pass(rows):
    found = {
        (r.case["task"], r.case["tokens"], r.case["variant"], r.case.get("pass")) for r in rows
    }
    expected = {
        (case.task, case.tokens, variant, pass_)
        for case in SUITE.cases(QUICK)
        for variant in SUITE.variants(case, QUICK)
        for pass_ in (("prefill", "decode") if case.task == "generate" else (None,))
    }
    assert found == expected
    status = {(row.case["variant"], row.status) for row in rows}
    refused = ("packed:transformers:flash_attention_2", "unsupported")
    assert refused in status
    assert {(name, "ok") for name, _ in status if name != refused[0]} | {refused} == status


def test_throughput_counts_no_pads(rows):
    padded = [
        row
        for row in rows
        if row.case["variant"] == BASELINE and row.case["documents"] == "log-normal"
    ]
    assert len(padded) == 3
    for row in padded:
        m, case = row.measures, row.case
        assert m["positions"] > case["tokens"]
        seconds = m["ms_p50"] / 1e3
        counted = case["tokens"]
        if case.get("pass") == "decode":
            counted = m["prompts"] * (case["new_tokens"] - 1)
        if m["tokens_per_s"] is not None:
            assert m["tokens_per_s"] == pytest.approx(counted / seconds)


def test_a_training_row_says_what_its_step_was(rows):
    of_case = {(r.case["tokens"], r.case["variant"]): r for r in rows if r.case["mode"] == "eager"}
    row = of_case[LOG_NORMAL.tokens, "serial:transformers:eager"]
    assert "AdamW" in row.case["step"]
    assert row.case["checkpointing"]
    m = row.measures
    assert m["forwards"] == m["documents"] > 1
    assert m["error"] <= 2 * (m["peer_error"] + torch.finfo(torch.float32).eps)
    assert m["grad_error"] <= 3 * (m["peer_grad_error"] + torch.finfo(torch.float32).eps)
    assert m["error_worst_document"] > m["error"]
    assert m["peer_error_worst_document"] > m["peer_error"]
    assert m["ms_p20"] <= m["ms_p50"] <= m["ms_p80"]
    assert of_case[TEXT.tokens, "packed:auto"].measures["attends"] == "sdpa"


def test_each_prompts_logits_are_judged(rows):
    told = [row.measures for row in rows if row.case["task"] == "generate"]
    assert told
    for m in told:
        assert m["error_worst_document"] > m["error"]
        assert m["peer_error_worst_document"] > m["peer_error"]


def test_compiling_is_told_apart(rows):
    compiled = [row.measures for row in rows if row.case["mode"] == "compiled"]
    assert len(compiled) == 2
    for m in compiled:
        assert (m["graphs"], m["compilations_while_timing_all"]) == (1, 0)
        assert m["first_step_s"] > m["compile_s"] > 0
        assert m["first_step_s"] > m["ms_p50"] / 1e3


def test_a_finished_case_is_not_measured_again(path, monkeypatch):
    monkeypatch.setattr(type(SUITE), "measure", lambda *args: pytest.fail("measured again"))
    before = path.read_text()
    ended = run_suite(SUITE, QUICK, Run(path, commit="x"))
    assert (ended.measured, ended.done_before) == (0, 4)
    assert path.read_text() == before


# --- what is wrong is not timed ------------------------------------------------------------------


def test_a_variant_that_leaks_is_wrong_and_not_timed(monkeypatch):
    def leaking(name, *args, **options):
        variant = make_variant(name, *args, **options)
        if not name.startswith("transformers:"):
            return variant
        return dataclasses.replace(variant, inputs=lambda lengths: {"use_cache": False})

    monkeypatch.setattr(model_train, "make_variant", leaking)
    found = measured(TEXT, "packed:sdpa", "packed:transformers:sdpa", BASELINE)
    leaked = found["packed:transformers:sdpa", ""]
    assert leaked.status == "wrong"
    assert "outputs" in leaked.reason
    assert "ms_p50" not in leaked.measures
    assert {f.status for f in found.values() if f is not leaked} == {"ok"}


def test_a_short_document_that_leaks_in_a_long_row_is_wrong(monkeypatch):
    """In bf16 the norm over all tokens does not see it; of one token no gradient comes."""
    monkeypatch.setattr(ModelCase, "lengths", lambda self, files: [1023, 1, 1024])

    def merged(name, *args, **options):
        variant = make_variant(name, *args, **options)
        if name != "auto":
            return variant
        return dataclasses.replace(variant, inputs=lambda lengths: variant.inputs([1024, 1024]))

    monkeypatch.setattr(model_train, "make_variant", merged)
    case = dataclasses.replace(TEXT, tokens=2048, dtype="bfloat16")
    found = measured(case, "packed:auto", "packed:sdpa")
    assert found["packed:sdpa", ""].status == "ok"
    leaked = found["packed:auto", ""]
    assert leaked.status == "wrong"
    assert "of document 1" in leaked.reason
    m = leaked.measures
    assert m["error"] <= 2 * (m["peer_error"] + torch.finfo(torch.bfloat16).eps)


def test_labels_of_the_next_document_are_wrong(monkeypatch):
    """A document's last token learning the next one's first: outputs are right, gradients not."""
    packed = Collection.packed

    def across(self, boundaries):
        (batch,) = packed(self, boundaries)
        return [dataclasses.replace(batch, labels=self.ids.roll(-1, dims=1))]

    monkeypatch.setattr(Collection, "packed", across)
    found = measured(LOG_NORMAL, "packed:sdpa")["packed:sdpa", ""]
    assert found.status == "wrong"
    assert "gradients" in found.reason


def test_a_prompt_that_sees_its_pads_is_wrong(monkeypatch):
    prompts = Collection.prompts

    def unmasked(self):
        found = prompts(self)
        return found | {"attention_mask": torch.ones_like(found["input_ids"])}

    monkeypatch.setattr(Collection, "prompts", unmasked)
    found = measured(GENERATE, "padded:sdpa", "serial:sdpa")
    assert {found["padded:sdpa", pass_].status for pass_ in Generation.passes} == {"wrong"}
    assert {found["serial:sdpa", pass_].status for pass_ in Generation.passes} == {"ok"}


def test_generation_is_not_packed():
    found = measured(GENERATE, "packed:sdpa")
    assert {f.status for f in found.values()} == {"unsupported"}
    assert "not packed" in found["packed:sdpa", "decode"].reason
    found = measured(GENERATE, "padded-sorted:sdpa")
    assert {f.status for f in found.values()} == {"unsupported"}


def test_a_packed_row_too_long_for_transformers_sdpa_is_a_row_unless_it_is_named(monkeypatch):
    monkeypatch.setattr(compared, "LONGEST_PACKED_SDPA", TEXT.tokens - 1)
    theirs = "packed:transformers:sdpa"
    found = measured(TEXT, theirs, BASELINE)
    assert found[theirs, ""].status == "unsupported"
    assert "not tried above 255 tokens" in found[theirs, ""].reason
    assert found[BASELINE, ""].status == "ok"
    named = dataclasses.replace(QUICK, variants=(theirs,))
    assert [f.status for f in SUITE.measure(TEXT, [theirs], named)] == ["ok"]


# --- what raises is a row ------------------------------------------------------------------------


def out_of_memory_at(monkeypatch, owner, name, condition):
    own = getattr(owner, name)

    def raising(self, *args, **options):
        if condition(self, *args):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 PiB")
        return own(self, *args, **options)

    monkeypatch.setattr(owner, name, raising)


def test_a_variant_that_does_not_fit_is_a_row_and_the_others_go_on(monkeypatch):
    out_of_memory_at(monkeypatch, Training, "check", lambda self, name: name == "packed:sdpa")
    found = measured(TEXT, "packed:sdpa", BASELINE)
    assert found["packed:sdpa", ""].status == "oom"
    assert "2 PiB" in found["packed:sdpa", ""].reason
    assert found[BASELINE, ""].status == "ok"


def test_an_oracle_that_does_not_fit_is_a_row_of_every_variant(monkeypatch):
    out_of_memory_at(monkeypatch, Generation, "alone", lambda *args: True)
    found = measured(GENERATE, "padded:sdpa", BASELINE)
    assert len(found) == 4
    assert {f.status for f in found.values()} == {"oom"}


def test_a_slow_step_is_not_timed_again(monkeypatch):
    calls = []
    own = Training.step
    monkeypatch.setattr(Training, "step", lambda *args: (calls.append(args[0]), own(*args)))
    monkeypatch.setattr(model_measure, "SLOW_S", 0.0)
    found = measured(TEXT, "packed:sdpa", BASELINE)
    assert len(calls) == len(found) == 2
    for finding in found.values():
        m = finding.measures
        assert m["repeats"] == 1
        assert 0 < m["ms_p20"] == m["ms_p50"] == m["ms_p80"]
        assert m["tokens_per_s"] == pytest.approx(TEXT.tokens / (m["ms_p50"] / 1e3))


def test_a_slow_step_in_which_something_compiled_is_timed_again(monkeypatch):
    calls = []
    own = Training.step

    def compiles(*args):
        calls.append(1)
        if len(calls) == 1:
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
        return own(*args)

    monkeypatch.setattr(Training, "step", compiles)
    monkeypatch.setattr(model_measure, "SLOW_S", 0.0)
    found = measured(TEXT, "packed:sdpa", BASELINE)
    assert found["packed:sdpa", ""].measures["repeats"] > 1
    assert found[BASELINE, ""].measures["repeats"] == 1


def test_what_raises_while_timed_is_left_out(monkeypatch):
    calls = []

    def third_time(self, call, batches):
        packed = len(batches) == 1
        calls.append(packed)
        return packed and calls.count(True) > 2

    out_of_memory_at(monkeypatch, Training, "step", third_time)
    found = measured(LOG_NORMAL, "packed:sdpa", BASELINE, "serial:sdpa")
    assert {name: f.status for (name, _), f in found.items()} == {
        "packed:sdpa": "oom",
        BASELINE: "ok",
        "serial:sdpa": "ok",
    }
    assert "ms_p50" not in found["packed:sdpa", ""].measures


def test_an_error_that_takes_the_device_ends_the_case(monkeypatch):
    monkeypatch.setattr(model_measure, "is_lost", lambda error, device: True)

    def illegal(self, variant):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Training, "check", illegal)
    with pytest.raises(DeviceLost, match="packed:sdpa") as raised:
        SUITE.measure(TEXT, ["packed:sdpa", BASELINE], QUICK)
    (finding,) = raised.value.findings
    assert (finding.variant, finding.status) == ("packed:sdpa", "failed")
    assert finding.measures["fatal"]


def test_an_oracle_that_takes_the_device_is_no_variants_fault(monkeypatch):
    monkeypatch.setattr(model_measure, "is_lost", lambda error, device: True)
    out_of_memory_at(monkeypatch, Training, "alone", lambda *args: True)
    with pytest.raises(DeviceLost, match="the oracle of qwen3-tiny") as raised:
        SUITE.measure(TEXT, ["packed:sdpa"], QUICK)
    assert raised.value.findings == ()


def test_outcomes():
    assert outcome_of(Unsupported("no package")) == ("unsupported", "no package")
    assert outcome_of(NotImplementedError("no"))[0] == "unsupported"
    assert outcome_of(torch.OutOfMemoryError("big"))[0] == "oom"
    assert outcome_of(KeyError("x"))[0] == "failed"


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_at_once", [5, 4096])
def test_the_loss_is_that_of_transformers(rows_at_once, monkeypatch):
    monkeypatch.setattr(model_step, "LOSS_ROWS", rows_at_once)
    torch.manual_seed(0)
    lm = new_causal_lm("qwen3-tiny", None, torch.float64, torch.device("cpu"))
    ids = torch.randint(128, (1, 32))
    labels = Collection(ids, (12, 20)).labels
    # transformers shifts by itself: the label before which a document begins counts for nothing.
    theirs = ids.clone()
    theirs[:, [0, 12]] = IGNORE_INDEX
    lm(ids, labels=theirs).loss.backward()
    expected = {name: p.grad.clone() for name, p in lm.named_parameters()}
    lm.zero_grad()
    hidden = lm.base_model(ids).last_hidden_state
    hidden.backward(next_token_gradient(hidden, lm.lm_head.weight, labels, counted=30))
    # transformers takes the logits to fp32.
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-7)


def test_steps_leave_the_weights_alone():
    training = Training(TEXT, QUICK)
    training.prepare()
    before = [p.detach().clone() for p in training.lm.parameters()]
    batches = training.collection.serial()
    training.step(training.base, batches)
    assert all(p.grad.abs().max() > 0 for p in training.lm.parameters())
    assert all(map(torch.equal, before, training.lm.parameters()))
    states = training.optimizer.state.values()
    assert all(state["exp_avg_sq"].abs().max() > 0 for state in states)


def test_every_way_of_batching_holds_the_same_tokens_and_labels():
    lengths = (5, 1, 17, 9, 8)
    whole = Collection(torch.randint(1, 128, (1, 40)), lengths)
    for batches in (whole.packed({}), whole.padded(40), whole.serial()):
        ids = [b.tokens_of(b.inputs["input_ids"][..., None]) for b in batches]
        labels = [b.tokens_of(b.labels[..., None]) for b in batches]
        assert torch.equal(torch.cat(ids)[:, 0], whole.ids[0])
        assert torch.equal(torch.cat(labels)[:, 0], whole.labels[0])
    assert int((whole.labels != IGNORE_INDEX).sum()) == whole.counted == 35
    assert [len(b.labels) for b in whole.padded(40)] == [2, 2, 1]
    prompts = whole.prompts()
    real = prompts["attention_mask"].bool()
    assert torch.equal(prompts["input_ids"][real], whole.ids[0])
    assert real[:, -1].all()


def test_documents_sorted_by_length_need_fewer_pads(rows):
    lengths = (5, 1, 17, 9, 8)
    whole = Collection(torch.randint(1, 128, (1, 40)), lengths)
    order = whole.by_length()
    assert [lengths[index] for index in order] == [17, 9, 8, 5, 1]
    batches = whole.padded(40, order)
    assert [tuple(b.labels.shape) for b in batches] == [(2, 17), (3, 8)]
    outputs = torch.cat([b.tokens_of(b.inputs["input_ids"][..., None]) for b in batches])
    assert torch.equal(whole.in_order(outputs, order)[:, 0], whole.ids[0])
    of_case = {r.case["variant"]: r for r in rows if r.case["tokens"] == LOG_NORMAL.tokens}
    as_they_come, ordered = of_case[BASELINE], of_case["padded-sorted:transformers:sdpa"]
    assert LOG_NORMAL.tokens < ordered.measures["positions"] < as_they_come.measures["positions"]


def test_padded_batches_fit_where_the_row_fits():
    lengths = [300, 1, 1, 1000, 20, 700, 4]
    groups = list(padded_groups(lengths, 2026))
    assert [index for group in groups for index in group] == list(range(7))
    assert all(len(g) * max(lengths[i] for i in g) <= 2026 for g in groups)
    assert list(padded_groups([9], 3)) == [[0]]


def test_slow_steps_are_timed_less_often():
    budget, most = 3.0, 15
    assert repeats_for({"a": 0.01, "b": 0.5, "c": 2.0}, budget, most) == {"a": 15, "b": 6, "c": 3}


# --- cases ---------------------------------------------------------------------------------------


def test_lengths_are_those_of_the_files(tmp_path):
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text("one two three")
    long.write_text("a longer text of several words. " * 30)
    found = text_lengths(400, 0, [short, long])
    assert sum(found) == 400
    counts = {length: found.count(length) for length in set(found)}
    assert len(counts) <= 3  # the two texts', cut, and the last
    assert max(found) <= 50
    options = dataclasses.replace(QUICK, text=(short, long))
    (case,) = [case for case in SUITE.cases(options) if case.documents == "text"]
    assert case.source == "short.txt, long.txt"
    assert case.lengths(options.text) != case.lengths(None)
    assert case.data() != TEXT.data()  # a resumed run measures other texts anew


def test_a_row_of_texts_holds_many_documents():
    for tokens in (2048, 8192, 32_768):
        found = text_lengths(tokens, 0, None)
        assert (sum(found), len(found) >= 8) == (tokens, True)
        assert max(found) <= tokens / 8
    for case in SUITE.cases(ON_A_GPU):
        cut = case.tokens // 8 if (case.task, case.documents) == ("train", "text") else None
        assert case.longest_doc == cut


def test_prompts_are_a_batch_of_their_own(tmp_path):
    (case,) = [c for c in SUITE.cases(ON_A_GPU) if c.name == "qwen3-1.7b-generate-eager-8K-text"]
    found = case.lengths(None)
    assert (len(found), sum(found), min(found) > 0) == (16, 8192, True)
    assert len(set(found)) > 3  # padding has pads
    assert found == prompt_lengths(16, 8192, case.seed, None)
    text = tmp_path / "one.txt"
    text.write_text("one two three")
    found = prompt_lengths(5, 1001, 0, [text])  # fewer texts and tokens than asked for
    assert (len(found), sum(found), max(found) - min(found)) == (5, 1001, 1)
    with pytest.raises(ValueError, match="tokens must be at least the 16 prompts, got 9"):
        prompt_lengths(16, 9, 0, None)


def test_every_geometry_is_asked_for_every_context_and_every_fast_form():
    cases = [case for case in SUITE.cases(ON_A_GPU) if case.task == "train"]
    contexts = {case.geometry: set() for case in cases}
    for case in cases:
        contexts[case.geometry].add(case.tokens)
    assert set(map(frozenset, contexts.values())) == {frozenset({2048, 8192, 32_768, 131_072})}
    flash = [f"packed:transformers:flash_attention_{n}@cu_seq_lens" for n in (2, 3)]
    for case in cases:
        wanted = {*flash, "padded-sorted:transformers:sdpa"}
        if case.documents == "text" and case.geometry == WHOLE:
            wanted.add("packed:transformers:sdpa")  # at 128K too: its refusal is a row
        if case.mode == "compiled":
            wanted |= {"packed:fa3", "packed:flex"}
        assert wanted <= set(SUITE.variants(case, ON_A_GPU))


def test_cases_on_a_gpu_have_names_of_their_own():
    cases = SUITE.cases(ON_A_GPU)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert {case.tokens for case in cases} == {2048, 8192, 32_768, 131_072}
    assert {case.mode for case in cases} == {"eager", "compiled"}
    for case in cases:
        assert case.task == "train" or case.new_tokens > 1
        for variant in SUITE.variants(case, ON_A_GPU):
            batching, attention = split_variant(variant)
            assert style_of(attention)
            assert (case.task, batching) != ("generate", "packed")


def test_only_what_does_not_fit_is_checkpointed():
    of = {case.name: case.checkpointing for case in SUITE.cases(ON_A_GPU)}
    assert not of["qwen3-1.7b-train-eager-8K-text"]
    assert of["qwen3-1.7b-train-eager-128K-text"]
    assert not of["qwen3-1.7b-generate-eager-8K-text"]
    assert training_bytes("llama-3.1-8b", 0) == pytest.approx(8 * 8.03e9, rel=0.01)
    assert not of["qwen3-1.7b-train-compiled-8K-text"]
    assert of["llama-3.1-8b-train-eager-8K-text"]


def test_one_geometry_has_all_variants_and_the_longest_steps_few():
    cases = {case.name: case for case in SUITE.cases(ON_A_GPU)}
    counts = {name: len(SUITE.variants(case, ON_A_GPU)) for name, case in cases.items()}
    for geometry in MEASURED:
        assert f"{geometry}-generate-eager-8K-text" in cases
        few = geometry in ("qwen3-4b", "llama-3.1-8b")
        assert (counts[f"{geometry}-train-eager-128K-text"] < 5) == few
        whole = geometry == WHOLE
        assert (counts[f"{geometry}-train-eager-32K-text"] > 20) == whole
    assert [name for name in cases if "compiled" in name] == ["qwen3-1.7b-train-compiled-8K-text"]


def test_a_quick_run_on_a_gpu_tries_every_variant():
    """It is there to see that they work."""
    quick = Options(torch.device("cuda"), quick=True)
    tried = {name for case in SUITE.cases(quick) for name in SUITE.variants(case, quick)}
    whole = SUITE.cases(ON_A_GPU)
    assert {name for case in whole for name in SUITE.variants(case, ON_A_GPU)} <= tried


def test_a_variant_must_say_how_it_batches():
    with pytest.raises(ValueError, match="how its documents are batched"):
        SUITE.measure(TEXT, ["sdpa"], QUICK)
    with pytest.raises(ValueError, match="variant must be one of"):
        split_variant("packed:")


# --- tables and figures --------------------------------------------------------------------------


def test_tables_show_every_row(rows):
    text = SUITE.section(rows)
    assert "commit x" in text
    assert "| packed | `auto` (sdpa) |" in text
    assert "| packed | transformers `flash_attention_2` | unsupported (1) |" in text
    assert "layers checkpointed" in text
    assert "| padded | transformers `sdpa` |" in text
    assert "tokens generated for each" in text
    assert f"{TEXT.tokens:,} tokens" in text


def context(rows, tokens: int):
    """The text case at another context."""
    return [
        dataclasses.replace(row, case=row.case | {"tokens": tokens})
        for row in rows
        if row.case["documents"] == "text"
    ]


def test_a_column_a_context(rows):
    own = context(rows, 256) + context(rows, 1024)
    own = [
        dataclasses.replace(row, status="oom", reason="too big", measures={})
        if (row.case["variant"], row.case["tokens"]) == ("packed:auto", 1024)
        else row
        for row in own
    ]
    text = SUITE.section(own)
    assert "| batch | attention | 256 tokens | 1,024 tokens |" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| packed | `auto`")]
    assert line.endswith("| oom (2) |")
    assert "(2) too big" in text
    (base,) = [line for line in text.splitlines() if line.startswith("| padded | transformers")]
    assert base.count("1.00×") == 2


def of_run(rows, number: int, *variants: str):
    """The rows of these variants, as another run measured them."""
    run = {"started_utc": f"{number}", "git_commit": f"{number}" * 40, "git_dirty": False}
    return [
        dataclasses.replace(row, environment=row.environment | run)
        for row in rows
        if row.case["variant"] in variants
    ]


def lines_of(text: str, batch: str, attention: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(f"| {batch} | {attention}")
    ]


def test_runs_of_other_variants_of_a_case_have_a_column_each(rows):
    own = context(rows, 256)
    text = SUITE.section(
        of_run(own, 1, "packed:auto", BASELINE) + of_run(own, 2, "packed:transformers:sdpa")
    )
    header = "| 256 tokens, commit 2222222 | 256 tokens, commit 1111111 |"
    assert f"| batch | attention {header}" in text
    ((*_, later, earlier),) = lines_of(text, "packed", "`auto`")
    assert "×" in earlier
    assert not later
    ((*_, later, earlier),) = lines_of(text, "packed", "transformers `sdpa`")
    assert " · – · " in later, "compared with a run that is not its own"
    assert not earlier


def test_a_variant_measured_again_is_its_latest_runs_alone(rows):
    own = context(rows, 256)
    again = of_run(own, 2, "packed:auto", BASELINE)
    text = SUITE.section(of_run(own, 1, "packed:auto", BASELINE) + again)
    assert "| batch | attention | 256 tokens |" in text
    assert "commit 1111111" not in text
    text = SUITE.section(of_run(own, 1, "packed:auto", BASELINE) + again[:1])
    (again_at,) = lines_of(text, "packed", "`auto`")
    assert again_at[2]
    assert not again_at[3]


def test_machines_are_not_mixed(rows):
    other = [
        dataclasses.replace(row, environment=row.environment | {"gpu": "NVIDIA H200"})
        for row in context(rows, 256)
    ]
    text = SUITE.section(context(rows, 256) + other)
    assert text.count("| batch | attention | 256 tokens |") == 2


def test_figures_are_drawn_from_the_rows_alone(rows, tmp_path):
    refused = [dataclasses.replace(row, status="oom") for row in context(rows, 512)]
    drawn = SUITE.figures([*rows, *context(rows, 1024), *refused], tmp_path / "figures")
    assert [path.name for path in drawn] == [
        "model-qwen3-tiny-eager-text-cpu.png",
        "model-llama-tiny-eager-log-normal-cpu.png",
        "model-qwen3-tiny-compiled-uniform-cpu.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_one_context_alone_is_drawn_as_dots(rows, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(model_figures, "save_dots", lambda grid, path, **how: drawn.append(how))
    monkeypatch.setattr(model_figures, "save_lines", lambda grid, path, **how: drawn.append(how))
    SUITE.figures(context(rows, 256), tmp_path)
    SUITE.figures(context(rows, 256) + context(rows, 512), tmp_path)
    assert [how["xlabel"] for how in drawn] == ["tokens a second", "documents' tokens"]
    assert "256 tokens" in drawn[0]["title"]


@pytest.mark.parametrize("inches", [5, 17.8])
def test_titles_fit_their_figure(inches):
    title = f"{'what is shown; ' * 20}\nNVIDIA H200, {'a version, ' * 20}"
    figure = Figure(figsize=(inches, 2))
    series_figure._title(figure, title)
    extent = figure._suptitle.get_window_extent(FigureCanvasAgg(figure).get_renderer())
    assert extent.width <= figure.bbox.width
    assert figure._suptitle.get_text().split() == title.split()


def test_a_case_of_which_nothing_ran_has_a_table():
    environment = {"gpu": "G", "started_utc": "1"}
    found = [
        Row("model", TEXT.data() | {"variant": "packed:auto"}, "oom", "big", {}, environment),
        *(
            Row(
                "model",
                GENERATE.data() | {"variant": "padded:auto", "pass": pass_},
                "oom",
                "big",
                {},
                environment,
            )
            for pass_ in Generation.passes
        ),
    ]
    text = SUITE.section(found)
    assert text.count("oom (1)") == 2


def test_the_oracle_is_in_float64(monkeypatch):
    """fp32, on a GPU even with products in TF32, was called the oracle."""
    dtypes, inner = [], set()

    def alone(self, dtype):
        dtypes.append(dtype)
        return of_training(self, dtype)

    def attend(begin, query, *rest):
        inner.add(query.dtype)
        return of_oracle(begin, query, *rest)

    of_training, of_oracle = Training.alone, oracle._attend_from
    monkeypatch.setattr(Training, "alone", alone)
    monkeypatch.setattr(oracle, "_attend_from", attend)
    found = measured(dataclasses.replace(TEXT, dtype="bfloat16"), "packed:sdpa")
    assert dtypes == [torch.float64, torch.bfloat16]
    assert inner == {torch.float64}
    (finding,) = found.values()
    assert finding.status == "ok"
    assert finding.measures["oracle_dtype"] == "float64"


def test_the_oracle_of_a_long_document_is_that_of_whole_scores(monkeypatch):
    """A block of queries at a time, forward and backward, with and without a window."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, h, 20, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2))
    for window in (None, 5):
        found = []
        for elements in (2**26, 4 * 20 * 3):
            monkeypatch.setattr(oracle, "SCORE_ELEMENTS", elements)
            out, _ = oracle._attention(None, q, k, k, None, sliding_window=window)
            found.append((out, *torch.autograd.grad(out.sin().sum(), (q, k))))
        for whole, blocks in zip(*found, strict=True):
            torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=1e-12)


def test_errors_are_told_with_every_oracle_that_they_are_against(rows):
    """A group has the rows of several runs, and one of them may be older."""
    rows = [row for row in rows if row.case["task"] == "train" and row.case["mode"] == "compiled"]
    (one, *rest) = [row for row in rows if row.status == "ok"]
    measures = {name: x for name, x in one.measures.items() if name != "oracle_dtype"}
    again = dataclasses.replace(one, measures=measures | {"oracle_in_tf32": True})
    assert "alone, in float64: outputs" in model_tables.section([one, *rest])
    both = model_tables.section([again, *rest])
    assert "alone, in float32 with products in TF32 or in float64: outputs" in both
