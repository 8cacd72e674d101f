"""A name that a release of transformers renamed: a sentence that holds it, never a wrong number."""

from __future__ import annotations

import re

import pytest

from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.patches.names import INTERFACES, NEEDS, check_interfaces
from tests.renamed import Case, outcomes


def kinds_of(need):
    """The families that have a name, sorted."""
    return [x for x in sorted(need.families) if x in BY_TYPE]


OWN = ("padding_idx", "rope_parameters", "num_attention_heads", "text_config", "rope_type")
"""Without these a model of transformers cannot be made."""


def cases_of(need, kinds):
    name = need.dotted.rpartition(".")[2].partition("|")[0]
    return [Case(kind, name, "made" if name in OWN else "model") for kind in kinds]


def not_refused(cases):
    """Those that did not end in a sentence with the name."""
    needed = r"^NotImplementedError: transformers \S+ has no \S*\b{}\b.* needs for "
    found = outcomes(cases)
    return {case: x for case, x in found.items() if not re.search(needed.format(case.name), x)}


def test_every_name_is_refused_when_it_is_renamed():
    assert (
        not_refused({case for need in NEEDS for case in cases_of(need, kinds_of(need)[:1])}) == {}
    )


@pytest.mark.slow
def test_every_name_is_refused_in_every_family():
    assert (
        not_refused({case for need in NEEDS for case in cases_of(need, kinds_of(need)[1:])}) == {}
    )


@pytest.mark.parametrize(
    ("need", "parameter"),
    [(need, parameter) for need in INTERFACES for parameter in need.parameters],
)
def test_every_parameter_is_looked_up(monkeypatch, need, parameter):
    """By a function of that name without it: none other of transformers is imported by it."""
    module, _, name = need.dotted.rpartition(".")
    others = ", ".join(x for x in need.parameters if x != parameter)
    renamed = eval(f"lambda {others}: None")
    renamed.__module__, renamed.__name__ = module, name
    monkeypatch.setattr(need.dotted, renamed)
    expected = rf"transformers \S+ has no {name}.{parameter}, which flexvarlen needs for "
    with pytest.raises(NotImplementedError, match=expected):
        check_interfaces.__wrapped__()
