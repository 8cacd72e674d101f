"""How much longer than the mean rank the slowest one works, by what rows are sorted by.

Simulated: documents are drawn, made into rows and dealt to ranks; a rank works for as long as
`fv.row_cost` says. `python -m tests.packing.row_balance` writes the records.
"""

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import flexvarlen as fv
from flexvarlen.bench.suites.model.geometries import GEOMETRIES

TOKENS = 65_536
"""Of a row that is packed, and of the longest document."""
EXAMPLES = 8
"""Of a padded batch that `unpad` makes into a row."""
STEPS = 80
"""More than a window of the sampler."""

MODELS = ("llama-3.1-8b", "qwen3.5-2b")
DOCUMENTS = ("chats", "books and chats", "agents")
ROWS = ("packed", "in order", "unpadded")
RANKS = (8, 64)

RECORDS = Path(__file__).with_suffix(".jsonl")


@cache
def cost_of(geometry: str) -> fv.RowCost:
    with torch.device("meta"):
        return fv.row_cost(AutoModelForCausalLM.from_config(GEOMETRIES[geometry](None)))


def lengths_of(documents: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Log-normal; one chat in a hundred is a book, a hundred times as long."""
    mean, sigma, longest = (12_000, 1.2, TOKENS) if documents == "agents" else (800, 1.0, 8192)
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).clip(16, longest)
    if documents == "books and chats":
        lengths[rng.random(count) < 0.01] *= 100
    return lengths.clip(max=TOKENS).astype(np.int64)


@cache
def rows_of(rows: str, documents: str, count: int) -> list[list[int]]:
    """The lengths of each row's documents."""
    rng = np.random.default_rng(0)
    if rows == "unpadded":
        return lengths_of(documents, EXAMPLES * count, rng).reshape(count, EXAMPLES).tolist()
    mean = lengths_of(documents, 100_000, rng).mean()
    lengths = lengths_of(documents, int(1.2 * count * TOKENS / mean), rng).tolist()
    strategy = "in_order" if rows == "in order" else "best_fit_decreasing"
    packed = fv.pack(lengths, TOKENS, strategy=strategy)
    return [[lengths[i] for i in packed[row]] for row in rng.permutation(len(packed))[:count]]


def simulated(geometry: str, documents: str, rows: str, ranks: int) -> dict[str, Any]:
    """The work of the slowest rank of each step over that of the mean rank, minus 1."""
    lengths, cost = rows_of(rows, documents, STEPS * ranks), cost_of(geometry)
    work = cost.of_rows(lengths)
    weights = {"tokens": fv.RowCost(1.0), "squares": None, "cost": cost}
    excess = {"shuffled": work.reshape(STEPS, ranks)} | {
        name: work[np.array(fv.BalancedSampler(lengths, num_replicas=ranks, cost=by).steps())]
        for name, by in weights.items()
    }
    return {
        "case": {"geometry": geometry, "documents": documents, "rows": rows, "ranks": ranks},
        "slowest_over_mean": {
            name: round(float(of_steps.max(1).sum() / of_steps.mean(1).sum()) - 1, 4)
            for name, of_steps in excess.items()
        },
        "worst_step": {
            name: round(float((of_steps.max(1) / of_steps.mean(1)).max()) - 1, 4)
            for name, of_steps in excess.items()
        },
    }


def cases() -> list[tuple[str, str, str, int]]:
    return list(product(MODELS, DOCUMENTS, ROWS, RANKS))


if __name__ == "__main__":
    lines = (json.dumps(simulated(*case)) + "\n" for case in cases())
    RECORDS.write_text("".join(lines), encoding="utf-8")
