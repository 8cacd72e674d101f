"""Rows of drift made by hand: of every suite, as a run would write them."""

from __future__ import annotations

import math

from flexvarlen.drift.difference import Difference
from flexvarlen.drift.training.verdict import verdict_row
from flexvarlen.rows import Row

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0+cu130",
    "transformers": "5.17.0",
    "flash_attn": "2.8.3",
    "flexvarlen": "0.1.0",
    "git_commit": "0123456789abcdef",
    "git_dirty": False,
}


def difference(prefix, relative):
    equal = 1.0 if relative == 0 else 0.5
    size = math.nan if relative != relative else relative
    return Difference(size, size / 10, relative, 3 * size, size, equal, 100).measures(prefix)


def op_row(backend, comparison, *, status="ok", reason=None, name="64,64", ratio=None, **parts):
    case = {"name": name, "lengths": [64, 64], "num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
    case |= {"causal": False, "window": None, "dtype": "bfloat16"}
    case |= {"backend": backend, "comparison": comparison, "other": None}
    measures = {}
    for part, relative in parts.items():
        measures |= difference(part, relative)
        if ratio is not None:
            measures |= difference(f"peer_{part}", 0.5) | {f"ratio_{part}": ratio}
    if comparison == "batch-serial":
        measures |= {f"serial_ratio_{part}": 0.25 for part in parts}
    if comparison == "exact":
        measures["blame"] = reason
    if comparison == "runtime":
        measures |= {"ms_p20": 1.0, "ms_p50": 2.0, "ms_p80": 3.0, "serial_ms_p50": 4.0}
    return Row("drift-op", case, status, reason, measures, ENVIRONMENT)


def model_case(comparison, backend, scope, index=None):
    case = {"model": "llama 1b", "comparison": comparison, "backend": backend, "other": None}
    case |= {"dtype": "bfloat16", "other_dtype": None, "tokens": 64, "documents": 2, "seed": 0}
    return case | {"scope": scope, "index": index}


def model_rows(backend, relative, *, first=0, comparison="packed-alone"):
    layers = [0.0] * (first + 1) + [relative] * (3 - first)
    measures = difference("logits", relative) | {
        "logprob_mean_abs": relative,
        "logprob_max_abs": relative,
        "logprob_p50": relative,
        "logprob_p99": relative,
        "logprob_histogram": {
            "edges": [-1.0, -1e-4, 1e-4, 1.0],
            "counts": [0 if relative == 0 else 3, 0, 0 if relative == 0 else 5],
            "zeros": 8,
            "nans": 0,
        },
        "kl_mean": relative,
        "kl_max": relative,
        "top1": 1.0 if relative == 0 else 0.97,
        "top5": 1.0,
        "loss": 7.0,
        "other_loss": 7.0,
        "loss_difference": -relative,
        "gradient_cosine": 1.0,
        "gradient_relative": relative,
        "worst_parameter": None,
        "worst_parameter_relative": relative,
        "first_layer": None if relative == 0 else first,
        "first_part": None if relative == 0 else f"block {first}",
        "worst_tokens": [],
    }
    rows = [
        Row(
            "drift-model",
            model_case(comparison, backend, "batch"),
            "ok",
            None,
            measures,
            ENVIRONMENT,
        )
    ]
    for index, one in enumerate(layers):
        case = model_case(comparison, backend, "layer", index - 1)
        rows.append(Row("drift-model", case, "ok", None, difference("hidden", one), ENVIRONMENT))
    document = difference("logits", relative) | {"kl_mean": 0.0, "kl_max": 0.0, "top1": 1.0}
    case = model_case(comparison, backend, "document", 0)
    return [*rows, Row("drift-model", case, "ok", None, document | {"length": 32}, ENVIRONMENT)]


def share_row(what, share, **more):
    case = {"model": "llama 1b", "backend": "fa3", "dtype": "bfloat16", "tokens": 64}
    case |= {"documents": 2, "seed": 0, "what": what}
    measures = difference("logits", share) | difference("hidden", share)
    measures |= {"gradient_relative": share, "share": share, "ms_p50": 12.0, "cost": 1.5}
    return Row("drift-attribution", case, "ok", None, measures | more, ENVIRONMENT)


def training_rows(loss=1.0):
    rows = []
    runs = [("unpacked", 0, 1.0), ("unpacked", 1, 1.1), ("unpacked", 2, 1.2)]
    for variant, seed, last in [*runs, ("rounding", 0, 1.0), ("fa2", 0, loss)]:
        case = {"model": "llama 1b", "variant": variant, "seed": seed, "steps": 8, "tokens": 64}
        measures = {"baseline": "unpacked", "losses": [2.0] * 6 + [last] * 2}
        if variant != "unpacked":
            measures |= {"angles": [0.1, 0.2], "angle_steps": [0, 4]}
        rows.append(
            Row("drift-training", case | {"dtype": "bfloat16"}, "ok", None, measures, ENVIRONMENT)
        )
    return [*rows, verdict_row(rows)]


def every_row():
    forward, backward = {"out": 0.0, "lse": 0.0}, {"dq": 0.0, "dk": 0.0, "dv": 0.0}
    wrong = "out wrong: no <b>scale</b> in /usr/lib/python3/kernel.so | of 24/24 heads"
    return [
        op_row("fa3", "exact", ratio=0.5, out=1e-3, lse=1e-4, dq=2e-3, dk=2e-3, dv=1e-3),
        op_row("fa3", "batch-serial", **forward, **backward),
        op_row("fa3", "runtime"),
        op_row("fa2", "exact", ratio=0.8, out=1e-3, dq=2e-3, dk=2e-3, dv=1e-3),
        op_row("fa2", "batch-serial", **forward, dq=2e-4, dk=0.0, dv=0.0),
        op_row("flex", "exact", status="wrong", reason=wrong, ratio=7.0, out=0.7),
        op_row("flex", "batch-serial", out=1e-3),
        op_row("fa4", "exact", status="unsupported", reason="fa4 is not installed; install it."),
        *model_rows("fa3", 0.0),
        *model_rows("fa2", 2e-3, first=1),
        *model_rows("transformers:sdpa", 0.9),
        share_row("all", 1.0),
        share_row("attention", 0.7),
        share_row("matmuls", 0.4),
        share_row("norms", 0.0),
        invariant_row(),
        *training_rows(),
    ]


def invariant_row():
    row = share_row("invariant", 0.0)
    equal = {"equal_logits": 1.0, "equal_hidden": 1.0, "equal_gradients": 1.0}
    measures = row.measures | equal | {"gradient_documents": [0], "share": None}
    return Row(row.suite, row.case, "ok", None, measures, ENVIRONMENT)
