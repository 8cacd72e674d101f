"""Trees in parts of a bounded number of tokens, whose gradients are those of the whole tree.

| file | holds |
|---|---|
| `plan.py` | which segments make a part, and which parts continue which; on the host |
| `states.py` | `PartStates`: keys, values, states and gradients that parts pass to one another |
| `keys_above.py` | `with_keys_above`: a layer's keys with those above, also in a compiled graph |
| `part.py` | `TreePart`: the `shard` of a part's layout |
| `run.py` | `run_parts`: the parts in their order, and the passes without gradients |

Imports: torch, `flexvarlen.layout` and `flexvarlen.parallel`. Never transformers.
"""
