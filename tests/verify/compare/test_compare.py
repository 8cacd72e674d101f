"""`compare` finds what is wrong, calls right what is right, and leaves the model alone."""

import copy
import importlib
import itertools
import math
import re
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache
from transformers.models.auto import AutoModelForCausalLM

import flexvarlen as fv
from flexvarlen.report.records import read_records
from flexvarlen.verify.compare import Report
from flexvarlen.verify.compare import compare as run_compare
from flexvarlen.verify.compare.report import BASELINE
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.models import GEOMETRIES, build_model
from tests.forms import given
from tests.planted import plant, with_gradient
from tests.slow import with_slow
from tests.tiny_models import config_of, new_model, padded_rows, two_rows
from tests.verify.planted import LENGTHS, TOKENS, larger_gradient, nan, new_batch, raising

pytestmark = pytest.mark.usefixtures("timed_briefly")


@pytest.fixture(scope="module")
def llama():
    return build_model("llama")[0]


@pytest.fixture(scope="module")
def report(llama, timed_briefly):
    return run_compare(llama, new_batch(), packings=2, name="llama tiny")


def compare_sdpa(model, **options):
    """The measures of the backend that bugs are planted in."""
    report = run_compare(model, new_batch(), "sdpa", **{"packings": 0, **options})
    return report.record("sdpa").measures


# ---- what is right ----


def test_every_backend_has_its_record(report):
    names = [record.case["variant"] for record in report.records]
    assert names == [BASELINE, *fv.BACKENDS, "auto", "transformers:sdpa", CACHED]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU more is usable")
def test_missing_backends_say_what_to_do(report):
    for name in ("varlen", "fa2"):
        record = report.record(name)
        assert (record.status, record.measures) == ("unsupported", {})
        assert record.reason == fv.why_not(name, needs_grad=False)
    flex = report.record("flex")
    assert "backward" in flex.reason
    assert report.verdict("flex") == "right (forward)"
    assert "gradient_max" not in flex.measures


@pytest.mark.parametrize("name", ["reference", "sdpa", "auto"])
def test_right_backend_is_right_in_all_measures(report, name):
    m = report.record(name).measures
    assert (m["verdict"], m["why"]) == ("right", None)
    assert 0 < m["logits_max"] <= m["logits_limit"] < 1e-3
    assert m["loss_error"] < 1e-5
    assert m["gradient_max"] < 1e-4
    assert m["worst_gradient_ratio"] <= 1
    assert m["leaked_documents"] == m["leaked_outputs"] == m["leaked_gradients"] == 0
    assert m["backward_repeats"]
    assert m["argmax_agreement"] == 1
    assert 0 < m["repacked_logits_max"] <= m["repacked_logits_limit"]
    assert (m["graph_breaks"], m["recompiles"], m["other_packings"]) == (0, 0, 2)
    assert m["ms_p20"] <= m["ms_p50"] <= m["ms_p80"]
    assert m["tokens_per_s"] == pytest.approx(TOKENS / m["ms_p50"] * 1e3)


CACHED = "transformers:sdpa@default_cache"


def test_plain_transformers_with_its_default_cache_is_shown_to_leak(report):
    assert report.verdict("transformers:sdpa") == "right"
    assert report.sentence() == (
        "Right, and no document leaks: reference, sdpa, flex, auto, transformers:sdpa on llama "
        f"tiny; leaks: {CACHED} on llama tiny."
    )
    m = report.record(CACHED).measures
    assert m["verdict"] == "leaks"
    assert m["leaked_outputs"] == len(LENGTHS) - 1  # all but the first
    assert m["leaked_gradients"] >= m["leaked_outputs"] - 1
    assert m["logits_max"] > 1
    assert report.passed  # theirs is not ours to fail
    # The logits of all but the first change; the first's tokens get gradients of the others.
    numbers = {int(number) for number in re.findall(r"\d+", m["why"])}
    assert len(numbers) == m["leaked_documents"] == len(LENGTHS)


def test_low_precision_is_compared_with_a_baseline_of_its_own(llama):
    m = compare_sdpa(llama, dtype=torch.bfloat16)
    assert (m["verdict"], m["why"]) == ("right", None)
    assert m["logits_max"] > 1e-3
    assert llama.dtype == torch.float32


