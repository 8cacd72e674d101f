"""No loss crosses the boundary of two documents, and no other label is lost."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

import flexvarlen as fv
from tests import forms
from tests.patches.batch.test_found_once import count
from tests.tiny_models import (
    ALL,
    LENGTHS,
    Batch,
    batch_of,
    documents,
    exact_and_baseline,
    new_model,
    one_row,
    padded_rows,
    shared_model,
    two_rows,
)

IGNORED = -100


def loss_of(model, batch: Batch, **inputs):
    with fv.patched(model, "sdpa"), torch.no_grad():
        return model(
            input_ids=batch.ids,
            **{"labels": batch.ids, "position_ids": batch.position_ids, **inputs},
        ).loss.item()


def by_document(batch: Batch, labels: list[torch.Tensor], *, reduction: str = "mean") -> float:
    """Cross-entropy of the exact logits of each document against its own labels."""
    exact, _ = exact_and_baseline("llama", batch.order)
    logits = exact.logits.split([len(documents()[i]) for i, _ in batch.order])
    ahead = torch.cat([x[:-1] for x in logits]), torch.cat([x[1:] for x in labels])
    return cross_entropy(*ahead, ignore_index=IGNORED, reduction=reduction).item()


def own_labels(batch: Batch) -> list[torch.Tensor]:
    """The tokens of each document."""
    return [documents()[i].clone() for i, _ in batch.order]


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def own_first_labels(batch: Batch) -> torch.Tensor:
    """As DataCollatorWithFlattening has them: -100 at each first token."""
    return batch.ids.masked_fill(batch.position_ids == 0, IGNORED)


ONE, TWO, PADDED = one_row(), two_rows(), padded_rows(left=False)
GIVEN = {
    "documents_of_one_token": (batch_of(((3,) * 30 + (0,) * 20,), row_tokens=130), {}),
    "uint8": (ONE, {"labels": ONE.ids.to(torch.uint8)}),  # which has no -100
    "uint8_ignored": (ONE, {"labels": ONE.ids.to(torch.uint8), "ignore_index": IGNORED}),
    "int16": (ONE, {"labels": ONE.ids.short()}),
    # transformers asks for labels too: without them it computes no loss
    "shift_labels": (TWO, {"labels": shifted(TWO.ids), "shift_labels": shifted(TWO.ids)}),
    "labels_and_shift_labels": (TWO, {"shift_labels": shifted(TWO.ids)}),
}


@pytest.mark.parametrize("case", GIVEN)
def test_no_document_learns_the_first_token_of_the_next(case):
    """Nor padding, and documents given in other forms: forward/test_packed_models.py."""
    batch, inputs = GIVEN[case]
    loss = loss_of(shared_model("llama"), batch, **inputs)
    assert loss == pytest.approx(by_document(batch, own_labels(batch)), rel=1e-5)


def test_labels_of_minus_100_stay():
    batch = one_row()
    labels = batch.ids.clone()
    labels[0, 20:120] = IGNORED  # a prompt in the second document, and the head of the third
    ours = loss_of(shared_model("llama"), batch, labels=labels)
    own = list(labels[0].split([len(documents()[i]) for i in ALL]))
    assert ours == pytest.approx(by_document(batch, own), rel=1e-5)
    assert ours != pytest.approx(by_document(batch, own_labels(batch)), rel=1e-3)


def test_num_items_in_batch_divides_the_sum():
    """Gradient accumulation hands the number of labels of all its batches."""
    batch = one_row()
    given = {"labels": own_first_labels(batch), "num_items_in_batch": torch.tensor(1000)}
    loss = loss_of(shared_model("llama"), batch, **given)
    total = by_document(batch, own_labels(batch), reduction="sum")
    assert loss == pytest.approx(total / 1000, rel=1e-5)


# Labels, how many Trainer counted, and whether some of these are masked in the model.
COUNTED = {
    "first_tokens": (ONE, {"labels": ONE.ids}, 255, True),
    "shifted": (ONE, {"labels": ONE.ids, "shift_labels": shifted(ONE.ids)}, 255, True),
    "padding": (
        PADDED,
        {"labels": PADDED.ids, "attention_mask": forms.real_tokens(PADDED)},
        255,
        True,
    ),
    "of_the_collator": (ONE, {"labels": own_first_labels(ONE)}, 250, False),
    "of_the_collator_shifted": (
        ONE,
        {"labels": ONE.ids, "shift_labels": shifted(own_first_labels(ONE))},
        250,
        False,
    ),
    # in no loss, patched or not, so nobody counts it
    "first_of_the_row": (
        ONE,
        {"labels": torch.where(torch.arange(256) == 0, ONE.ids, own_first_labels(ONE))},
        250,
        False,
    ),
    "nothing_counted": (ONE, {"labels": ONE.ids}, None, False),
    "no_labels": (ONE, {}, 250, False),
    "one_document": (
        ONE,
        {"labels": ONE.ids, "position_ids": torch.arange(256)[None]},
        255,
        False,
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_counted_labels_that_are_masked_are_told_of_once(case):
    """Trainer counts the labels before any model sees them, and divides by that."""
    batch, inputs, count, told = COUNTED[case]
    model = fv.patch_model(new_model("llama"), "sdpa")
    given = {"position_ids": batch.position_ids, **inputs}
    if count is not None:
        given["num_items_in_batch"] = torch.tensor(count)
    for first in (True, False):
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(batch.ids, **given)
        sentences = [x for x in caught if "num_items_in_batch counts" in str(x.message)]
        assert len(caught) == len(sentences) == (told and first)


def test_labels_are_compared_once(monkeypatch):
    """Boundaries of the host cost no read, and counted labels one, at the first batch."""
    batch = one_row()
    model = fv.patch_model(new_model("llama"), "reference")
    given = {
        "labels": own_first_labels(batch),
        "packed_layout": fv.PackedLayout.from_lengths(LENGTHS),
        "use_cache": False,
    }
    with torch.no_grad():
        model(batch.ids, **given)
        reads = count(monkeypatch, torch.Tensor, "__bool__")
        for expected in ({}, 0), ({"num_items_in_batch": 250}, 1), ({"num_items_in_batch": 9}, 1):
            model(batch.ids, **given, **expected[0])
            assert len(reads) == expected[1]


def test_the_callers_tensors_stay_as_they_are():
    batch = one_row()
    labels, mask = batch.ids.clone(), batch.document_ids.clone()
    inputs = {"labels": labels, "attention_mask": mask, "cu_seq_lens_q": batch.cu_seqlens.clone()}
    loss_of(shared_model("llama"), batch, **inputs)
    assert torch.equal(labels, batch.ids)
    assert torch.equal(mask, batch.document_ids)
    assert torch.equal(inputs["cu_seq_lens_q"], batch.cu_seqlens)
