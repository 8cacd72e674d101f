"""Which tokens of a row lie on which rank: none lost, as many on each, few cuts, even work."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flexvarlen.parallel.plan import plan_row

RANKS = st.one_of(st.integers(1, 8), st.integers(1, 64))
LENGTHS = st.one_of(
    st.lists(st.one_of(st.integers(0, 12), st.integers(0, 3000)), max_size=80),
    st.lists(st.integers(0, 3000), max_size=8),
)


def planned(lengths, ranks, padding=0, **options):
    capacity = -(-(sum(lengths) + padding) // ranks)
    return plan_row(lengths, ranks, total_tokens=capacity * ranks, **options)


def log_normal_row(total, mean, sigma, rng):
    """Documents in the order in which they are drawn, until one does not fit."""
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, total // 10)
    drawn = np.clip(drawn, 1, total).astype(int)
    return drawn[: np.searchsorted(drawn.cumsum(), total, side="right")].tolist()


def excess(plan):
    """How much more attention work the rank with the most has than the mean."""
    work = plan.work()
    return max(work) / np.mean(work) - 1


def step_excess(plan):
    """The same of all work: what a token costs beside attention is as much as 8K keys."""
    work = np.array(plan.work()) + 8192 * plan.tokens_per_rank
    return max(work) / np.mean(work) - 1


def pieces_by_document(plan):
    """The (rank, start, stop) of each document, in the order of the ranks."""
    found = defaultdict(list)
    for rank, own in enumerate(plan.pieces):
        for document, start, stop in own:
            found[document].append((rank, start, stop))
    return found


ATTENTION = pytest.mark.parametrize("causal", [True, False])


@pytest.mark.parametrize("options", [{}, {"contiguous": True}, {"causal": False}])
@given(LENGTHS, RANKS, st.integers(0, 50))
def test_each_token_lies_on_one_rank_and_padding_comes_last(options, lengths, ranks, padding):
    plan = planned(lengths, ranks, padding, **options)
    total = ranks * plan.tokens_per_rank
    order = plan.order()
    assert np.sort(order).tolist() == list(range(total))
    for rank, tokens in enumerate(order.reshape(ranks, -1)):
        real = plan.tokens_per_rank - plan.padding(rank)
        assert (tokens[:real] < sum(lengths)).all(), "documents"
        assert (tokens[real:] >= sum(lengths)).all(), "padding"
        starts = np.cumsum([0, *lengths])
        expected = [t + starts[d] for d, a, b in plan.pieces[rank] for t in range(a, b)]
        assert tokens[:real].tolist() == expected


@ATTENTION
@given(LENGTHS, RANKS, st.integers(0, 50))
@example([4096], 64, 0)
@example([3] * 30, 64, 0)
@example([4, 3, 4], 3, 0)
@example([200_000, 150_000, 150_000, 1, 30_000], 4, 0)
def test_at_most_a_document_for_each_boundary_of_ranks_is_cut(causal, lengths, ranks, padding):
    """Where a document attends to all of itself, those longer than a rank are cut besides."""
    plan = planned(lengths, ranks, padding, causal=causal)
    cut = [d for d in plan.cut_documents if causal or lengths[d] <= plan.tokens_per_rank]
    assert len(cut) <= max(ranks - 1, 0)
    assert set(plan.cut_documents) == {
        d for d, found in pieces_by_document(plan).items() if len(found) > 1
    }


@given(LENGTHS, RANKS)
def test_a_rank_has_the_first_and_the_last_of_what_is_left_of_a_cut_document(lengths, ranks):
    """So at most two pieces, one that attends to few keys and one that attends to many."""
    plan = planned(lengths, ranks)
    for document, found in pieces_by_document(plan).items():
        low, high = 0, lengths[document]
        for rank in dict.fromkeys(rank for rank, _, _ in found):
            own = [(start, stop) for other, start, stop in found if other == rank]
            assert len(own) <= 2
            for start, stop in own:
                assert start == low or stop == high, (document, own)
                low, high = (stop, high) if start == low else (low, start)
            assert all(a[1] < b[0] for a, b in pairwise(own)), "two pieces that are one"


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), RANKS, st.randoms())
def test_no_document_is_cut_where_longest_first_places_all_evenly(lengths, ranks, random):
    """Each rank gets the same lengths, so that the longest first fill all alike."""
    row = lengths * ranks
    random.shuffle(row)
    plan = planned(row, ranks)
    assert plan.cut_documents == ()
    assert excess(plan) < 1e-9


@given(LENGTHS, RANKS)
def test_whole_documents_come_first(lengths, ranks):
    """So what no other rank needs is one run of tokens."""
    plan = planned(lengths, ranks)
    for own in plan.pieces:
        are_cut = [document in plan.cut_documents for document, _, _ in own]
        assert are_cut == sorted(are_cut)


@given(LENGTHS, RANKS)
def test_a_rank_has_one_piece_of_a_document_if_attention_is_bidirectional(lengths, ranks):
    """Each piece needs all keys of its document, so two would hold them twice."""
    for own in planned(lengths, ranks, causal=False).pieces:
        assert len({piece.document for piece in own}) == len(own)


@given(st.one_of(LENGTHS, st.lists(st.integers(0, 200_000), max_size=40)), RANKS)
@example([92229, 186067, 186067], 2)
def test_work_is_within_5_percent_of_the_mean(lengths, ranks):
    plan = planned([1, *lengths], ranks)
    assert step_excess(plan) <= 0.05 + 1e-9


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mean", [500, 2000, 8000])
def test_so_is_that_of_bidirectional_attention_in_almost_all_rows(mean, ranks):
    """All tokens of a document have the same work, so a cut leaves less choice."""
    rng = np.random.default_rng(0)
    rows = [log_normal_row(ranks * 16384, mean, 1.0, rng) for _ in range(30)]
    found = np.array([step_excess(planned(lengths, ranks, causal=False)) for lengths in rows])
    assert np.mean(found > 0.05) < 0.04
    assert found.max() < 0.08


@ATTENTION
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_attention_work_alone_is_even_in_rows_that_must_be_cut(ranks, sigma, causal):
    """With a document that is longer than a rank, as then no row stays whole."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        lengths = [4 * 16384, *log_normal_row(ranks * 16384, 8000, sigma, rng)]
        assert excess(planned(lengths, ranks, causal=causal)) < 0.01