@pytest.mark.parametrize("kind", with_slow(["qwen3_5_text", "mamba2"], ["mamba2"]))
def test_hybrid_is_right_and_transformers_leaks(kind):
    torch.manual_seed(0)
    config = config_of(kind)
    model = AutoModelForCausalLM.from_config(config)
    batch = new_batch((9, 1, 12), config.vocab_size)
    found = run_compare(model, batch, "sdpa,transformers:sdpa", packings=1)
    assert found.verdict("sdpa") == "right"
    assert found.verdict("transformers:sdpa") == ("unsupported" if kind == "mamba2" else "leaks")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["qwen3_vl", "internvl"])
def test_text_of_a_model_with_a_vision_tower(kind):
    report = run_compare(new_model(kind), new_batch(vocabulary=80), f"sdpa,{CACHED}", packings=0)
    assert report.record("sdpa").measures["verdict"] == "right"
    assert report.record("sdpa").measures["gradient_max"] > 0
    assert report.record(CACHED).measures["leaked_documents"] > 0


@pytest.mark.gpu
def test_hybrid_is_right_on_a_gpu():
    """Its reference and its baseline run no kernel of fla, which has no fp64."""
    model = build_model("qwen3_5_text", device="cuda", dtype=torch.bfloat16)[0]
    row = new_batch()
    batch = PackedBatch(row.input_ids.cuda(), row.lengths)
    found = run_compare(model, batch, "flex", packings=1).record("flex")
    assert (found.measures["verdict"], found.measures["why"]) == ("right", None)


def test_forward_of_one_document_leaks_or_measures_gradients(llama):
    row = new_batch((12,))
    m = run_compare(llama, row, "sdpa", packings=1, train=False).record("sdpa").measures
    assert (m["passes"], m["verdict"]) == ("forward", "right")
    assert "gradient_max" not in m
    assert m["leaked_gradients"] is None


# ---- what is wrong ----


def test_leak_below_rounding_into_the_last_document_is_reported(llama, monkeypatch):
    """A bit is enough: what drowns in the tolerance of the errors is still a leak."""

    def change(attend, q, k, v, *rest):
        out, lse = attend(q, k, v, *rest)
        others, last = out.split([TOKENS - LENGTHS[-1], LENGTHS[-1]])
        return torch.cat([others, last + v[-LENGTHS[-1] - 1].max() * 1e-6]), lse

    plant(monkeypatch, change)
    m = compare_sdpa(llama, train=False)
    assert (m["verdict"], m["leaked_outputs"]) == ("leaks", 1)
    assert m["why"].startswith("the logits of document 4 change with other documents' tokens")


def test_leak_in_the_backward_alone_is_reported(llama, monkeypatch):
    def leak(gradient, out):
        gradient[0] += gradient[-2] * 1e-3  # the last token has no loss
        return gradient

    def change(attend, *args):
        out, lse = attend(*args)
        return with_gradient(leak)(out), lse

    plant(monkeypatch, change)
    row = compare_sdpa(llama)
    assert row["verdict"] == "leaks"
    assert (row["leaked_outputs"], row["leaked_gradients"]) == (0, 1)
    assert "token gradients" in row["why"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("other", range(6, 9))
def test_bits_that_do_not_come_again_are_no_leak(llama, monkeypatch, other):
    calls = itertools.count(1)
    # One call's gradients differ by a bit, as atomic additions make them
    shaky = with_gradient(lambda gradient, out: gradient * (1 + (next(calls) == other) * 2**-20))

    def change(attend, *args):
        out, lse = attend(*args)
        return shaky(out), lse

    plant(monkeypatch, change)
    row = compare_sdpa(llama)
    assert next(calls) > other
    assert (row["verdict"], row["leaked_documents"]) == ("right", 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda attend, q, *rest: attend(q * 1.001, *rest), "logits: largest"),
        (larger_gradient, "the gradient of"),
    ],
)
def test_wrong_numbers_are_wrong_but_no_leak(llama, monkeypatch, change, words):
    plant(monkeypatch, change)
    m = compare_sdpa(llama)
    assert (m["verdict"], m["leaked_documents"]) == ("wrong", 0)
    assert m["why"].startswith(words)
    assert not m["worst_gradient_ratio"] <= 1


def test_nan_is_wrong(llama, monkeypatch):
    plant(monkeypatch, nan)
    assert compare_sdpa(llama, train=False)["verdict"] == "wrong"


