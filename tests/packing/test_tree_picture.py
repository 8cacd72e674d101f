"""The picture of samples that share prefixes: what has labels, and a line for each branch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from matplotlib.colors import to_rgb
from matplotlib.image import imread

import flexvarlen as fv
from flexvarlen.packing.tree_picture import CONTEXT_COLOR, LABEL_COLOR, _is_label, _lines
from tests.docs.scripts import ROOT, module_at
from tests.packing.test_prefixes import ids_of, sample_lists, shifted


@given(sample_lists())
def test_a_token_is_drawn_as_learned_where_a_sample_learns_it(samples):
    """One that samples repeat, as they part behind it, is drawn alike in all of them."""
    shared = fv.share_prefixes(samples)
    is_label, beginnings = _is_label(shared), set()
    for sample, path in zip(samples, shared.paths, strict=True):
        for i, (token, label) in enumerate(zip(path[1:].tolist(), shifted(sample), strict=False)):
            if label != -100:
                assert is_label[token]
                beginnings.add(tuple(ids_of(sample)[: i + 2]))
    for sample, path in zip(samples, shared.paths, strict=True):
        for i, token in enumerate(path.tolist()):
            assert not is_label[token] or tuple(ids_of(sample)[: i + 1]) in beginnings


def test_a_line_for_each_branch():
    prompt = list(range(10, 20))
    shared = fv.share_prefixes([[*prompt, 1, 2], [*prompt, 3], [*prompt, 1, 4], [5, 6]])
    assert shared.layout.segments.parents == (-1, 0, 1, 1, 0, -1)
    assert _lines(shared) == [0, 0, 0, 1, 2, 3]
    assert _lines(fv.share_prefixes([[1, 2], [3]])) == [0, 1]


@pytest.mark.parametrize(
    "samples", [[[1, 2, 3], [1, 2, 4]], [{"input_ids": [1, 2], "labels": [-100, 2]}]]
)
def test_a_png_has_both_colours(samples, tmp_path):
    path = fv.share_prefixes(samples).save_picture(tmp_path / "new" / "a.png")
    pixels = imread(path)[..., :3].reshape(-1, 3)
    for color in (CONTEXT_COLOR, LABEL_COLOR):
        assert (np.abs(pixels - to_rgb(color)).max(1) < 0.01).sum() > 500


def test_what_is_refused(tmp_path):
    shared = fv.share_prefixes([[1, 2]])
    with pytest.raises(ValueError, match=r"path must end in \.png"):
        shared.save_picture(tmp_path / "a.jpg")
    with pytest.raises(ValueError, match="names must have one entry for each of 1 samples, got 2"):
        shared.save_picture(tmp_path / "a.png", ["a", "b"])


def test_the_picture_of_the_page_is_current(tmp_path):
    module_at(ROOT / "docs/make_agents.py").main(tmp_path)
    mine, there = imread(tmp_path / "agents.png"), imread(ROOT / "docs/images/agents.png")
    assert mine.shape == there.shape, "run: python docs/make_agents.py"
    bars = [np.abs(x[..., :3] - to_rgb(LABEL_COLOR)).max(2) < 0.01 for x in (mine, there)]
    assert (bars[0] != bars[1]).mean() < 0.01
