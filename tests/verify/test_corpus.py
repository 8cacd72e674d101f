"""Documents, tokens and packing of a comparison."""

import pytest
import torch

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.verify import corpus
from flexvarlen.verify.corpus import (
    DEFAULT_TOKENS,
    pack,
    read_documents,
    row_of,
    tokenize,
    train_tokenizer,
)
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.models import build_model

LLAMA = build_model("llama@1")[0]


def test_default_documents_are_many_and_of_varied_length():
    lengths = sorted(len(text) for text in read_documents())
    assert len(lengths) > 50
    assert lengths[0] < 500 < 10_000 < lengths[-1]


@pytest.mark.parametrize(
    ("text", "documents"),
    [
        ("one\fstill\n\n\ntwo", ["one", "still\n\n\ntwo"]),
        ("a\n\nb\n\n\nc\n", ["a\n\nb", "c"]),
        ("a\nb\n\nc", ["a\nb", "c"]),
        ("only", ["only"]),
    ],
)
def test_one_file_is_split_at_its_strongest_separator(tmp_path, text, documents):
    file = tmp_path / "notes.txt"
    file.write_text(text)
    assert list(read_documents([file])) == documents


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b" \n"])
def test_unusable_file_is_one_sentence(tmp_path, content):
    file = tmp_path / "bad"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"^text must "):
        read_documents([file])


def test_tokens_come_back_as_the_text_they_were():
    documents = ("naïve – déjà vu\n\tprint('x')", "aaaa bbbb aaaa")
    tokenizer = train_tokenizer(documents, 300)
    for text, ids in zip(documents, tokenize(documents, vocabulary=300), strict=True):
        assert tokenizer.decode(ids) == text
        assert max(ids) < 300


def test_ids_of_a_tokenizer_larger_than_the_model_stay_in_its_vocabulary():
    class Large:
        def encode(self, text, add_special_tokens):
            return [1, 5, 10_000]

    assert tokenize(("x",), vocabulary=10, tokenizer=Large()) == [[1, 5, 9]]


@pytest.mark.parametrize("tokens", [2, 3, 257, 2048])
def test_row_is_not_the_budget_or_not_of_its_seed(tokens):
    documents = [[n] * n for n in range(1, 99)]
    first, again, other = (pack(documents, tokens, seed, "") for seed in (0, 0, 1))
    assert first.input_ids.shape == (1, tokens)
    assert sum(first.lengths) == tokens
    assert min(first.lengths) >= 1
    assert torch.equal(first.input_ids, again.input_ids)
    assert first.lengths == again.lengths
    assert not torch.equal(first.input_ids, other.input_ids)


def test_no_document_fills_the_row_and_cuts_fall_anywhere():
    batch = pack([[1] * 100_000, [2] * 100_000], 4096, 0, "")
    assert max(batch.lengths) <= 1024
    assert len({length % 128 for length in batch.lengths}) > 2
    assert "repeated " in batch.source


def test_default_batch_is_that_of_the_seed_and_the_device(monkeypatch):
    def packed(*, tokens, seed, **options):
        return PackedBatch.random((tokens,), 1024, seed)

    monkeypatch.setattr(corpus, "packed_text", packed)
    model, _ = build_model("qwen3@1")
    right = packed(tokens=DEFAULT_TOKENS["cpu"], seed=4)
    assert torch.equal(row_of(model, None, seed=4).input_ids, right.input_ids)
    assert row_of(model, None, tokens=32).total_tokens == 32
    model.to("meta")  # a kind of device that has no default of its own
    assert row_of(model, right).input_ids.device.type == "meta"
    assert row_of(model, None).total_tokens == DEFAULT_TOKENS["cpu"]


def test_labels_never_cross_a_boundary_or_are_of_documents_left_out():
    row = PackedBatch(torch.arange(1, 8)[None], (3, 1, 3))
    assert row.labels().tolist() == [[-100, 2, 3, -100, -100, 6, 7]]
    assert row.labels([2]).tolist() == [[-100, -100, -100, -100, -100, 6, 7]]


def test_batch_of_a_collator_drops_padding_and_keeps_documents():
    ids = torch.tensor([[7, 8, 9, 0], [0, 4, 5, 6]])
    mask = torch.tensor([[1, 1, 2, 0], [0, 1, 1, 1]])
    batch = row_of(LLAMA, {"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert batch.input_ids.tolist() == [[7, 8, 9, 4, 5, 6]]
    assert batch.lengths == (2, 1, 3)


def test_batch_from_a_layout_leaves_out_empty_documents_and_the_tail():
    ids = torch.arange(8)[None]
    layout = PackedLayout.from_lengths([3, 0, 2], total_tokens=8)
    batch = row_of(LLAMA, {"input_ids": ids, "packed_layout": layout})
    assert batch.lengths == (3, 2)


@pytest.mark.parametrize(
    "batch", [{}, {"input_ids": torch.arange(3)}, {"input_ids": torch.zeros(1, 4)[:, :0].long()}]
)
def test_batch_without_tokens_is_one_sentence(batch):
    with pytest.raises(ValueError, match="must"):
        row_of(LLAMA, batch)
