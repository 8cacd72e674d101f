"""Mutations change lines that are there."""

from tests.mutations.__main__ import MUTATIONS, ROOT


def test_a_line_that_is_gone():
    missing = [x.name for x in MUTATIONS if x.before not in (ROOT / x.file).read_text()]
    assert missing == []
