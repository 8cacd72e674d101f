"""Suite scaling-ranks: two ranks on the CPU; checks that can fail."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexvarlen.bench.suites.training import ranks, ranks_child, scaling_ranks, sequence
from flexvarlen.bench.suites.training.scaling_ranks_tables import efficiency_of
from flexvarlen.bench.suites.training.trainer import fresh_accelerate
from flexvarlen.parallel.plan import plan_row
from flexvarlen.report.records import Record
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.run import record_case
from flexvarlen.runner.suite import Finding, Options

CPU = torch.device("cpu")
CASES = {case.name: case for case in scaling_ranks.SUITE.cases(Options(CPU, quick=True))}


def measured(name, variant, **changes):
    return ranks_child.measured(variant, replace(CASES[name], **changes), CPU)


def recorded(name, finding):
    case = record_case(CASES[name], finding)
    return Record("scaling-ranks", case, finding.status, finding.reason, finding.measures, {})


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("name", "variants", "words"),
    [
        ("trainer-1", ("trainer", "sft"), ("a row of 96 tokens over all GPUs", "SFTTrainer | 1 ")),
        ("training-1-shuffled", ("ddp", "fsdp2"), ()),
    ],
)
def test_both_variants_take_the_same_steps(name, variants, words):
    with fresh_accelerate():
        found = [Finding(variant, *measured(name, variant)) for variant in variants]
    assert [each.status for each in found] == ["ok", "ok"]
    for loss in ("first_loss", "last_loss"):
        assert found[0].measures[loss] == pytest.approx(found[1].measures[loss], rel=1e-5)
    text = scaling_ranks.SUITE.section([recorded(name, each) for each in found])
    assert all(word in text for word in words)


def test_a_launch_brings_the_finding_of_its_ranks():
    """By torchrun, the child and its file."""
    found = scaling_ranks.launch(CASES["training-2-shuffled"], "ddp", CPU)
    assert (found.variant, found.status, found.reason) == ("ddp", "ok", None)
    assert found.measures["tokens_per_s"] > 0


def test_a_rank_that_fails_is_reported():
    said = "[rank0]: Traceback (most recent call last):\n[rank0]: KeyError: 'x'\nE ChildFailedError"
    assert scaling_ranks._error_of(said + ": ranks_child FAILED") == "[rank0]: KeyError: 'x'"
    assert "without a finding" in scaling_ranks._error_of("")


class LimitedOnceRanksRun(subprocess.Popen):
    """The limit is over when both ranks run, however long they take to start."""

    def communicate(self, input=None, timeout=None):
        while timeout and len([*Path(os.environ["RANKS"]).iterdir()]) < 2:
            assert self.poll() is None, super().communicate()
            time.sleep(0.1)
        return super().communicate(input, timeout)


def test_ranks_live_on_after_the_limit(monkeypatch, tmp_path):
    child = "import os, pathlib, time\npathlib.Path(os.environ['RANKS'], str(os.getpid())).touch()"
    (tmp_path / "sleeping_rank.py").write_text(f"{child}\ntime.sleep(600)")
    (tmp_path / "ranks").mkdir()
    monkeypatch.setenv("RANKS", str(tmp_path / "ranks"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(scaling_ranks, "CHILD", "sleeping_rank")
    monkeypatch.setattr(scaling_ranks, "LIMIT_S", 0.5)
    monkeypatch.setattr(subprocess, "Popen", LimitedOnceRanksRun)
    with pytest.raises(subprocess.TimeoutExpired):
        scaling_ranks.launch(CASES["sequence-2-cut"], "sequence", CPU)
    ranks = [int(path.name) for path in (tmp_path / "ranks").iterdir()]
    assert len(ranks) == 2
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def test_too_few_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Unsupported, match="needs 2 GPUs, has 1"):
        scaling_ranks.launch(CASES["sequence-2-cut"], "sequence", torch.device("cuda"))


def test_each_row_is_taken_once_in_either_order():
    lengths = [[90], [30, 30], [10] * 9, [50, 40]]
    for order in ("shuffled", "balanced"):
        case = replace(CASES["training-2-shuffled"], order=order)
        steps = ranks_child.order_of(case, lengths)
        assert sorted(row for step in steps for row in step) == [0, 1, 2, 3]
        assert {len(step) for step in steps} == {2}


def test_a_loss_that_is_not_finite(process_group, monkeypatch):
    monkeypatch.setattr(ranks, "LEARNING_RATE", 1e30)  # the first loss is still right
    status, reason, measures = measured("training-1-shuffled", "ddp")
    assert (status, reason) == ("wrong", "a loss is not finite")
    assert "tokens_per_s" not in measures


def test_a_sequence_that_learns_from_half_the_row_is_wrong(process_group, monkeypatch):
    pack = sequence.texts.pack

    def half(tokens, rows):
        def collate(documents):
            batch = pack(tokens, rows)(documents)
            batch["labels"][:, 48:] = -100
            return batch

        return collate

    monkeypatch.setattr(sequence.texts, "pack", half)
    status, reason, _ = measured("sequence-2-cut", "sequence", ranks=1)
    assert status == "wrong"
    assert "in the first step" in reason


@pytest.mark.parametrize("loss", [1.01, float("nan")])
def test_a_timed_row_with_another_loss_than_on_one_rank_is_wrong(process_group, monkeypatch, loss):
    losses = {"loss": loss, "single_loss": 1.0}
    monkeypatch.setattr(sequence, "_against_one", lambda *_: losses)
    status, reason, measures = measured("sequence-2-cut", "sequence", ranks=1)
    assert (status, reason) == ("wrong", "the loss over all ranks is not one rank's")
    assert measures["single_loss"] == 1.0


def test_a_row_over_two_ranks_is_timed_against_one(ranks):
    """Of a row whose documents all fit nothing is exchanged."""
    found = Finding("sequence", *ranks.run(measured, "sequence-2-whole", "sequence")[0])
    assert found.status == "ok"
    assert found.measures["cut_documents"] == 0
    assert found.measures["efficiency"] > 0
    assert found.measures["loss"] == pytest.approx(found.measures["single_loss"], rel=1e-5)
    text = scaling_ranks.SUITE.section([recorded("sequence-2-whole", found)])
    assert "| 160 in 16 documents, longest 20 | 2 | documents | 0 |" in text


def test_the_rows_of_the_measures():
    """10 documents of 65,536 tokens, and documents that are whole on 2 and on 4 ranks."""
    case = {case.name: case for case in scaling_ranks.SUITE.cases(Options(CPU, quick=False))}
    for count in (2, 4):
        cut, whole = (
            list(map(len, sequence._documents(case[f"sequence-{count}-{row}"], [[1]])))
            for row in ("cut", "whole")
        )
        assert (len(cut), max(cut), sum(cut)) == (10, 13_657, 65_536)
        assert plan_row(cut, count, total_tokens=65_536).cut_documents
        assert plan_row(whole, count, total_tokens=65_536).cut_documents == ()


def test_efficiency_is_against_one_gpu(tmp_path):
    def record(ranks, order, rate):
        case = {"variant": "ddp", "order": order, "ranks": ranks, "geometry": "qwen3-1.7b"}
        case |= {"layers": 28, "backend": "auto", "dtype": "bfloat16", "checkpointing": False}
        measures = {"tokens_per_s_rank": rate}
        return Record("scaling-ranks", case, "ok", None, measures)

    records = [record(1, "shuffled", 10.0), record(2, "balanced", 9.0)]
    assert efficiency_of(records[1], records[1:]) is None
    assert efficiency_of(records[1], records) == 0.9
    (path,) = scaling_ranks.SUITE.figures(records, tmp_path)
    assert path.name == "scaling-ranks.png"
    assert scaling_ranks.SUITE.figures(records[1:], tmp_path) == []
