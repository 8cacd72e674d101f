"""flexvarlen inside transformers: the attention implementations it registers, and `patch_model`.

| file | holds |
|---|---|
| `documents.py` | the documents of a forward, found in its arguments |
| `interface.py` | the attention and mask functions that transformers calls by name |
| `routing.py` | kinds of layers, and which backend serves which |
| `towers.py` | the text and the vision tower of a model |
| `compile_warnings.py` | a sentence where graphs are made for too many sizes |
| `one_forward.py` | what the layers share by a name alone |
| `model.py` | `patch_model`, `unpatch_model`, `patched` |
| `forward_inputs.py` | what a patched model's forward is called with |
| `positions.py` | its position_ids, read and made |
| `vision_tower.py` | the same for a vision tower: frames of images are documents |
| `wrapped_forward.py` | a `forward` wrapped on the instance |
| `packed_cache.py` | caches that a packed forward filled, from which decoding refuses |
| `rotary.py` | rotary tables computed once a compiled forward |
| `families.py`, `family.py`, `llama.py` | which model types are verified, and what each needs |
| `heads.py`, `overlays.py`, `stateful.py` | heads, masks and model types that are refused |
| `sequence_parallel.py` | rows cut over ranks: what a model may be, and be called with |
| `context_parallel.py` | accelerate's sharding of tokens, which is refused |
"""

if __name__ == "patches":
    raise ImportError(
        "this folder must be imported as flexvarlen.patches, got patches; install flexvarlen, or "
        "put the folder above it on the path."
    )

from flexvarlen.patches.api import patch_model, patched, unpatch_model
from flexvarlen.patches.attention.functions import IMPLEMENTATIONS, register

__all__ = ["IMPLEMENTATIONS", "patch_model", "patched", "register", "unpatch_model"]
