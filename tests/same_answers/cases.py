"""Cases of `tests.cases` as plain data, which names nothing of flexvarlen.

So every checkout gets the very same config and tensors.
"""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from typing import Any

import torch

import flexvarlen as fv
from flexvarlen.bench.suites.contract.tiny_configs import tiny_config
from tests import cases, forms
from tests.cases import HEADS, KINDS_OF_LAYERS, MODES, Combination
from tests.patches.models import images
from tests.tiny_models import documents, task_of

Inputs = dict[str, Any]

OF_HEADS = tuple(HEADS)[:4]
OF_MODES = tuple(name for name, x in MODES.items() if x.call != "cached" and x.patch != "base")
FLEX_ON_CPU = (
    Combination("llama", "own", "packed_layout", "eval", "flex"),
    Combination("gemma2", "none", "document_ids", "eval", "flex"),
)
"""FlexAttention has no backward on the CPU, and takes seconds to compile."""


def tree() -> Inputs:
    """A prompt of 40 tokens with three answers, one of which branches again; padding at the end."""
    ids = torch.cat(documents())[None, :110]
    shape = {"lengths": (40, 9, 30, 1, 8), "parents": (-1, 0, 0, 2, 2), "total_tokens": 110}
    return {"input_ids": ids, "packed_layout": shape}


def samples() -> Inputs:
    """What `fv.share_prefixes` makes a tree of, with its labels."""
    prompt = documents()[2][:40]
    return {"samples": [torch.cat([prompt, x]).tolist() for x in documents()[1].split([10, 60])]}


def shared_prompt(side: str) -> Inputs:
    """Three rows that begin with the same 40 tokens, padded on a side."""
    prompt, answers = documents()[2][:40], documents()[1].split([10, 25, 35])
    rows = [torch.cat([prompt, answer]) for answer in answers]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
    return {
        "input_ids": pad(rows),
        "attention_mask": pad([torch.ones_like(x) for x in rows]),
        "documents": len(rows),
    }


def with_images() -> Inputs:
    inputs = images.inputs_of(images.documents())
    return inputs | {"packed_layout": {"lengths": images.LENGTHS}, "documents": len(images.TEXT)}


OTHERS = {
    "tree": tree,
    "samples with a common prefix": samples,
    "shared prompt, left padding": partial(shared_prompt, "left"),
    "shared prompt, right padding": partial(shared_prompt, "right"),
    "images": with_images,
}
"""Forms that `tests.cases` draws no rows for."""


def inputs_of(given: Combination) -> Inputs:
    """The batch, with labels of the kind that the head takes: -100 at padding and at images."""
    if given.form in OTHERS:
        inputs = OTHERS[given.form]()
    else:
        rng = random.Random(name_of(given))
        rows = cases.draw_rows(rng, given)
        while max(rows.lengths) == 1:  # the mean over no labels has no value
            rows = cases.draw_rows(rng, given)
        batch = rows.batch(0, padding=0)
        beside = [name for name in forms.FORMS[given.form].beside if rng.random() < 0.4]
        inputs = {"input_ids": batch.ids, **forms.given(given.form, batch, *beside)}
        if "packed_layout" in inputs:
            lengths = batch.cu_seqlens.diff().tolist()
            inputs["packed_layout"] = {"lengths": lengths, "total_tokens": batch.ids.numel()}
        inputs["documents"] = len(rows.lengths)
    count, ids = inputs.pop("documents", 0), inputs.get("input_ids")
    if ids is None or given.mode == "generate":
        return inputs
    labels = {
        "own": ids.masked_fill((ids == 0) | (ids >= images.IMAGE), -100),
        "TokenClassification": ids % 2,
        # transformers' own classifier takes one of each row
        "SequenceClassification": None if given.mode == "unpatched" else torch.arange(count) % 2,
    }.get(given.head)
    if labels is not None and given.form != "tree":  # whose labels are those of `samples`
        inputs["labels"] = labels
    return inputs


def backends_on(device: str) -> list[str]:
    """Those to sample, which serve most cases. On a GPU `auto` may choose anew in each process."""
    if device == "cpu":
        return ["sdpa", "reference", "auto"]
    kind = {"device": device, "dtype": torch.bfloat16, "head_dim": 64, "window": 9}
    return [x for x in fv.BACKENDS if x != "auto" and fv.why_not(x, **kind) is None]


def sample(device: str = "cpu", seed: int = 0) -> list[Combination]:
    """Every family in every form."""
    of = (KINDS_OF_LAYERS, OF_HEADS, (*forms.FORMS, *OTHERS), OF_MODES, backends_on(device))
    return [*cases.sample(*of, seed=seed), *(FLEX_ON_CPU if device == "cpu" else ())]


def name_of(given: Combination) -> str:
    return " | ".join(given)


def case_of(given: Combination, device: str) -> Inputs:
    family, head = given.family, given.head
    on_gpu = device == "cuda"
    config = tiny_config(family, head_dim=64 if on_gpu else 16, every_expert=on_gpu)
    task = task_of(family) if head == "own" else head
    return {
        "name": name_of(given),
        "model_type": family,
        "config": config.to_dict(),
        "class": "AutoModel" if head == "none" else f"AutoModelFor{task}",
        "inputs": inputs_of(given),
        "mode": dataclasses.asdict(MODES[given.mode]),
        "backend": given.backend,
    }
