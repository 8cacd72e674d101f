"""A row cut by documents: the ranks attend and train as one process does on the whole row."""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from tests.parallel.documents_ranks import (
    CALLS,
    COMPILED,
    GROUPS,
    HYBRIDS,
    MODELS,
    WORLD,
    copies,
    embedded,
    embedding_model,
    graphs,
    in_group,
    losses_of,
    rounded_once,
)
from tests.parallel.documents_refusals import (
    refused_forwards,
    refused_rows,
    refused_shards,
)
from tests.parallel.documents_rows import ROWS, batch_of
from tests.ranks import Ranks
from tests.tiny_models import new_model


@pytest.fixture(scope="module")
def shares():
    """What a call with a group returns on each of its ranks."""
    with Ranks(WORLD) as world:

        def run(ranks, call, *arguments):
            found = world.run(in_group, ranks, call, *arguments)
            return [found[rank] for rank in GROUPS[ranks]]

        yield run


def assert_near(actual, expected, name):
    """Relative to the largest number, as sums over tokens have another order."""
    error = (actual - expected).abs().max()
    relative = 1e-9 if expected.dtype == torch.float64 else 1e-5
    assert error <= relative * expected.abs().max() + 1e-9, name


def assert_as_one_process(own, by_token, summed):
    """What the ranks have of tokens, put together, and their sums are those of one process."""
    order = torch.cat([share["tokens"] for share in own])
    for name, expected in by_token.items():
        assert_near(torch.cat([x["by_token"][name] for x in own]), expected[order], name)
    for name, expected in summed.items():
        assert_near(sum(x["summed"][name] for x in own), expected, name)


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_ranks_attend_as_one_process(shares, case):
    assert_as_one_process(shares(case.ranks, case.share), *case.alone())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", {}),
        ("qwen3_windows", {"window": 9}),
        ("qwen3_5_text", {"method": "contiguous"}),
        ("bert", {"causal": False}),
        ("modernbert", {"causal": False, "window": 9}),
    ],
)
def test_the_shard_that_a_model_needs(kind, expected):
    model = new_model(kind)
    assert fv.shard_options(model) == fv.shard_options(fv.patch_model(model)) == expected


def test_nothing_is_sent_unless_a_document_is_cut(shares):
    """Counted in the forward and the backward of attention."""
    counts = {
        case.name: {share["collectives"] for share in shares(case.ranks, case.share)}
        for case in CALLS
        if not case.compiled
    }
    assert counts.pop("nothing_cut") == {0}
    assert set.union(*counts.values()) == {2}


@pytest.mark.parametrize("case", [*MODELS, *HYBRIDS], ids=lambda case: case.name)
def test_a_model_trains_as_on_the_whole_row(shares, case):
    """Logits, loss and all gradients, and the same bits in a second step."""
    model = case.new()
    out = model(**case.batch())
    out.loss.backward()
    summed = {name: x.grad for name, x in model.named_parameters()} | losses_of(out)
    own = shares(case.ranks, case.share)
    assert all(share["same_bits"] for share in own)
    assert all(share["summed"].keys() == summed.keys() for share in own)
    if case.kind in ("bert", "roberta"):
        for name in [name for name in summed if name.endswith("key.bias")]:  # moves no softmax
            del summed[name]
            assert sum(share["summed"][name] for share in own).abs().max() < 1e-6
    by_token = {} if case.chunk_tokens else {"logits": out.logits.detach()[0]}
    assert_as_one_process(own, by_token, summed)


@torch.no_grad()
def test_embeddings_of_a_decoder_that_became_an_encoder(shares):
    batch = batch_of(ROWS["long"])
    model = fv.patch_model(embedding_model(), "sdpa")
    expected = model(batch["input_ids"], packed_layout=batch["packed_layout"]).last_hidden_state[0]
    assert_as_one_process(shares(2, embedded), {"hidden states": expected}, {})


def test_gradients_are_added_in_fp32(shares):
    """In bf16 256 + 1 is 256, and so is 256 + 1 + 1 if each sum is rounded."""
    assert shares(2, rounded_once)[0].unique().tolist() == [258]


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.sampled(3)
def test_one_graph_for_rows_of_equal_bounds(shares, name):
    for found in shares(2, graphs, name):
        assert found["count"] == 1
        assert max(found["errors"]) < 1e-6


def test_a_copy_keeps_the_group_and_a_pickle_leaves_it_out(shares):
    for found in shares(2, copies):
        assert "must get its documents from the model's own" in found.pop("pickle")
        assert found == {"copy": True, "again": True, "whole": "bits", "generated": 2}


@pytest.mark.parametrize("refused", [refused_rows, refused_shards, refused_forwards])
def test_a_rank_hangs_or_goes_wrong_on_what_must_be_refused(shares, refused):
    assert shares(2, refused) == [[], []]
