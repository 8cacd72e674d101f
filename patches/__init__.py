"""flexvarlen inside transformers: the attention implementations it registers, and `patch_model`.

| folder | holds |
|---|---|
| `api.py`, `state.py` | `patch_model`, `unpatch_model`, `patched`; what a patched model keeps |
| `forward/` | a patched model's forward, step by step, and the wrapper around it |
| `attention/` | the functions that transformers calls, and which backend serves which layers |
| `models/` | the verified families, as data, and what single ones need |
| `batch/` | what a batch says: documents, positions, labels, cache |

Each imports those below it in this table alone.
"""

if __name__ == "patches":
    raise ImportError(
        "this folder must be imported as flexvarlen.patches, got patches; install flexvarlen, or "
        "put the folder above it on the path."
    )

from flexvarlen.patches.api import patch_model, patched, unpatch_model
from flexvarlen.patches.attention.functions import register
from flexvarlen.patches.state import IMPLEMENTATIONS

__all__ = ["IMPLEMENTATIONS", "patch_model", "patched", "register", "unpatch_model"]
