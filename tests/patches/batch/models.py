"""A tiny model that keeps documents apart: patched, or by a plugin name alone."""

from __future__ import annotations

import flexvarlen as fv
from tests.tiny_models import new_model

PATCHED, NAME = "patched", "flexvarlen_doc"
HOW = (PATCHED, NAME)


def model_of(how: str, kind: str = "llama", **changes):
    """A model of its own; `how` is "patched", or an attn_implementation of ours."""
    if how == PATCHED:
        return fv.patch_model(new_model(kind, **changes), "sdpa")
    return new_model(kind, implementation=how, **changes)
