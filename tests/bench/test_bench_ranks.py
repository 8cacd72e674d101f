"""flexvarlen.bench.training.scaling_ranks: two ranks on the CPU; checks that can fail."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing

from flexvarlen.bench.model.cases import training_bytes
from flexvarlen.bench.report import report, section_of
from flexvarlen.bench.training import ranks, scaling_ranks, sequence, ulysses
from flexvarlen.bench.training.scaling_ranks_tables import efficiency_of
from flexvarlen.bench.training.ulysses import Answer, Inputs
from flexvarlen.rows import Row, read_rows
from tests.bench.counted_operators import CountedOperators
from tests.bench.few_texts import few_texts, read_few

__all__ = ["few_texts"]  # a fixture of each module

WORLD = 2
TEXTS = "--device cpu --geometry qwen3-tiny --tokens 96 --rows 4 --document 160 --steps 2"
FASTER = 10_000  # than the others' the clock of rank 1 runs


def three_runs(rank, ports, out):
    """A rank of two runs, one after the other, on one file; and of one that rank 1 finds wrong."""
    sizes = "--warmup 1 --row 256 --mean 60 --heads 4 --kv-heads 2 --head-dim 16 --repeats 1"
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1")
    with pytest.MonkeyPatch.context() as patch:
        read_few(patch)
        if rank == 1:
            clock = SimpleNamespace(perf_counter=lambda: FASTER * time.perf_counter())
            patch.setattr(sequence, "time", clock)
        for port, count in zip(ports, (6, 0), strict=False):
            patch.setenv("MASTER_PORT", str(port))
            rows = scaling_ranks.main([*f"{TEXTS} {sizes}".split(), "--out", out])
            assert len(rows) == count
        if rank == 1:
            patch.setattr(sequence.FirstStep, "check", finds_it_wrong)
        patch.setenv("MASTER_PORT", str(ports[2]))
        (row,) = scaling_ranks.main([*TEXTS.split(), "--what", "sequence"])
    verdict_on(out, rank).write_text(f"{row.status}: {row.reason}")


def finds_it_wrong(self, model, found, loss):
    raise sequence.WrongError("rank 1 says so")


def verdict_on(out, rank):
    return Path(out).with_suffix(f".{rank}.txt")


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    """Rows of two ranks, whose second run had nothing to do."""
    out = tmp_path_factory.mktemp("ranks") / "rows.jsonl"
    sockets = [socket.socket() for _ in range(3)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    multiprocessing.set_forkserver_preload([__name__])  # imported once for both
    torch.multiprocessing.start_processes(
        three_runs, args=(ports, str(out)), nprocs=WORLD, start_method="forkserver"
    )
    return out


def test_two_ranks(ranked):
    assert len(ranked.read_text().splitlines()) == 6
    rows = read_rows([ranked])
    assert {row.case["variant"] for row in rows} == {"ddp", "fsdp2", "ulysses", "sequence"}
    assert {row.status for row in rows} == {"ok"}
    ddp, sharded = (
        [row.measures["first_loss"] for row in rows if row.case["variant"] == name]
        for name in ("ddp", "fsdp2")
    )
    assert ddp == pytest.approx(sharded, rel=1e-5)
    (found,) = (row.measures for row in rows if row.case["variant"] == "ulysses")
    for name in ("out", "dq", "dk", "dv"):
        assert found[f"error_{name}"] <= 2 * (found[f"single_error_{name}"] + 1e-7)
    table = section_of("scaling-ranks", rows)
    assert "| DDP | 2 | balanced |" in table
    assert "| 4 / 2 | 2 |" in table
    assert "one document of 160 tokens over all GPUs" in table


@pytest.fixture
def no_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


def sequence_row(*more):
    """One rank's."""
    (row,) = scaling_ranks.main([*TEXTS.split(), "--what", "sequence", *more])
    return row


