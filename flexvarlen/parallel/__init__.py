"""One packed row over several ranks.

| module | holds |
|---|---|
| `plan.py` | which tokens lie on which rank |
| `pieces.py` | pieces of documents, and the two simple plans |
| `balance.py` | which documents are whole on a rank, and which are cut, for even work |
| `shard.py` | `shard_row` gives each rank its part of the row |
| `documents.py` | attention over the row, each rank with its own tokens |
| `key_exchange.py` | which keys of cut documents the ranks exchange |
| `transfer.py` | how these travel, and their gradients back |
| `gather_keys.py` | the same as one operator, for compiled graphs |
| `keys_on_the_way.py` | the same in two steps, between which a rank attends to what it has |
| `row_keys.py` | attention with these keys, in one call or two |
| `sharded_layout.py` | the layout of the pieces that one rank holds |
| `trees.py` | trees, which lie whole on a rank |
| `router_loss.py` | each rank's part of the router loss |
"""
