"""What a process of `compile_time.py` does: resolve "auto", compile a model, or time steps."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.bench.model.accuracy import ORACLE_DTYPE, errors_of, packed_answer, per_document
from flexvarlen.bench.model.geometries import log_normal_lengths, new_base_model
from flexvarlen.bench.model.utilisation import peak_tflops, step_tflop, utilisation
from flexvarlen.bench.model.variants import Sizes, Variant, make_variant
from flexvarlen.measure import time_interleaved, watch_compilation

STEPS_AFTER = 3


def by_layer(model: nn.Module, settings: dict[str, Any]) -> tuple[Callable[..., Any], str]:
    """The model compiled layer by layer, what surrounds the layers too; and by what."""
    from accelerate.utils import compile_regions

    return compile_regions(model, **settings), "accelerate.utils.compile_regions"


def decoder_layers(model: nn.Module, settings: dict[str, Any]) -> tuple[Callable[..., Any], str]:
    """The model with its decoder layers alone compiled, and by what."""
    for layer in model.get_submodule("layers").children():
        layer.compile(**settings)
    return model, "Module.compile"


BY_LAYER = {"layer": by_layer, "decoder": decoder_layers}


def nothing_compiled(graphs: int, how: str) -> str | None:
    """The sentence for steps that ran eagerly though they were to be compiled, else None."""
    if graphs > 0:
        return None
    return (
        f"nothing was compiled ({how}), so the steps ran eagerly; accelerate before 1.15 compiles "
        "nothing of a model that was patched first: use a newer one, or compile_regions first."
    )


class Child:
    """A model, its packed row, and one part of the benchmark."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        dtype: torch.dtype = getattr(torch, args.dtype)
        torch.manual_seed(args.seed)
        self.base = new_base_model(args.geometry, args.layers, dtype, self.device).train()
        config = self.base.config
        shape = (1, args.tokens)
        self.ids = torch.randint(config.vocab_size, shape, device=self.device)
        self.cotangent = torch.randn((*shape, config.hidden_size), device=self.device, dtype=dtype)
        self.lengths = log_normal_lengths(args.tokens, args.mean, args.sigma, args.seed)
        self.inputs = self.variant().inputs(self.lengths)

    def variant(self) -> Variant:
        """A model over the shared parameters, with the attention that is asked for."""
        sizes = Sizes.of(self.args.tokens, self.lengths)
        return make_variant(self.args.backend, self.base, sizes)

    def resolve(self) -> dict[str, Any]:
        """The backend that "auto" takes; of several the first layer's."""
        resolved = self.variant().resolved(self.lengths)
        return {} if resolved is None else {"backend": resolved.partition(", ")[0]}

    def compiled(self, scope: str) -> tuple[Callable[..., Any], str]:
        """A variant compiled, and by what."""
        variant = self.variant()
        settings = {"backend": self.args.compiler, "fullgraph": variant.fullgraph}
        if scope in BY_LAYER:
            return BY_LAYER[scope](variant.model, settings)
        return torch.compile(variant.model, **settings), "torch.compile"

    def compile(self) -> dict[str, Any]:
        """Two eager steps, the first compiled one, and the three after it."""
        found: dict[str, Any] = {}
        if "flex" not in self.args.backend:  # eagerly that goes through torch.compile, too
            eager = self.variant().model
            found["eager_start_s"] = self.seconds(eager) - self.seconds(eager)
        call, how = self.compiled(self.args.scope)
        with watch_compilation() as stats:
            first = self.seconds(call)
        with watch_compilation() as after:
            rest = [self.seconds(call) for _ in range(STEPS_AFTER)]
        reason = nothing_compiled(stats.compilations, how)
        if reason is not None:
            found |= {"status": "failed", "reason": reason}
        return found | {
            "compile_wall_s": first - min(rest),
            "first_step_s": first,
            "step_s": min(rest),
            "compile_s": stats.compile_s,
            "graphs": stats.compilations,
            "graph_breaks": stats.graph_breaks,
            "graphs_later": after.compilations,
            "how": how,
        }

    def steady(self) -> dict[str, Any]:
        """Interleaved steps of all ways, once outputs and gradients of all are right."""
        calls: dict[str, Callable[..., Any]] = {}
        found: dict[str, dict[str, Any]] = {}
        steps: dict[str, Callable[[], object]] = {}
        for scope in self.args.scopes:
            calls[scope], how = self.compiled(scope)
            found[scope] = {"how": how}
        row = (self.base, self.ids, self.lengths, self.cotangent)
        oracle = per_document(*row, dtype=ORACLE_DTYPE)
        peer = errors_of(per_document(*row, dtype=self.base.dtype), oracle)
        graphs = 0
        for scope, call in calls.items():
            graphs = graphs if scope == "decoder" else 0
            with watch_compilation() as stats:
                outputs = self.step(call)
            error = errors_of(packed_answer(self.base, outputs), oracle)  # parameters are shared
            found[scope] |= {"error": error.outputs, "grad_error": error.gradients}
            found[scope] |= {"peer_error": peer.outputs, "peer_grad_error": peer.gradients}
            graphs += stats.compilations  # those of the layers serve both ways of compiling them
            reason = nothing_compiled(graphs, found[scope]["how"])
            if reason is not None:
                found[scope] |= {"status": "failed", "reason": reason}
                continue
            reason = error.why_wrong(peer, self.base.dtype)
            if reason is not None:
                found[scope] |= {"status": "wrong", "reason": reason}
                continue
            steps[scope] = partial(self.step, call)
        timings = time_interleaved(
            steps, device=self.device, repeats=self.args.repeats, flush_l2=False, lead_in=1
        )
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        peak = peak_tflops(gpu, self.args.dtype)
        tflop = step_tflop(self.base, self.lengths)
        for scope, timing in timings.items():
            found[scope] |= dataclasses.asdict(timing)
            found[scope]["mfu"] = utilisation(tflop, timing.ms_p50, peak)
        return found

    def step(self, call: Callable[..., Any]) -> Tensor:
        """Gradients dropped, forward, backward."""
        self.base.zero_grad(set_to_none=True)
        outputs: Tensor = call(input_ids=self.ids, **self.inputs).last_hidden_state
        outputs.backward(self.cotangent)
        return outputs

    def seconds(self, call: Callable[..., Any]) -> float:
        self.synchronize()
        begin = time.perf_counter()
        self.step(call)
        self.synchronize()
        return time.perf_counter() - begin

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
