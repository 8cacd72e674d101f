"""Packing: documents into rows of a fixed number of tokens, and rows into batches.

| module | holds |
|---|---|
| `bins.py` | `pack`: which documents share a row; `split_long`; `efficiency` |
| `stream.py` | `StreamPacker`: the same for documents that come one after another |
| `collator.py` | `PackedCollator`: documents as one row of fixed shapes |
| `sampler.py` | `BalancedSampler`: rows in an order in which no rank waits |
| `loader_pass.py` | what accelerate's loader does with a sampler, and does not tell it |
"""

from flexvarlen.packing.collator import PackedCollator
from flexvarlen.packing.pack import Piece, efficiency, pack, split_long
from flexvarlen.packing.sampler import BalancedSampler
from flexvarlen.packing.stream import StreamPacker

__all__ = [
    "BalancedSampler",
    "PackedCollator",
    "Piece",
    "StreamPacker",
    "efficiency",
    "pack",
    "split_long",
]
