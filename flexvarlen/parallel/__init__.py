"""One packed row over several ranks.

| module | holds |
|---|---|
| `shard.py` | `shard_row` gives each rank its part of the row |
| `ulysses.py` | attention over the row, each rank with a part of the heads |
"""
