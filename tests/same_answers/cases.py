"""The cases: a pairwise sample of families, heads, batches, modes and backends, as plain data.

A case names nothing of flexvarlen, so every checkout gets the very same config and tensors.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from functools import cache, partial
from typing import Any

import torch
import transformers

import flexvarlen as fv
from flexvarlen.bench.suites.contract.tiny_configs import tiny_config
from flexvarlen.patches.models.families import BY_TYPE
from tests import forms
from tests.patches.models import images
from tests.tiny_models import documents

Case = dict[str, Any]
Inputs = dict[str, Any]

# Each stands for a way of its layers: windows, softcap, sinks, chunks, experts, shared keys and
# values, latent attention, longrope, M-RoPE, encoders, the delta rule, Mamba-2, short convolutions.
FAMILIES = (
    *("llama", "mistral", "gemma2", "gpt_oss", "llama4_text", "qwen3_moe", "gemma4_text"),
    *("deepseek_v3", "phi3", "qwen2_vl", "qwen3_5", "roberta", "modernbert"),
    *("qwen3_next", "granitemoehybrid", "mamba2", "lfm2"),
)
HEADS = ("own", "none", "SequenceClassification", "TokenClassification")
MODES: dict[str, Inputs] = {
    "train": {},
    "eval": {},
    "checkpointing": {},
    "compiled": {},
    "generate": {},
    "by name": {},
    "unpatched": {},
    "unpad": {"unpad": True},
    "unpad and share prefixes": {"unpad": True, "share_prefixes": True},
    "deterministic": {"deterministic": True},
    "batch invariant": {"batch_invariant": True},
}
"""How the model runs, with the arguments of `patch_model`."""

GENERATED = ("left padding", "shared prompt, left padding", "no documents")
"""Batches of one document a row, with no padding at its end."""
NO_SDPA = ("gemma2", "gpt_oss")  # softcap and sinks
COMPILED = ("llama", "gpt_oss", "roberta")
"""Each takes seconds."""
FLEX_ON_CPU = (
    ("llama", "own", "packed_layout", "eval", "flex"),
    ("gemma2", "none", "document ids, left padding", "eval", "flex"),
)
"""FlexAttention has no backward on the CPU, and takes seconds to compile."""


def given(form: str, rows: str, *beside: str) -> Inputs:
    """A batch of the catalogue of forms."""
    batch = forms.ROWS[rows]()
    lengths = batch.cu_seqlens.diff().tolist()
    inputs = {"input_ids": batch.ids, **forms.given(form, batch, *beside)}
    if "packed_layout" in inputs:
        inputs["packed_layout"] = {"lengths": lengths}
    return inputs | {"documents": len(batch.ids) if form == "plain" else len(lengths)}


def tree() -> Inputs:
    """A prompt of 40 tokens with three answers, one of which branches again; padding at the end."""
    ids = torch.cat(documents())[None, :110]
    shape = {"lengths": (40, 9, 30, 1, 8), "parents": (-1, 0, 0, 2, 2), "total_tokens": 110}
    return {"input_ids": ids, "packed_layout": shape, "labels": None}


def samples() -> Inputs:
    """What `fv.share_prefixes` makes a tree of, with its labels."""
    prompt = documents()[2][:40]
    return {"samples": [torch.cat([prompt, x]).tolist() for x in documents()[1].split([10, 60])]}


def shared_prompt(*, left: bool) -> Inputs:
    """Three rows that begin with the same 40 tokens."""
    prompt, answers = documents()[2][:40], documents()[1].split([10, 25, 35])
    rows = [torch.cat([prompt, answer]) for answer in answers]
    side = "left" if left else "right"
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
    return {
        "input_ids": pad(rows),
        "attention_mask": pad([torch.ones_like(x) for x in rows]),
        "documents": len(rows),
    }


def with_images() -> Inputs:
    inputs = images.inputs_of(images.documents())
    return inputs | {"packed_layout": {"lengths": images.LENGTHS}, "documents": len(images.TEXT)}


BATCHES = {
    "packed_layout": partial(given, "packed_layout", "one_row", "ones"),
    "tree": tree,
    "samples with a common prefix": samples,
    "cu_seq_lens": partial(given, "cu_seq_lens", "one_row", "cu_seq_lens_k", "max_length"),
    "position_ids": partial(given, "position_ids", "one_row"),
    "position_ids, two rows": partial(given, "position_ids", "two_rows", "ones"),
    "positions that continue": partial(given, "position_ids", "several_continued"),
    "document ids, left padding": partial(given, "document_ids", "left_padding_packed"),
    "mask and positions": partial(given, "padding_mask_and_position_ids", "both_sides_packed"),
    "seq_idx": partial(given, "seq_idx", "right_padding_packed", "positions"),
    "left padding": partial(given, "padding_mask", "left_padding"),
    "right padding": partial(given, "padding_mask", "right_padding", "positions"),
    "shared prompt, left padding": partial(shared_prompt, left=True),
    "shared prompt, right padding": partial(shared_prompt, left=False),
    "images": with_images,
    "no documents": partial(given, "plain", "two_rows"),
}


def with_labels(inputs: Inputs, head: str, mode: str) -> Inputs:
    """Labels of the kind that the head takes; -100 at padding and at images."""
    inputs = dict(inputs)
    count, ids = inputs.pop("documents", 0), inputs.get("input_ids")
    if ids is None or head == "none" or mode == "generate":
        return inputs
    if "labels" in inputs:  # a tree's are those of `samples`
        del inputs["labels"]
    elif head == "TokenClassification":
        inputs["labels"] = ids % 2
    elif head == "SequenceClassification" and mode != "unpatched":
        inputs["labels"] = torch.arange(count) % 2
    elif head == "own":
        inputs["labels"] = ids.masked_fill((ids == 0) | (ids >= images.IMAGE), -100)
    return inputs


def head_class(family: str, head: str) -> str:
    """The transformers class that builds a model with this head."""
    if head == "none":
        return "AutoModel"
    return f"AutoModelFor{BY_TYPE[family].task if head == 'own' else head}"


@cache
def has_head(family: str, head: str) -> bool:
    return (
        type(tiny_config(family)) in getattr(transformers, head_class(family, head))._model_mapping
    )


def backends_on(device: str) -> list[str]:
    """Those to sample, which serve most cases. On a GPU `auto` may choose anew in each process."""
    if device == "cpu":
        return ["sdpa", "reference", "auto"]
    kind = {"device": device, "dtype": torch.bfloat16, "head_dim": 64, "window": 9}
    return [x for x in fv.BACKENDS if x != "auto" and fv.why_not(x, **kind) is None]


def possible(combination: tuple[str, ...]) -> tuple[str, ...]:
    """The combination, with what does not exist, says nothing or takes too long replaced."""
    family, head, batch, mode, backend = combination
    task, sees_images = BY_TYPE[family].task, family in images.KINDS
    if batch == "images" and not sees_images:
        batch = "cu_seq_lens"
    if batch == "tree" and head == "SequenceClassification":
        head = "TokenClassification"
    if mode == "generate" and (task != "CausalLM" or batch not in GENERATED):
        mode = "eval"
    if mode == "by name" and not BY_TYPE[family].by_name_alone:
        mode = "train"
    if mode.startswith("unpad") and sees_images:
        mode = "train"
    if mode == "compiled" and family not in COMPILED:
        mode = "checkpointing"
    if backend == "sdpa" and family in NO_SDPA:
        backend = "reference"
    if backend == "reference" and mode == "batch invariant":
        mode = "deterministic"
    if not has_head(family, head) or mode == "generate" or batch == "samples with a common prefix":
        head = "own"
    return family, head, batch, mode, backend


def sample(device: str = "cpu", seed: int = 0, most: int | None = None) -> list[Case]:
    """Every family on every batch, or the first `most` of them.

    Head, mode and backend of each are those of a few drawn ones with the most new pairs of values.
    """
    rng = random.Random(seed)
    backends = backends_on(device)
    every = list(itertools.product(FAMILIES, BATCHES))
    rng.shuffle(every)
    seen: Counter[frozenset[tuple[int, str]]] = Counter()
    found: list[tuple[str, ...]] = []
    for family, batch in every:
        drawn = []
        for _ in range(30):
            head, mode, backend = (rng.choice(list(x)) for x in (HEADS, MODES, backends))
            drawn.append(possible((family, head, batch, mode, backend)))
        chosen = max(drawn, key=lambda x: sum(2.0 ** -seen[pair] for pair in pairs(x)))
        seen.update(pairs(chosen))
        found.append(chosen)
    found += FLEX_ON_CPU if device == "cpu" else ()
    return [case_of(x, device) for x in dict.fromkeys(found[:most])]


def pairs(combination: tuple[str, ...]) -> list[frozenset[tuple[int, str]]]:
    """Each two of its values."""
    return [frozenset(x) for x in itertools.combinations(enumerate(combination), 2)]


def case_of(combination: tuple[str, ...], device: str) -> Case:
    family, head, batch, mode, backend = combination
    on_gpu = device == "cuda"
    config = tiny_config(family, head_dim=64 if on_gpu else 16, every_expert=on_gpu)
    return {
        "name": " | ".join(combination),
        "model_type": family,
        "config": config.to_dict(),
        "class": head_class(family, head),
        "inputs": with_labels(BATCHES[batch](), head, mode),
        "mode": mode,
        "options": MODES[mode],
        "backend": backend,
    }
