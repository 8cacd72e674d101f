"""How long documents are: those of a text collection, of one length, or log-normal.

Texts are measured in tokens of a byte-level BPE of 1,024 tokens that is trained on them: a model's
own tokenizer would find fewer tokens in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from flexvarlen.bench.suites.model.geometries import log_normal_lengths
from flexvarlen.bench.suites.training.texts import full_rows
from flexvarlen.verify.corpus import VOCABULARY, read_documents, tokenize

Documents = Literal["text", "uniform", "log-normal"]
LONGEST_SHARE = 8
"""A text longer than an eighth of the row is cut there, so that a row has at least 8 documents."""


def drawn_lengths(tokens: int, documents: Documents, mean: int, seed: int) -> list[int]:
    """Lengths of a row's documents that are no texts; the last one is cut to fit.

    >>> drawn_lengths(8192, "uniform", 2048, 0)
    [2048, 2048, 2048, 2048]
    """
    if documents == "log-normal":
        return log_normal_lengths(tokens, mean, 1.0, seed)
    count = max(1, round(tokens / mean))
    return [tokens * (i + 1) // count - tokens * i // count for i in range(count)]


def text_lengths(
    tokens: int, seed: int, files: Sequence[Path] | None, longest: int | None = None
) -> list[int]:
    """Lengths of a collection's texts in random order, repeated until they fill the row.

    Args:
        tokens: of the row; the last document is cut to fit.
        seed: of the order.
        files: as `flexvarlen.verify.corpus.read_documents` takes them; None: Python's topics.
        longest: tokens at which a document is cut; None: an eighth of the row.

    Raises:
        ValueError: no text in the files.
    """
    longest = longest or max(1, tokens // LONGEST_SHARE)
    texts = tokenize(read_documents(files or ()), vocabulary=VOCABULARY)
    (row,) = full_rows([ids[:longest] for ids in texts if ids], tokens, 1, seed)
    return [len(ids) for ids in row]


def source_of(files: Sequence[Path] | None) -> str:
    """The texts that a run's lengths come from, for its records."""
    if files is None:
        return "Python's help topics"
    return ", ".join(Path(file).name for file in files)
