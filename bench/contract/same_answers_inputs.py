"""The batches, masks and modes that `same_answers.py` runs, and its pairwise sample of them.

Nothing here imports flexvarlen's own modules beyond its public names, so that two versions of
flexvarlen get exactly the same inputs.

Shapes: six documents of 5 to 98 tokens, T = 256 tokens in all; the third crosses token 128, the
boundary of two blocks of a BlockMask.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import flexvarlen as fv

LENGTHS = (5, 70, 98, 1, 30, 52)
TOTAL_TOKENS = sum(LENGTHS)
SHORTEST_ID, VOCABULARY, IMAGE_IDS = 3, 90, (90, 92, 93)
IGNORE_INDEX = -100
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ENCODERS = ("bert", "roberta", "modernbert")

Inputs = dict[str, Any]


def token_ids(device: torch.device) -> Tensor:
    """int64 `[T]`, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SHORTEST_ID, VOCABULARY, (TOTAL_TOKENS,), generator=generator).to(device)


# ---- forms of a batch: token ids [T] -> the arguments of a model's forward ----


def _positions(ids: Tensor, firsts: Sequence[int] = (0,) * len(LENGTHS)) -> Tensor:
    parts = [torch.arange(s, s + n) for s, n in zip(firsts, LENGTHS, strict=True)]
    return torch.cat(parts).to(ids.device)[None]


def _numbers(ids: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(1, 7), torch.tensor(LENGTHS)).to(ids.device)[None]


def _layout(ids: Tensor, **sizes: Any) -> Any:
    return fv.PackedLayout.from_lengths(LENGTHS, device=ids.device, **sizes)


def _cu_seq_lens(ids: Tensor, lengths: Sequence[int] = LENGTHS, *, longest: bool = True) -> Inputs:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(ids.device, torch.int32)
    found: Inputs = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    return found | ({"max_length_q": 98, "max_length_k": 98} if longest else {})


def _row(ids: Tensor, **more: Any) -> Inputs:
    return {"input_ids": ids[None], "use_cache": False} | more


def _rows(ids: Tensor, **more: Any) -> Inputs:
    """Two rows of 128 tokens; the third document is cut at the rows' boundary."""
    return {"input_ids": ids.view(2, 128), "use_cache": False} | more


def _with_tail(ids: Tensor, **more: Any) -> Inputs:
    """One row with three pad tokens at its end."""
    return _row(ids, input_ids=torch.cat([ids, ids.new_zeros(3)])[None], **more)


def _tail(row: Tensor, value: int) -> Tensor:
    return torch.cat([row, row.new_full((1, 3), value)], dim=1)


