"""The names of other packages that may change without notice, and what of ours depends on each.

Private names, and public ones whose parameters, instance attributes or behaviour are not documented
to stay. `tests/test_private_names.py` looks each of them up: the first thing to run against a new
release, `make test-newest` does. What `patch_model` looks up itself (`flexvarlen/patches/names.py`)
is not listed.
"""

from __future__ import annotations

from tests.private_names.of_torch import TORCH
from tests.private_names.of_trainers_and_kernels import ACCELERATE, FLA, PEFT, TRL
from tests.private_names.of_transformers import TRANSFORMERS

NAMES = (*TORCH, *TRANSFORMERS, *ACCELERATE, *TRL, *PEFT, *FLA)
