"""examples/train.py: learns, and goes on after a kill as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from flexvarlen.equivalence.corpus import train_tokenizer

ROOT = Path(__file__).parent.parent
STEPS, SAVED, DIES = 17, 9, 11
DOCUMENTS = 60


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
    fast = train_tokenizer(tuple(texts), 300)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    tokenizer.save_pretrained(folder / "tiny")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "tiny")
    return folder


def train(folder, *, dies=0, resume=False):
    """A run on two ranks: the documents of each step, and its loss and tokens."""
    out, notes = folder / "out", folder / f"notes-{dies}"
    arguments = ["--data", folder / "texts", "--model", folder / "tiny", "--out", out]
    arguments += ["--tokens", 128, "--steps", STEPS, "--save-every", SAVED, "--backend", "sdpa"]
    arguments += ["--learning-rate", 0.01, *(["--resume"] if resume else [])]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    script = [ROOT / "tests" / "train_ranks.py", notes, dies, *arguments]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *map(str, launch + script)],
        env=os.environ | own | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode == 0) is (dies == 0), done.stderr[-3000:]
    seen: dict[int, list[int]] = {}
    for rank in range(2):
        for line in Path(f"{notes}-{rank}.jsonl").read_text().splitlines():
            note = json.loads(line)
            seen.setdefault(note["step"], []).extend(note["documents"])
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    (out / "log.jsonl").unlink()
    return seen, {line["step"]: (line["loss"], line["tokens"]) for line in log}


def test_a_killed_run_goes_on_as_if_it_had_not_been(folder):
    """Two ranks under torchrun die two steps after a checkpoint: these steps come again, alike."""
    seen, log = train(folder, dies=DIES)
    assert list(log) == list(range(1, DIES + 1))
    again, resumed = train(folder, resume=True)
    assert list(resumed) == list(range(SAVED + 1, STEPS + 1))
    for step in range(SAVED, DIES):
        assert again[step] == seen[step]
        assert resumed[step + 1] == log[step + 1]  # to the last bit
    trained = {step: seen[step] for step in range(SAVED)} | again
    counts = Counter(document for step in trained for document in trained[step])
    assert len(counts) == DOCUMENTS
    # Whole epochs, and the first rows of one: no document is lost, none comes twice in an epoch.
    assert max(counts.values()) - min(counts.values()) == 1
    assert sum(counts.values()) > 2 * DOCUMENTS
    assert resumed[STEPS][0] < log[1][0] - 0.5  # it learns
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert len(AutoTokenizer.from_pretrained(folder / "out")) == model.config.vocab_size
