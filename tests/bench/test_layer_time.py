"""flexvarlen.bench.model.layer_time: a whole layer's time beside the estimate of it."""

from __future__ import annotations

import pytest
import torch

from flexvarlen.attention.auto.decoder_layer import Layer
from flexvarlen.bench.model import layer_time
from flexvarlen.bench.model.geometries import GEOMETRIES
from flexvarlen.measure import HostAndDevice, Timing
from flexvarlen.rows import read_rows


def a_run(*more):
    arguments = ["--geometries", "llama-tiny", "--tokens", "8", "--device", "cpu", *more]
    return layer_time.Run(layer_time.SUITE, layer_time.parse(arguments))


def test_a_row_a_pass_and_its_table(monkeypatch, tmp_path):
    timed = HostAndDevice(Timing(1.0, 2.0, 3.0, 9), Timing(7.0, 8.0, 9.0, 9))
    monkeypatch.setattr(layer_time, "time_host_and_device", lambda *_, **__: {"": timed})
    monkeypatch.setattr(layer_time, "time_layer", lambda *_: Layer(3.0, 4.0))
    path = tmp_path / "rows.jsonl"
    a_run("--out", str(path)).run()
    rows = read_rows([path])
    assert [row.case["passes"] for row in rows] == list(layer_time.PASSES)
    assert rows[0].measures["host_ms_p50"] == 2.0
    cells = "2.00 (1.00–3.00) | 3.00 | 1.50× | 8.00 (7.00–9.00) | 4.00 | 0.50× |"
    assert f"| llama-tiny | forward | {cells}" in layer_time.layer_time_section(rows)


def test_the_backward_goes_through_all_projections(monkeypatch):
    """A parameter without a gradient would be an error of autograd.grad."""
    gradients = []
    grad = torch.autograd.grad

    def recorded(*args):
        gradients.append(grad(*args))
        return gradients[-1]

    monkeypatch.setattr(torch.autograd, "grad", recorded)
    layer_time.AttentionInterface.register(layer_time.NO_ATTENTION, layer_time._no_attention)
    config = GEOMETRIES["qwen3-tiny"](1)
    a_run().layer(config, needs_grad=True)()
    (found,) = gradients
    assert len(found) == 1 + 11  # hidden; seven projections, two norms, two of queries and keys
    assert all(g.abs().sum() > 0 for g in found)


def test_out_of_memory_is_a_row(monkeypatch, tmp_path):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layer_time, "time_layer", full)
    path = tmp_path / "rows.jsonl"
    a_run("--out", str(path)).run()
    rows = read_rows([path])
    assert [row.status for row in rows] == ["oom", "oom"]
    assert "| llama-tiny | forward | oom | – |" in layer_time.layer_time_section(rows)


def test_an_unknown_geometry_is_refused(capsys):
    with pytest.raises(SystemExit):
        layer_time.parse(["--geometries", "llama-tiny", "gpt-9"])
    assert "gpt-9" in capsys.readouterr().err
