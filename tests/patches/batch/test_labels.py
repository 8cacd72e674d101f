"""No loss crosses the boundary of two documents, and no other label is lost."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import flexvarlen as fv
from tests import forms
from tests.tiny_models import (
    ALL,
    LENGTHS,
    Batch,
    batch_of,
    documents,
    exact_and_baseline,
    new_model,
    one_by_one,
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


BATCHES = {
    "one_row": one_row(),
    "two_rows": two_rows(),
    "documents_of_one_token": batch_of(((3,) * 30 + (0,) * 20,), row_tokens=130),
    "first_at_100": one_row(firsts={0: 100}),
}


@pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens", "document_ids"])
@pytest.mark.parametrize("batch", BATCHES)
def test_first_labels_are_masked(batch, form):
    batch = BATCHES[batch]
    inputs = forms.given(form, batch)
    loss = loss_of(shared_model("llama"), batch, **inputs)
    assert loss == pytest.approx(by_document(batch, own_labels(batch)), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
@pytest.mark.parametrize("given", [{}, {"ignore_index": -100}])
def test_labels_of_a_dtype_without_minus_100(dtype, given):
    batch = one_row()
    assert batch.ids.max() < 256
    loss = loss_of(shared_model("llama"), batch, labels=batch.ids.to(dtype), **given)
    assert loss == pytest.approx(by_document(batch, own_labels(batch)), rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_labels_at_padding_are_masked(left, packed):
    batch = padded_rows(left=left, packed=packed)
    mask = (batch.document_ids > 0).long()
    loss = loss_of(shared_model("llama"), batch, attention_mask=mask)
    assert loss == pytest.approx(by_document(batch, own_labels(batch)), rel=1e-5)


def test_labels_of_minus_100_stay():
    batch = one_row()
    labels = batch.ids.clone()
    labels[0, 20:120] = IGNORED  # a prompt in the second document, and the head of the third
    ours = loss_of(shared_model("llama"), batch, labels=labels)
    own = list(labels[0].split([len(documents()[i]) for i in ALL]))
    assert ours == pytest.approx(by_document(batch, own), rel=1e-5)
    assert ours != pytest.approx(by_document(batch, own_labels(batch)), rel=1e-3)


@pytest.mark.parametrize("given", ["shift_labels", "both"])
def test_shift_labels_stop_at_the_last_token_of_a_document(given):
    batch = two_rows()
    shifted = torch.nn.functional.pad(batch.ids[:, 1:], (0, 1), value=IGNORED)
    labels = {"both": batch.ids, "shift_labels": None}[given]
    model = shared_model("llama")
    # transformers asks for labels too: without them it computes no loss
    loss = loss_of(
        model, batch, labels=labels if given == "both" else shifted, shift_labels=shifted
    )
    assert loss == pytest.approx(by_document(batch, own_labels(batch)), rel=1e-5)


def own_first_labels(batch: Batch) -> torch.Tensor:
    """As DataCollatorWithFlattening has them: -100 at each first token."""
    return batch.ids.masked_fill(batch.position_ids == 0, IGNORED)


def test_num_items_in_batch_divides_the_sum():
    """Gradient accumulation hands the number of labels of all its batches."""
    batch = one_row()
    given = {"labels": own_first_labels(batch), "num_items_in_batch": torch.tensor(1000)}
    loss = loss_of(shared_model("llama"), batch, **given)
    total = by_document(batch, own_labels(batch), reduction="sum")
    assert loss == pytest.approx(total / 1000, rel=1e-5)


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


COUNTED = {
    "first_tokens": (one_row(), {"labels": one_row().ids}),
    "shifted": (one_row(), {"labels": one_row().ids, "shift_labels": shifted(one_row().ids)}),
    "padding": (
        padded_rows(left=False),
        {
            "labels": padded_rows(left=False).ids,
            "attention_mask": (padded_rows(left=False).document_ids > 0).long(),
        },
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_counted_labels_that_are_masked_are_told_of_once(case):
    """Trainer counts the labels before any model sees them, and divides by that."""
    batch, inputs = COUNTED[case]
    model = fv.patch_model(new_model("llama"), "sdpa")
    given = {"position_ids": batch.position_ids, **inputs}
    with torch.no_grad():
        with pytest.warns(UserWarning, match="num_items_in_batch counts labels"):
            model(batch.ids, num_items_in_batch=torch.tensor(255), **given)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(batch.ids, num_items_in_batch=torch.tensor(255), **given)


SILENT = {
    "of_the_collator": {"labels": own_first_labels(one_row()), "num_items_in_batch": 250},
    "of_the_collator_shifted": {
        "labels": one_row().ids,  # Trainer counts the others
        "shift_labels": shifted(own_first_labels(one_row())),
        "num_items_in_batch": 250,
    },
    "first_of_the_row": {  # in no loss, patched or not, so nobody counts it
        "labels": torch.where(torch.arange(256) == 0, one_row().ids, own_first_labels(one_row())),
        "num_items_in_batch": 250,
    },
    "nothing_counted": {"labels": one_row().ids},
    "no_labels": {"num_items_in_batch": 250},
    "one_document": {
        "labels": one_row().ids,
        "position_ids": torch.arange(256)[None],
        "num_items_in_batch": 255,
    },
}


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_said_of_labels_that_are_right(case):
    model = fv.patch_model(new_model("llama"), "sdpa")
    given = {"position_ids": one_row().position_ids, **SILENT[case]}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(one_row().ids, **given)


def test_labels_are_compared_once(monkeypatch):
    """Boundaries of the host cost no read, and counted labels one, at the first batch."""
    batch = one_row()
    model = fv.patch_model(new_model("llama"), "reference")
    given = {
        "labels": own_first_labels(batch),
        "packed_layout": fv.PackedLayout.from_lengths(LENGTHS),
        "use_cache": False,
    }
    reads = []
    with torch.no_grad():
        model(batch.ids, **given)
        read = torch.Tensor.__bool__
        monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: reads.append(x) or read(x))
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


@pytest.mark.parametrize("kwargs", [False, True], ids=["position_ids", "flash_attn_kwargs"])
def test_trainer_with_flattened_batches(tmp_path, kwargs):
    """Loss and weights after two steps are those of the documents one by one."""
    model, plain = new_model("qwen3"), new_model("qwen3")
    order = tuple((i, 0) for i in ALL)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    expected = []
    for _ in range(2):
        outcome = one_by_one(plain, order)
        for name, parameter in plain.named_parameters():
            parameter.grad = outcome.gradients[name]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(outcome.loss.item())
    fv.patch_model(model, "sdpa")
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=len(ALL),
        learning_rate=0.01,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="sgd",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=[{"input_ids": document.tolist()} for document in documents()],
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=kwargs),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected, abs=1e-4)  # it logs four decimals
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
