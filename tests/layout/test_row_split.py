"""A row that is not split over ranks: its layouts share one object, and so do their copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import flexvarlen as fv
from flexvarlen.layout.row_split import OWN_KEYS, WHOLE

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
