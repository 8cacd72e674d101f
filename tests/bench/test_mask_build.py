"""The suite mask-build: right masks are timed, and wrong ones are said to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flexvarlen as fv
from flexvarlen.bench.suites.masks import mask_build
from flexvarlen.bench.suites.masks.builders import (
    BUILDERS,
    COMPARED,
    KINDS,
    TREES,
    MaskCase,
    difference,
    expected_tables,
    layout_of,
)
from flexvarlen.bench.suites.masks.mask_build import SUITE
from tests.bench.quick import CPU, ON_A_GPU, QUICK, records_of

CASE = MaskCase("build", 1000, 128)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return records_of(SUITE, tmp_path_factory.mktemp("masks"))


def test_every_builder_and_kind_has_its_record(records):
    found = {(r.case["part"], r.case["variant"]): r.status for r in records}
    parts = {"build": BUILDERS, "kinds": KINDS, "trees": TREES}
    assert set(found) == {(part, x) for part, names in parts.items() for x in names}
    on_gpu = {("build", x) for x in BUILDERS if "ompile" in x}
    assert {key for key, status in found.items() if status == "unsupported"} == on_gpu
    assert set(found.values()) == {"ok", "unsupported"}


def test_speed_up_is_of_the_longest_row_that_both_built(records):
    ok = next(r for r in records if r.case["variant"] == COMPARED)
    theirs = replace(
        ok,
        case=ok.case | {"variant": "create_block_mask compiled"},
        measures={"wall_us_p50": 4 * ok.measures["wall_us_p50"]},
    )
    longer = replace(ok, case=ok.case | {"tokens": 9999})  # theirs has no such row
    assert mask_build.speed_up([ok, theirs, longer]) == (1000, pytest.approx(4))
    assert mask_build.speed_up([ok]) is None


def test_a_mask_of_other_documents_is_wrong_and_not_timed(monkeypatch):
    def of_one_document(case, device):
        layout = fv.PackedLayout.from_lengths([case.tokens], device=device)
        return lambda: fv.document_block_mask(layout)

    monkeypatch.setitem(BUILDERS, "flexvarlen", of_one_document)
    (finding,) = SUITE.measure(CASE, ["flexvarlen"], QUICK)
    assert finding.status == "wrong"
    assert "other blocks" in finding.reason
    assert "wall_us_p50" not in finding.measures


def test_a_million_tokens_are_not_evaluated_pair_by_pair():
    case = MaskCase("build", 2**20, 8192)
    (finding,) = SUITE.measure(case, ["create_block_mask eager"], QUICK)
    assert finding.status == "oom"
    assert "not tried" in finding.reason


def test_trees_are_of_64_and_4096_segments_and_lie_as_documents_too():
    cases = [x for x in SUITE.cases(ON_A_GPU) if x.part == "trees"]
    layouts = [layout_of(case, "trees", CPU) for case in cases]
    assert [len(x.segments.lengths) for x in layouts] == [64, 4096]
    assert [x.total_tokens for x in layouts] == [32_768, 1_048_576]
    assert all(x.num_docs * 16 == len(x.segments.lengths) for x in layouts)
    assert layout_of(cases[0], "documents", CPU).num_docs == 64


@pytest.mark.parametrize("name", ["kv", "full_kv", "q", "full_q"])
def test_a_block_that_differs_is_seen(name):
    layout = fv.PackedLayout.from_lengths(CASE.lengths())
    tables = expected_tables(layout)
    assert difference(tables, tables) is None
    field = f"{name}_num_blocks"
    counts = getattr(tables, field).clone()
    counts[..., 0] += 1
    wrong = f"tables list other blocks: {name}"
    assert difference(tables._replace(**{field: counts}), tables) == wrong
