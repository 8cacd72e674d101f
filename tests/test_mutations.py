"""Mutations change lines that are there, and name tests that are."""

from tests.mutations.__main__ import MUTATIONS, ROOT


def test_a_line_that_is_gone():
    missing = [x.name for x in MUTATIONS if x.before not in (ROOT / x.file).read_text()]
    assert missing == []


def test_a_killer_that_is_gone():
    """pytest would end with another code than that of a failed test."""
    assert [x.name for x in MUTATIONS if not (ROOT / x.killer.partition("::")[0]).exists()] == []
