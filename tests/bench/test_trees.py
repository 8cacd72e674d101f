"""The suite "trees": both forms hold the same samples, and leaks are seen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import flexvarlen as fv
from flexvarlen.bench.suites.attention.inputs import Expected, serial
from flexvarlen.bench.suites.attention.packed import ours
from flexvarlen.bench.suites.model.tree_cases import STEPS, Tree
from flexvarlen.bench.suites.model.tree_parts import PartsStep, require_known_parts
from flexvarlen.bench.suites.model.tree_runs import (
    TreeInputs,
    TreeSteps,
    both_passes,
    row_of,
    split_variant,
)
from flexvarlen.bench.suites.model.trees import SUITE
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.runner.suite import Finding, UnknownVariant
from tests.bench.quick import CPU, ON_A_GPU, QUICK, records_of

CASES = {case.name: case for case in SUITE.cases(QUICK)}
# Each kind once, both forms of attention; a compiled step takes longer than all others.
DENSE = "^qwen3-tiny-(?!compiled)(attention|.*-24-4x)"
COMPILED = "^qwen3-tiny-compiled-24-4x"
LEVELS = CASES["qwen3-tiny-attention-16-2x8-2x8"]
CHAIN = CASES["qwen3.5-tiny-eager-chain-8-1x6"]
AGENTS = CASES["qwen3-tiny-eager-agents-24-4x15"]
RAGGED = CASES["qwen3.5-tiny-eager-ragged-24-4x8"]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return records_of(SUITE, tmp_path_factory.mktemp("trees"), cases=DENSE)


# --- what is measured ----------------------------------------------------------------------------


def check_right_and_timed(records, cases):
    """Every variant of these cases."""
    chosen = [case for name, case in CASES.items() if re.search(cases, name)]
    assert len(records) == sum(len(SUITE.variants(case, QUICK)) for case in chosen) > 0
    assert {(r.status, r.reason) for r in records} == {("ok", None)}
    for r in records:
        assert r.measures["ms_p50"] > 0
        if r.case["kind"] in STEPS:
            assert 0 < r.measures["error_over_allowed"] <= 1
            assert r.measures["samples_per_s"] > 0
            assert 0 < r.measures["head_ms"] < r.measures["ms_p50"]


def test_every_variant_is_right_and_timed(records):
    check_right_and_timed(records, DENSE)


# What a compiled measure counts: test_bench_compile.py.
@pytest.mark.slow
def test_compiled_steps_are_right_and_timed(tmp_path):
    records = records_of(SUITE, tmp_path, cases=COMPILED)
    check_right_and_timed(records, COMPILED)
    for r in records:
        assert r.measures["graph_breaks"] == r.measures["recompilations"] == 0
        assert r.measures["other_packings"] == 2


def test_times_ideal_is_the_time_over_that_of_the_same_work_at_the_baselines_rate(records):
    own = [r for r in records if r.case["kind"] == "attention"]
    for levels in ([[1, 24], [4, 8]], [[1, 16], [2, 8], [2, 8]]):
        alike = {r.case["variant"]: r.measures for r in own if r.case["levels"] == levels}
        tree, repeated = alike["sdpa"], alike["repeated:sdpa"]
        assert tree["tflop"] < repeated["tflop"]
        ideal = tree["tflop"] * repeated["ms_p50"] / repeated["tflop"]
        assert tree["times_ideal"] == pytest.approx(tree["ms_p50"] / ideal)
        assert repeated["times_ideal"] == 1


# --- the same samples in both forms --------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_paths_are_those_of_the_layout(case):
    tree = case.tree()
    layout = fv.PackedLayout.from_tree(tree.lengths, tree.parents)
    positions, paths = layout.position_ids(), tree.paths()
    assert all(torch.equal(positions[path], torch.arange(len(path))) for path in paths)
    assert len(paths) == case.samples
    assert sum(map(len, case.rows(tree.paths())), 0) == case.samples
    assert all(sum(map(len, row)) <= case.max_row_tokens for row in case.rows(tree.paths()))


def test_other_trees_have_other_answers_in_as_many_tokens_and_equal_rows():
    case = CASES["qwen3-tiny-compiled-16-2x8-2x8"]
    first, other = case.tree(), case.tree(1)
    assert first != other
    assert sum(first.lengths) == sum(other.lengths)
    assert torch.equal(first.counts(), other.counts())
    sizes = {sum(map(len, row)) for tree in (first, other) for row in case.rows(tree.paths())}
    assert len(sizes) == 1


def attention_of(layout_of):
    """What is wrong with attention on another layout of the same row."""
    inputs = TreeInputs.of(LEVELS, CPU)

    class Other(TreeInputs):
        def layout(self):
            return layout_of(self.case.tree())

    prepared = ours("sdpa")(Other(**vars(inputs)), True)
    out = prepared.forward()
    return Expected(inputs).why_wrong(prepared.results(out, prepared.backward(out)))


def test_attention_that_sees_siblings_is_wrong():
    def tree(tree):
        return fv.PackedLayout.from_tree(tree.lengths, tree.parents)

    def siblings(tree):
        parents = [parent if parent < 0 else index - 1 for index, parent in enumerate(tree.parents)]
        return fv.PackedLayout.from_tree(tree.lengths, parents)

    assert attention_of(tree) is None
    assert "more than" in attention_of(siblings)
    assert "more than" in attention_of(lambda tree: fv.PackedLayout.from_lengths(tree.lengths))


def test_repeated_samples_have_the_outputs_and_gradients_of_the_tree():
    inputs = TreeInputs.of(LEVELS, CPU)
    prepared = serial(ours("sdpa"))(inputs, True)
    assert len(prepared.documents) > 1
    out = prepared.forward()
    found = prepared.results(out, prepared.backward(out))
    assert found.dk.shape == inputs.k.shape
    assert Expected(inputs).why_wrong(found) is None


def test_a_step_that_counts_shared_tokens_once_is_wrong():
    steps = TreeSteps(CASES["qwen3-tiny-eager-16-2x8-2x8"], QUICK)
    assert steps.check("auto").wrong is None
    steps.row = replace(steps.row, label_counts=torch.ones_like(steps.row.label_counts))
    assert steps.check("auto").wrong.startswith("the gradient of")


def test_labels_are_of_the_answers_alone():
    steps = TreeSteps(CASES["qwen3-tiny-eager-24-4x8"], QUICK)
    labels, ids = steps.row.labels()[0], steps.row.input_ids[0]
    has_label = labels != IGNORE_INDEX
    assert has_label.nonzero()[:, 0][:8].tolist() == [*range(24, 31), 32]
    assert torch.equal(labels[has_label], ids.roll(-1)[has_label])
    assert steps.loss.counted == 8 * 7


def test_labels_of_agents_are_of_their_turns_alone():
    tree = AGENTS.tree()
    row = row_of(tree, torch.zeros(1, sum(tree.lengths), dtype=torch.long), form="agents")
    has_label = (row.shift_labels[0] != IGNORE_INDEX).split(list(tree.lengths))
    counts = [int(own.sum()) for own in has_label]
    leaves = set(range(len(tree.lengths))) - set(tree.parents)
    assert counts == [x - 1 if i in leaves else 0 for i, x in enumerate(tree.lengths)]


# --- recurrent layers ----------------------------------------------------------------------------


def test_ragged_trees_through_recurrent_layers_are_right():
    assert len(set(RAGGED.tree().lengths)) > 2
    steps = TreeSteps(RAGGED, QUICK)
    assert steps.check("auto").wrong is None
    apart = row_of(RAGGED.tree(), steps.row.input_ids, of_segments=True)
    steps.row = replace(steps.row, trees=apart.trees)
    assert steps.check("auto").wrong.startswith("outputs")


def test_a_chain_is_timed_beside_its_segments_as_documents(tmp_path):
    chain, segments = records = records_of(SUITE, tmp_path, cases="chain")
    assert [r.status for r in records] == ["ok", "ok"]
    assert chain.measures["row_tokens"] == segments.measures["row_tokens"] == CHAIN.tokens
    assert [r.measures["checked_samples"] for r in records] == [4, 8]


@pytest.mark.slow  # tests/patches/forward/test_tree_parts.py checks the gradients
def test_parts_give_the_gradients_of_packed_rows(tmp_path):
    records = records_of(SUITE, tmp_path, cases="qwen3-tiny-parts")
    assert [r.status for r in records] == ["ok"] * 4
    assert all(r.measures["gradient_difference"] < 1e-5 for r in records)
    repeated, whole, *in_parts = (r.measures["tokens_of_forwards"] for r in records)
    assert sum(repeated) == records[0].measures["sample_tokens"]
    assert {sum(tokens) for tokens in (whole, *in_parts)} == {records[0].measures["tree_tokens"]}
    assert len(whole) == 1 < len(in_parts[0]) < len(in_parts[1])


def test_a_wrong_gradient_of_parts_is_not_timed(tmp_path, monkeypatch):
    right = PartsStep.rows

    def twice(self, name):
        return (row for _ in range(1 + ("parts" in name)) for row in right(self, name))

    monkeypatch.setattr(PartsStep, "rows", twice)
    records = records_of(SUITE, tmp_path, "whole", "parts:40", cases="qwen3-tiny-parts")
    assert [r.status for r in records] == ["ok", "wrong"]


def test_unknown_parts_raise():
    for name in ("parts:", "parts:x", "fa3", "checkpointed:40"):
        with pytest.raises(UnknownVariant, match="variants must be among whole, checkpointed"):
            require_known_parts([name])


# --- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SUITE.cases(ON_A_GPU), ids=lambda case: case.name)
def test_rows_of_a_gpu_are_whole_samples_as_many_as_fit(case):
    paths = case.tree().paths()
    rows = case.rows(paths)
    assert [path for row in rows for path in row] == paths
    tokens = [sum(map(len, row)) for row in rows]
    assert max(tokens) <= case.max_row_tokens
    if case.kind in STEPS and case.form not in ("paths", "agents"):
        assert len(set(map(len, rows))) == 1  # so that other trees' rows are as long
    else:
        following = [len(row[0]) for row in rows[1:]]
        assert all(a + b > case.max_row_tokens for a, b in zip(tokens, following, strict=False))
    variants = SUITE.variants(case, ON_A_GPU)
    if case.kind == "parts":
        require_known_parts(variants)
        return
    for variant in variants:
        split_variant(variant)


@pytest.mark.parametrize("case", [c for c in SUITE.cases(ON_A_GPU) if c.kind == "compiled"])
def test_every_other_tree_has_answers(case):
    trees = [case.tree(index) for index in range(1 + case.other_trees)]
    assert len(set(trees)) == len(trees) > 5
    assert all(min(tree.lengths) > 0 and sum(tree.lengths) == case.tokens for tree in trees)


def test_a_tree_of_three_levels_is_depth_first():
    tree = Tree.of(((1, 5), (2, 3), (2, 2)), groups=1)
    assert tree.lengths == (5, 3, 2, 2, 3, 2, 2)
    assert tree.parents == (-1, 0, 1, 1, 0, 4, 4)


def test_a_pass_that_is_refused_is_the_variants_outcome():
    forward = Finding("flex", "ok", None, {"device_ms_p50": 1.0}, "forward")
    backward = Finding("flex", "unsupported", "no backward", {}, "backward")
    found = both_passes(forward, backward, 1.0)
    assert (found.status, found.reason, found.pass_) == ("unsupported", "no backward", "")
