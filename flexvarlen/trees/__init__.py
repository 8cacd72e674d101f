"""Trees in parts of a bounded number of tokens, whose gradients are those of the whole tree.

| file | holds |
|---|---|
| `plan.py` | which segments make a part, and which part hangs from which; on the host |
| `step.py` | `TreeStep`: keys, values and gradients that parts share, for one pass over a tree |
| `part.py` | `TreePart`: what the layout of a part answers as its `shard` |
| `run.py` | `run_parts`: the parts in their order, and the passes that keep keys |

Imports: torch, `flexvarlen.layout` and `flexvarlen.parallel`. Never transformers.
"""
