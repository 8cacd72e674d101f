"""Suite embeddings, small on the CPU: vectors are checked before a speed counts."""

from __future__ import annotations

import sys

import pytest

import flexvarlen as fv
from flexvarlen.bench.suites.model import embeddings
from flexvarlen.bench.suites.model.embeddings import SUITE, TextsCase, random_texts
from tests.bench.quick import records_of


def measured(folder, *variants):
    return {record.case["variant"]: record for record in records_of(SUITE, folder, *variants)}


def test_every_variant_has_a_record_and_a_line(tmp_path):
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    records = measured(tmp_path)
    assert {r.status for r in records.values()} == {"ok"}
    assert set(records) == set(embeddings.ON_CPU)
    assert all(r.measures["lowest_cosine"] > 0.9999 for r in records.values())
    assert "| `fv.embed` | – |" in SUITE.section(list(records.values()))


def test_vectors_of_other_texts_are_wrong(tmp_path, monkeypatch):
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    embed = fv.embed
    monkeypatch.setattr(fv, "embed", lambda *a, **k: embed(*a, **k).roll(1, 0))
    record = measured(tmp_path, "embed")["embed"]
    assert record.status == "wrong"
    assert "cosine" in record.reason


def test_without_sentence_transformers_all_is_unsupported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    records = measured(tmp_path)
    assert {r.status for r in records.values()} == {"unsupported"}
    assert all("sentence-transformers>=6" in r.reason for r in records.values())
    assert "unsupported: sentence-transformers" in SUITE.section(list(records.values()))


def test_lengths_of_the_texts():
    texts = random_texts(TextsCase(texts=4000), 1000)
    words = [len(text.split()) for text in texts]
    assert 0.9 < sum(words) / len(words) / 64 < 1.05  # long ones are cut
    assert max(words) <= 510
    assert texts == random_texts(TextsCase(texts=4000), 1000)
