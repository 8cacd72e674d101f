"""What one rank finds ends the run of all, in a sentence: rank 1 waited for rank 0's gradients."""

from __future__ import annotations

import re

import pytest

from tests.verify.isolation.isolation_ranks import sentence

WHOLE = "NotImplementedError: verify_isolation needs whole rows on each rank, got "


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a leak", r"IsolationError: document \d .* leaks into document \d"),
        ("one document", "ValueError: batch must hold at least two documents, got 1"),
        ("nothing", "nothing"),
        ("a shard", f"{WHOLE}a shard of fv.shard_row"),
        ("a group", f"{WHOLE}a model with sequence_parallel_group"),
    ],
)
def test_every_rank_says_why(ranks, case, words, tmp_path):
    first, second = ranks.run(sentence, case, str(tmp_path))
    assert re.match(words, first)
    by_rank_0 = case in ("a leak", "one document")
    assert second == (f"RuntimeError: rank 0 raised {first}" if by_rank_0 else first)
