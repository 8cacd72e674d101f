"""Drift of models in tests: one batch, and a matrix product that depends on its rows."""

from __future__ import annotations

import torch
from torch import nn

from flexvarlen.drift.model.attribution import attribute
from flexvarlen.drift.model.invariance import invariance, invariant_variant
from flexvarlen.drift.model.setting import ModelSetting
from flexvarlen.drift.report.files import DriftReport
from flexvarlen.equivalence import PackedBatch

# With a document of one token, which MKL multiplies by a kernel of its own.
LENGTHS = (30, 1, 17, 40, 8)
TOKENS = sum(LENGTHS)


def new_batch(lengths=LENGTHS, vocabulary=1024):
    generator = torch.Generator().manual_seed(0)
    return PackedBatch(torch.randint(vocabulary, (1, sum(lengths)), generator=generator), lengths)


def setting_of(model, lengths=LENGTHS, **options):
    return ModelSetting.of(model, new_batch(lengths), **options)


def row_dependent_linear(self, x):
    """`nn.Linear.forward` whose result depends on how many rows it gets, with any BLAS."""
    rows = x.shape[:-1].numel()
    return nn.functional.linear(x, self.weight, self.bias) * (1 + rows / 256)


def rows_of(model, backend="sdpa", **options):
    options = {"repeats": 1, "train": False, **options}
    batch = options.pop("batch", None) or new_batch()
    return {row.case["what"]: row for row in attribute(model, batch, backend, **options)}


def markdown(rows):
    return DriftReport(tuple(rows.values())).markdown()


def check_invariant(model, lengths, dtype, backend="sdpa", backward=True):
    """Batch invariant, the row and each document alone have the same bits; gradients too."""
    setting = ModelSetting.of(model, new_batch(lengths), dtype=dtype)
    variant = invariant_variant(setting, backend)
    found = invariance(setting, variant, piece=32, sample=9)
    assert found["equal_logits"] == found["equal_hidden"] == 1
    assert found["logits_max_abs"] == found["any_hidden_max_abs"] == 0
    assert found["logits_finite"] == 1
    assert variant.train == backward, variant.why_no_backward
    if backward:
        assert found["equal_gradients"] == 1
        assert found["document_gradients_max_abs"] == 0
        assert found["gradient_documents"] == list(range(len(lengths)))
        parameters = sum(p.numel() for p in setting.base.parameters())
        assert found["document_gradients_elements"] == parameters * len(lengths)
