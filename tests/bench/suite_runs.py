"""Suites of attention run small on the CPU, and rows as a GPU would have written them."""

from __future__ import annotations

import dataclasses

import torch

from flexvarlen.bench.runner import Run, run_suite
from flexvarlen.bench.suite import Finding, Options
from flexvarlen.rows import Row, read_rows

CPU = torch.device("cpu")
H200 = {
    "gpu": "NVIDIA H200",
    "device": "cuda",
    "torch": "2.11.0",
    "started_utc": "2026-11-22T00:00:00Z",
}


def ran(suite, folder, *, variants=None, cases=None):
    """The rows of a quick run."""
    out = folder / "rows.jsonl"
    options = Options(CPU, quick=True, variants=variants, seconds=0.02, say=lambda line: None)
    run_suite(suite, options, Run(out, cases=cases))
    return read_rows([out])


def row_of(rows, variant, pass_="forward", **case):
    """The one row of that variant, pass and case."""
    (found,) = (
        row
        for row in rows
        if (row.case["variant"], row.case.get("pass", "")) == (variant, pass_)
        and case.items() <= row.case.items()
    )
    return found


def on_h200(suite, case, ms, *, measures=None, **statuses):
    """Rows of a case: device ms by variant and pass ("fa2 forward"), or a status and a reason."""
    rows = []
    for key, value in {**ms, **statuses}.items():
        variant, _, pass_ = key.rpartition(" ")
        if isinstance(value, tuple):
            finding = Finding(variant, *value, pass_=pass_)
        else:
            timed = {f"device_ms_{at}": value for at in ("p20", "p50", "p80")}
            more = (measures or {}).get(key, {})
            finding = Finding(variant, "ok", None, timed | {"tflops": 1.0} | more, pass_)
        data = case.data() | {"variant": variant, "pass": pass_}
        row = Row(suite.name, data, finding.status, finding.reason, dict(finding.measures), H200)
        rows.append(row)
    return rows


def wrong(prepare):
    """A way whose outputs are half as large again as they should be."""

    def prepared(inputs, needs_grad):
        right = prepare(inputs, needs_grad)
        return dataclasses.replace(right, forward=lambda: right.forward() * 1.5)

    return prepared


def too_large(inputs, needs_grad):
    """A way that does not fit in memory."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 137.44 GB")


def sizes_of(path):
    """Width and height of a PNG, in pixels."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])
