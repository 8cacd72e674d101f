"""Ranks that run other trees, or other parts of one tree, learn together what one process does."""

from __future__ import annotations

from functools import cache, partial
from itertools import combinations, pairwise

import pytest
import torch

import flexvarlen as fv
from flexvarlen.packing.tree_ranks import deal_samples
from flexvarlen.trees.plan import plan_parts
from flexvarlen.trees.steps import common_schedule, fill_steps, steps_of
from tests.patches import tree_ranks as cases
from tests.patches.forward.test_trees import samples
from tests.ranks import Ranks
from tests.slow import with_slow


@pytest.fixture(scope="module")
def four_ranks():
    with Ranks(4) as ranks:
        yield ranks


@cache
def alone(family, world, is_lora=False):
    """Loss and gradients of one process on the trees of all ranks, whole."""
    texts = [text for rank in range(world) for text in cases.samples_of(rank)]
    return learned_whole(family, texts, is_lora)


def learned_whole(family, texts, is_lora=False):
    model = cases.new(family, is_lora=is_lora)
    loss = model(**fv.share_prefixes(texts).batch()).loss
    loss.backward()
    return loss.detach(), cases.gradients_of(model)


def assert_learned(found, expected):
    loss, gradients = expected
    torch.testing.assert_close(found["loss"], loss, atol=0, rtol=1e-12)
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in found["gradients"].items():
        norm = gradients[name].norm()
        assert (gradient - gradients[name]).norm() <= 1e-12 * norm, name


@pytest.mark.parametrize("loop", cases.LOOPS)
@pytest.mark.parametrize(
    "wrapper",
    with_slow(
        [x for x in cases.WRAPPERS if x != "hsdp"],
        ["fsdp2, checkpoints", "fsdp2, gathered", "ddp, gradients in buckets"],
    ),
)
def test_other_trees_on_each_rank(ranks, wrapper, loop):
    found = ranks.run(cases.learned, "llama", wrapper, loop)
    for each in found:
        assert_learned(each, alone("llama", 2))
    if loop == "plain loop":
        first, second = (each["is_own"] for each in found)
        assert sum(first) > sum(second) > 0
        assert all(first)
        assert len(second) == (len(first) if "fsdp2" in wrapper else sum(second))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    "family",
    with_slow(["qwen3_5_text", "qwen3_moe", "qwen3_windows"], ["qwen3_moe", "qwen3_windows"]),
)
def test_families(ranks, family, wrapper):
    for each in ranks.run(cases.learned, family, wrapper, "plain loop"):
        assert_learned(each, alone(family, 2))


@pytest.mark.parametrize("loop", cases.LOOPS)
@pytest.mark.parametrize("wrapper", with_slow(["ddp", "fsdp2"], ["fsdp2"]))
def test_lora(ranks, wrapper, loop):
    pytest.importorskip("peft")
    for each in ranks.run(partial(cases.learned, is_lora=True), "llama", wrapper, loop):
        assert_learned(each, alone("llama", 2, is_lora=True))


@pytest.mark.parametrize("wrapper", with_slow(["ddp", "hsdp"], ["hsdp"]))
def test_four_ranks(four_ranks, wrapper):
    for each in four_ranks.run(cases.learned, "llama", wrapper, "plain loop"):
        assert_learned(each, alone("llama", 4))


@pytest.mark.parametrize("texts", [samples(), samples()[:1]], ids=["tree", "one sample"])
@pytest.mark.parametrize("loop", cases.LOOPS)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_one_tree_over_ranks(ranks, wrapper, loop, texts):
    """Of one sample, the second rank has none."""
    found = ranks.run(cases.of_one_tree, wrapper, loop, texts, 12)
    assert sorted(i for each in found for i in each["samples"]) == [*range(len(texts))]
    for each in found:
        assert_learned(each, learned_whole("llama", texts))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_an_exception_in_the_middle(ranks, wrapper):
    for each in ranks.run(cases.interrupted, wrapper):
        assert_learned(each, learned_whole("llama", samples()))
        if wrapper == "ddp":
            assert each["flags"] == [False, False, True]


