"""The suite "model": what is wrong is not timed; rates count no padding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flexvarlen.bench.suites.model.cases import ModelCase, split_variant
from flexvarlen.bench.suites.model.geometries import GEOMETRIES, text_lengths
from flexvarlen.bench.suites.model.whole_model import SUITE, Training
from flexvarlen.verify.experiment import experiment, inputs
from flexvarlen.verify.experiment.variant import make_variant
from tests.bench.quick import ON_A_GPU, QUICK, records_of
from tests.slow import with_slow

TEXT, LOG_NORMAL, COMPILED = SUITE.cases(QUICK)


def measured(case, *variants):
    return {f.variant: f for f in SUITE.measure(case, variants, QUICK)}


# --- what is measured ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    # Compiled rows: test_bench_compile.py.
    with_slow([TEXT, LOG_NORMAL, COMPILED], [COMPILED]),
    ids=lambda case: case.name,
)
def test_every_variant_has_a_record_and_throughput_counts_no_padding(case, tmp_path):
    records = records_of(SUITE, tmp_path, cases=f"^{case.name}$")
    assert {r.case["variant"] for r in records} == {*SUITE.variants(case, QUICK)}
    assert {r.status for r in records} <= {"ok", "unsupported"}
    for r in records:
        m = r.measures
        if r.status == "unsupported":
            assert r.case["variant"].endswith("flash_attention_2")
            continue
        assert m["tokens_per_s"] == pytest.approx(r.case["tokens"] / m["ms_p50"] * 1e3)
        assert (m["graphs"] > 0) == (r.case["mode"] == "compiled")
        padded = r.case["variant"].startswith("padded")
        assert (m["positions"] > r.case["tokens"]) == (padded and r.case["documents"] != "text")


def test_a_variant_that_leaks_is_wrong_and_not_timed(monkeypatch):
    def leaking(name, *args, **options):
        made = make_variant(name, *args, **options)
        if not made.theirs:
            return made
        monkeypatch.setattr(type(made), "inputs", lambda self, row: {"use_cache": False})
        return made

    monkeypatch.setattr(experiment, "make_variant", leaking)
    found = measured(TEXT, "packed:sdpa", "packed:transformers:sdpa")
    leaked = found["packed:transformers:sdpa"]
    assert (leaked.status, found["packed:sdpa"].status) == ("wrong", "ok")
    assert "outputs" in leaked.reason
    assert "ms_p50" not in leaked.measures


def test_a_short_document_that_leaks_in_a_long_row_is_wrong(monkeypatch):
    monkeypatch.setattr(ModelCase, "lengths", lambda self, files: [1023, 1, 1024])
    training = Training(dataclasses.replace(TEXT, tokens=2048, dtype="bfloat16"), QUICK)
    assert training.check("packed:sdpa").wrong is None
    training.row = dataclasses.replace(training.row, lengths=(1024, 1024))
    found = training.check("packed:sdpa")
    assert found.wrong.startswith("outputs")
    assert found.measures["error_worst_document"] > 0.1


def test_labels_of_the_next_document_are_wrong(monkeypatch):
    """A document's last token learns the next one's first: outputs are right, gradients not."""
    packed = inputs.packed

    def across(row, *args):
        (forward,) = packed(row, *args)
        return [dataclasses.replace(forward, labels=row.input_ids.roll(-1, dims=1))]

    monkeypatch.setattr(inputs, "packed", across)
    found = measured(LOG_NORMAL, "packed:sdpa")["packed:sdpa"]
    assert found.status == "wrong"
    assert "gradient" in found.reason


def test_steps_leave_the_weights_alone_and_the_optimizer_works():
    training = Training(TEXT, QUICK)
    before = [p.detach().clone() for p in training.model.parameters()]
    checked = training.check("serial:sdpa")
    checked.call()
    assert all(p.grad.abs().max() > 0 for p in training.model.parameters())
    assert all(map(torch.equal, before, training.model.parameters()))
    assert all(s["exp_avg_sq"].abs().max() > 0 for s in training.optimizer.state.values())


# --- batches and documents -----------------------------------------------------------------------


def test_a_variant_must_say_how_it_batches():
    with pytest.raises(ValueError, match=r"variant must be one of .*, got 'sdpa'; say how"):
        split_variant("sdpa")


def test_a_row_of_texts_holds_many_documents():
    lengths = text_lengths(4096, 6, None)
    assert sum(lengths) == 4096
    assert max(lengths) == 4096 // 8
    assert lengths == text_lengths(4096, 6, None) != text_lengths(4096, 7, None)


def test_only_what_does_not_fit_is_checkpointed():
    found = {(c.geometry, c.tokens): c.checkpointing for c in SUITE.cases(ON_A_GPU)}
    assert not any(kept for (_, tokens), kept in found.items() if tokens == 2048)
    assert all(kept for (_, tokens), kept in found.items() if tokens == 131_072)
    assert set(GEOMETRIES) >= {geometry for geometry, _ in found}
