"""Drift on a GPU's kernels: planted bugs are seen on their output, promises hold, models agree.

Each test runs on the CPU's kernels too, so that what it does is known to work. A kernel that is not
installed, or cannot serve the case, is skipped with the reason.
"""

from __future__ import annotations

import math

import pytest
import torch
from typer.testing import CliRunner

import flexvarlen as fv
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.cli import app
from flexvarlen.drift.op.cases import OpCase
from flexvarlen.drift.op.comparisons import operator_drift
from flexvarlen.drift.report.files import DriftReport
from flexvarlen.equivalence.models import build_model
from flexvarlen.mask.document_mask import DocumentMask
from tests.backends import DEVICES
from tests.drift.drift_models import LENGTHS, check_invariant
from tests.drift.drift_ops import change_backward, exact, named

# Grouped heads of a size that every kernel serves; documents off block borders, one of one token.
HEADS = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
CASE = OpCase("causal", (200, 1, 127, 300, 76), causal=True, **HEADS)
KERNELS = ("flex", "varlen", "fa2", "fa3", "fa4")
DTYPE = torch.bfloat16


def kernels(*on_gpu, on_cpu=("sdpa",)):
    """Parametrize: `backend` and its `device`."""
    cpu = [pytest.param(name, "cpu", id=f"{name}-cpu") for name in on_cpu]
    gpu = [pytest.param(n, "cuda", id=f"{n}-cuda", marks=pytest.mark.gpu) for n in on_gpu]
    return pytest.mark.parametrize(("backend", "device"), [*cpu, *gpu])


def need(backend, device, **asked):
    """Skip, with the reason, where the backend cannot serve this."""
    reason = why_not(backend, device, **asked)
    if reason is not None:
        pytest.skip(reason)


def why_not(backend, device, **asked):
    asked = {"device": torch.device(device), "needs_grad": False, **HEADS, **asked}
    return fv.why_not(backend, dtype=DTYPE, causal=True, **asked)


# ---- attention alone ----


@kernels(*KERNELS, on_cpu=("sdpa", "reference"))
def test_right_kernel_is_called_wrong(backend, device):
    need(backend, device)
    comparisons = ["exact", "batch-serial", "run-run", "place"]
    comparisons += ["eager-compiled"] * (device == "cuda")  # the CPU's are compared elsewhere
    options = {"device": device, "dtypes": [DTYPE], "comparisons": comparisons}
    rows = operator_drift([CASE], [backend], **options)
    assert [(row.case["comparison"], row.status, row.reason) for row in rows] == [
        (comparison, "ok", None) for comparison in comparisons
    ]
    by = {row.case["comparison"]: row.measures for row in rows}
    assert 0 < by["exact"]["ratio_out"] <= 1
    assert 0 < by["batch-serial"]["serial_ratio_out"] <= 1
    assert by["run-run"]["out_equal"] == 1  # a forward has no sum in an order of its own


def scaled(attend, q, k, v, sinks, call, mask, plan):
    return attend(q, k, v, sinks, call._replace(scale=2 * call.scale), mask, plan)


def halved(attend, *args):
    out, lse = attend(*args)
    return out / 2, lse


def unwritten(attend, *args):
    out, lse = attend(*args)
    out = out.clone()
    out[201:205] = math.nan
    return out, lse


def one_document(attend, q, k, v, sinks, call, mask, plan):
    whole = fv.PackedLayout.from_lengths([len(q)], device=q.device)
    mask = DocumentMask.of(whole, causal=True)
    return attend(q, k, v, sinks, call, mask, attend.__self__.plan(mask))


def shifted_lse(attend, *args):
    out, lse = attend(*args)
    return out, None if lse is None else lse - math.log(2)


def unscaled_dk(attend, q, k, *args):
    return attend(q, change_backward(k, lambda grad: grad * 8), *args)


BUGS = {
    "scaled": (scaled, ["wrong scale", "twice the right one"]),
    "halved": (halved, ["every output is multiplied by 0.5 (half)"]),
    "unwritten": (unwritten, ["not finite, first at token 0 of document 2"]),
    "one_document": (one_document, ["all documents see each other"]),
    "shifted_lse": (shifted_lse, ["constant: -0.693", "(-ln 2)", "while the output is right"]),
    "unscaled_dk": (unscaled_dk, ["dk wrong", "dq and dv right", "is missing"]),
}


@kernels(*KERNELS, on_cpu=["reference"])
@pytest.mark.parametrize("bug", BUGS)
def test_bug_on_a_real_kernels_output_is_named(monkeypatch, backend, device, bug):
    change, words = BUGS[bug]
    backward = bug == "unscaled_dk"
    need(backend, device, needs_grad=backward)
    if bug == "shifted_lse":  # drift asks for it beside a backward, where there is one
        differentiates = why_not(backend, device, needs_grad=True) is None
        need(backend, device, needs_grad=differentiates, return_lse=True)
    own = get_backend(backend)
    kind, right = type(own), own.attend
    monkeypatch.setattr(kind, "attend", lambda self, *args: change(right, *args))
    named(exact(CASE, backend, DTYPE, train=backward, device=device), *words)


# ---- a model ----


@pytest.mark.parametrize("lengths", [LENGTHS, (128, 256, 128)], ids=["anywhere", "block-borders"])
@kernels("fa2", "fa3", "flex")
def test_invariant_mode_is_bitwise_zero(backend, device, lengths):
    model, _ = build_model("llama@1", device=device, dtype=DTYPE)
    config = model.config
    heads = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }
    need(backend, device, **heads)  # the promises themselves must be kept: no skip for them
    backward = backend != "flex"  # which promises its outputs alone
    check_invariant(model, lengths, DTYPE, backend, backward)


@pytest.mark.parametrize("device", DEVICES)
def test_available_backends_drift_by_rounding_alone(device, tmp_path):
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16}  # of the tiny llama
    names = [name for name in fv.BACKENDS if why_not(name, device, **heads) is None]
    names = [n for n in names if (n, device) != ("flex", "cpu")]  # it compiles for each shape
    assert len(names) > 1
    options = ["--model", "llama", "--tokens", "128", "--dtype", "bfloat16", "--device", device]
    options += ["--backends", ",".join(names), "--no-compile", "--no-attribution"]
    result = CliRunner().invoke(app, ["drift", "model", *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = [row for row in DriftReport.read(tmp_path).rows if row.case["scope"] == "batch"]
    ran = {(row.case["backend"], row.case["comparison"]) for row in rows}
    comparisons = ("packed-alone", "packed-padded", "backend-backend", "dtype")
    assert ran == {(name, comparison) for name in names for comparison in comparisons}
    for row in rows:
        who = (row.case["backend"], row.case["comparison"])
        assert row.status == "ok", (who, row.reason)
        assert row.measures["logits_relative"] < 0.1, who
        if "gradient_cosine" in row.measures:
            assert row.measures["gradient_cosine"] > 0.98, who
