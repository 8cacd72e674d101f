"""Every form of the documents holds the same tokens, labels and gradients."""

import torch

from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.inputs import BATCHINGS, forwards_of, in_order, padded_groups


def test_every_batching_holds_the_same_tokens_labels_and_gradients():
    row = PackedBatch(torch.randint(1, 128, (1, 40)), (5, 1, 17, 9, 8))
    start = torch.randn(40, 3)
    assert int((row.next_tokens() != IGNORE_INDEX).sum()) == 35
    for batching in BATCHINGS:
        forwards = forwards_of(batching, row, lambda row: {}, start)

        def tokens(of, forwards=forwards, batching=batching):
            return in_order(row, torch.cat([x.tokens_of(of(x)) for x in forwards]), batching)

        assert torch.equal(tokens(lambda x: x.inputs["input_ids"]), row.input_ids[0])
        assert torch.equal(tokens(lambda x: x.labels), row.next_tokens()[0])
        if batching != "serial":
            assert torch.equal(tokens(lambda x: x.grad_output), start)
    by_length = forwards_of("padded-sorted", row, lambda row: {})
    assert [tuple(x.labels.shape) for x in by_length] == [(2, 17), (3, 8)]


def test_padded_batches_fit_where_the_row_fits():
    lengths = [300, 1, 1, 1000, 20, 700, 4]
    groups = list(padded_groups(lengths, 2026))
    assert [index for group in groups for index in group] == list(range(7))
    assert all(len(g) * max(lengths[i] for i in g) <= 2026 for g in groups)
    assert list(padded_groups([9], 3)) == [[0]]
