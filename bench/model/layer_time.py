"""`python -m flexvarlen.bench.model.layer_time`: the decoder layer that auto estimates, measured.

For eager calls `auto` weighs a kernel's host time against its device time by what the layer around
takes, which it estimates by running one like it (`decoder_layer.py`). Here that estimate
stands beside transformers' own decoder layer, with an attention that does nothing.

Shape legend: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim, C = hidden.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, PretrainedConfig

from flexvarlen.attention.auto.decoder_layer import Layer, time_layer
from flexvarlen.attention.call import AttentionCall
from flexvarlen.bench.bench_run import BenchRun
from flexvarlen.bench.model.geometries import GEOMETRIES
from flexvarlen.markdown import markdown
from flexvarlen.measure import HostAndDevice, time_host_and_device
from flexvarlen.rows import Row, commit_of, one_line, rows_alike

SUITE = "layer-time"
NO_ATTENTION = "flexvarlen_no_attention"
PASSES = ("forward", "forward and backward")
LARGE = ("llama-3.2-1b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "llama-3.1-8b")
BUSY_MS = 30.0  # before each timed layer: no host takes as long for one


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.model.layer_time", description=summary
    )
    add = parser.add_argument
    add("--geometries", nargs="+", default=list(LARGE), choices=sorted(GEOMETRIES))
    add("--tokens", type=int, default=8192)
    add("--repeats", type=int, default=30)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--commit", help="recorded in place of what git finds here")
    add("--out", type=Path, help="JSON lines to append to")
    return parser.parse_args(argv)


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


class Run(BenchRun):
    """Layers of random weights in bfloat16, one geometry after another."""

    def run(self) -> None:
        AttentionInterface.register(NO_ATTENTION, _no_attention)
        for geometry in self.args.geometries:
            for passes in PASSES:
                self.measure(geometry, passes)

    def measure(self, geometry: str, passes: str) -> None:
        """One row: the layer's own times on host and device, and the estimate of them."""
        case = {
            "geometry": geometry,
            "passes": passes,
            "tokens": self.args.tokens,
            "dtype": "bfloat16",
            "repeats": self.args.repeats,
        }
        try:
            timed, estimate = self.times(GEOMETRIES[geometry](1), passes != "forward")
        except torch.OutOfMemoryError as error:
            self.append(case, "oom", one_line(error), {})
            return
        measures: dict[str, Any] = {}
        for part, timing in (("host", timed.host), ("device", timed.device)):
            measures[f"{part}_ms_estimated"] = getattr(estimate, f"{part}_ms")
            for at in ("p20", "p50", "p80"):
                measures[f"{part}_ms_{at}"] = getattr(timing, f"ms_{at}")
        self.append(case, "ok", None, measures)
        self.say(
            f"{geometry}, {passes}: host {timed.host.ms_p50:.3f} ms, estimated "
            f"{estimate.host_ms:.3f}; device {timed.device.ms_p50:.3f}, {estimate.device_ms:.3f}"
        )

    def times(self, config: PretrainedConfig, needs_grad: bool) -> tuple[HostAndDevice, Layer]:
        """Of transformers' layer, and what auto makes of it."""
        config.vocab_size = 16  # embeddings are not called
        how: dict[str, Any] = {"device": self.device, "repeats": self.args.repeats}
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        kind = AttentionCall(self.device, torch.bfloat16, *heads, needs_grad=needs_grad)
        with torch.set_grad_enabled(needs_grad):
            call = {"": self.layer(config, needs_grad)}
            timed = time_host_and_device(call, busy_ms=BUSY_MS, **how)[""]
            del call
            return timed, time_layer(kind, self.args.tokens)

    def layer(self, config: PretrainedConfig, needs_grad: bool) -> Callable[[], object]:
        """A call of transformers' decoder layer on `[1, T, C]`."""
        config._attn_implementation = NO_ATTENTION
        with torch.device(self.device):
            model = AutoModel.from_config(config, dtype=torch.bfloat16)
            shape = (1, self.args.tokens, config.hidden_size)
            hidden = torch.randn(shape, dtype=torch.bfloat16, requires_grad=needs_grad)
            grad = torch.randn_like(hidden)
            positions = torch.arange(self.args.tokens)[None]
        rotation = model.rotary_emb(hidden, positions)
        layer = model.layers[0]
        leaves = [hidden, *layer.parameters()]

        def call() -> None:
            out = layer(hidden, attention_mask=None, position_embeddings=rotation)
            if needs_grad:
                torch.autograd.grad(out, leaves, grad)

        return call


def layer_time_section(rows: Sequence[Row]) -> str:
    """A table a run: measured, estimated, and how far the one is from the other."""
    runs = rows_alike(rows, ("geometry", "passes"), of_one_run=True)
    return "\n\n".join(map(_table, runs))


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cells = [row.case["geometry"], row.case["passes"]]
        if row.status != "ok":
            lines.append([*cells, row.status, *["–"] * 5])
            continue
        for part in ("host", "device"):
            m = {key: row.measures[f"{part}_ms_{key}"] for key in ("p20", "p50", "p80")}
            estimated = row.measures[f"{part}_ms_estimated"]
            cells += [
                f"{m['p50']:.2f} ({m['p20']:.2f}–{m['p80']:.2f})",
                f"{estimated:.2f}",
                f"{estimated / m['p50']:.2f}×",
            ]
        lines.append(cells)
    where, case = rows[0].environment, rows[0].case
    head = ["geometry", "passes"]
    for part in ("host", "device"):
        head += [f"{part} ms (p20–p80)", "estimated", "estimate / measured"]
    return (
        f"A decoder layer of transformers without its attention, eager, {case['tokens']:,} tokens, "
        f"{case['dtype']}; {where.get('gpu') or where.get('cpu')}, torch {where.get('torch')}"
        f"{commit_of(where)}:\n\n{markdown(head, lines)}"
    )


def main(argv: list[str] | None = None) -> None:
    Run(SUITE, parse(argv)).run()


if __name__ == "__main__":
    main()
