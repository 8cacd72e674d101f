"""The layout of a rank's pieces: what needs whole documents is refused where one is cut."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import flexvarlen as fv
from flexvarlen.parallel.plan import plan_row
from flexvarlen.parallel.sharded_layout import sharded_layout


def shard_of(lengths, ranks=2):
    """The first rank's layout of a row without padding."""
    plan = plan_row(lengths, ranks, total_tokens=sum(lengths))
    return sharded_layout(plan, 0)


X = torch.randn(1, 6, 4)
LABELS = torch.zeros(1, 6, dtype=torch.long)
OF_DOCUMENTS = {
    "split": lambda layout: layout.split(X),
    "paths": lambda layout: layout.paths(),
    "unfold": lambda layout: layout.unfold(X),
    "first_tokens": lambda layout: layout.first_tokens(),
    "last_tokens": lambda layout: layout.last_tokens(),
    "real_documents": lambda layout: layout.real_documents(),
    "pool": lambda layout: fv.pool(X, layout),
    "document_logprobs": lambda layout: fv.document_logprobs(X, LABELS, layout),
}


@pytest.mark.parametrize("name", OF_DOCUMENTS)
def test_pieces_are_not_taken_for_documents(name):
    for lengths in ([12], [4, 4, 2, 2]):  # where none is cut, too, so that no row raises alone
        with pytest.raises(NotImplementedError, match="a shard of a row may have parts of documen"):
            OF_DOCUMENTS[name](shard_of(lengths))


@pytest.mark.parametrize(
    "remade",
    [lambda layout: pickle.loads(pickle.dumps(layout)), copy.deepcopy],
    ids=["pickle", "deepcopy"],
)
def test_positions_and_exchange_survive(remade):
    layout = shard_of([12])
    found = remade(layout)
    assert found.position_ids().tolist() == layout.position_ids().tolist()
    assert found.shard.exchange.key_ranges.equal(layout.shard.exchange.key_ranges)


def test_all_tensors_but_the_tables_move():
    shard = shard_of([12]).to("meta").shard
    assert shard.starts.device.type == "meta"
    assert shard.exchange.layout_k.device.type == "meta"
    exchange = shard.exchange
    tables = exchange.key_ranges, exchange.send_ranges, exchange.grad_ranges
    assert {x.device.type for x in (*tables, exchange.receive_counts)} == {"cpu"}


def test_a_shard_says_which_it_is():
    assert "shard=0 of 2, total_tokens=6" in repr(shard_of([12]))
