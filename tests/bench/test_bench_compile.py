"""Suites "packings", "compile" and "small-inference" on a tiny model: right before it is timed."""

from __future__ import annotations

import pytest
import torch

from flexvarlen.bench.suites.model import compile_time, packings, small_inference
from flexvarlen.bench.suites.model.compile_time import CompileCase, in_process, measured
from flexvarlen.verify.experiment import experiment
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.variant import Variant
from tests.bench.quick import CPU, QUICK


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def one_document(self, row):
    """Every packing is one document to the model."""
    positions = torch.arange(row.total_tokens)[None]
    return {"position_ids": positions, "use_cache": False}


def row_of(*lengths):
    return PackedBatch(torch.zeros(1, sum(lengths), dtype=torch.int64), lengths)


# --- packings ------------------------------------------------------------------------------------

(PACKINGS,) = packings.SUITE.cases(QUICK)


def test_other_packings_compile_nothing_anew_and_the_last_is_checked():
    found = {f.variant: f for f in packings.SUITE.measure(PACKINGS, ["auto"], QUICK)}
    m = found["auto"].measures
    assert found["auto"].status == "ok"
    assert (m["attends"], m["graphs"], m["graph_breaks"]) == ("sdpa", 1, 0)
    assert (m["other_packings"], m["recompilations"]) == (2, 0)
    assert m["error_last_packing"] > 0
    assert m["ms_p20"] <= m["ms_p50"] <= m["ms_p80"]


def test_a_graph_that_keeps_the_first_documents_is_wrong(monkeypatch):
    """Right on the first packing, so it is timed; the last one shows it."""
    first = row_of(*PACKINGS.packings(1)[0])
    inputs = Variant.inputs
    monkeypatch.setattr(Variant, "inputs", lambda self, row: inputs(self, first))
    (found,) = packings.SUITE.measure(PACKINGS, ["sdpa"], QUICK)
    assert found.status == "wrong"
    assert "ms_p50" in found.measures


def test_no_packing_begins_when_time_is_up(monkeypatch):
    monkeypatch.setattr(experiment, "PACKINGS_S", -1.0)
    (found,) = packings.SUITE.measure(PACKINGS, ["sdpa"], QUICK)
    assert (found.status, found.measures["other_packings"]) == ("ok", 0)
    assert "error_last_packing" not in found.measures


# --- compile -------------------------------------------------------------------------------------


def compile_case(scope):
    return CompileCase("qwen3-tiny", 4, 64, 16, "eager", dtype="float32", scope=scope)


@pytest.mark.parametrize(
    ("scope", "graphs"),
    [("whole", 1), ("layer", 4), pytest.param("decoder", 1, marks=pytest.mark.slow)],
)
def test_a_compilation_is_timed_apart_from_the_steps_after_it(scope, graphs):
    found = measured(compile_case(scope), "sdpa", compile_time.WARM, CPU)
    assert (found["graphs"], found["graph_breaks"], found["graphs_later"]) == (graphs, 0, 0)
    assert found["compile_wall_s"] == found["first_step_s"] - found["step_s"]
    assert found["ms_p50"] > 0
    assert "status" not in found


def test_layers_that_ran_eagerly_are_no_compile_time(monkeypatch):
    """accelerate before 1.15, and patch_model first: each layer keeps its eager forward."""
    monkeypatch.setattr(compile_time, "compiled", lambda variant, *_: (variant, "nothing"))
    found = measured(compile_case("layer"), "sdpa", compile_time.COLD, CPU)
    assert found["status"] == "failed"
    assert "nothing was compiled (nothing)" in found["reason"]


def test_wrong_outputs_are_not_timed(monkeypatch):
    monkeypatch.setattr(Variant, "inputs", one_document)
    found = measured(compile_case("decoder"), "transformers:sdpa", compile_time.WARM, CPU)
    assert found["status"] == "wrong"
    assert "ms_p50" not in found


def test_a_process_answers_and_one_that_fails_says_why(tmp_path):
    found = in_process(compile_case("whole"), "fa2", compile_time.COLD, CPU, tmp_path)
    assert found["status"] == "unsupported"
    assert found["reason"]


def test_a_process_that_dies_says_its_last_line(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_time, "CHILD", "raise SystemExit('no such kernel')")
    found = in_process(compile_case("whole"), "sdpa", compile_time.COLD, CPU, tmp_path)
    assert found == {"status": "failed", "reason": "exit 1: no such kernel"}


# --- small inference -----------------------------------------------------------------------------

EAGER, GRAPHS, COMPILED = small_inference.SUITE.cases(QUICK)


def test_both_packings_are_right_and_cuda_graphs_need_a_gpu():
    found = {f.variant: f for f in small_inference.SUITE.measure(EAGER, ["auto", "sdpa"], QUICK)}
    assert {f.status for f in found.values()} == {"ok"}
    assert found["auto"].measures["attends"] == "sdpa"
    assert found["auto"].measures["error_other_packing"] > 0
    (refused,) = small_inference.SUITE.measure(GRAPHS, ["auto"], QUICK)
    assert refused.status == "unsupported"


def test_a_call_that_keeps_its_first_documents_is_wrong(monkeypatch):
    row, inputs = PackedBatch(torch.zeros(1, 16), EAGER.documents), Variant.inputs
    monkeypatch.setattr(Variant, "inputs", lambda self, _: inputs(self, row))
    (found,) = small_inference.SUITE.measure(EAGER, ["sdpa"], QUICK)
    assert found.status == "wrong"
    assert found.reason.startswith("after other documents came")


@pytest.mark.slow  # as the packings above
def test_compiled_inference_compiles_once_for_both_packings():
    (found,) = small_inference.SUITE.measure(COMPILED, ["auto@position_ids"], QUICK)
    assert found.status == "ok"
    assert (found.measures["graphs"], found.measures["recompilations"]) == (1, 0)
