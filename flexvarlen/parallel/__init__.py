"""Context parallelism: one packed row over several ranks.

| module | holds |
|---|---|
| `plan.py` | which tokens lie on which rank |
| `pieces.py` | pieces of documents, and the two simple plans |
| `balance.py` | which documents are whole on a rank, and which are cut, for even work |
| `shard.py` | `shard_row` gives each rank its part of the row |
| `documents.py` | attention over the row, each rank with its own tokens |
| `key_exchange.py` | which keys of cut documents the ranks exchange |
| `gather_keys.py` | the operator that moves them, and their gradients back |
| `sharded_layout.py` | the layout of the pieces that one rank holds |
| `trees.py` | trees, which lie whole on a rank |
| `router_loss.py` | each rank's part of the router loss |
| `every_rank.py` | an error of one rank is raised on all |
| `sharded_parameters.py` | whether ranks share a model, and which ranks |
"""
