"""A row that is not split: its layouts share `WHOLE`, and a forward enters nothing that splits."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch

import flexvarlen as fv
from flexvarlen.layout.row_split import OWN_KEYS, WHOLE
from tests.tiny_models import new_model

LAYOUTS = (fv.PackedLayout.from_lengths([3, 5]), fv.PackedLayout.from_tree([3, 2], [-1, 0]))


@pytest.mark.parametrize(
    "remade",
    [
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.deepcopy,
        lambda x: x.moved(torch.clone) if isinstance(x, fv.PackedLayout) else copy.copy(x),
    ],
    ids=["pickle", "deepcopy", "moved"],
)
def test_copies_are_whole_as_well(remade):
    """The same object, as compiled graphs would else be made for each copy."""
    assert [remade(layout).shard for layout in LAYOUTS] == [WHOLE] * 2
    assert remade(OWN_KEYS) is OWN_KEYS is WHOLE.keys(3, None, None)


@pytest.mark.parametrize("kind", ["llama", "qwen3_windows", "bert", "lfm2"])
def test_a_whole_row_enters_nothing_that_splits_rows(kind):
    """Neither of `flexvarlen.parallel` nor of patches/forward/sequence_parallel.py."""
    model = fv.patch_model(new_model(kind), "sdpa")
    entered = set()

    def note(frame, event, _):
        if event == "call":
            entered.add(Path(frame.f_code.co_filename))

    ids, layout = torch.arange(3, 11)[None], LAYOUTS[0]
    sys.setprofile(note)
    try:
        model(ids, packed_layout=layout, labels=ids)
    finally:
        sys.setprofile(None)
    own = {path for path in entered if {"flexvarlen", "patches"} & {*path.parts}}
    assert any(path.name == "packed_forward.py" for path in own)
    found = {p.name for p in own if p.parent.name == "parallel" or "parallel" in p.stem}
    assert found <= {"refuse_context_parallel.py"}  # which asks whether torch's own is active
