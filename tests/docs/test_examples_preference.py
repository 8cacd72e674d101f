"""examples/dpo.py, reward.py, grpo.py: they learn the same with padding and without; agents.py."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainingArguments,
)

import flexvarlen as fv
from tests.docs.scripts import ROOT, on_two_ranks, save_tiny_model
from tests.packing.test_conversations import ROLLOUTS, STRIPS, TOOLS

pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")

SETTINGS = {"steps": 2, "backend": "sdpa"}
TEXTS = [("packed rows of many documents", 3), ("a mask and a kernel", 40), ("one", 1)] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer, and data."""
    folder = tmp_path_factory.mktemp("preference")
    texts = tuple(text for text, _ in TEXTS)
    save_tiny_model(folder / "tiny", texts, eos_token="<e>", pad_token="<p>")
    lines = [
        {"prompt": "say:", "chosen": f" {text}" * count, "rejected": f" {text[::-1]}"}
        for text, count in TEXTS
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def logged(text):
    """Names and values that a trainer printed."""
    pattern = r"'(loss|grad_norm|reward|kl|accuracy|rewards/margins)': '([^']+)'"
    return [(name, float(value)) for name, value in re.findall(pattern, text)]


@pytest.mark.parametrize("options", [{}, {"lora": 2}], ids=["whole", "lora"])
def test_dpo_on_data_of_ones_own(load, folder, tmp_path, capsys, options):
    dpo = load("dpo")
    inputs = {"data": folder / "pairs.jsonl", "model": str(folder / "tiny"), "batch": 4}
    logs = []
    for padded in (True, False):
        dpo.main(**inputs, **SETTINGS, **options, padded=padded, out=tmp_path / "out")
        logs.append(logged(capsys.readouterr().out))
    assert len(logs[0]) >= 2 * 3
    assert logs[1] == [(name, pytest.approx(value, rel=1e-2, abs=1e-4)) for name, value in logs[0]]
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json" if options else "config.json", "tokenizer.json"} <= saved


@pytest.mark.slow
def test_dpo_on_two_ranks(folder, tmp_path):
    script = [ROOT / "tests/docs/leave.py", ROOT / "examples/dpo.py", "--model", folder / "tiny"]
    script += ["--data", folder / "pairs.jsonl", "--batch", 3, "--steps", 2, "--backend", "sdpa"]
    logs = []
    for padded in ([], ["--padded"]):
        done = on_two_ranks(*script, "--out", tmp_path / "out", *padded)
        assert done.returncode == 0, done.stderr[-3000:]
        logs.append(logged(done.stdout))
    assert len(logs[0]) >= 2 * 3
    assert logs[1] == [(name, pytest.approx(value, rel=1e-2, abs=1e-4)) for name, value in logs[0]]


def test_reward_then_grpo_on_their_own_samples(load, tmp_path, capsys, monkeypatch):
    """Without arguments; the reward model that one saves scores the completions of the other."""
    reward, grpo = load("reward"), load("grpo")
    patched = []
    patch = fv.patch_trainer
    monkeypatch.setattr(fv, "patch_trainer", lambda *args: patched.append(patch(*args)))
    reward.main(**SETTINGS, batch=4, learning_rate=1e-2, out=tmp_path / "reward")
    said = capsys.readouterr().out
    assert "of 64 held-out pairs" in said
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert saved.config.num_labels == 1
    logs, scorer = [], str(tmp_path / "reward")
    for padded in (True, False):
        grpo.main(
            **SETTINGS,
            reward_model=scorer,
            max_new_tokens=8,
            padded=padded,
            out=tmp_path / f"grpo-{padded}",
        )
        logs.append(logged(capsys.readouterr().out))
    assert [name for name, _ in logs[0]].count("reward") == 2
    assert logs[1] == [(name, pytest.approx(value, rel=1e-2, abs=1e-4)) for name, value in logs[0]]
    trainer = patched[-1]
    assert all(map(fv.is_patched, (trainer.model, trainer.ref_model, *trainer.reward_funcs)))


def test_agents_learn_from_recorded_rollouts(load, folder, tmp_path, capsys):
    """Loss and gradients are those of each turn alone, times the advantage of its rollout."""
    agents, tokenizer = load("agents"), AutoTokenizer.from_pretrained(folder / "tiny")
    tokenizer.chat_template = STRIPS
    shutil.copytree(folder / "tiny", tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    lines = [
        {"task": task, "reward": reward, "messages": messages, "tools": TOOLS}
        for reward, messages in enumerate(ROLLOUTS)
        for task in ("a", "b")
    ]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    inputs = {"data": tmp_path / "rollouts.jsonl", "model": str(tmp_path / "tiny")}
    agents.main(**inputs, backend="sdpa", out=tmp_path / "out")
    logs = dict(logged(capsys.readouterr().out))
    assert logs["grad_norm"] > 0

    turns = agents.read_tasks(inputs["data"], tokenizer)[0]
    assert [round(advantage, 2) for _, advantage in turns] == [-1.22] * 3 + [0.0] * 2 + [1.22]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    expected = torch.zeros(())
    for turn, advantage in turns:
        ids, labels = torch.tensor([turn["input_ids"], turn["labels"]])
        logits = model(ids[None]).logits[0, :-1]
        expected = expected + advantage * cross_entropy(logits, labels[1:], reduction="sum")
    expected = expected / sum(label >= 0 for turn, _ in turns for label in turn["labels"])
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    fv.patch_model(model, "sdpa")
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = agents.PolicyGradientTrainer(model, arguments)
    found = trainer.compute_loss(model, agents.collate([turns]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad(found, list(model.parameters())), gradients, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_scores_are_those_of_each_document_alone(load):
    reward = load("reward")
    tokenizer, model = reward.tokenizer_and_model(None)
    model.config.pad_token_id = tokenizer.pad_token_id
    documents = [tokenizer(text * count).input_ids for text, count in TEXTS]
    with torch.no_grad():
        alone = [model.eval()(torch.tensor([ids])).logits.item() for ids in documents]
    fv.patch_model(model, "sdpa")
    assert reward.scores(model, documents, 512).tolist() == pytest.approx(alone, abs=1e-5)


def test_distinct_words(load):
    assert load("grpo").distinct_words(["a b a b", ""]) == [0.5, 0.0]
