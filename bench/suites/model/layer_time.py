"""Suite "layer-time": the decoder layer that `auto` estimates, beside transformers' own.

For eager calls `auto` weighs a kernel's host time against its device time by what the layer around
it takes, which it estimates by running one like it (`decoder_layer.py`). Here that estimate stands
beside transformers' own decoder layer, with an attention that does nothing.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim, C = hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, PretrainedConfig

from flexvarlen.attention.auto.decoder_layer import time_layer
from flexvarlen.attention.call import AttentionCall
from flexvarlen.bench.suites.model.geometries import GEOMETRIES, GEOMETRY_TITLES
from flexvarlen.bench.suites.model.tables import cell, table_of, value, where
from flexvarlen.measure import time_host_and_device
from flexvarlen.report.records import Record, by_machine
from flexvarlen.report.table import Column, Notes, Table
from flexvarlen.runner.suite import Case, Finding, Options, Suite

NO_ATTENTION = "flexvarlen_no_attention"
PASSES = ("forward", "forward and backward")
LARGE = ("llama-3.2-1b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "llama-3.1-8b")
BUSY_MS = 30.0  # before each timed layer: no host takes as long for one


@dataclass(frozen=True)
class LayerCase:
    """One decoder layer of a geometry."""

    geometry: str
    tokens: int = 8192
    dtype: str = "bfloat16"
    repeats: int = 30

    @property
    def name(self) -> str:
        return self.geometry

    def data(self) -> dict[str, Any]:
        return asdict(self)


class LayerTime(Suite):
    """One variant, transformers' layer, whose measures hold the estimate too."""

    name: ClassVar[str] = "layer-time"

    def cases(self, options: Options) -> Sequence[LayerCase]:
        if options.quick or not options.on_gpu:
            return [LayerCase("llama-tiny", tokens=8, repeats=3)]
        return [LayerCase(geometry) for geometry in LARGE]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        return ("transformers",)

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, LayerCase)
        return [
            Finding("transformers", "ok", None, measured(case, pass_, options.device), pass_)
            for pass_ in PASSES
        ]

    def section(self, records: Sequence[Record]) -> str:
        return "\n\n".join(_table(own).markdown() for own in by_machine(records))


def measured(case: LayerCase, pass_: str, device: torch.device) -> dict[str, Any]:
    """The layer's own times on host and device, and the estimate of them."""
    config = GEOMETRIES[case.geometry](1)
    needs_grad = pass_ != "forward"
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    kind = AttentionCall(device, torch.bfloat16, *heads, needs_grad=needs_grad)
    with torch.set_grad_enabled(needs_grad):
        call = {"": layer_call(config, case.tokens, device, needs_grad=needs_grad)}
        how = {"device": device, "repeats": case.repeats, "busy_ms": BUSY_MS}
        timed = time_host_and_device(call, **how)[""]  # type: ignore[arg-type]
        call.clear()
        estimate = time_layer(kind, case.tokens)
    measures: dict[str, Any] = {}
    for part, timing in (("host", timed.host), ("device", timed.device)):
        measures[f"{part}_ms_estimated"] = getattr(estimate, f"{part}_ms")
        for at in ("p20", "p50", "p80"):
            measures[f"{part}_ms_{at}"] = getattr(timing, f"ms_{at}")
    return measures


def layer_call(
    config: PretrainedConfig, tokens: int, device: torch.device, *, needs_grad: bool
) -> Callable[[], object]:
    """A call of transformers' decoder layer on `[1, T, C]`, in bfloat16."""
    AttentionInterface.register(NO_ATTENTION, _no_attention)
    config._attn_implementation = NO_ATTENTION
    config.vocab_size = 16  # embeddings are not called
    with torch.device(device):
        model = AutoModel.from_config(config, dtype=torch.bfloat16)
        shape = (1, tokens, config.hidden_size)
        hidden = torch.randn(shape, dtype=torch.bfloat16, requires_grad=needs_grad)
        grad = torch.randn_like(hidden)
        positions = torch.arange(tokens)[None]
    rotation = model.rotary_emb(hidden, positions)
    layer = model.layers[0]
    leaves = [hidden, *layer.parameters()]

    def call() -> None:
        out = layer(hidden, attention_mask=None, position_embeddings=rotation)
        if needs_grad:
            torch.autograd.grad(out, leaves, grad)

    return call


class _NoAttention(torch.autograd.Function):
    """The queries, as attention's output; first and last heads' gradients are K's and V's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.kv_heads = k.shape[1]
        return q.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_q = grad.transpose(1, 2)
        first, last = grad_q[:, : ctx.kv_heads], grad_q[:, -ctx.kv_heads :]
        return grad_q, first.contiguous(), last.contiguous()  # as a kernel leaves them


def _no_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, **_: object
) -> tuple[Tensor, None]:
    """No work, and all projections take part in the backward; q `[1, H, T, D]`, k, v with Hkv."""
    return _NoAttention.apply(query, key, value), None  # type: ignore[no-untyped-call]


# --- the table -----------------------------------------------------------------------------------


def _table(records: Sequence[Record]) -> Table:
    notes = Notes()

    def time(record: Record, part: str) -> str:
        p50, p20, p80 = (value(record, f"{part}_ms_p{x}") or 0.0 for x in (50, 20, 80))
        return cell(record, f"{p50:.2f} ({p20:.2f}–{p80:.2f})", notes)

    def estimate(record: Record, part: str) -> str:
        found = value(record, f"{part}_ms_estimated") or 0.0
        ratio = found / (value(record, f"{part}_ms_p50") or 1.0)
        return cell(record, f"{found:.2f} ({ratio:.2f}×)", notes)

    columns = [
        Column("layer of", lambda r: GEOMETRY_TITLES.get(r.case["geometry"], r.case["geometry"])),
        Column("pass", lambda r: r.case.get("pass", "")),
    ]
    for part in ("host", "device"):
        columns.append(Column(f"{part} ms (p20–p80)", partial(time, part=part)))
        columns.append(Column("estimate (÷ measured)", partial(estimate, part=part)))
    tokens = records[0].case["tokens"]
    title = f"A decoder layer without its attention, eager, {tokens:,} tokens; {where(records)}"
    return table_of(records, columns, title, notes)


SUITE = LayerTime()
