"""flexvarlen inside transformers: the attention implementations it registers, and `patch_model`.

| folder | holds |
|---|---|
| `embed.py` | `embed`; `sentence_transformers_files.py` reads the files of sentence-transformers |
| `trainers.py` | `patch_trainer` |
| `context_parallel_trainer.py` | a Trainer whose processes share packed rows |
| `shard_collator.py` | the collator of such a Trainer, which keeps a rank's shard of a row |
| `trainer_callback.py` | checks the model and loader of every Trainer; sets a dataset's epoch |
| `lm_head.py` | `lm_head`: a model's head as a function of hidden states |
| `api.py` | `patch_model`, `unpatch_model`, `patched` |
| `verification.py` | the check that `patch_model(verify=True)` makes |
| `isolation/` | `verify_isolation`: whether any bit of one document reaches another |
| `forward/` | a patched model's forward, step by step, and the wrapper around it |
| `attention/` | the functions that transformers calls, and which backend serves which layers |
| `state.py` | the state of a patched model; our attn_implementation names |
| `models/` | the verified families, as data, and model-specific code |
| `batch/` | reads a batch: documents, positions, labels, cache |

Each imports only those below it in this table.
"""

if __name__ == "patches":
    raise ImportError(
        "this folder must be imported as flexvarlen.patches, got patches; install flexvarlen, or "
        "put the folder above it on the path."
    )

import importlib
from typing import TYPE_CHECKING, Any

# Must be first: its end registers our functions, which imports most of this folder.
import transformers.modeling_utils  # noqa: F401

if TYPE_CHECKING:
    from flexvarlen.attention.backends.registry import IMPLEMENTATIONS
    from flexvarlen.patches.api import is_patched, patch_model, patched, unpatch_model
    from flexvarlen.patches.attention.functions import register

__all__ = [
    "IMPLEMENTATIONS",
    "is_patched",
    "patch_model",
    "patched",
    "register",
    "unpatch_model",
]

_HOME_OF = {
    "IMPLEMENTATIONS": "flexvarlen.attention.backends.registry",
    "register": "flexvarlen.patches.attention.functions",
}


def __getattr__(name: str) -> Any:
    """Import a public name lazily, as transformers may be half imported at this point."""
    if name not in __all__:
        raise AttributeError(f"module 'flexvarlen.patches' has no attribute {name!r}")
    home = importlib.import_module(_HOME_OF.get(name, "flexvarlen.patches.api"))
    return getattr(home, name)
