"""Documents in one row of fixed shapes: what a model is given is what the documents say."""

from __future__ import annotations

from functools import partial
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

import flexvarlen as fv
from tests.tiny_models import documents, new_model

SIZES = {"total_tokens": 16, "capacity": 4, "max_seqlen_bound": 8}
DOCUMENTS = [[11, 12, 13], [21], [31, 32, 33, 34]]
FEATURES = [{"input_ids": document} for document in DOCUMENTS]
FILL = [0] * 8


@pytest.fixture
def collate():
    return fv.PackedCollator(**SIZES)


def same(batch, other):
    assert batch.keys() == other.keys()
    for name, value in batch.items():
        if isinstance(value, fv.PackedLayout):
            assert value.lengths == other[name].lengths
        else:
            torch.testing.assert_close(value, other[name], rtol=0, atol=0)


def test_a_row_of_documents(collate):
    batch = collate(FEATURES)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 21, 31, 32, 33, 34, *FILL]]
    masked = [-100, 12, 13, -100, -100, 32, 33, 34, *[-100] * 8]
    assert batch["labels"].tolist() == [masked]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, *range(8)]]
    same(collate(batch), batch)  # what it makes it takes
    layout = batch["packed_layout"]
    assert layout.lengths == (3, 1, 4)
    assert (layout.total_tokens, layout.capacity, layout.max_seqlen_bound) == (16, 4, 8)
    assert layout.max_seqlen == 4
    assert {batch[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}


@pytest.mark.parametrize("kind", ["llama", "qwen3_windows", "gemma2"])
def test_a_packed_batch_that_nobody_reads(kind):
    """An unpatched model finds the documents by position_ids, as long as it makes no cache."""
    model, batch = new_model(kind), fv.PackedCollator()(documents())
    with torch.no_grad():
        unpatched = model(**batch).loss
        patched = fv.patch_model(model, "reference")(**batch).loss
    torch.testing.assert_close(unpatched, patched, rtol=1e-5, atol=0)


def test_shapes_never_change(collate):
    shapes = {
        tuple((name, tuple(value.shape)) for name, value in batch.items() if torch.is_tensor(value))
        for batch in (collate(FEATURES), collate(FEATURES[:1]), collate(FEATURES[1:]))
    }
    assert len(shapes) == 1


def test_names_of_transformers():
    """The padding is a document: FlashAttention would leave its rows unwritten."""
    collate = fv.PackedCollator(**SIZES, boundaries="cu_seq_lens")
    batch = collate(FEATURES)
    assert "packed_layout" not in batch
    for side in "qk":
        assert batch[f"cu_seq_lens_{side}"].tolist() == [0, 3, 4, 8, 16]
        assert batch[f"cu_seq_lens_{side}"].dtype == torch.int32
        assert batch[f"max_length_{side}"] == 8
    assert (batch["labels"][0, 8:] == -100).all()
    longer = fv.PackedCollator(
        total_tokens=30, capacity=8, max_seqlen_bound=8, boundaries="cu_seq_lens"
    )
    assert longer(FEATURES)["cu_seq_lens_q"].tolist() == [0, 3, 4, 8, 16, 24, 30, 30, 30]


@pytest.mark.parametrize("boundaries", ["packed_layout", "cu_seq_lens"])
def test_positions_of_padding_stay_below_the_bound(boundaries):
    """A table of positions ends where the longest document may."""
    sizes = {"total_tokens": 64, "capacity": 16, "max_seqlen_bound": 8}
    batch = fv.PackedCollator(**sizes, boundaries=boundaries, position_ids_start=2)(FEATURES)
    assert batch["position_ids"][0, :5].tolist() == [2, 3, 4, 2, 2]  # as RoBERTa's
    assert batch["position_ids"].max() == 9


TOKENS = [token for document in DOCUMENTS for token in document]
IN_BLOCKS = [1, 1, 1, 2, 3, 3, 3, 3]


def flat(**options):
    """As transformers' collator makes them."""
    return DataCollatorWithFlattening(return_tensors="pt", **options)(FEATURES)


def padding_free():
    """As TRL's collator makes them."""
    sft = pytest.importorskip("trl.trainer.sft_trainer", reason="needs TRL: pip install trl")
    made = sft.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return made([dict(feature) for feature in FEATURES])


ALIKE = {
    "rows": lambda: [FEATURES],
    "two_rows": lambda: [DOCUMENTS[:1], DOCUMENTS[1:]],
    "lists": lambda: DOCUMENTS,
    "tuples": lambda: [{"input_ids": tuple(x)} for x in DOCUMENTS],
    "tensors": lambda: [torch.tensor(x) for x in DOCUMENTS],
    "arrays": lambda: [np.array(x) for x in DOCUMENTS],
    "lists_of_numpy_integers": lambda: [list(np.array(x)) for x in DOCUMENTS],
    "flat": flat,
    "flat_in_a_list": lambda: [flat()],
    "flat_with_cu_seq_lens": partial(flat, return_flash_attn_kwargs=True),
    "flat_with_seq_idx": partial(flat, return_seq_idx=True, return_position_ids=False),
    "flat_with_both": partial(flat, return_seq_idx=True, return_flash_attn_kwargs=True),
    "flat_from_position_2": partial(flat, position_ids_start=2),
    "padding_free": padding_free,
    "padded": lambda: {
        "input_ids": torch.tensor([[0, 11, 12, 13], [21, 0, 0, 0], [31, 32, 33, 34]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]),
    },
    "cu_seq_lens_k": lambda: {"input_ids": TOKENS, "cu_seq_lens_k": [0, 3, 4, 8]},
    "cu_seq_lens_and_mask": lambda: {
        "input_ids": TOKENS,
        "cu_seq_lens_q": [0, 3, 4, 8],
        "attention_mask": IN_BLOCKS,
    },
    "seq_lengths_and_positions": lambda: {
        "input_ids": TOKENS,
        "seq_lengths": [3, 1, 4],
        "position_ids": [0, 1, 2, 0, 0, 1, 2, 3],
    },
    "document_ids": lambda: {"input_ids": TOKENS, "attention_mask": IN_BLOCKS},
    "positions": lambda: {"input_ids": TOKENS, "position_ids": [0, 1, 2, 0, 5, 6, 7, 8]},
}


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_documents_that_are_given_in_another_way(collate, make):
    same(collate(make()), collate(FEATURES))


@pytest.mark.parametrize(
    "document",
    [
        {"input_ids": [[11, 12, 13]], "attention_mask": [[1, 1, 1]]},  # a tokenizer's
        {"input_ids": [11, 12, 13], "labels": [-100, 12, 13]},
        {"input_ids": [11, 12, 99, 13], "attention_mask": [1, 1, 0, 1]},  # a hole makes no other
        [11, 12, 13],
        torch.tensor([11, 12, 13]),
        torch.tensor([[11, 12, 13]]),
        [[11, 12, 13]],
    ],
    ids=["row_with_mask", "labels", "hole", "list", "tensor", "row_of_a_tensor", "list_of_a_list"],
)
def test_one_document_needs_no_boundaries(collate, document):
    same(collate([document]), collate(FEATURES[:1]))


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
def test_a_flattened_batch_without_boundaries_is_not_one_document(collate, return_tensors):
    flatten = DataCollatorWithFlattening(return_position_ids=False, return_tensors=return_tensors)
    flat = flatten(FEATURES)
    for features in (flat, [flat], [[flat]]):
        with pytest.raises(ValueError, match=r"got input_ids, labels; .*return_position_ids=True"):
            collate(features)


def test_packed_rows_of_trl(collate):
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    data = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    packed = trl.pack_dataset(data, seq_length=8)
    batch = collate([row for row in packed])
    assert sorted(batch["packed_layout"].lengths) == [1, 3, 4]
    inside = batch["input_ids"][0, :8].tolist()
    assert sorted(inside) == sorted(token for document in DOCUMENTS for token in document)


def test_labels_of_ones_own(collate):
    batch = collate([{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 7, 8]}])
    assert batch["labels"][0, :5].tolist() == [-100, -100, 7, 8, -100]
    own = [{"input_ids": [1, 2], "labels": [5, 6]}, {"input_ids": [3], "labels": [3]}]
    assert collate(own)["labels"][0, :3].tolist() == [5, 6, 3]