def test_steps_on_a_document_are_a_plain_loop_s(monkeypatch, no_launcher):
    """Nothing of the check stays in the gradients, and no step's in the next."""
    given = []
    measure = scaling_ranks.measure_sequence
    monkeypatch.setattr(
        scaling_ranks, "measure_sequence", lambda *args: given.extend(args) or measure(*args)
    )
    found = sequence_row().measures
    case, new_model, _, document = given
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), ranks.LEARNING_RATE)
    ids = torch.tensor([document])
    losses = []
    for _ in range(sequence.WARMUP_STEPS + case.steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert ids.shape == (1, 160)
    assert found["document_first_loss"] == pytest.approx(losses[0], rel=1e-5)
    assert learned(found) == pytest.approx(losses[0] - losses[-1], rel=1e-2)


def learned(found):
    """1e-3 of the loss in four steps, which fp32 gives to about 1e-3 of itself."""
    return found["document_first_loss"] - found["document_last_loss"]


def test_two_ranks_learn_from_a_document_what_one_does(ranked, no_launcher):
    (two,) = (row for row in read_rows([ranked]) if row.case["variant"] == "sequence")
    one = sequence_row()
    assert two.case == one.case | {"ranks": WORLD}
    for name in ("document_first_loss", "first_loss"):
        assert two.measures[name] == pytest.approx(one.measures[name], rel=1e-5)
    assert learned(two.measures) == pytest.approx(learned(one.measures), rel=1e-2)
    assert learned(two.measures) > 0


def test_a_step_s_time_is_the_slowest_rank_s(ranked):
    (row,) = (row for row in read_rows([ranked]) if row.case["variant"] == "sequence")
    found = row.measures
    assert 0 < found["ms_p20"] <= found["ms_p50"] <= found["ms_p80"]
    assert found["repeats"] == 2
    assert found["ms_p20"] > FASTER  # a step takes more than 1 ms
    assert found["tokens_per_s"] * found["ms_p50"] / 1e3 == pytest.approx(160)
    assert f"| 2 | {found['tokens_per_s']:,.0f} | {found['ms_p50']:,.0f} |" in section_of(
        "scaling-ranks", [row]
    )


def test_what_one_rank_alone_finds_wrong_all_say(ranked):
    """None goes on to steps in which the others are missing."""
    said = [verdict_on(ranked, rank).read_text() for rank in range(WORLD)]
    assert said == ["wrong: rank 1 says so"] * WORLD


def test_a_document_s_loss_that_is_not_finite(monkeypatch, no_launcher):
    monkeypatch.setattr(ranks, "LEARNING_RATE", 1e30)  # the first loss is still right
    row = sequence_row()
    assert (row.status, row.reason) == ("wrong", "a loss is not finite")
    assert "tokens_per_s" not in row.measures


def test_layers_of_a_document_are_checkpointed_where_the_case_says_so(no_launcher):
    calls = {}
    for given in (True, False):
        with CountedOperators() as seen:
            row = sequence_row(
                "--backend", "sdpa", "--checkpointing" if given else "--no-checkpointing"
            )
        assert (row.status, row.case["checkpointing"]) == ("ok", given)
        calls[given] = seen.calls[torch.ops.flexvarlen.sdpa_forward.default]
    assert calls[False] == 2 * (1 + sequence.WARMUP_STEPS + 2)  # layers; the check and steps
    assert calls[True] == 2 * calls[False]


def test_the_longer_of_both_decides_on_checkpointing():
    args = scaling_ranks.parse(["--tokens", "1024", "--document", "98304"])
    assert (args.checkpointing, args.sequence_checkpointing) == (False, True)
    args = scaling_ranks.parse(["--tokens", "32768", "--document", "1024"])
    assert (args.checkpointing, args.sequence_checkpointing) == (True, True)
    args = scaling_ranks.parse(["--no-checkpointing"])
    assert (args.checkpointing, args.sequence_checkpointing) == (False, False)


def test_a_document_that_is_longer_than_a_row_is_checkpointed_for_itself(monkeypatch, no_launcher):
    between = training_bytes("qwen3-tiny", 128)  # the row has 96 tokens, the document 160
    monkeypatch.setattr(scaling_ranks, "BUDGET_BYTES", between)
    assert sequence_row().case["checkpointing"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--rows 3", "rows must be a multiple of the 2 ranks, got 3; "),
        ("--document 161", r"document must be .* 2 ranks .*, got 161; .* set --document 160\."),
        ("--document 0", r"document must be .* at least 2, got 0; .* set --document 2\."),
        ("--document -4", r"document must be .* at least 2, got -4; .* set --document 2\."),
        ("--tokens 97", r"tokens must be .* 2 ranks .*, got 97; .* set --tokens 96\."),
    ],
)
def test_sizes_that_ranks_cannot_share(given, said, monkeypatch):
    monkeypatch.setattr(scaling_ranks.dist, "get_world_size", lambda: WORLD)
    monkeypatch.setattr(scaling_ranks.dist, "get_rank", lambda: 0)
    args = scaling_ranks.parse([*TEXTS.split(), *given.split()])
    with pytest.raises(ValueError, match=said):
        scaling_ranks.Run(args)
    args = scaling_ranks.parse([*TEXTS.split(), *given.split(), "--rows", "4", "--what", "ddp"])
    scaling_ranks.Run(args)  # what only sequence cuts


