"""examples/train.py: learns, and goes on after a kill as if nothing had been."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.docs.scripts import ROOT, on_two_ranks, save_tiny_model
from tests.docs.train_ranks import run

STEPS, SAVED, DIES = 14, 5, 10
DOCUMENTS = 66
PADDING = [0]  # the document of a row that fills a step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents, none like another, and a tiny model with a tokenizer."""
    folder = tmp_path_factory.mktemp("train")
    draw = np.random.default_rng(0)
    words = ["attention", "packed", "row", "token", "mask", "kernel", "loss", "step"]
    texts = [
        f"document {i}: " + " ".join(draw.choice(words, draw.integers(1, 40)))
        for i in range(DOCUMENTS)
    ]
    (folder / "texts").mkdir()
    (folder / "texts" / "all.txt").write_text("\f".join(texts))
    save_tiny_model(folder / "tiny", tuple(texts))
    return folder


def arguments(folder, **options):
    """Of train.py."""
    options = {
        "data": folder / "texts",
        "model": folder / "tiny",
        "tokens": 128,
        "steps": STEPS,
        "backend": "sdpa",
        "learning_rate": 0.01,
        **options,
    }
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    return [part for name, value in pairs for part in ([name] if value is True else [name, value])]


def documents_of(notes, ranks=1):
    """The documents that were trained on, by the steps before."""
    seen: dict[int, list[tuple[int, ...]]] = {}
    for rank in range(ranks):
        for line in Path(f"{notes}-{rank}.jsonl").read_text().splitlines():
            note = json.loads(line)
            real = [tuple(ids) for ids in note["documents"] if ids != PADDING]
            seen.setdefault(note["step"], []).extend(real)
    return seen


def log_of(out):
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert all(line["tokens_per_s"] > 0 for line in lines)
    return [(line["step"], line["loss"], line["tokens"]) for line in lines]


def two_ranks(folder, *, dies=0, **options):
    """A run of two rows a rank and step: the documents of each step, and the log."""
    notes = folder / f"notes-{dies}"
    options = {"out": folder / "out", "accumulate": 2, "save_every": SAVED, **options}
    script = ROOT / "tests" / "docs" / "train_ranks.py"
    done = on_two_ranks(script, notes, dies, *arguments(folder, **options))
    assert (done.returncode == 0) is (dies == 0), done.stderr[-3000:]
    return documents_of(notes, 2), log_of(options["out"])


@pytest.fixture(scope="module")
def killed(folder):
    return two_ranks(folder, dies=DIES)