@pytest.mark.parametrize("seen", [False, True], ids=["documents", "its_own_batch"])
def test_first_labels_of_tokens_of_their_own(seen):
    """Token classification and masked LM: without first labels the loss would differ, or be NaN."""
    encoder, tags = new_model("bert").double(), [[5, 6, 7], [8], [9, -100, 3, 2]]
    features = [{"input_ids": x, "labels": y} for x, y in zip(DOCUMENTS, tags, strict=True)]
    batch = fv.PackedCollator()(features)
    batch = fv.PackedCollator()(batch) if seen else batch
    assert batch["labels"].tolist() == [[5, 6, 7, 8, 9, -100, 3, 2]]
    with torch.no_grad():
        losses = [
            encoder(torch.tensor([x]), labels=torch.tensor([y])).loss * sum(n != -100 for n in y)
            for x, y in zip(DOCUMENTS, tags, strict=True)
        ]
        found = fv.patch_model(encoder, "sdpa")(**batch).loss
    torch.testing.assert_close(found, torch.stack(losses).sum() / 7)


UNSIGNED = (
    *(partial(np.array, dtype=each) for each in (np.uint8, np.uint16, np.uint32, np.uint64)),
    *(partial(torch.tensor, dtype=each) for each in (torch.uint8, torch.uint16, torch.uint32)),
    list,
)


