"""Scripts of docs/ and examples/ as modules, and what the tests run them on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from flexvarlen.verify.corpus import train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def module_at(path: Path) -> ModuleType:
    """Runs a script as a module of another name than `__main__`."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # typer reads annotations there, and datasets pickles by it
    spec.loader.exec_module(module)
    return module


def save_tiny_model(folder: Path, texts: tuple[str, ...], **tokens: Any) -> None:
    """Saves a causal model with a tokenizer of the texts; `tokens` are options of the tokenizer."""
    words = train_tokenizer(texts, 300)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **tokens)
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(vocab_size=len(tokenizer), **TINY, **HEADS)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def on_two_ranks(*words: Any) -> subprocess.CompletedProcess[str]:
    """A script with its arguments under torchrun, on the CPU."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.run(
        [sys.executable, *launch, *map(str, words)],
        env=os.environ | own | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
