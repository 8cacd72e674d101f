"""Texts as packed rows of a fixed number of tokens, for `embed`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.packing import pack

T = TypeVar("T")

_CHUNK = 4096
"""Texts that are tokenized at once. Some rows' worth, so that the model seldom waits."""
_MIN_MEAN_TOKENS = 8
"""Tokens of a text on average below which the number of texts, not of tokens, ends a row."""


@dataclass(frozen=True)
class TextRow:
    """A packed row.

    Attributes:
        texts: the index of each document.
        ids: int64 `[1, T]`, on the host.
        layout: the documents, on the host until the row runs.
    """

    texts: list[int]
    ids: Tensor
    layout: PackedLayout


@dataclass(frozen=True)
class Tokenizer:
    tokenizer: PreTrainedTokenizerBase
    prompt: str
    longest: int

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, special tokens included."""
        prompted = [self.prompt + text for text in texts] if self.prompt else list(texts)
        ids: list[list[int]] = self.tokenizer(
            prompted,
            truncation=True,
            max_length=self.longest,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return ids


def rows_of_texts(
    texts: Sequence[str], tokenize: Tokenizer, tokens_per_row: int, longest: int
) -> Iterator[list[TextRow]]:
    """Lists of packed rows, one list for each chunk of texts.

    The last row of a chunk is seldom full, so its texts wait for the next chunk.
    """
    waiting: dict[int, list[int]] = {}
    for first in range(0, len(texts), _CHUNK):
        chunk = texts[first : first + _CHUNK]
        tokens = waiting | dict(enumerate(tokenize(chunk), first))
        rows = _pack(tokens, tokens_per_row)
        is_last = first + len(chunk) == len(texts)
        waiting = {} if is_last else {i: tokens[i] for i in rows.pop()}
        yield [_row(row, tokens, tokens_per_row, longest) for row in rows]


def _pack(tokens: dict[int, list[int]], tokens_per_row: int) -> list[list[int]]:
    """The texts of each row: longest first, and long texts alone in rows of their own."""
    long = [i for i, ids in tokens.items() if len(ids) > tokens_per_row]
    short = [i for i, ids in tokens.items() if len(ids) <= tokens_per_row]
    lengths = [max(len(tokens[i]), 1) for i in short]  # without tokens: anywhere
    slots = _slots(tokens_per_row)
    rows = [[short[i] for i in row] for row in pack(lengths, tokens_per_row)]
    cut = [row[first : first + slots] for row in rows for first in range(0, len(row), slots)]
    return [[i] for i in long] + cut


def _slots(total: int) -> int:
    """Texts that a row holds at most."""
    return -(-total // _MIN_MEAN_TOKENS)


def _row(texts: list[int], tokens: dict[int, list[int]], full: int, longest: int) -> TextRow:
    """One packed row of these texts, padded to `full` tokens.

    One that is at most half full, which only the last can be, or longer than `full`: to a power of
    two.
    """
    documents = [tokens[i] for i in texts]
    lengths = [len(ids) for ids in documents]
    used = sum(lengths)
    total = round_up_to_power_of_two(used)
    total = total if used > full else min(total, full)
    ids = np.zeros(total, np.int64)
    ids[:used] = np.concatenate(documents)
    layout = PackedLayout.from_lengths(
        lengths,
        total_tokens=total,
        capacity=max(_slots(total), len(texts)),
        max_seqlen_bound=min(longest, total),
    )
    return TextRow(texts, torch.from_numpy(ids)[None], layout)


def prefetched(groups: Iterator[list[T]]) -> Iterator[T]:
    """The items of each group, while a thread makes the next group."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, groups, None)
        while (group := following.result()) is not None:
            following = thread.submit(next, groups, None)
            yield from group
