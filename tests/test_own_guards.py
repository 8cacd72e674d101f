"""A compiled model is guarded on nothing that flexvarlen's own modules hold, and on all else."""

from __future__ import annotations

import re

import pytest
import torch

import flexvarlen as fv
from flexvarlen.patches import own_guards
from tests.tiny_models import new_model

OURS = "__import_flexvarlen"


def guarded(model, call):
    """The names of what the compiled graphs are guarded on."""
    names = []

    def note(entries):
        names.extend(re.sub(r"_\d+(_c\d+)?", "", entry.name) for entry in entries)
        return [True] * len(entries)

    torch._dynamo.reset()
    options = {"guard_filter_fn": note}
    compiled = torch.compile(model, backend="eager", fullgraph=True, options=options)
    call(compiled)
    return names


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_no_guard_on_what_is_ours(backend, monkeypatch):
    model = fv.patch_model(new_model("qwen3"), backend)
    layout = fv.PackedLayout.from_lengths([20, 12])
    ids = torch.arange(32)[None]

    def call(run):
        with torch.no_grad():
            run(ids, packed_layout=layout)

    kept = guarded(model, call)
    assert not [name for name in kept if OURS in name]
    monkeypatch.setattr(own_guards, "_drop", lambda context: None)
    found = guarded(model, call)
    assert len([name for name in found if OURS in name]) > 100
    assert {name for name in found if OURS not in name} <= set(kept)


def test_another_torch_keeps_the_guards(monkeypatch):
    class Context:
        """What comptime hands out, without what is private to torch."""

    own_guards._drop(Context())  # raises nothing