def _padded(ids: Tensor, *, left: bool, positions: bool = False) -> Inputs:
    """One document a row, padded to the longest."""
    shape = (len(LENGTHS), max(LENGTHS))
    tokens, mask = ids.new_zeros(shape), ids.new_zeros(shape)
    for row, document in enumerate(ids.split(list(LENGTHS))):
        where = slice(-len(document), None) if left else slice(len(document))
        tokens[row, where], mask[row, where] = document, 1
    found = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
    if positions:
        found["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return found


def _numbered_rows(ids: Tensor, *, left: bool) -> Inputs:
    """Two rows of several documents each, with padding, told by numbers in the mask."""
    tokens, mask = ids.new_zeros(2, 180), ids.new_zeros(2, 180)
    for row, (begin, end) in enumerate(((0, 173), (173, TOTAL_TOKENS))):
        where = slice(begin - end, None) if left else slice(end - begin)
        tokens[row, where], mask[row, where] = ids[begin:end], _numbers(ids)[0, begin:end]
    return {"input_ids": tokens, "attention_mask": mask, "use_cache": False}


def _images(ids: Tensor, **more: Any) -> Inputs:
    """Two documents with an image each, as 8 × 4 and 4 × 4 patches; merged two by two."""
    image, begin, end = IMAGE_IDS
    documents, types, grids = [], [], [(1, 8, 4), (1, 4, 4)]
    for own, (_, height, width) in zip(ids[:60].split(30), grids, strict=True):
        patches = height * width // 4
        documents += [*own.tolist(), begin, *[image] * patches, end, 5, 6]
        types += [0] * 31 + [1] * patches + [0] * 3
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(sum(h * w for _, h, w in grids), 96, generator=generator)
    return {
        "input_ids": torch.tensor([documents], device=ids.device),
        "mm_token_type_ids": torch.tensor([types], device=ids.device),
        "image_grid_thw": torch.tensor(grids, device=ids.device),
        "pixel_values": pixels.to(ids.device),
        "packed_layout": fv.PackedLayout.from_lengths([42, 38], device=ids.device),
        "use_cache": False,
    } | more


def _ones(ids: Tensor) -> Tensor:
    return torch.ones_like(ids)[None]


Form = Callable[[Tensor], Inputs]
FORMS: dict[str, Form] = {
    "packed_layout": lambda x: _row(x, packed_layout=_layout(x)),
    "packed_layout, sizes given": lambda x: _row(
        x, packed_layout=_layout(x, capacity=16, max_seqlen_bound=128)
    ),
    "packed_layout, padding": lambda x: _with_tail(x, packed_layout=_layout(x, total_tokens=259)),
    "packed_layout, rows": lambda x: _rows(
        x, packed_layout=fv.PackedLayout.from_lengths([5, 70, 53, 45, 1, 30, 52], device=x.device)
    ),
    "cu_seq_lens": lambda x: _row(x, **_cu_seq_lens(x)),
    "cu_seq_lens, no longest": lambda x: _row(x, **_cu_seq_lens(x, longest=False)),
    "cu_seq_lens, positions": lambda x: _row(x, position_ids=_positions(x), **_cu_seq_lens(x)),
    "cu_seq_lens, padding": lambda x: _with_tail(
        x,
        position_ids=_tail(_positions(x), 0),
        attention_mask=_tail(_ones(x), 0),
        **_cu_seq_lens(x),
    ),
    "cu_seq_lens, broken": lambda x: _row(x, **_cu_seq_lens(x, (100, -50, 206))),
    "position_ids": lambda x: _row(x, position_ids=_positions(x)),
    "position_ids, default cache": lambda x: {
        "input_ids": x[None],
        "position_ids": _positions(x),
    },
    "position_ids, empty cache": lambda x: _row(
        x, position_ids=_positions(x), past_key_values=DynamicCache(), use_cache=True
    ),
    "position_ids, ones": lambda x: _row(x, position_ids=_positions(x), attention_mask=_ones(x)),
    "position_ids, rows": lambda x: _rows(x, position_ids=_positions(x).view(2, 128)),
    "position_ids, go on": lambda x: _row(x, position_ids=_positions(x, (100, 0, 2, 0, 0, 0))),
    "document ids": lambda x: _row(x, attention_mask=_numbers(x)),
    "document ids, rows, left": lambda x: _numbered_rows(x, left=True),
    "document ids, rows, right": lambda x: _numbered_rows(x, left=False),
    "seq_idx": lambda x: _row(x, seq_idx=_numbers(x).int()),
    "seq_idx, rows": lambda x: _rows(x, seq_idx=_numbers(x).view(2, 128).int()),
    "padding, right": lambda x: _padded(x, left=False),
    "padding, left": lambda x: _padded(x, left=True),
    "padding, left, positions": lambda x: _padded(x, left=True, positions=True),
    "one document": lambda x: _row(x),
    "images": lambda x: _images(x),
    "images, document ids": lambda x: _images(
        x,
        packed_layout=None,
        attention_mask=torch.tensor([[1] * 42 + [2] * 38], device=x.device),
    ),
}


def labels_of(inputs: Inputs) -> Tensor:
    """The batch's own tokens, `IGNORE_INDEX` at padding and at images."""
    ids: Tensor = inputs["input_ids"]
    hidden = (ids == 0) | (ids >= VOCABULARY)
    return ids.masked_fill(hidden, IGNORE_INDEX)


# ---- kinds of attention: what packed_attention is called with ----


@dataclass(frozen=True)
class AttentionKind:
    """Heads, documents and mask of one call; `prefix` and `keys` count tokens of each document."""

    heads: tuple[int, int] = (6, 2)
    dims: tuple[int, int] | None = None
    options: Inputs = field(default_factory=dict)
    keys: tuple[int, ...] | None = None
    sinks: bool = False
    total_tokens: int | None = None
    lengths: tuple[int, ...] = LENGTHS


KINDS: dict[str, AttentionKind] = {
    "causal": AttentionKind(),
    "bidirectional": AttentionKind(options={"causal": False}),
    "window": AttentionKind(options={"window": 9}),
    "two-sided window": AttentionKind(options={"causal": False, "window": (5, 3)}),
    "chunk": AttentionKind(options={"chunk": 16}),
    "window and chunk": AttentionKind(options={"chunk": 32, "window": 9}),
    "prefix": AttentionKind(options={"prefix": (2, 30, 0, 1, 30, 8)}),
    "prefix and window": AttentionKind(options={"prefix": (2, 30, 0, 1, 30, 8), "window": (20, 4)}),
    "cross": AttentionKind(keys=(9, 30, 98, 4, 1, 60), options={"causal": False}),
    "cross, causal": AttentionKind(keys=(9, 30, 98, 4, 1, 60)),
    "cross, top left": AttentionKind(keys=(9, 30, 98, 4, 1, 60), options={"align": "top_left"}),
    "cross, window": AttentionKind(keys=(9, 30, 98, 4, 1, 60), options={"window": 9}),
    "softcap": AttentionKind(options={"softcap": 5.0}),
    "sinks": AttentionKind(sinks=True),
    "sinks and window": AttentionKind(sinks=True, options={"window": 9}),
    "one head for each": AttentionKind(heads=(4, 4)),
    "one head for all": AttentionKind(heads=(8, 1)),
    "scale": AttentionKind(options={"scale": 0.3}),
    "lse": AttentionKind(options={"return_lse": True}),
    "padding": AttentionKind(total_tokens=300),
    "padding, bidirectional": AttentionKind(total_tokens=300, options={"causal": False}),
    "empty documents": AttentionKind(lengths=(0, 5, 0, 90, 161, 0)),
    "one document": AttentionKind(lengths=(256,)),
    "other head_dim of values": AttentionKind(dims=(2, 1)),
}

# ---- which cases ----


@dataclass(frozen=True)
class Case:
    """`family`: a model type, or "attention", whose `form` is one of `KINDS`."""

    family: str
    backend: str
    form: str
    mode: str


MODEL_MODES = (
    "train",
    "eval",
    "by name",
    "checkpoint",
    "deterministic",
    "batch invariant",
    "generate",
    "compiled",
    "unpatched",
)
ATTENTION_MODES = ("train", "eval", "deterministic", "batch invariant")
SOME_FORMS = ("packed_layout", "position_ids", "document ids, rows, left", "padding, left")
FORMS_OF_MODE = {
    "checkpoint": SOME_FORMS,
    "deterministic": SOME_FORMS,
    "batch invariant": SOME_FORMS,
    "generate": ("one document", "padding, left", "padding, right", *SOME_FORMS[:3]),
    "compiled": ("packed_layout", "position_ids"),
    "unpatched": ("position_ids",),
}
"""Of modes that do not take every form."""
COMPILED_FAMILIES = ("llama", "llama4_text", "gemma2", "gpt_oss", "bert", "qwen3_vl")
FLEX_ON_CPU = (("eval", "packed_layout"), ("eval", "document ids, rows, left"))
"""FlexAttention on the CPU has no backward, and takes seconds to compile."""


def every_case(families: Sequence[str], backends: Sequence[str], device: str) -> Iterator[Case]:
    """All combinations that say something new."""
    for backend, form, mode in itertools.product(backends, KINDS, ATTENTION_MODES):
        if device == "cuda" or not backend.startswith("flex") or mode == "eval":
            yield Case("attention", backend, form, mode)
    for family, backend, mode in itertools.product(families, backends, MODEL_MODES):
        if mode == "compiled" and family not in COMPILED_FAMILIES:
            continue
        if mode == "generate" and family in ENCODERS:
            continue
        for form in FORMS_OF_MODE.get(mode, tuple(FORMS)):
            if form.startswith("images") and family not in VISION:
                continue
            slow = device == "cpu" and backend.startswith("flex")
            if not slow or (mode, form) in FLEX_ON_CPU:
                yield Case(family, backend, form, mode)


def pairwise(cases: Sequence[Case], most: int | None) -> list[Case]:
    """A sample in which each pair of values that occurs in `cases` occurs, or the first `most`.

    Greedy, over a few random candidates at each step; the same sample for the same cases.
    """

    def pairs(case: Case) -> list[tuple[str, str, str, str]]:
        # Forms of models and kinds of attention do not mix. No set: its order differs by process.
        named = list(vars(case).items())
        return [(a, x, b, y) for (a, x), (b, y) in itertools.combinations(named, 2)]

    order = random.Random(0)
    left: dict[tuple[str, str, str, str], list[Case]] = {}
    for case in cases:
        for pair in pairs(case):
            left.setdefault(pair, []).append(case)
    chosen: list[Case] = []
    while left and (most is None or len(chosen) < most):
        of_pair = left[order.choice(list(left))]
        some = order.sample(of_pair, min(30, len(of_pair)))
        best = max(some, key=lambda case: sum(pair in left for pair in pairs(case)))
        chosen.append(best)
        for pair in pairs(best):
            left.pop(pair, None)
    return chosen