@pytest.mark.parametrize("loop", cases.LOOPS)
def test_no_sync(ranks, loop):
    first, second = ranks.run(cases.unsynced, loop)
    _, gradients = alone("llama", 2)
    for name, gradient in gradients.items():
        assert not torch.equal(first["alone"][name], second["alone"][name])
        mean = (first["alone"][name] + second["alone"][name]) / 2
        torch.testing.assert_close(mean, gradient, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(first["gradients"][name], mean, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_without_gradients(ranks, wrapper):
    for found, whole, expected in ranks.run(cases.without_gradients, wrapper):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(whole, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("fsdp1", "under FSDP1 or ZeRO-3"),
        ("forward", "inside DDP's forward"),
        ("static_graph", "DDP with static_graph"),
    ],
)
def test_what_waits_for_other_ranks_raises(ranks, kind, says):
    for said in ranks.run(cases.refused, kind):
        assert says in said


# ---- on the host ----


def random_trees(seed):
    """Lengths and parents of up to 30 segments."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 30, (), generator=generator))
    parents, path = [], []
    for segment in range(count):
        depth = int(torch.randint(0, len(path) + 1, (), generator=generator))
        path = path[:depth]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return torch.randint(1, 9, (count,), generator=generator).tolist(), parents


def test_all_ranks_run_one_schedule():
    """Which has the steps of each, in their order."""
    for seed in range(30):
        steps = [
            steps_of(plan_parts(*random_trees(3 * seed + rank), 9), trains=True)
            for rank in range(3)
        ]
        schedule = common_schedule([[x.is_first_pass for x in own] for own in steps])
        assert len(schedule) <= sum(map(len, steps))
        for own in steps:
            filled = [*fill_steps(own, schedule)]
            assert [x.is_first_pass for x in filled] == schedule
            assert [x for x in filled if x.part is not None] == own


def test_equal_ranks_run_no_empty_parts():
    schedule = [True, False, True, False, False, False]
    assert common_schedule([schedule] * 3) == schedule


def tokens_of(paths, samples_of_rank):
    return len({token for i in samples_of_rank for token in paths[i].tolist()})


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_the_largest_rank_is_as_small_as_it_can_be(seed, ranks):
    """Of all ways to cut the samples in the order of the row."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(5, 7, (n,), generator=generator).tolist() for n in (9, 1, 6, 8, 5, 9, 3)]
    paths = fv.share_prefixes(texts).paths
    dealt = deal_samples(paths, ranks)
    assert sorted(i for own in dealt for i in own) == [*range(len(texts))]
    order = sorted(range(len(texts)), key=lambda i: (int(paths[i][-1]), i))

    def largest(cuts):
        ends = [0, *cuts, len(order)]
        return max(tokens_of(paths, order[a:b]) for a, b in pairwise(ends))

    best = min(
        largest(cuts)
        for count in range(ranks)
        for cuts in combinations(range(1, len(order)), count)
    )
    assert max(tokens_of(paths, own) for own in dealt) == best


def test_the_rows_of_ranks():
    """Tokens, counts and labels of a rank are those of its samples alone."""
    texts = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [5, 6, 7, 9], "labels": [-100, 6, -100, 9]},
        {"input_ids": [5, 6, 7, 9, 4], "labels": [-100, -100, -100, -100, 4]},
    ]
    shared = fv.share_prefixes(texts, total_tokens=20, capacity=9, max_depth=5)
    for rank in range(2):
        own = shared.of_rank(rank, 2)
        assert own.layout.capacity == 9
        assert int(own.num_items_in_batch) == 5
        for index, ids, labels in zip(
            own.samples,
            own.unfold(own.input_ids),
            own.unfold(own.shift_labels),
            strict=True,
        ):
            given = texts[index]["labels"][1:]
            assert ids.tolist() == texts[index]["input_ids"]
            assert all(x in (-100, y) for x, y in zip(given, labels.tolist(), strict=False))
        expected = fv.share_prefixes([texts[i] for i in own.samples])
        assert own.label_counts.sum() == expected.label_counts.sum()
        assert own.sample_counts.sum() == expected.sample_counts.sum()
        assert (own.shift_labels != -100).sum() == (own.label_counts > 0).sum()


def test_bad_ranks_raise():
    shared = fv.share_prefixes(samples())
    with pytest.raises(ValueError, match="rank must be below 2, got 2; count ranks from 0"):
        shared.of_rank(2, 2)
    with pytest.raises(ValueError, match="ranks must be an integer of at least 1"):
        shared.of_rank(0, 0)
