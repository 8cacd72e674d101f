"""The documents of `convergence.py`: the rows that a seed takes, packed or padded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import flexvarlen as fv
from flexvarlen.bench.training.convergence_tables import PADDED, UNPATCHED
from flexvarlen.bench.training.texts import crc_of, document_ids, packed_rows
from flexvarlen.equivalence.batch import IGNORE_INDEX
from flexvarlen.layout.boundaries import round_up_to_power_of_two

FEWEST_TOKENS = 16  # shorter docstrings are a name said again

Inputs = dict[str, Any]


class Documents:
    """The rows of all steps, and a row as each variant gets it.

    Args:
        tokens: of a row, at most.
        vocabulary, library, longest: as in `document_ids`.
    """

    def __init__(self, tokens: int, vocabulary: int, *, library: bool, longest: int) -> None:
        found = document_ids(vocabulary, library=library, fewest=FEWEST_TOKENS, longest=longest)
        self.rows = packed_rows(found, tokens)
        self.crc = crc_of(self.rows)
        self.pack = fv.PackedCollator(
            tokens,
            round_up_to_power_of_two(max(map(len, self.rows))),
            min(longest, tokens),
        )

    def order(self, seed: int, steps: int) -> list[int]:
        """The row of each step: all of them, shuffled, before any comes again."""
        chance = random.Random(seed)
        order: list[int] = []
        while len(order) < steps:
            order += chance.sample(range(len(self.rows)), len(self.rows))
        return order[:steps]

    def batch(self, variant: str, row: int) -> Inputs:
        """Keyword arguments of a forward, on the host."""
        documents = self.rows[row]
        labels = sum(map(len, documents)) - len(documents)
        counted = {"num_items_in_batch": torch.tensor(labels)}
        if variant == PADDED:
            return padded(documents) | counted
        batch = self.pack([{"input_ids": ids} for ids in documents])
        if variant == UNPATCHED:
            del batch["packed_layout"], batch["use_cache"]
        return batch | counted


def padded(documents: Sequence[Sequence[int]]) -> Inputs:
    """Documents to the right of which the shorter ones are padded; labels as the packed row's."""
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
