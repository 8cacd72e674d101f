"""Rows dealt to ranks: each once, the costs of a step alike, on from the middle of an epoch."""

from __future__ import annotations

import numpy as np
import pytest

import flexvarlen as fv

RANKS = 4


@pytest.fixture(scope="module")
def rows():
    drawn = np.random.default_rng(0).lognormal(np.log(500) - 0.5, 1.2, 20_000)
    lengths = np.clip(drawn.round(), 1, 8192).astype(int)
    return [[int(lengths[i]) for i in row] for row in fv.pack(lengths, 8192)]


def sampler(rows, **options):
    return fv.BalancedSampler(rows, num_replicas=RANKS, **options)


@pytest.mark.parametrize("count", [RANKS, 41, 43, 500])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_the_rows(rows, count, drop_last):
    ranks = [list(sampler(rows[:count], rank=r, drop_last=drop_last)) for r in range(RANKS)]
    assert len({len(own) for own in ranks}) == 1
    seen = sorted(row for own in ranks for row in own)
    assert len(sampler(rows[:count], rank=0, drop_last=drop_last)) == len(ranks[0])
    if drop_last:
        assert len(seen) == len(set(seen)) == count - count % RANKS
    else:
        assert set(seen) == set(range(count))
        assert len(seen) - count == -count % RANKS  # repeated, to fill the last step


def test_fewer_rows_than_ranks_are_repeated(rows):
    ranks = [list(sampler(rows[:2], rank=rank)) for rank in range(RANKS)]
    assert sorted(row for own in ranks for row in own) == [0, 0, 1, 1]


def test_all_ranks_order_is_that_of_the_ranks(rows):
    """accelerate deals the batches of one order to the ranks in turn."""
    every = list(sampler(rows))
    assert len(sampler(rows)) == len(every)
    for rank in range(RANKS):
        assert every[rank::RANKS] == list(sampler(rows, rank=rank))


def test_steps_cost_alike_where_shuffled_rows_do_not(rows):
    balanced, shuffled = sampler(rows), sampler(rows, window=1)
    assert shuffled.imbalance() > 1.1
    assert balanced.imbalance() < 1 + (shuffled.imbalance() - 1) / 10


def test_steps_that_do_not_fill_a_window_are_sorted_with_others(rows):
    some = rows[-9 * RANKS :]
    assert sampler(some, window=5).imbalance() == sampler(some, window=9).imbalance()


def test_rows_are_dealt_by_the_cost_that_is_given():
    rows = [[6], [4, 4, 4], [6], [4, 4, 4]]  # of 36 and 48 squares, or of 6 and 12 tokens
    dealt = fv.BalancedSampler(rows, num_replicas=2, cost=fv.RowCost(per_token=1.0))
    assert dealt.costs.tolist() == [6, 12, 6, 12]
    assert dealt.imbalance() == 1
    with pytest.raises(ValueError, match="the state's rows must be"):
        dealt.load_state_dict(fv.BalancedSampler(rows, num_replicas=2).state_dict())


def test_imbalance_is_the_slowest_ranks_cost_over_the_mean():
    lone = fv.BalancedSampler([[4], [2, 2]], num_replicas=2)
    assert lone.imbalance() == pytest.approx(16 / 12)


def test_epochs_and_seeds_have_orders_of_their_own(rows):
    one, other, again = sampler(rows), sampler(rows), sampler(rows, seed=1)
    assert list(one) == list(other)
    assert list(one) != list(again)
    other.set_epoch(1)
    assert list(one) != list(other)
    assert sorted(set(one)) == sorted(set(other))


def test_no_rank_has_the_longest_rows_always(rows):
    mine = sampler(rows)
    largest = np.array([mine.costs[step].argmax().item() for step in mine.steps()])
    assert all((largest == rank).mean() > 0.15 for rank in range(RANKS))


def test_an_epoch_goes_on_where_its_state_was_taken(rows):
    whole = list(sampler(rows, rank=1))
    stopped = sampler(rows, rank=1)
    taken = [row for row, _ in zip(stopped, range(7), strict=False)][:6]
    state = stopped.state_dict() | {"taken": 6}
    later = sampler(rows, rank=1, seed=9)
    later.load_state_dict(state)
    assert taken + list(later) == whole
    assert list(later) == whole  # the next pass is a whole one


def test_the_epoch_of_a_state_set_again_keeps_the_place(rows):
    whole = sampler(rows)
    whole.set_epoch(2)
    later = sampler(rows)
    later.load_state_dict(whole.state_dict() | {"taken": 2 * RANKS})
    with pytest.raises(ValueError, match="epoch must be 2, which load_state_dict resumed"):
        later.set_epoch(0)  # a loop over epochs that begins anew would lose the place
    later.set_epoch(2)
    assert list(later) == list(whole)[2 * RANKS :]
    later.set_epoch(0)
    assert list(later) == list(sampler(rows))


def test_a_pass_that_was_broken_off_begins_anew(rows):
    mine = sampler(rows, rank=0)
    first = next(iter(mine))
    assert next(iter(mine)) == first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_replicas": 3}, "state's num_replicas must be 3, got 4"),
        ({"window": 2}, "state's window must be 2, got 64"),
        ({"drop_last": True}, "state's drop_last must be True, got False"),
    ],
)
def test_a_state_of_another_order_is_a_sentence(rows, changes, words):
    state = sampler(rows[:40]).state_dict()
    with pytest.raises(ValueError, match=words):
        fv.BalancedSampler(rows[:40], **{"num_replicas": RANKS, **changes}).load_state_dict(state)
    with pytest.raises(ValueError, match="the state's rows must be"):
        sampler([[5]] * 40).load_state_dict(state)
    with pytest.raises(ValueError, match="taken must be from 0 to 40"):
        sampler(rows[:40]).load_state_dict(state | {"taken": -3})


def test_long_rows_of_small_integers_cost_most():
    rows = [[np.int32(60_000)], [np.int32(10)]]
    assert fv.BalancedSampler(rows, num_replicas=1).costs.tolist() == [3.6e9, 100.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_replicas": 2, "seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"num_replicas": 2, "rank": 0.5}, "rank must be an integer"),
        ({"num_replicas": 2, "cost": len}, r"cost must be a RowCost, got <.*; pass fv.row_cost"),
        ({"num_replicas": 2, "rows": [3, 4, 5]}, r"rows\[0\] must be a list or a 1D array"),
        ({"num_replicas": 2, "rows": [[3], ["4"]]}, r"rows\[1\] must be integers, got '4'"),
        ({"num_replicas": 2, "rows": 5}, "rows must be a list of rows, got 5"),
        ({"num_replicas": 0}, "num_replicas must be an integer of at least 1"),
        ({"num_replicas": 2, "window": 0}, "window must be an integer of at least 1"),
        ({"num_replicas": 2, "rank": 2}, "rank must be None or from 0 to 1, got 2"),
        ({"num_replicas": 9, "drop_last": True}, "rows must fill a step of 9 ranks, got 3"),
    ],
)
def test_mistake_is_a_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        fv.BalancedSampler(**{"rows": [[1], [2], [3]], **options})
