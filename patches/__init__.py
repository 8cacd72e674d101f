"""flexvarlen inside transformers: the attention implementations it registers, and `patch_model`.

| file or folder | holds |
|---|---|
| `trainers.py` | `patch_trainer` |
| `context_parallel_trainer.py` | a Trainer whose processes share packed rows |
| `shard_collator.py` | its collator, which keeps a rank's shard of a row |
| `replay_trainer.py` | TRL's GRPOTrainer, whose forwards replay the experts of an engine |
| `tree_trainer.py` | one tree for each optimizer step of TRL's trainers |
| `tree_logprobs.py` | `tree_logprobs`: of a tree's labels, for any loss, in parts |
| `embed.py` | `embed`; `embed_rows.py` packs texts, `embedding_settings.py` reads what was saved |
| `row_cost.py` | `row_cost`: the FLOPs of a training step, by token and by pair in attention |
| `trainer_callback.py` | every Trainer's check of a batch's model and loader; a dataset's epoch |
| `api.py` | `patch_model`, `unpatch_model`, `patched` |
| `apply.py` | applies a patch to a model, and undoes it |
| `verification.py` | the check of a model that `patch_model(verify=True)` makes |
| `isolation/` | `verify_isolation`: whether a bit of one document reaches another |
| `forward/` | a patched model's forward: its `steps.py`, and what `stages.py` chooses for it |
| `lm_head.py` | `lm_head`: a model's head as a function of hidden states |
| `inner_model.py` | finds the transformers model inside wrappers |
| `attention/` | the functions that transformers calls, and which backend serves which layers |
| `batch/` | reads a batch: what was given, documents, positions, targets: the row |
| `why_not.py`, `adapters.py`, `names.py` | why a model cannot be patched |
| `state.py` | the state of a patched model; our attn_implementation names |
| `parts.py` | what a model is made of |
| `models/` | the verified families, as data, and model-specific code |
| `refusal.py` | tables of what is refused: when, and the sentence |

Each imports only those below it in this table, except `models/llama4.py`, which imports `batch/`.
"""

if __name__ == "patches":
    raise ImportError(
        "this folder must be imported as flexvarlen.patches, got patches; install flexvarlen, or "
        "put the folder above it on the path."
    )

import importlib
from typing import TYPE_CHECKING, Any

# Must be first: it registers our functions at its end, which imports most of this folder.
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
    """A public name, from its module: transformers may be half imported when this is."""
    if name not in __all__:
        raise AttributeError(f"module 'flexvarlen.patches' has no attribute {name!r}")
    home = importlib.import_module(_HOME_OF.get(name, "flexvarlen.patches.api"))
    return getattr(home, name)
