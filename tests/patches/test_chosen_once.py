"""A plain model's packed forward enters no function of a capability that it does not have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import flexvarlen as fv
from tests.tiny_models import config_of, new_model

ROOT = Path(fv.__file__).parents[1]
OF_CAPABILITIES = (
    "patches/batch/padded_batch.py",
    "patches/batch/shared_rows.py",
    "patches/forward/multiple_choice.py",
    "patches/forward/chunked_mlp.py",
    "patches/forward/neftune.py",
    "patches/forward/padding.py",
    "patches/forward/pooling.py",
    "patches/forward/recurrent_layers.py",
    "patches/forward/replay.py",
    "patches/forward/router.py",
    "patches/forward/row_size.py",
    "patches/forward/sequence_parallel.py",
    "patches/forward/trees.py",
    "patches/forward/under_head.py",
    "patches/forward/vision_tower.py",
    "patches/attention/decoding.py",
    "patches/attention/without_patch.py",
    "patches/models/image_masks.py",
    "patches/models/llama4.py",
    "flexvarlen/layout/level_order.py",
    "flexvarlen/layout/per_document.py",
    "flexvarlen/layout/segments.py",
    "flexvarlen/parallel/",
    "flexvarlen/recurrent/",
)
"""Files, or folders, that hold what only some models or batches need."""


def entered(model: Any, batch: dict[str, Any]) -> set[str]:
    """Those of `OF_CAPABILITIES` of which a forward enters a function; a second one is traced."""
    model(**batch)
    files = set()

    def trace(frame: Any, event: str, _: Any) -> None:
        files.add(frame.f_code.co_filename.replace("/flexvarlen/patches/", "/patches/"))

    sys.settrace(trace)
    try:
        model(**batch)
    finally:
        sys.settrace(None)
    return {x for x in OF_CAPABILITIES if any(f.startswith(f"{ROOT}/{x}") for f in files)}


def patched(model: Any = "llama", **settings: Any) -> Any:
    """In train mode; of this kind, or the model itself."""
    model = new_model(model) if isinstance(model, str) else model
    return fv.patch_model(model.train(), "sdpa", **settings)


def classifier() -> Any:
    return AutoModelForSequenceClassification.from_config(config_of("llama"))


def packed() -> dict[str, Any]:
    return fv.PackedCollator(total_tokens=64)([list(range(3, n + 3)) for n in (9, 20, 31)])


def padded() -> dict[str, Any]:
    mask = torch.tensor([[1] * 9 + [0] * 3, [1] * 12])
    return {"input_ids": torch.arange(3, 27).view(2, 12), "attention_mask": mask}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_plain_forward_enters_no_capability(kind):
    assert entered(patched(kind), packed()) == set()


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_one_document_enter_no_capability(rows):
    assert entered(patched(), {"input_ids": torch.arange(3, 3 + 12 * rows).view(rows, 12)}) == set()


@pytest.mark.parametrize(
    ("model", "batch", "file"),
    [
        (lambda: patched(unpad=True), padded, "patches/forward/padding.py"),
        (
            lambda: patched(classifier()),
            lambda: {name: packed()[name] for name in ("input_ids", "packed_layout")},
            "patches/forward/pooling.py",
        ),
        (
            patched,
            lambda: {
                "input_ids": torch.arange(3, 9)[None],
                "packed_layout": fv.PackedLayout.from_tree([3, 2, 1], [-1, 0, 0]),
            },
            "patches/forward/trees.py",
        ),
        (lambda: patched("mixtral"), packed, "patches/forward/router.py"),
        (lambda: patched(same_bits=64), packed, "patches/forward/row_size.py"),
        (lambda: patched(mlp_chunk_tokens=8), packed, "patches/forward/chunked_mlp.py"),
    ],
    ids=["unpad", "classifier", "tree", "router", "same_bits", "mlp_chunk_tokens"],
)
def test_a_capability_is_entered_where_it_is_asked_for(model, batch, file):
    """Else the trace sees nothing."""
    assert file in entered(model(), batch())


def test_files_of_capabilities_exist():
    assert [x for x in OF_CAPABILITIES if not (ROOT / x).exists()] == []
