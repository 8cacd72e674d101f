"""The keys of each piece are the tokens of its document: the exchange of all ranks, on one host."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from flexvarlen.parallel.plan import plan_row
from flexvarlen.parallel.sharded_layout import sharded_layout

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def exchanged(exchanges, own):
    """What each rank receives: of rank 0, then of rank 1, and so on.

    Args:
        exchanges: of all ranks.
        own: the tokens of each rank.
    """
    sent = {}
    for source, exchange in enumerate(exchanges):
        for slot, to, n in exchange.sends.tolist():
            sent.setdefault((source, to), []).extend(own[source][slot : slot + n])
    for rank, exchange in enumerate(exchanges):
        counts = [len(sent.get((source, rank), [])) for source in range(len(exchanges))]
        assert exchange.received.tolist() == counts
        yield [token for source in range(len(exchanges)) for token in sent.get((source, rank), [])]


def rows_of_keys(exchange, own, received):
    """The token of each row of keys; None in spare rows."""
    rows, slots = [None] * exchange.layout_k.total_tokens, own + received
    for slot, _, n, row in exchange.runs.tolist():
        assert slot >= len(own) or slot + n <= len(own), (
            "a run is of own tokens or of received ones"
        )
        assert rows[row : row + n] == [None] * n, "rows are filled once"
        rows[row : row + n] = slots[slot : slot + n]
    return rows


def check_returns(exchanges, own, received):
    """Each rank expects gradients of the tokens for which they are returned, in their order."""
    sent, expected = {}, {}
    for rank, exchange in enumerate(exchanges):
        tokens = own[rank] + received[rank]
        for slot, to, n, _ in exchange.runs.tolist():
            if slot >= len(own[rank]):
                sent.setdefault((rank, to), []).extend(tokens[slot : slot + n])
        returns = [returned for returned in exchange.returns.tolist() if returned[2]]
        assert returns == sorted(returns, key=lambda returned: returned[1]), "as they arrive"
        for slot, source, n in returns:
            expected.setdefault((source, rank), []).extend(own[rank][slot : slot + n])
    assert sent == expected


@given(LENGTHS, st.integers(1, 16), st.integers(0, 9), st.booleans(), st.booleans())
@example([100, 1, 19], 4, 0, True, False)
@example([64], 16, 0, False, False)
def test_the_keys_of_a_piece_are_its_documents(lengths, ranks, padding, causal, contiguous):
    capacity = max(-(-(sum(lengths) + padding) // ranks), 1)
    total = capacity * ranks
    plan = plan_row(lengths, ranks, total_tokens=total, contiguous=contiguous, causal=causal)
    layouts = [sharded_layout(plan, r) for r in range(ranks)]
    shards = [layout.shard for layout in layouts]
    if not plan.cut_documents:
        assert all(shard.exchange is None for shard in shards)
        return
    own = plan.order().reshape(ranks, -1).tolist()
    begins = np.cumsum([0, *lengths])
    exchanges = [shard.exchange for shard in shards]
    all_received = [*exchanged(exchanges, own)]
    check_returns(exchanges, own, all_received)
    for rank, received in enumerate(all_received):
        assert len(received) == len(set(received)), "each key travels once to a rank"
        assert not set(received) & set(own[rank]), "what it has does not"
        rows = rows_of_keys(shards[rank].exchange, own[rank], received)
        bounds = shards[rank].exchange.layout_k.cu_seqlens.tolist()
        queries = layouts[rank].cu_seqlens.tolist()
        for slot, (document, start, stop) in enumerate(plan.pieces[rank]):
            end = stop if causal else lengths[document]
            expected = list(range(begins[document], begins[document] + end))
            assert rows[bounds[slot] : bounds[slot + 1]] == expected
            positions = layouts[rank].position_ids()[queries[slot] : queries[slot + 1]]
            assert positions.tolist() == list(range(start, stop))
        needed = set(rows) - {None} - set(own[rank])
        assert set(received) == needed, "nothing travels that no query needs"


@given(LENGTHS, st.integers(1, 8), st.integers(0, 9), st.integers(1, 20), st.booleans())
@example([100, 1, 19], 4, 0, 5, False)
@example([100, 1, 19], 4, 0, 5, True)
def test_the_keys_of_a_window_are_those_it_reaches(lengths, ranks, padding, window, causal):
    capacity = max(-(-(sum(lengths) + padding) // ranks), 1)
    plan = plan_row(lengths, ranks, total_tokens=capacity * ranks, causal=causal)
    keys = [sharded_layout(plan, r, window=window).shard.windowed for r in range(ranks)]
    if not plan.cut_documents:
        assert keys == [None] * ranks
        return
    own = plan.order().reshape(ranks, -1).tolist()
    begins = np.cumsum([0, *lengths])
    all_received = [*exchanged(keys, own)]
    check_returns(keys, own, all_received)
    for rank, received in enumerate(all_received):
        assert len(received) == len(set(received)), "each key travels once to a rank"
        rows = rows_of_keys(keys[rank], own[rank], received)
        assert set(received) == set(rows) - {None} - set(own[rank]), "and if a query needs it"
        bounds = keys[rank].layout_k.cu_seqlens.tolist()
        for slot, (document, start, stop) in enumerate(plan.pieces[rank]):
            first = max(0, start - window + 1)
            last = stop if causal else min(lengths[document], stop + window - 1)
            expected = list(range(begins[document] + first, begins[document] + last))
            assert rows[bounds[slot] : bounds[slot + 1]] == expected
        if causal:
            assert keys[rank].own_keys is None
            continue
        keys_of_queries = keys[rank].own_keys.tolist()
        assert len(set(keys_of_queries)) == capacity, "each query has a row of its own"
        real = capacity - plan.padding(rank)
        assert [rows[key] for key in keys_of_queries[:real]] == own[rank][:real]
        assert all(bounds[-1] <= key < len(rows) for key in keys_of_queries[real:]), "padding"


@given(LENGTHS, st.integers(2, 16), st.booleans(), st.booleans(), st.integers(1, 20))
def test_sizes_are_the_same_on_all_ranks(lengths, ranks, causal, contiguous, window):
    """Else a compiled graph of one rank would wait for the compilation of another."""
    capacity = max(-(-sum(lengths) // ranks), 1)
    total = capacity * ranks
    plan = plan_row(lengths, ranks, total_tokens=total, contiguous=contiguous, causal=causal)
    layouts = [sharded_layout(plan, rank, window=window) for rank in range(ranks)]

    def sizes(layout):
        found = [layout.capacity, layout.max_seqlen_bound]
        for exchange in filter(None, (layout.shard.exchange, layout.shard.windowed)):
            k = exchange.layout_k
            found += [k.total_tokens, k.capacity, k.max_seqlen_bound, exchange.own_keys is None]
            tables = exchange.runs, exchange.sends, exchange.received, exchange.returns
            found += [table.shape for table in tables]
        return found

    assert all(sizes(layout) == sizes(layouts[0]) for layout in layouts)
