"""Fixtures of several files: kernels that run anywhere, instead of FlashAttention's."""

from __future__ import annotations

from tests.attention.backends.hub_repositories import local_kernels  # noqa: F401
from tests.attention.backends.plain_kernel import backend  # noqa: F401