def test_few_short_documents_are_cut_where_attention_is_a_small_part_of_the_work():
    """A full row: its shortest documents fill what the others leave."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = np.minimum(log_normal_row(8 * 16384, 500, 1.0, rng), 4000).tolist()
        plan = planned(lengths, 8)
        assert len(plan.cut_documents) <= 3
        assert sum(lengths[d] for d in plan.cut_documents) < 300


@given(LENGTHS, RANKS)
def test_contiguous_ranks_are_the_row_as_it_is(lengths, ranks):
    plan = planned(lengths, ranks, contiguous=True)
    assert plan.order().tolist() == list(range(ranks * plan.tokens_per_rank))


def test_padding_inside_a_row_goes_last_too():
    """A run of padding is a document without tokens, and the others tell where they begin."""
    plan = plan_row([3, 0, 2], 2, total_tokens=8)
    order = plan.order(first_tokens=[1, 4, 5])
    assert sorted(order.tolist()) == list(range(8))
    padding = [
        t for rank, own in enumerate(order.reshape(2, 4)) for t in own[-plan.padding(rank) :]
    ]
    assert sorted(padding) == [0, 4, 7]


@pytest.mark.parametrize(("mean", "seconds"), [(500, 0.1), (20, 2)])
def test_a_million_tokens_do_not_take_the_square_of_the_documents(mean, seconds):
    """A fast machine takes 11 ms and 260 ms; the bounds leave room for slow ones."""
    rng = np.random.default_rng(0)
    lengths = log_normal_row(2**20, mean, 1.0, rng)
    took = []
    for _ in range(7 if mean == 500 else 2):
        begin = time.thread_time()
        plan_row(lengths, 64, total_tokens=2**20)
        took.append(time.thread_time() - begin)
    assert min(took) < seconds


@pytest.mark.parametrize(
    ("lengths", "ranks", "total", "words"),
    [
        ([3], 2, 5, "total_tokens must be a multiple of the 2 ranks, got 5"),
        ([3], 0, 4, "total_tokens must be a multiple of the 0 ranks"),
        ([3, 3], 2, 4, "total_tokens must be at least those of all documents, 6, got 4"),
    ],
)
def test_mistakes_are_sentences(lengths, ranks, total, words):
    with pytest.raises(ValueError, match=words):
        plan_row(lengths, ranks, total_tokens=total)