@pytest.fixture
def one_process(folder, monkeypatch):
    """Runs train.py in this process, on the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def start(notes, **options):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        run(folder / notes, arguments(folder, **options))

    yield start
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def check_gradients(folder, notes, documents):
    """A step's against those of its documents one by one, in fp64."""
    model = AutoModelForCausalLM.from_pretrained(folder / "tiny").double()
    count = sum(len(document) - 1 for document in documents)
    for document in documents:
        logits = model(torch.tensor([document])).logits[0, :-1]
        targets = torch.tensor(document[1:])
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / count
        loss.backward()
    exact = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    found = torch.cat([gradient.flatten() for gradient in torch.load(f"{folder / notes}.pt")])
    # Sums of fp32 are good to 1e-6 or so; a wrong scale is off by a factor.
    assert (found - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.slow
def test_two_ranks_killed_as_they_save_go_on_as_if_they_had_not_been(folder, killed):
    """The last whole checkpoint counts, and the steps behind it come again, alike."""
    seen, log = killed
    assert [step for step, *_ in log] == list(range(1, DIES + 1))
    assert [path.name for path in folder.glob("out/checkpoint-*")] == [f"checkpoint-{SAVED}"]
    again, whole = two_ranks(folder, resume=True)
    assert [step for step, *_ in whole] == list(range(1, STEPS + 1))
    assert whole[:DIES] == log  # to the last bit
    assert all(again[step] == seen[step] for step in range(SAVED, DIES))
    assert sorted(again) == list(range(SAVED, STEPS))
    trained = {step: seen[step] for step in range(SAVED)} | again
    counts = Counter(document for step in trained for document in trained[step])
    assert len(counts) == DOCUMENTS
    # Whole epochs, and the first rows of one: no document is lost, none comes twice in an epoch.
    assert max(counts.values()) - min(counts.values()) == 1
    assert sum(counts.values()) > 2 * DOCUMENTS
    notes = [
        json.loads(line) for rank in (0, 1) for line in (folder / f"notes-0-{rank}.jsonl").open()
    ]
    assert any(note["documents"] == [PADDING] for note in notes)  # rows were odd, and none repeated
    assert whole[-1][1] < log[0][1] - 0.5  # it learns
    assert [path.name for path in folder.glob("out/checkpoint-*")] == [f"checkpoint-{STEPS}"]
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert len(AutoTokenizer.from_pretrained(folder / "out")) == model.config.vocab_size


@pytest.mark.slow
def test_gradients_of_two_ranks_and_accumulation_are_of_the_mean_over_tokens(folder, killed):
    seen, _ = killed
    check_gradients(folder, f"notes-{DIES}", seen[0])


@pytest.mark.slow
def test_two_ranks_that_share_rows_learn_what_one_process_does(folder, one_process):
    options = {"tokens": 64, "steps": 4, "accumulate": 2}
    _, shared = two_ranks(
        folder, out=folder / "shared", context_parallel=2, loss_chunk_tokens=16, **options
    )
    one_process("whole-rows", out=folder / "whole", **options)
    for ours, alone in zip(shared, log_of(folder / "whole"), strict=True):
        assert ours == pytest.approx(alone, rel=1e-5)


def test_one_process_has_another_order_each_epoch(folder, one_process):
    """And the gradients of all its rows, with four rows a step; a run begins its log anew."""
    options = {
        "out": folder / "single",
        "accumulate": 4,
        "loss_chunk_tokens": 16,
        "mlp_chunk_tokens": 16,
    }
    one_process("dry", **options, steps=1, save_every=9)
    shutil.rmtree(folder / "single" / "checkpoint-1")
    one_process("one", **options, steps=9)
    seen = documents_of(folder / "one")
    check_gradients(folder, "one", seen[0])
    assert [step for step, *_ in log_of(folder / "single")] == list(range(1, 10))
    order = [document for step in seen for document in seen[step]]
    first, second = order[:DOCUMENTS], order[DOCUMENTS : 2 * DOCUMENTS]
    assert sorted(first) == sorted(second)
    assert first != second


def test_no_run_goes_on_from_another(folder, one_process):
    """A number of processes, rows, an order: whatever decides what comes next."""
    out = folder / "other"
    one_process("other", out=out, steps=1)
    (folder / "few.txt").write_text("a document\fanother document")
    for changed in ({"tokens": 96}, {"seed": 1}, {"accumulate": 2}, {"data": folder / "few.txt"}):
        with pytest.raises(typer.BadParameter, match=r"settings must be the checkpoint's, .*, got"):
            one_process("other", **{"out": out, "steps": 2, "resume": True, **changed})
    (progress,) = out.glob("checkpoint-*/progress.json")
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"processes": 2}))
    with pytest.raises(typer.BadParameter, match=r"'processes': 2.*got .'processes': 1"):
        one_process("other", out=out, steps=2, resume=True)
    with pytest.raises(typer.BadParameter, match="out must hold no checkpoint"):
        one_process("other", out=out)
    with pytest.raises(typer.BadParameter, match="out must hold a checkpoint"):
        one_process("other", out=folder / "nowhere", resume=True)


def test_data_without_a_file_is_refused(folder, one_process):
    (folder / "empty" / "within").mkdir(parents=True)
    for data in ("empty", "missing"):
        with pytest.raises(typer.BadParameter, match="data must be or hold a file"):
            one_process("empty", data=folder / data, out=folder / "nothing")


def test_other_rows_on_another_process_are_refused(folder, one_process, monkeypatch):
    monkeypatch.setattr("accelerate.utils.gather_object", lambda rows: [*rows, 0])
    with pytest.raises(typer.BadParameter, match="data and model must be the same files for all"):
        one_process("mixed", out=folder / "mixed")


def test_chats_are_trained_on_in_the_models_template(folder, one_process):
    """And JSON lines of anything else are refused, not trained on as they stand."""
    shutil.copytree(folder / "tiny", folder / "chatty")
    tokenizer = AutoTokenizer.from_pretrained(folder / "chatty")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "chatty")
    chat = [{"role": "user", "content": "packed?"}, {"role": "assistant", "content": "a row"}]
    data = folder / "chats.jsonl"
    data.write_text(f"{json.dumps({'messages': chat})}\n\n{json.dumps({'text': 'token'})}\n")
    options = {"data": data, "model": folder / "chatty", "out": folder / "chatty-out", "steps": 1}
    one_process("chats", **options)
    seen = documents_of(folder / "chats")[0]
    assert sorted(map(tokenizer.decode, seen)) == ["[user]packed?[assistant]a row", "token"]

    data.write_text('{"text": "good"}\n{"prompt": "bad"}\n')
    with pytest.raises(typer.BadParameter, match=r"text must be objects with .*line 2 of"):
        one_process("refused", **options)
