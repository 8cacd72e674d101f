"""Suite embeddings, small on the CPU: vectors are checked before a speed counts."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import flexvarlen as fv
from flexvarlen.bench.suites.model import embeddings
from flexvarlen.bench.suites.model.embeddings import SUITE, TextsCase, random_texts
from flexvarlen.report.records import Record, read_records
from flexvarlen.runner.run import RunRequest, run_suite
from flexvarlen.runner.suite import Options

OPTIONS = Options(torch.device("cpu"), quick=True, say=lambda line: None)


def measured(folder, *variants):
    out = folder / "records.jsonl"
    run_suite(SUITE, replace(OPTIONS, variants=variants or None), RunRequest(out))
    return {record.case["variant"]: record for record in read_records([out])}


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


def test_the_fastest_stand_first():
    speeds = {
        "embed": 9.0,
        **{f"sentence-transformers:sdpa@{n}": float(i) for i, n in enumerate((32, 64, 128), 1)},
    }
    records = [
        Record(
            "embeddings",
            {**TextsCase(texts=9).data(), "variant": name},
            "ok",
            None,
            measures(speed),
        )
        for name, speed in speeds.items()
    ]
    lines = SUITE.section(records).splitlines()[4:8]
    assert [line.split(" | ")[1] for line in lines] == ["–", "128", "64", "32"]
    assert lines[2].startswith("| sentence-transformers, `sdpa` | 64 | 2 |")


def measures(speed):
    numbers = ("texts", "seconds", "tokens_per_s", "peak_mib", "lowest_cosine")
    more = ("plain_lowest_cosine", "highest_cosine_of_two_texts")
    return {"texts_per_s": speed, **dict.fromkeys((*numbers, *more), 1)}
