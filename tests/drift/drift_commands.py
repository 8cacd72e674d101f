"""`flexvarlen drift` in tests: small commands, and what they left."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from flexvarlen.cli import app
from flexvarlen.drift.report import page
from flexvarlen.drift.report.files import DriftReport

CPU = ["--device", "cpu"]
HEADS = ["--heads", "2/1", "--head-dim", "8", *CPU]
OP = ["op", "--lengths", "5,3; 7", *HEADS, "--backends", "reference,sdpa", "--no-compile"]
MODEL = ["model", "--model", "qwen3@1", "--tokens", "48", "--backends", "sdpa,reference", *CPU]
MODEL += ["--comparisons", "packed-alone,backend-backend"]
TRAIN = ["train", "--model", "qwen3@1", "--tokens", "64", "--steps", "4", *CPU]
TRAIN += ["--backends", "reference"]
PACKED = [*TRAIN, "--baseline", "sdpa"]  # where documents alone do not matter: in half the time


@pytest.fixture(autouse=True)
def no_plots(request, monkeypatch):
    """A second a run; test_drift_report.py draws them. A fixture `plots` of a test keeps them."""
    if "plots" not in request.fixturenames:
        monkeypatch.setattr(page, "pictures", lambda rows: [])


@pytest.fixture
def run(tmp_path):
    def run(*args):
        return CliRunner().invoke(app, ["drift", *args, "--out", str(tmp_path / "out")])

    return run


def rows_in(folder):
    return DriftReport.read(folder / "out").rows


def said(result):
    return " ".join(result.output.split())
