"""A row cut by documents: the ranks attend and train as one process does on the whole row."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import torch.multiprocessing as mp

import flexvarlen as fv
from tests.parallel.documents_ranks import (
    CALLS,
    GROUPS,
    HYBRIDS,
    MODELS,
    WORLD,
    embedding_model,
    run,
)
from tests.parallel.documents_rows import ROWS, TOKENS, batch_of
from tests.tiny_models import new_model


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    """What each rank of a group saved, by the number of ranks."""
    folder = tmp_path_factory.mktemp("documents")
    multiprocessing.set_forkserver_preload(["tests.parallel.documents_ranks"])
    mp.start_processes(run, (str(folder),), nprocs=WORLD, start_method="forkserver")
    saved = [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]
    return {ranks: [saved[rank] for rank in members] for ranks, members in GROUPS.items()}


def assert_near(actual, expected, name):
    """Relative to the largest number, as sums over tokens have another order."""
    error = (actual - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_ranks_attend_as_one_process(shares, case):
    qkv, cotangent, sinks = case.inputs()
    layout = fv.PackedLayout.from_lengths(ROWS[case.row], total_tokens=TOKENS)
    leaves = [x.requires_grad_() for x in (*qkv, *([] if sinks is None else [sinks]))]
    expected = fv.packed_attention(*leaves[:3], layout, **case.keywords(sinks))
    gradients = torch.autograd.grad(expected, leaves, cotangent)
    own = [share[case.name] for share in shares[case.ranks]]
    order = torch.cat([share["tokens"] for share in own])
    torch.testing.assert_close(torch.cat([share["out"] for share in own]), expected[order])
    for index in range(3):
        together = torch.cat([share["gradients"][index] for share in own])
        torch.testing.assert_close(together, gradients[index][order])
    if sinks is not None:
        torch.testing.assert_close(sum(share["gradients"][3] for share in own), gradients[3])


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
        case.name: {share[case.name]["collectives"] for share in shares[case.ranks]}
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
    own = [share[case.name] for share in shares[case.ranks]]
    assert all(share["same_bits"] for share in own)
    found = [share["found"] for share in own]
    order = torch.cat([share["tokens"] for share in own])
    logits = torch.cat([each["logits"] for each in found])
    assert_near(logits, out.logits.detach()[0, order], "logits")
    assert_near(sum(each["loss"] for each in found), out.loss.detach(), "loss")
    for name, parameter in model.named_parameters():
        summed = sum(each[name] for each in found)
        if case.kind in ("bert", "roberta") and name.endswith("key.bias"):  # which moves no softmax
            assert summed.abs().max() < 1e-6
        else:
            assert_near(summed, parameter.grad, name)


@torch.no_grad()
def test_embeddings_of_a_decoder_that_became_an_encoder(shares):
    batch = batch_of(ROWS["long"])
    model = fv.patch_model(embedding_model(), "sdpa")
    expected = model(batch["input_ids"], packed_layout=batch["packed_layout"]).last_hidden_state[0]
    for share in (share["embedded"] for share in shares[2]):
        assert_near(share["hidden"], expected[share["tokens"]], "hidden states")


def test_gradients_are_added_in_fp32(shares):
    """In bf16 256 + 1 is 256, and so is 256 + 1 + 1 if each sum is rounded."""
    assert shares[2][0]["rounded_once"].unique().tolist() == [258]


@pytest.mark.parametrize("name", ["documents", "contiguous", "encoder", "trees"])
def test_one_graph_for_rows_of_equal_bounds(shares, name):
    for share in shares[2]:
        assert share["graphs"][name]["count"] == 1
        assert max(share["graphs"][name]["errors"]) < 1e-6


def test_refused_calls(shares):
    for share in shares[2]:
        assert share["failed_refusals"] == {}
