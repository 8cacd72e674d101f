"""Packing of documents into rows of a fixed number of tokens, and of rows into batches.

| module | holds |
|---|---|
| `pack.py` | `pack`: which documents share a row; `split_long`; `efficiency` |
| `stream.py` | `StreamPacker`: packing of a stream of documents |
| `collator.py` | `PackedCollator`: documents as one row of fixed shapes |
| `sampler.py` | `BalancedSampler`: an order of rows that balances attention cost over ranks |
| `loader_pass.py` | the state of accelerate's data loader that the sampler needs |
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