@pytest.mark.parametrize("of", UNSIGNED)
@pytest.mark.parametrize("packer", [fv.PackedDataset, fv.StreamPacker])
def test_pieces_of_examples_with_unsigned_labels(packer, of):
    """The label of a piece's first token is -100."""
    tokens = list(range(1, 20))
    others = {"attention_mask": of([1] * 19), "completion_mask": of([0] * 9 + [1] * 10)}
    example = {"input_ids": of(tokens), "labels": of(tokens)}
    for given in (example, example | others):
        labels = {
            int(row[0]["input_ids"][0]): fv.PackedCollator()(row)["labels"][0].tolist()
            for row in packer([given], 8)
        }
        assert labels[9] == [-100, *range(10, 17)]
        assert (1 in labels) == (given is example)


@pytest.mark.parametrize("of", [list, np.array, torch.tensor])
def test_next_token_labels_of_ones_own(of):
    """What Trainer counts must be what a causal model learns."""
    features = [{"input_ids": of(x), "labels": of(x)} for x in DOCUMENTS]
    assert torch.equal(
        fv.PackedCollator()(features)["labels"], fv.PackedCollator()(FEATURES)["labels"]
    )
    some = [{"input_ids": of([1, 2, 3]), "labels": of([1, -100, 3])}]
    for each in (some, some + features):  # perhaps of masked LM, with these tokens kept
        with pytest.raises(ValueError, match=r"next_token_labels must be set .* pass True"):
            fv.PackedCollator()(each)
    for next_token, first in ((True, -100), (False, 1)):
        labels = fv.PackedCollator(next_token_labels=next_token)(some + features)["labels"]
        assert labels[0, :3].tolist() == [first, -100, 3]
        assert labels[0, 3] == (-100 if next_token else DOCUMENTS[0][0])
    prompts = [{"input_ids": of([1, 2, 3]), "labels": of([-100, 2, 3])}]
    labels = fv.PackedCollator()(prompts + features)["labels"]
    assert labels[0, :4].tolist() == [-100, 2, 3, -100]


@pytest.mark.parametrize("of", UNSIGNED)
@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks"])
def test_loss_of_completions_alone(collate, mask, of):
    """No unsigned type holds the -100 of the others."""
    batch = collate([{"input_ids": of([1, 2, 3, 4]), mask: [0, 0, 1, 1]}])
    assert batch["labels"].dtype == batch["input_ids"].dtype == torch.int64
    assert batch["labels"][0, :4].tolist() == [-100, -100, 3, 4]


