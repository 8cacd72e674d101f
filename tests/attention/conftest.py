"""Fixtures of several files."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flexvarlen.attention.backends import compiled_flex
from tests.attention.backends.hub_repositories import local_kernels  # noqa: F401
from tests.attention.backends.plain_kernel import backend  # noqa: F401


@pytest.fixture
def _flex_without_inductor(monkeypatch):
    """Eager flex compiled by AOTAutograd's eager backend: how often is Dynamo's, and is fast."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled_flex._compiled.cache_clear()
    yield
    compiled_flex._compiled.cache_clear()
