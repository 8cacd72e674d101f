"""The table that `auto` chooses from is that of the records, and near cases are near enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexvarlen.attention.auto import table
from flexvarlen.bench import kernel_table
from flexvarlen.report.records import read_records

MOST = 1.02
"""Of the fastest kernel's time in the geometric mean, if `auto` does not know the case."""


@pytest.fixture(scope="module")
def records():
    return read_records(kernel_table.RESULTS / f"{x}-h200.jsonl" for x in kernel_table.SUITES)


@pytest.fixture(scope="module")
def cases(records):
    return table.read_cases(kernel_table.table_of(records))


def test_the_shipped_table_is_made_from_the_records(records, cases):
    text = table.PATH.read_text(encoding="utf-8")
    assert text == kernel_table.as_text(kernel_table.table_of(records)), (
        "run python -m flexvarlen.bench.kernel_table"
    )
    assert table.shipped_cases() == cases


@pytest.mark.parametrize("installed", kernel_table.INSTALLED)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_a_case_that_is_left_out_is_served_by_its_neighbours(cases, installed, compiled):
    """Replayed on the records of "kernels"; `python -m flexvarlen.bench.kernel_table` prints it."""
    known = [case for case in cases if case.depth == 1]
    found = kernel_table.replay(known, kernel_table.INSTALLED[installed])
    ratio = kernel_table.mean_ratio([one for one in found if one.compiled == compiled])
    assert 1.0 < ratio <= MOST


def test_the_replay_sees_a_table_with_two_kernels_swapped(cases):
    """Its neighbours then say the opposite of what the case left out says."""
    names = {"fa3": "flex", "flex": "fa3"}
    half = [
        case._replace(ms={names.get(name, name): ms for name, ms in case.ms.items()})
        if index % 2
        else case
        for index, case in enumerate(cases)
    ]
    found = kernel_table.replay(half, kernel_table.INSTALLED["all kernels"])
    assert kernel_table.mean_ratio(found) > MOST


def test_times_in_which_the_device_waited_are_not_of_the_kernel(records):
    kernels = [r for r in records if r.suite == "kernels" and r.case["variant"] == "fa3"]
    waited = [replace(r, measures=r.measures | {"host_bound": True}) for r in kernels]
    assert kernel_table.table_of(waited)["cases"] == []


def test_the_worst_case_is_named(cases):
    said = kernel_table.sentences(cases)
    assert [sentence.partition(":")[0] for sentence in said] == list(kernel_table.INSTALLED)
    assert all("instead of" in sentence for sentence in said)
