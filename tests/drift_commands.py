"""`flexvarlen drift` in tests: small commands, and what they left."""

from __future__ import annotations

from flexvarlen.drift.report.files import DriftReport

CPU = ["--device", "cpu"]
HEADS = ["--heads", "2/1", "--head-dim", "8", *CPU]
OP = ["op", "--lengths", "5,3; 7", *HEADS, "--backends", "reference,sdpa", "--no-compile"]
MODEL = ["model", "--model", "qwen3@1", "--tokens", "48", "--backends", "sdpa,reference", *CPU]
MODEL += ["--comparisons", "packed-alone,backend-backend"]
TRAIN = ["train", "--model", "qwen3@1", "--tokens", "64", "--steps", "4", *CPU]
TRAIN += ["--backends", "reference"]
PACKED = [*TRAIN, "--baseline", "sdpa"]  # where documents alone do not matter: in half the time


def rows_in(folder):
    return DriftReport.read(folder / "out").rows


def said(result):
    return " ".join(result.output.split())
