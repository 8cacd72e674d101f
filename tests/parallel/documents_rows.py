"""Rows and trees for the tests of documents over ranks."""

from __future__ import annotations

from typing import Any

import torch

import flexvarlen as fv
from tests.tiny_models import VOCABULARY

TOKENS = 120  # a multiple of 2, 3, 4 and 8, the numbers of ranks
ROWS = {
    "mixed": (41, 1, 40, 37),  # and a token of padding
    "long": (100, 1, 19),  # longer than a rank
    "one": (120,),
    "apart": (80, 12, 4, 24),  # each of two ranks sends some tokens and keeps some
    "short": (1,) * 60,  # each whole on a rank, however many
    "edge": (59, 30, 31),  # contiguous: the first of two ranks has a token of the second
    "padded": (50, 30),  # contiguous: the last of four ranks has padding alone
}


def batch_of(lengths: tuple[int, ...]) -> dict[str, Any]:
    """One packed row, with labels."""
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=generator)
    layout = fv.PackedLayout.from_lengths(lengths, total_tokens=TOKENS)
    return {"input_ids": ids, "labels": ids.clone(), "packed_layout": layout}


TREES = fv.TreeCollator(total_tokens=TOKENS, capacity=32, max_seqlen_bound=64, max_depth=3)


def tree_samples(seed: int) -> list[dict[str, list[int]]]:
    """Five prompts with answers; no tree is longer than a quarter of the row."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for prompt, answers in ((9, (4, 7, 2)), (5, (6, 6)), (12, (0,)), (3, (10, 1, 5, 8)), (7, (3,))):
        sizes = [prompt, *answers]
        ids = torch.randint(3, VOCABULARY, (sum(sizes),), generator=generator).split(sizes)
        of_prompt = [torch.cat([ids[0], answer]).tolist() for answer in ids[1:]]
        samples += [{"input_ids": x, "labels": [-100, -100, *x[2:]]} for x in of_prompt]
    return samples
