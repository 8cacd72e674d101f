"""The picture of docs/several-gpus.md is what the plan gives today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from matplotlib.image import imread

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_picture_of_the_page_is_current(tmp_path):
    path = DOCS / "make_several_gpus.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path)
    mine, there = imread(tmp_path / "several-gpus.png"), imread(DOCS / "images/several-gpus.png")
    assert mine.shape == there.shape, "run: python docs/make_several_gpus.py"
    assert (np.abs(mine - there).max(2) > 0.5).mean() < 0.01