def test_boundaries_kept_from_the_first_batch_are_found_on_another_packing(llama, monkeypatch):
    kept = []

    def change(attend, q, k, v, sinks, call, mask, plan):
        kept.append(plan)
        return attend(q, k, v, sinks, call, mask, kept[0])

    plant(monkeypatch, change)
    row = compare_sdpa(llama, packings=1)
    assert row["verdict"] == "wrong"
    assert row["why"].startswith("on another packing")


@pytest.mark.parametrize(
    ("error", "status", "passed"),
    [
        (RuntimeError("kernel died"), "failed", False),
        (NotImplementedError("no such head_dim"), "unsupported", True),
        pytest.param(torch.OutOfMemoryError("no room"), "oom", True, marks=pytest.mark.slow),
    ],
)
def test_backend_that_raises_has_a_record_and_the_others_theirs(
    llama, monkeypatch, error, status, passed
):
    plant(monkeypatch, raising(error))
    found = run_compare(llama, new_batch((6, 4)), "sdpa,reference", packings=0, train=False)
    assert found.record("sdpa").status == status
    assert str(error) in found.record("sdpa").reason
    assert found.verdict("reference") == "right"
    assert found.passed == passed


# ---- the model, the batch, the options ----


@pytest.mark.parametrize("patch", with_slow([None, "reference"], ["reference"]))
def test_model_is_left_as_it_was(patch):
    model = build_model("qwen3")[0].eval()
    if patch:
        fv.patch_model(model, patch)
    before = copy.deepcopy(model.state_dict())
    implementation = model.config._attn_implementation
    compare_sdpa(model)
    assert model.config._attn_implementation == implementation
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert ("forward" in model.__dict__) == bool(patch)


DOCUMENTS = [new_batch((n,)).input_ids[0].tolist() for n in LENGTHS]
COLLATED = fv.PackedCollator(total_tokens=128)(DOCUMENTS)
FLASH = fv.PackedCollator(boundaries="cu_seq_lens")(DOCUMENTS)


def chosen(batch, *names):
    return {name: batch[name] for name in names}


def rows(form, batch):
    return {"input_ids": batch.ids, "use_cache": False, **given(form, batch)}


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        pytest.param(COLLATED, "right", id="collator"),
        pytest.param(FLASH, "right", id="collator, cu_seq_lens", marks=pytest.mark.slow),
        pytest.param(
            chosen(COLLATED, "input_ids", "position_ids"),
            "leaks",
            id="default cache",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            COLLATED | {"attention_mask": torch.ones_like(COLLATED["input_ids"])},
            "leaks",
            id="mask of ones",
        ),
        pytest.param(
            {name: x for name, x in FLASH.items() if name != "position_ids"},
            "leaks",
            id="cu_seq_lens alone",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            chosen(COLLATED, "input_ids", "packed_layout"),
            "right",
            id="layout alone",
            marks=pytest.mark.slow,
        ),
        pytest.param(rows("padding_mask", padded_rows(left=False)), "right", id="padded rows"),
        pytest.param(
            rows("position_ids", two_rows()), "right", id="two rows", marks=pytest.mark.slow
        ),
    ],
)
def test_plain_transformers_runs_other_than_the_batch_says(llama, batch, expected):
    """A mask of ones or the default cache joins the documents, a padding mask does not."""
    before = {name: x.clone() for name, x in batch.items() if isinstance(x, torch.Tensor)}
    found = run_compare(llama, batch, "sdpa,transformers:sdpa", packings=0, train=False)
    assert found.verdict("sdpa") == "right"
    assert found.verdict("transformers:sdpa") == expected
    assert all(torch.equal(batch[name], x) for name, x in before.items())


def test_forms_of_a_variant_are_named_and_leak_by_themselves(llama):
    names = {"default_cache": "leaks", "mask_of_ones": "leaks", "cu_seq_lens_alone": "leaks"}
    names |= {"document_ids": "leaks", "position_ids": "right", "both": "right"}
    asked = {f"transformers:sdpa@{form}": verdict for form, verdict in names.items()}
    found = run_compare(llama, COLLATED, list(asked), packings=0, train=False)
    assert {name: found.verdict(name) for name in asked} == asked


