"""Trees in parts of a bounded number of tokens, whose gradients are those of the whole tree.

| file | holds |
|---|---|
| `plan.py` | which segments make a part, and which parts continue which; on the host |
| `steps.py` | `Step`: the parts and passes without gradients in their order, on several ranks too |
| `ranks.py` | `ModelRanks`: what one rank, DDP and FSDP2 do before and after each step |
| `states.py` | `PartStates`: keys, values, states and gradients that parts pass to one another |
| `keys_above.py` | `KeysOfPart`: a layer's keys with those above, also in a compiled graph |
| `part.py` | `TreePart`: the `shard` of a part's layout |
| `run.py` | `run_parts`: the loop over the steps |
"""
