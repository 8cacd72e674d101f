"""How long the documents of a text collection are: those of a packed row, those of prompts.

Measured by a byte-level BPE of 1,024 tokens that is trained on the texts: a model's own tokenizer
would find fewer tokens in each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from flexvarlen.equivalence.corpus import VOCABULARY, read_documents, tokenize

LONGEST_SHARE = 8  # a text longer than an eighth of the row is cut there: a row has 8 at least


def longest_of(tokens: int) -> int:
    """Where a text is cut in a row of so many tokens."""
    return max(1, tokens // LONGEST_SHARE)


def text_lengths(
    tokens: int, seed: int, files: Sequence[Path] | None, longest: int | None = None
) -> list[int]:
    """Lengths of a collection's texts in random order, over again until they fill the row.

    Args:
        tokens: of the row; the last document is cut to fit.
        seed: of the order.
        files: as `flexvarlen.equivalence.corpus.read_documents` takes them; None: Python's topics.
        longest: tokens at which a document is cut; None: `longest_of`.

    Raises:
        ValueError: no text in the files.
    """
    found = _texts(files)
    chance = random.Random(seed)
    longest = longest_of(tokens) if longest is None else longest
    lengths: list[int] = []
    left = tokens
    while left > 0:
        for length in chance.sample(found, len(found)):
            taken = min(length, longest, left)
            if taken:
                lengths.append(taken)
                left -= taken
    return lengths


def prompt_lengths(prompts: int, tokens: int, seed: int, files: Sequence[Path] | None) -> list[int]:
    """Lengths of prompts that a collection's texts make, all cut at one length.

    Args:
        prompts: how many; texts are drawn at random, over again where there are fewer.
        tokens: of all together, at least one each: what decides where they are cut. Texts that
            have fewer are repeated as a whole.
        seed: of the drawing.
        files: as `text_lengths` takes them.

    Raises:
        ValueError: no text in the files, or fewer tokens than prompts.
    """
    if tokens < prompts:
        raise ValueError(
            f"tokens must be at least the {prompts} prompts, got {tokens}; give each one token."
        )
    found = _texts(files)
    chance = random.Random(seed)
    drawn: list[int] = []
    while len(drawn) < prompts:
        drawn += chance.sample(found, min(len(found), prompts - len(drawn)))
    return cut_alike([length * -(-tokens // sum(drawn)) for length in drawn], tokens)


def cut_alike(lengths: Sequence[int], total: int) -> list[int]:
    """Lengths cut at one length so that they have this sum; where it leaves a rest, one more.

    >>> cut_alike([2, 9, 7], 13)
    [2, 6, 5]
    """
    cut = max(n for n in range(max(lengths) + 1) if sum(min(n, x) for x in lengths) <= total)
    found = [min(cut, length) for length in lengths]
    rest = total - sum(found)
    for index, length in enumerate(lengths):
        if rest and length > cut:
            found[index] += 1
            rest -= 1
    return found


def source_of(files: Sequence[Path] | None) -> str:
    """What texts a run's lengths come from, for its rows."""
    if files is None:
        return "Python's help topics"
    return ", ".join(Path(file).name for file in files)


def _texts(files: Sequence[Path] | None) -> list[int]:
    """Tokens of each text that has any."""
    texts = tokenize(read_documents(files or ()), vocabulary=VOCABULARY)
    return [len(ids) for ids in texts if len(ids)]
