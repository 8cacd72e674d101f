"""What rows cost a model: the pairs of each mask, and how evenly ranks then work."""

import json

import numpy as np
import pytest

import flexvarlen as fv
from flexvarlen.mask.spec import MaskSpec
from flexvarlen.packing.row_cost import visible_pairs
from tests.packing import row_balance, row_times

MASKS = [
    {"causal": True},
    {"causal": False},
    {"window": 3},
    {"causal": False, "window": 3},
    {"window": 100},
    {"chunk": 4},
    {"causal": False, "chunk": 4},
    {"chunk": 7, "window": 3},
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_pairs_are_those_that_the_mask_shows(mask):
    lengths = [0, 1, 2, 3, 4, 7, 8, 30]
    found = visible_pairs(MaskSpec.of(**mask), np.array(lengths, np.int32))
    assert found.tolist() == [
        fv.DocumentMask.of(fv.PackedLayout.from_lengths([n]), **mask).num_pairs() for n in lengths
    ]


def test_squares_of_long_documents_are_exact():
    (cost,) = fv.BalancedSampler([[90_000, 3]], num_replicas=1).costs
    assert cost == 90_000**2 + 9


def test_a_row_without_documents_costs_nothing():
    cost = fv.RowCost(2.0, {MaskSpec.of(): 1.0})
    assert cost.of_rows([[], [3], [], [1, 1], []]).tolist() == [0, 12, 0, 6, 0]


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"per_token": -1.0}, "costs must be finite, at least 0, .* got per_token=-1.0"),
        ({"per_token": float("nan")}, "costs must be finite"),
        ({"per_token": 0.0}, "not all 0"),
        ({"per_token": 1.0, "per_pair": {MaskSpec.of(): float("inf")}}, "per_pair=.inf.; pass"),
        (
            {"per_token": 1.0, "per_pair": {MaskSpec.of(prefix=True): 1.0}},
            "length alone, got .*pref",
        ),
    ],
)
def test_a_mistake_is_a_sentence(costs, words):
    with pytest.raises(ValueError, match=words):
        fv.RowCost(**costs)


# ---- simulated ranks ----


def recorded():
    lines = row_balance.RECORDS.read_text(encoding="utf-8").splitlines()
    return {tuple(record["case"].values()): record for record in map(json.loads, lines)}


def test_ranks_work_alike_on_packed_rows_by_their_cost_alone():
    excess = {case: record["slowest_over_mean"] for case, record in recorded().items()}
    assert sorted(excess) == sorted(row_balance.cases())
    packed = [found for case, found in excess.items() if "unpadded" not in case]
    assert max(found["cost"] for found in packed) < 0.03
    assert max(found["squares"] for found in packed) > 0.1
    assert max(found["tokens"] for found in packed) > 0.5


@pytest.mark.parametrize("documents", row_balance.DOCUMENTS)
def test_the_record_is_what_the_sampler_does(documents):
    case = ("llama-3.1-8b", documents, "in order", 8)
    found = row_balance.simulated(*case)["slowest_over_mean"]
    assert found == pytest.approx(recorded()[case]["slowest_over_mean"], abs=0.005)


# ---- two H200 ----


def test_steps_on_two_gpus_take_what_the_cost_of_their_rows_says():
    """As docs/packing.md does, of the record that row_times.py wrote."""
    lines = row_times.RECORDS.read_text(encoding="utf-8").splitlines()
    found = [each["ms"] / each["ms_of_cost"] - 1 for each in map(json.loads, lines)]
    assert len(found) == 2 * len(row_times.MODELS) * len(row_times.PAIRS)
    assert f"{max(map(abs, found)):.1%}" == "3.3%"
