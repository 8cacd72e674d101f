"""Documents of real text that every Python brings along: ids of a byte-level BPE, rows, batches.

Python's help topics (`pydoc_data`), 79 long texts; and the docstrings of the standard library,
about 8,000 texts, most of them short. A BPE is trained on the very documents that it reads.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithFlattening

import flexvarlen as fv
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.verify.corpus import (
    SMALLEST_VOCABULARY,
    VOCABULARY,
    read_documents,
    train_tokenizer,
)

Document = list[int]
"""Token ids."""

NOT_READ = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib"})
"""Folders of the standard library's root that hold no documentation, or not its own."""


def topics() -> tuple[str, ...]:
    return read_documents()


@cache
def docstrings() -> tuple[str, ...]:
    """The docstrings of the standard library's modules, classes and functions, each text once."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if NOT_READ.isdisjoint(file.relative_to(root).parts)
    ]
    return tuple(dict.fromkeys(text for file in files for text in _docstrings(file)))


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # a template of some tool
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def document_ids(
    texts: tuple[str, ...], vocabulary: int, *, longest: int, fewest: int = 1
) -> list[Document]:
    """Token ids of each document, in the texts' order.

    Args:
        texts: the documents, on which the BPE is trained too.
        longest: a document of more tokens is cut into several.
        fewest: documents of fewer tokens are dropped.
    """
    encodings = train_tokenizer(texts, vocabulary).encode_batch(list(texts))
    found = [encoding.ids for encoding in encodings if encoding.ids]
    pieces = fv.split_long([len(ids) for ids in found], longest)
    cut = [found[piece.document][piece.start : piece.stop] for piece in pieces]
    return [ids for ids in cut if len(ids) >= fewest]


def topic_ids(vocab_size: int, longest: int) -> list[Document]:
    """Python's help topics for a model of that vocabulary.

    A tiny model has fewer ids than a BPE has tokens: those beyond become its last.
    """
    vocabulary = min(VOCABULARY, max(vocab_size, SMALLEST_VOCABULARY))
    found = document_ids(topics(), vocabulary, longest=longest)
    return [[min(token, vocab_size - 1) for token in document] for document in found]


def packed_rows(documents: Sequence[Document], tokens: int, seed: int = 0) -> list[list[Document]]:
    """Rows of whole documents in random order, `tokens` at most; a row less than half full is left.

    Long and short documents are mixed as a shuffled data set mixes them.
    """
    shuffled = random.Random(seed).sample(list(documents), len(documents))
    packed = fv.pack([len(ids) for ids in shuffled], tokens, strategy="first_fit")
    rows = [[shuffled[index] for index in row] for row in packed]
    return [row for row in rows if sum(map(len, row)) > tokens // 2]


def full_rows(
    documents: Sequence[Document], tokens: int, count: int, seed: int = 0
) -> list[list[Document]]:
    """`count` rows of exactly `tokens`: documents in random order, repeated until they are full.

    The last document of a row is truncated to fit.
    """
    rng = random.Random(seed)
    rows: list[list[Document]] = [[]]
    left = tokens
    while True:
        for ids in rng.sample(list(documents), len(documents)):
            rows[-1].append(ids[:left])
            left -= len(rows[-1][-1])
            if left:
                continue
            if len(rows) == count:
                return rows
            rows.append([])
            left = tokens


def crc_of(rows: Sequence[Sequence[Document]]) -> int:
    """A checksum of the tokens: another Python brings other texts."""
    return zlib.crc32(json.dumps(rows).encode())


# --- a step's documents as batches: packed by flexvarlen, packed by transformers, padded ----------

Inputs = dict[str, Any]
"""Keyword arguments of a forward."""
Collate = Callable[[Sequence[Document]], Inputs]


def pack(tokens: int, rows: Sequence[Sequence[Document]]) -> Collate:
    """`PackedCollator` for rows of `tokens`; its shapes are those of all `rows`."""
    longest = max(len(ids) for row in rows for ids in row)
    collator = fv.PackedCollator(
        total_tokens=tokens, capacity=max(map(len, rows)), max_seqlen_bound=longest
    )
    return lambda documents: collator([{"input_ids": ids} for ids in documents])


def flatten(*, flash: bool) -> Collate:
    """transformers' packed batch; `flash`: with FlashAttention's arguments."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)
    return lambda documents: collator([{"input_ids": ids} for ids in documents])


def pad(documents: Sequence[Document]) -> Inputs:
    """Documents padded on the right; a first token is no label, as in a packed row."""
    ids = [torch.tensor(document) for document in documents]
    lengths = torch.tensor([len(document) for document in ids])
    real = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    input_ids = pad_sequence(ids, batch_first=True)
    labels = input_ids.masked_fill(~real, IGNORE_INDEX)
    labels[:, 0] = IGNORE_INDEX
    return {
        "input_ids": input_ids,
        "attention_mask": real.long(),
        "labels": labels,
        "use_cache": False,
    }


def split_evenly(documents: Sequence[Document], batches: int) -> list[list[Document]]:
    """Documents in order, in `batches` batches of equal count, or one apart."""
    edges = np.linspace(0, len(documents), batches + 1).round().astype(int)
    return [list(documents[begin:end]) for begin, end in pairwise(edges.tolist())]


def padded_batches(
    steps: Sequence[Sequence[Document]], positions: int
) -> list[list[list[Document]]]:
    """Each step in equally many batches, the fewest that hold at most `positions` each.

    If even one document a batch is too many: as many batches as the smallest step has documents.
    """
    for count in range(1, min(map(len, steps)) + 1):
        found = [split_evenly(documents, count) for documents in steps]
        if max(len(b) * max(map(len, b)) for batches in found for b in batches) <= positions:
            break
    return found