def test_columns_of_ones_own_are_padded_with_a_value_of_their_kind():
    collate = fv.PackedCollator(**SIZES, extra={"weights": 0.5})
    batch = collate([{"input_ids": [1, 2], "weights": [2, 3]}])
    assert batch["weights"][0, :4].tolist() == [2.0, 3.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ([], "features must contain at least one document"),
        ([{"input_ids": []}], "features must contain at least one document"),
        ([{"labels": [1]}], "features must have input_ids, got labels"),
        ([{"input_ids": [1], "text": "a"}], "got 'text'; drop it, as it is not tokenized"),
        ([{"input_ids": [1], "w": [0.5]}], "got 'w'; drop it, or pass extra={'w': padding value}"),
        ([{"input_ids": [1], "label": 1}], r"got 'label'; .* give a classifier batch\['labels'\]"),
        ([{"messages": [{"role": "user"}]}], "have input_ids, got messages; tokenize the dataset"),
        ([{"input_ids": [1, 2], "labels": 1}], "labels .* got one for the document; for a class"),
        ([{"input_ids": [[1, 2]] * 2, "labels": 1}], "labels must have a row for each of 2, got 0"),
        ([[1.0, 2.5]], "input_ids must be integers, got float64"),
        ([[-1, 2]], "input_ids must be at least 0, got -1"),
        ([[None]], "features must be mappings with input_ids, got NoneType"),
        (3, "features must be mappings with input_ids, got int"),
        ({"input_ids": [1, 2], "seq_lengths": 2}, "seq_lengths must be a list of integers"),
        ({"input_ids": [1, 2], "cu_seq_lens_q": []}, "cu_seq_lens_q must be a list of integers"),
        ([{"input_ids": [1, 2], "labels": [1]}], "labels must have a value for each of 2 tokens"),
        ([{"input_ids": [1, 2], "seq_lengths": [1]}], "seq_lengths must sum to the row's 2 tokens"),
        ([{"input_ids": [1, 2], "seq_lengths": [3, -1]}], "boundaries must rise from 0"),
        (
            [{"input_ids": [1] * 9}] * 2,
            "features must contain at most total_tokens=16 tokens, got 18 in 2 documents; .*"
            "per_device_train_batch_size=1 and per_device_eval_batch_size=1",
        ),
        ([{"input_ids": [1]}] * 5, "capacity"),
        ([{"input_ids": [1] * 9}], "max_seqlen_bound"),
        (["text"], "features must be mappings with input_ids, got str"),
        ([{"input_ids": [1, 2], "labels": [1.0, float("nan")]}], "labels must be integers"),
        ([{"input_ids": [1, 2], "labels": [-1, 2]}], "labels must be at least 0, or -100 .*got -1"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids must have rows of equal length"),
        (
            {"input_ids": [1, 2, 3, 4, 5], "cu_seq_lens_q": [0, 2]},
            "boundaries must cover the row's tokens, got 2 of 5",
        ),
        (
            {"input_ids": [1, 2, 3], "cu_seq_lens_q": [0, 3], "position_ids": [0, 1, 0]},
            "must describe the same documents, got different boundaries at 2",
        ),
        (
            {"input_ids": [1, 2, 3], "cu_seq_lens_q": [0, 3], "cu_seq_lens_k": [0, 1, 3]},
            "must describe the same documents",
        ),
    ],
)
def test_mistake_is_a_sentence(collate, features, words):
    with pytest.raises(ValueError, match=words):
        collate(features)


def test_a_name_of_its_own_is_no_extra():
    with pytest.raises(
        ValueError, match="extra must name columns unknown to the collator, got 'labels'"
    ):
        fv.PackedCollator(extra={"labels": 0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("boundaries", "position_ids"),
        ("tokenizer", 4096),
        ("total_tokens", "8k"),
        ("capacity", 2.0),
        ("max_seqlen_bound", True),
        ("pad_token_id", "<pad>"),
        ("position_ids_start", -1),
        ("extra", "weights"),
        ("next_token_labels", "yes"),
        ("model", "qwen3_vl"),
    ],
)
def test_a_wrong_argument_raises_where_it_is_given(name, value):
    kinds = [x for x in (fv.PackedCollator, fv.TreeCollator) if name in signature(x).parameters]
    assert fv.PackedCollator in kinds
    for kind in kinds:
        with pytest.raises(ValueError, match=f"{name} must"):
            kind(**{name: value})


@pytest.mark.parametrize("kind", [fv.PackedCollator, fv.TreeCollator])
def test_the_pad_token_of_a_tokenizer(kind):
    """As collators of transformers take it; None, as of GPT-2, is any token."""
    tokenizer = SimpleNamespace(pad_token_id=7)
    for collate, pad in (
        (kind(tokenizer, total_tokens=np.int64(4)), 7),
        (kind(tokenizer=tokenizer, total_tokens=4, pad_token_id=5), 5),
        (kind(SimpleNamespace(pad_token_id=None), total_tokens=4), 0),
        (kind(total_tokens=torch.tensor(4), pad_token_id=None), 0),
    ):
        for _ in range(2):
            assert collate([[1, 2, 3]])["input_ids"].tolist() == [[1, 2, 3, pad]]


@pytest.mark.gpu
def test_a_loader_pins_the_layout():
    loader = DataLoader(
        DOCUMENTS, batch_size=3, collate_fn=fv.PackedCollator(**SIZES), pin_memory=True
    )
    (batch,) = loader
    assert batch["input_ids"].is_pinned()
    assert batch["packed_layout"].cu_seqlens.is_pinned()
    moved = batch["packed_layout"].to("cuda", non_blocking=True)
    assert moved.lengths == (3, 1, 4)
    assert moved.cu_seqlens.tolist() == [0, 3, 4, 8, 8]
