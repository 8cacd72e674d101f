"""Samples as trees: each gets its own tokens and labels back, and nothing is computed twice."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import flexvarlen as fv

tokens = st.lists(st.integers(1, 2), min_size=1, max_size=8)


@st.composite
def sample_lists(draw):
    """Samples of two tokens, so that prefixes, twins and continuations are common."""
    samples = []
    for ids in draw(st.lists(tokens, min_size=1, max_size=7)):
        learned = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        labels = [x if own else -100 for x, own in zip(ids, learned, strict=True)]
        samples.append({"input_ids": ids, "labels": labels} if draw(st.booleans()) else ids)
    return samples


def ids_of(sample):
    return sample["input_ids"] if isinstance(sample, dict) else sample


def shifted(sample):
    labels = sample["labels"] if isinstance(sample, dict) else sample
    return [*labels[1:], -100]


@given(sample_lists(), st.integers(0, 3))
def test_each_sample_gets_its_own_back(samples, padding):
    """And its labels; where it has none, another sample's may be."""
    plain = fv.share_prefixes(samples)
    total = plain.layout.total_tokens + padding
    shared = fv.share_prefixes(samples, total_tokens=total, pad_token_id=9)
    positions = shared.unfold(shared.layout.position_ids())
    for sample, ids, labels, own in zip(
        samples,
        shared.unfold(shared.input_ids),
        shared.unfold(shared.shift_labels),
        positions,
        strict=True,
    ):
        assert ids.tolist() == ids_of(sample)
        own_labels = torch.tensor(shifted(sample))
        assert labels[own_labels != -100].equal(own_labels[own_labels != -100])
        assert own.tolist() == list(range(len(ids)))
    counts, learned = torch.zeros(2, total, dtype=torch.long)
    for sample, path in zip(samples, shared.paths, strict=True):
        counts[path] += 1
        learned[path] += torch.tensor(shifted(sample)) != -100
    assert torch.equal(shared.sample_counts[0], counts)
    assert torch.equal(shared.label_counts[0], learned)
    assert torch.equal(shared.shift_labels[0] != -100, learned > 0)
    assert (shared.input_ids[0, total - padding :] == 9).all()


@given(st.lists(tokens, min_size=1, max_size=7), st.integers(0, 6))
def test_a_token_is_shared_where_one_sample_learns_it(texts, learning):
    """So a later turn's prompt shares the answer that it repeats."""
    samples = [{"input_ids": ids, "labels": [-100] * len(ids)} for ids in texts]
    samples[learning % len(texts)].pop("labels")
    shared = fv.share_prefixes(samples)
    beginnings = {tuple(ids[: i + 1]) for ids in texts for i in range(len(ids))}
    assert shared.layout.total_tokens == len(beginnings)
    assert int(shared.label_counts.sum()) == len(texts[learning % len(texts)]) - 1


@given(sample_lists(), st.none() | st.integers(1, 3), st.integers(1, 4))
def test_the_loss_is_that_of_the_samples(samples, max_depth, min_tokens):
    shared = fv.share_prefixes(samples, max_depth=max_depth, min_tokens=min_tokens)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shared.layout.total_tokens, 4, generator=generator).double()
    losses, count = torch.zeros((), dtype=torch.float64), 0
    for sample, own in zip(samples, shared.unfold(logits), strict=True):
        labels = torch.tensor(shifted(sample))
        losses += cross_entropy(own, labels, reduction="sum")
        count += int((labels != -100).sum())
    counts, labels = shared.label_counts, shared.shift_labels
    if count:
        torch.testing.assert_close(fv.tree_loss(logits, labels, counts), losses / count)
    torch.testing.assert_close(fv.tree_loss(logits, labels, counts, 7), losses / 7)


def test_labels_that_are_not_the_tokens_themselves():
    samples = [{"input_ids": [1, 2, 3], "labels": [-100, label, 3]} for label in (2, 7, 7, -100)]
    shared = fv.share_prefixes(samples)
    for sample, labels in zip(samples, shared.unfold(shared.shift_labels), strict=True):
        assert labels.tolist() == [max(2, sample["labels"][1]), 3, -100]
    assert shared.input_ids.tolist() == [[1, 2, 3, 1, 2, 3]]
    assert shared.label_counts.tolist() == [[1, 2, 0, 2, 2, 0]]


def test_a_group_of_answers():
    prompt = list(range(10, 20))
    shared = fv.share_prefixes([[*prompt, 1, 2], [*prompt, 3], [*prompt, 1, 4]])
    assert shared.layout.segments.lengths == (9, 1, 2, 2, 2)
    assert shared.layout.segments.parents == (-1, 0, 1, 1, 0)


def test_samples_that_share_nothing_are_plain_documents():
    shared = fv.share_prefixes([[1, 2, 3], [4, 5]])
    assert shared.layout.segments is None
    assert shared.layout.lengths == (3, 2)


