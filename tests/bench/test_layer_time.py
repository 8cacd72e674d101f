"""The suite "layer-time": transformers' layer is run whole, beside the estimate of it."""

from __future__ import annotations

import torch

from flexvarlen.attention.auto.decoder_layer import Layer
from flexvarlen.bench.suites.model import layer_time
from flexvarlen.bench.suites.model.geometries import GEOMETRIES
from flexvarlen.measure import HostAndDevice, Timing
from flexvarlen.report.records import read_records
from flexvarlen.runner.run import RunRequest, run_suite
from flexvarlen.runner.suite import Options

CPU = torch.device("cpu")
QUICK = Options(CPU, quick=True, say=lambda line: None)


def test_a_record_a_pass_and_its_table(monkeypatch, tmp_path):
    timed = HostAndDevice(Timing(1.0, 2.0, 3.0, 9), Timing(7.0, 8.0, 9.0, 9))
    monkeypatch.setattr(layer_time, "time_host_and_device", lambda *_, **__: {"": timed})
    monkeypatch.setattr(layer_time, "time_layer", lambda *_: Layer(3.0, 4.0))
    path = tmp_path / "records.jsonl"
    run_suite(layer_time.SUITE, QUICK, RunRequest(path))
    records = read_records([path])
    assert [record.case["pass"] for record in records] == list(layer_time.PASSES)
    cells = "2.00 (1.00–3.00) | 3.00 (1.50×) | 8.00 (7.00–9.00) | 4.00 (0.50×) |"
    assert f"| llama-tiny | forward | {cells}" in layer_time.SUITE.section(records)


def test_the_backward_goes_through_all_projections(monkeypatch):
    """A parameter without a gradient would be an error of autograd.grad."""
    gradients = []
    grad = torch.autograd.grad

    def recorded(*args):
        gradients.append(grad(*args))
        return gradients[-1]

    monkeypatch.setattr(torch.autograd, "grad", recorded)
    layer_time.layer_call(GEOMETRIES["qwen3-tiny"](1), 8, CPU, needs_grad=True)()
    (found,) = gradients
    assert len(found) == 1 + 11  # hidden; seven projections, two norms, two of queries and keys
    assert all(g.abs().sum() > 0 for g in found)


def test_out_of_memory_is_a_record(monkeypatch, tmp_path):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layer_time, "time_layer", full)
    path = tmp_path / "records.jsonl"
    run_suite(layer_time.SUITE, QUICK, RunRequest(path))
    records = read_records([path])
    assert {record.status for record in records} == {"oom"}
    assert "oom (1)" in layer_time.SUITE.section(records)
