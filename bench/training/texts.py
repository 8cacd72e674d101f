"""Documents of real text that every Python brings along, as ids of a byte-level BPE.

Python's help topics (`pydoc_data`), 79 long texts; and the docstrings of the standard library,
about 8,000 texts, most of them short. A BPE is trained on the very documents that it reads.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import flexvarlen as fv
from flexvarlen.equivalence.corpus import (
    SMALLEST_VOCABULARY,
    VOCABULARY,
    read_documents,
    train_tokenizer,
)

NO_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib"})
"""Folders of the standard library's root whose files are not read."""


@cache
def docstrings() -> tuple[str, ...]:
    """Of the standard library's modules, classes and functions, each text once."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if NO_LIBRARY.isdisjoint(file.relative_to(root).parts)
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
    vocabulary: int, *, library: bool, fewest: int = 1, longest: int | None = None
) -> list[list[int]]:
    """Token ids of each document, in the texts' order.

    Args:
        vocabulary: tokens of the BPE.
        library: the docstrings too, not the topics alone.
        fewest: documents of fewer tokens are left out.
        longest: a document of more is cut into several; None: none is.
    """
    texts = read_documents() + (docstrings() if library else ())
    tokenizer = train_tokenizer(texts, vocabulary)
    found = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    if longest is not None:
        pieces = fv.split_long([len(ids) for ids in found if ids], longest)
        kept = [ids for ids in found if ids]
        found = [kept[piece.document][piece.start : piece.stop] for piece in pieces]
    return [ids for ids in found if len(ids) >= fewest]


def topic_ids(ids: int, longest: int) -> list[list[int]]:
    """Python's help topics for a model of so many ids.

    Args:
        ids: the model's; a tiny one has fewer than a BPE has tokens, and gets its last for those.
        longest: as in `document_ids`.
    """
    vocabulary = min(VOCABULARY, max(ids, SMALLEST_VOCABULARY))
    found = document_ids(vocabulary, library=False, longest=longest)
    return [[min(token, ids - 1) for token in document] for document in found]


def packed_rows(
    documents: Sequence[list[int]], tokens: int, seed: int = 0
) -> list[list[list[int]]]:
    """Rows of whole documents in random order, `tokens` at most; what fills no last row is left.

    Long and short documents are mixed as a shuffled data set mixes them.
    """
    shuffled = random.Random(seed).sample(list(documents), len(documents))
    rows = fv.pack([len(ids) for ids in shuffled], tokens, strategy="first_fit")
    return [[shuffled[index] for index in row] for row in rows if _fills(row, shuffled, tokens)]


def _fills(row: Sequence[int], documents: Sequence[list[int]], tokens: int) -> bool:
    return sum(len(documents[index]) for index in row) > tokens // 2


def full_rows(
    documents: Sequence[list[int]], tokens: int, count: int, seed: int = 0
) -> list[list[list[int]]]:
    """`count` rows of exactly `tokens`: documents in random order, over again until they are full.

    The last document of a row is cut to fit; what is cut off is left out.
    """
    chance = random.Random(seed)
    rows: list[list[list[int]]] = [[]]
    left = tokens
    while True:
        for ids in chance.sample(list(documents), len(documents)):
            rows[-1].append(ids[:left])
            left -= len(rows[-1][-1])
            if left:
                continue
            if len(rows) == count:
                return rows
            rows.append([])
            left = tokens


def crc_of(rows: Sequence[Sequence[list[int]]]) -> int:
    """Tells rows of equal texts: another Python brings others."""
    return zlib.crc32(json.dumps(rows).encode())