def test_a_document_alone_on_one_rank_has_two_tokens(no_launcher):
    with pytest.raises(ValueError, match="at least 2, got 1; "):
        sequence_row("--document", "1")


def test_no_steps_on_a_document(capsys):
    with pytest.raises(SystemExit):
        scaling_ranks.parse(["--steps", "0"])
    assert "steps must be at least 1, got 0; set --steps 1" in capsys.readouterr().err


def test_a_sequence_that_learns_from_half_the_row_is_wrong(monkeypatch, no_launcher):
    pack = sequence.fv.PackedCollator.__call__

    def half(collator, examples):
        batch = pack(collator, examples)
        batch["labels"][:, 48:] = -100
        return batch

    monkeypatch.setattr(sequence.fv.PackedCollator, "__call__", half)
    row = sequence_row()
    assert row.status == "wrong"
    assert row.reason.startswith("relative error of the first")
    assert "| 1 | wrong: relative error" in section_of("scaling-ranks", [row])


def test_a_loss_that_is_not_finite_on_another_rank(monkeypatch, no_launcher):
    """No rank may leave alone: the others would wait for it in what follows."""
    monkeypatch.setattr(scaling_ranks.Run, "largest", lambda self, value: max(value, 1.0))
    arguments = "--device cpu --geometry qwen3-tiny --tokens 96 --rows 2 --warmup 1 --what ddp"
    (row,) = scaling_ranks.main(arguments.split())
    assert (row.status, row.reason) == ("wrong", "a loss is not finite")


def test_efficiency_is_against_one_gpu(ranked):
    (row,) = (
        row
        for row in read_rows([ranked])
        if (row.case["variant"], row.case.get("order")) == ("ddp", "balanced")
    )
    assert efficiency_of(row, [row]) is None
    rate = row.measures["tokens_per_s_rank"]
    one = Row("", row.case | {"ranks": 1}, "ok", None, {"tokens_per_s_rank": 2 * rate})
    assert efficiency_of(row, [one, row]) == 0.5


def test_ranks_that_answer_otherwise_are_wrong(monkeypatch):
    monkeypatch.setattr(ulysses.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(ulysses.dist, "broadcast_object_list", lambda found, src: None)
    lengths = (30, 34)
    inputs = Inputs.random(lengths, (4, 2), 16, torch.float32, torch.device("cpu"), True)
    layout = ulysses.fv.PackedLayout.from_lengths(lengths)
    qkv = (inputs.q, inputs.k, inputs.v)

    def attend(q, k, v):
        return ulysses.fv.packed_attention(q, k, v, layout, backend="sdpa")

    right = ulysses._answer(attend, qkv, inputs.cotangent)
    assert ulysses._judged(inputs, Answer(right), Answer(right))[1] is None
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        shifted = [x.roll(1, 0) if i == index else x for i, x in enumerate(right)]
        _, reason = ulysses._judged(inputs, Answer(right), Answer(shifted))
        assert f"relative error of {name} " in reason


def test_a_report_has_a_table_and_a_figure(ranked, tmp_path):
    page = tmp_path / "page.md"
    names = ("scaling-ranks", "scaling-ranks-figures")
    page.write_text("".join(f"<!-- bench:{x} begin -->\n<!-- bench:{x} end -->\n" for x in names))
    report([ranked], pages=[page], figures=tmp_path / "figures")
    assert page.read_text().count(".png)") == len(list((tmp_path / "figures").glob("*.png"))) == 1
    assert "| DDP | 2 | balanced |" in page.read_text()