@pytest.mark.parametrize(
    "sample",
    [[], {"input_ids": [1, 2], "labels": [1]}, {"input_ids": [1], "completion_mask": [1]}, {}],
)
def test_a_bad_sample(sample):
    with pytest.raises(ValueError, match="at index 1"):
        fv.share_prefixes([[1], sample])


def test_collator():
    batch = fv.TreeCollator(total_tokens=16, capacity=8)([{"input_ids": [1, 2, 3]}, [1, 2, 4]])
    assert batch["input_ids"].shape == (1, 16)
    assert batch["packed_layout"].capacity == 8
    counts = {"sample_counts", "label_counts"}
    assert set(batch) == {"input_ids", "shift_labels", "packed_layout", *counts}


def test_rows_of_whole_groups():
    groups = [[[1, 2, 3, n] for n in range(4, 4 + size)] for size in (2, 3, 4, 2, 1)]
    tokens = [fv.share_prefixes(group).layout.total_tokens for group in groups]
    collate = fv.TreeCollator(total_tokens=14)
    rows = fv.pack(tokens, 14)
    assert sorted(i for row in rows for i in row) == list(range(5))
    for row in rows:
        members = [groups[i] for i in row]
        batch = collate(members)
        flat = collate([sample for group in members for sample in group])
        assert batch["input_ids"].shape == (1, 14)
        assert torch.equal(batch["input_ids"], flat["input_ids"])
        assert torch.equal(batch["sample_counts"], flat["sample_counts"])


@pytest.mark.parametrize("once", [iter, lambda group: map(list, group), lambda x: (y for y in x)])
def test_groups_that_can_be_read_once(once):
    """Without a list of each, their first samples would be dropped."""
    group, collate = [[5, 6, 7], [5, 6, 8], [5, 9]], fv.TreeCollator()
    for features in ([once(group)], once([once(group)]), [once(group), [[1, 2]]]):
        made, whole = collate(features), collate([group, [[1, 2]]])
        tokens = made["input_ids"].shape[1]
        for name in ("input_ids", "sample_counts"):
            assert torch.equal(made[name], whole[name][:, :tokens])
        assert tokens in (7, 9)
    made = fv.share_prefixes(once(group))
    assert torch.equal(made.input_ids, collate([group])["input_ids"])


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2],
        (1, 2),
        [np.int64(1), 2],
        torch.tensor([1, 2], dtype=torch.int32),
        np.array([1, 2], np.uint16),
        torch.tensor([1, 2], dtype=torch.uint16),
        np.array([1, 2, 9])[:2],
    ],
)
@pytest.mark.parametrize("in_mapping", [False, True])
def test_samples_of_each_kind(ids, in_mapping):
    features = [{"input_ids": ids, "labels": ids} if in_mapping else ids]
    assert fv.TreeCollator()(features)["input_ids"].tolist() == [[1, 2]]
    assert fv.TreeCollator()([features, features])["sample_counts"].tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "samples must contain at least one"),
        ("ab", "samples must be a list of samples, got str"),
        (5, "samples must be a list of samples, got int"),
        ([1, 2], "input_ids of sample 0 must be a list"),
        ([[None]], "input_ids of sample 0 must be integers, got None"),
        ([[1, 2.0]], "input_ids of sample 0 must be integers, got 2.0 at index 1"),
        ([[True, False]], "input_ids of sample 0 must be integers, got True"),
        ([np.array([1.0])], "input_ids of sample 0 must be integers, got"),
        ([torch.ones(2, dtype=torch.bool)], "input_ids of sample 0 must be integers, got True"),
        ([[1], [2, -1]], "input_ids of sample 1 must be at least 0, got -1"),
        ([{"input_ids": [1], "labels": ["a"]}], "labels of sample 0 must be integers, got 'a'"),
        (
            [[1], {"input_ids": [5, 6], "labels": [-1, 6]}],
            "labels of sample 1 must be at least 0, or -100 .* got -1; set the",
        ),
    ],
)
def test_samples_that_are_none_are_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        fv.share_prefixes(samples)


@pytest.mark.parametrize("features", [5, [5], [[5, None]]])
def test_features_that_are_none_are_refused(features):
    with pytest.raises(ValueError, match="must be"):
        fv.TreeCollator()(features)


@pytest.mark.parametrize("name", ["max_depth", "min_tokens", "capacity", "total_tokens"])
@pytest.mark.parametrize("call", [partial(fv.share_prefixes, [[1]]), fv.TreeCollator])
def test_sizes_are_integers(name, call):
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        call(**{name: "8"})
    call(**{name: np.int64(8)})


def test_unfold_takes_the_tokens_of_the_row():
    with pytest.raises(ValueError, match="x must have the row's 2 tokens"):
        fv.share_prefixes([[1, 2]]).unfold(torch.zeros(3))