def test_a_cache_in_the_batch_is_refused(llama):
    inputs = new_batch().inputs() | {"past_key_values": DynamicCache()}
    with pytest.raises(ValueError, match="batch must hold no past_key_values, got DynamicCache"):
        run_compare(llama, inputs, "sdpa")


def test_unverified_model_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(NotImplementedError, match="gpt2"):
        run_compare(model, new_batch((4, 4), 16), "sdpa")


def test_progress_reaches_its_end(llama):
    seen = []
    run_compare(
        llama,
        new_batch(),
        "sdpa,fa2",
        packings=1,
        progress=lambda done, total, what: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_references_are_in_the_peaks_of_variants(llama, monkeypatch):
    """They are freed before variants run for their memory and time."""
    module, made, alive = importlib.import_module("flexvarlen.verify.compare.compare"), [], []
    of = module.reference_of

    def reference_of(*args, **options):
        found = of(*args, **options)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(module, "reference_of", reference_of)
    monkeypatch.setattr(module, "free", lambda *_: alive.append([each() for each in made]))
    run_compare(llama, new_batch((6, 4)), "sdpa", packings=1, train=False)
    assert alive == [[None, None]]


def test_every_geometry_is_a_valid_configuration():
    from transformers import AutoConfig

    for family, sizes in GEOMETRIES.items():
        for geometry in sizes.values():
            config = AutoConfig.for_model(family, **geometry)
            assert config.num_attention_heads % config.num_key_value_heads == 0
    types = AutoConfig.for_model("qwen3_5_text", **GEOMETRIES["qwen3_5_text"]["tiny"]).layer_types
    assert types == ["linear_attention", "full_attention"]


def test_local_folder_is_loaded(tmp_path, llama):
    llama.save_pretrained(tmp_path)
    model, tokenizer = build_model(str(tmp_path))
    assert tokenizer is None
    ids = new_batch().input_ids
    assert torch.equal(model(ids).logits, llama.eval()(ids).logits)


# ---- the report ----


def test_saved_report_is_read_back(report, tmp_path):
    paths = report.save(tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["records.jsonl", "table.md", "compare.png"]
    assert Report(tuple(read_records(paths[:1]))).table() == report.table()
    assert paths[2].stat().st_size > 10_000
    assert "Right, and no document leaks" in paths[1].read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU more is usable")
def test_kernels_that_need_a_gpu_share_one_line(report):
    (line,) = (note for note in report.notes() if note.startswith("Not run"))
    assert all(name in line for name in ("varlen", "fa2", "fa3", "flex_fa4"))
    assert "varlen" not in {line[0] for line in report.table().lines}


def leaking(records, name):
    leaks = {"verdict": "leaks"}
    return tuple(
        replace(r, measures=r.measures | leaks) if r.case["variant"] == name else r for r in records
    )


def test_failure_is_in_the_sentence_and_in_passed(report):
    failed = Report(leaking(report.records, "sdpa"))
    assert not failed.passed
    assert "Not right: llama tiny sdpa: leaks" in failed.sentence()
    assert failed.sentence() in str(failed)
    untimed = Report((replace(report.record("sdpa"), status="oom"),))
    assert (untimed.passed, untimed.verdict("sdpa")) == (True, "right")


def test_models_that_leak_are_named_apart_from_those_that_are_right(report):
    other = [
        replace(r, case=r.case | {"model": "hybrid"})
        for r in leaking(report.records, "transformers:sdpa")
        if r.case["variant"] != "reference"
    ]
    assert Report((*report.records, *other)).sentence() == (
        "Right, and no document leaks: reference, transformers:sdpa on llama tiny; sdpa, flex, "
        "auto on llama tiny, hybrid; leaks: "
        f"{CACHED} on llama tiny, hybrid; transformers:sdpa on hybrid."
    )


@pytest.mark.filterwarnings("error")
def test_picture_has_room_for_errors_that_a_log_axis_has_not(report, tmp_path):
    errors = itertools.cycle([0.0, math.nan, math.inf])
    records = tuple(
        replace(r, measures=r.measures | {"logits_max": next(errors)}) if r.measures else r
        for r in report.records
    )
    assert len(Report(records).save(tmp_path)) == 3


def test_no_picture_where_nothing_ran(report, tmp_path):
    refused = tuple(r for r in report.records if r.status == "unsupported")
    assert len(Report(refused).save(tmp_path)) == 2
