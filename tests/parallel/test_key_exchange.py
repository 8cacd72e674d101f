"""The tables of `KeyExchange`: the exchanges of all ranks, simulated in one process."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from flexvarlen.parallel.plan import plan_row
from flexvarlen.parallel.sharded_layout import sharded_layout

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12)
WINDOWS = st.none() | st.integers(1, 20)


def ranges_of(table):
    """The rows of a table, without those of no tokens."""
    return [row for row in table.tolist() if row[2]]


def received_by_rank(exchanges, own):
    """The tokens that each rank receives, by the rank that sends them.

    Args:
        exchanges: of all ranks.
        own: the tokens of each rank.
    """
    sent = {}
    for source, exchange in enumerate(exchanges):
        ranges = ranges_of(exchange.send_ranges)
        assert ranges == sorted(ranges, key=lambda row: row[1]), "by rank"
        for token, to, n in ranges:
            sent.setdefault((source, to), []).extend(own[source][token : token + n])
    ranks = range(len(exchanges))
    for rank, exchange in enumerate(exchanges):
        received = [sent.get((source, rank), []) for source in ranks]
        assert exchange.receive_counts.tolist() == list(map(len, received))
        yield [*chain.from_iterable(received)]


def gathered_tokens(exchange, own, received):
    """The row's token at each gathered key; None past the last."""
    found, tokens = [None] * exchange.layout_k.total_tokens, own + received
    for token, _, n, key in ranges_of(exchange.key_ranges):
        assert token >= len(own) or token + n <= len(own), "of own tokens or of received ones"
        assert found[key : key + n] == [None] * n, "each key is filled once"
        found[key : key + n] = tokens[token : token + n]
    return found


def check_gradients(exchanges, own, received):
    """They are sent for the tokens that their owner expects, in the same order."""
    sent, expected = {}, {}
    for rank, exchange in enumerate(exchanges):
        tokens = own[rank] + received[rank]
        of_others = [row for row in ranges_of(exchange.key_ranges) if row[0] >= len(own[rank])]
        arrivals = ranges_of(exchange.grad_ranges)
        for ranges in (of_others, arrivals):
            assert ranges == sorted(ranges, key=lambda row: row[1]), "by rank"
        for token, to, n, _ in of_others:
            sent.setdefault((rank, to), []).extend(tokens[token : token + n])
        for token, source, n in arrivals:
            expected.setdefault((source, rank), []).extend(own[rank][token : token + n])
    assert sent == expected


def plan_of(lengths, ranks, padding=0, **options):
    tokens_per_rank = max(-(-(sum(lengths) + padding) // ranks), 1)
    return plan_row(lengths, ranks, total_tokens=tokens_per_rank * ranks, **options)


def keys_of(piece, plan, window):
    """The first and one past the last token of its document that a piece attends to."""
    _, start, stop = piece
    length = plan.lengths[piece.document]
    reach = length if window is None else window - 1
    return max(0, start - reach), stop if plan.causal else min(length, stop + reach)


@given(LENGTHS, st.integers(1, 16), st.integers(0, 9), st.booleans(), st.booleans(), WINDOWS)
@example([100, 1, 19], 4, 0, True, False, None)
@example([100, 1, 19], 4, 0, True, False, 5)
@example([100, 1, 19], 4, 0, False, False, 5)
@example([64], 16, 0, False, False, None)
def test_a_piece_gets_the_keys_that_it_attends_to(
    lengths, ranks, padding, causal, contiguous, window
):
    plan = plan_of(lengths, ranks, padding, causal=causal, contiguous=contiguous)
    layouts = [sharded_layout(plan, rank, window=window) for rank in range(ranks)]
    shards = [layout.shard for layout in layouts]
    exchanges = [shard.exchange if window is None else shard.windowed for shard in shards]
    if not plan.cut_documents:
        assert exchanges == [None] * ranks
        return
    own = plan.order().reshape(ranks, -1).tolist()
    begins = np.cumsum([0, *lengths])
    all_received = [*received_by_rank(exchanges, own)]
    check_gradients(exchanges, own, all_received)
    for rank, (exchange, received) in enumerate(zip(exchanges, all_received, strict=True)):
        assert len(received) == len(set(received)), "each key is sent once to a rank"
        assert not set(received) & set(own[rank]), "a rank receives no key that it holds"
        tokens = gathered_tokens(exchange, own[rank], received)
        needed = set(tokens) - {None} - set(own[rank])
        assert set(received) == needed, "only keys that a query needs are received"
        bounds = exchange.layout_k.cu_seqlens.tolist()
        for slot, piece in enumerate(plan.pieces[rank]):
            first, last = keys_of(piece, plan, window)
            begin = begins[piece.document]
            assert tokens[bounds[slot] : bounds[slot + 1]] == [*range(begin + first, begin + last)]
        if causal or window is None:
            assert exchange.own_keys is None
            continue
        keys = exchange.own_keys.tolist()
        assert len(set(keys)) == plan.tokens_per_rank, "each query has a key of its own"
        real = plan.tokens_per_rank - plan.padding(rank)
        assert [tokens[key] for key in keys[:real]] == own[rank][:real]
        assert all(bounds[-1] <= key < len(tokens) for key in keys[real:]), "padding"


@given(LENGTHS, st.integers(1, 16), st.integers(0, 9), st.booleans(), st.booleans())
def test_positions_count_in_the_document(lengths, ranks, padding, causal, contiguous):
    plan = plan_of(lengths, ranks, padding, causal=causal, contiguous=contiguous)
    for rank, pieces in enumerate(plan.pieces):
        layout = sharded_layout(plan, rank)
        positions, bounds = layout.position_ids().tolist(), layout.cu_seqlens.tolist()
        for slot, (_, start, stop) in enumerate(pieces):
            assert positions[bounds[slot] : bounds[slot + 1]] == list(range(start, stop))


@given(LENGTHS, st.integers(2, 16), st.booleans(), st.booleans(), st.integers(1, 20))
def test_sizes_are_the_same_on_all_ranks(lengths, ranks, causal, contiguous, window):
    """Otherwise one rank would compile while the others wait for it."""
    plan = plan_of(lengths, ranks, causal=causal, contiguous=contiguous)
    layouts = [sharded_layout(plan, rank, window=window) for rank in range(ranks)]

    def sizes(layout):
        found = [layout.capacity, layout.max_seqlen_bound]
        for exchange in filter(None, (layout.shard.exchange, layout.shard.windowed)):
            k = exchange.layout_k
            found += [k.total_tokens, k.capacity, k.max_seqlen_bound, exchange.own_keys is None]
            tables = exchange.key_ranges, exchange.send_ranges, exchange.grad_ranges
            assert len({len(table) for table in tables}) == 1
            found += [table.shape for table in (*tables, exchange.receive_counts)]
        return found

    assert all(sizes(layout) == sizes(layouts[0]) for layout in layouts)
