"""The parts "share", "attention" and "long": what a mask costs and does inside a model's attention.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flexvarlen as fv
from flexvarlen.bench.mask_build.accuracy import (
    Answer,
    disagreement,
    sampled_errors,
    why_apart,
    why_wrong,
)
from flexvarlen.bench.mask_build.builders import prepare_kind, theirs
from flexvarlen.bench.mask_build.run import PackedRow, Run, Wrong
from flexvarlen.bench.model.geometries import GEOMETRIES, new_base_model
from flexvarlen.equivalence.variants import Unsupported
from flexvarlen.measure import (
    Timing,
    summarize,
    time_host_and_device,
    time_interleaved,
    watch_compilation,
)

OURS, THEIRS = "flexvarlen", "create_block_mask"


@dataclass(frozen=True)
class Heads:
    """The shape of the attention measured."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def random_inputs(run: Run, tokens: int, heads: Heads) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the output's gradient, `[T, heads, D]`; on a GPU q, k, v require gradients."""
    generator = torch.Generator(run.device).manual_seed(0)

    def normal(count: int) -> Tensor:
        shape = (tokens, count, heads.head_dim)
        return torch.randn(shape, dtype=run.dtype, device=run.device, generator=generator)

    counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    # FlexAttention has no backward on the CPU, where `long_step` takes none either.
    qkv = [normal(count).requires_grad_(run.on_gpu) for count in counts]
    return qkv, normal(heads.num_heads)


def named(prefix: str, timing: Timing) -> dict[str, Any]:
    """A timing as measures: `<prefix>ms_p50` and its kin."""
    return {prefix + key: value for key, value in dataclasses.asdict(timing).items()}


# --- share ---------------------------------------------------------------------------------------


def share(run: Run, row: PackedRow, names: Sequence[str], geometry: str) -> None:
    """A build beside one layer's forward: a model of two layers less one of one layer."""
    for name in names:
        measures = run.attempt(name, partial(_share, run, row, geometry))
        if measures is not None:
            run.write(name, "ok", None, measures)
    run.clean()


def _share(run: Run, row: PackedRow, geometry: str) -> dict[str, Any]:
    live = prepare_kind(OURS, row, {})
    times = run.time_builds({OURS: live.build})[OURS]
    measures = live.measures | times | run.gpu_work(live.build) | layer_ms(run, row, geometry)
    for name, us in (("build", "wall_us_p50"), ("gpu", "gpu_us")):
        if measures[us] is not None and measures["layer_ms_p50"] > 0:
            measures[f"{name}_share_percent"] = measures[us] / (10 * measures["layer_ms_p50"])
    return measures


def layer_ms(run: Run, row: PackedRow, geometry: str) -> dict[str, Any]:
    """`layer_ms_p50`: forward without gradients, in the run's dtype."""
    models = {f"model_{layers}_": one_model(run, geometry, layers) for layers in (1, 2)}
    vocabulary = GEOMETRIES[geometry](1).vocab_size
    ids = torch.randint(vocabulary, (1, row.tokens), device=run.device)

    def step(model: Callable[..., Any]) -> None:
        with torch.no_grad():
            model(input_ids=ids, packed_layout=row.layout, use_cache=False)

    calls = {name: partial(step, model) for name, model in models.items()}
    for call in calls.values():
        call()  # compiles
    repeats = 3 if run.quick else 20
    timings = time_interleaved(calls, device=run.device, repeats=repeats, flush_l2=False, lead_in=1)
    one, two = timings.values()
    found = {"layer_ms_p50": two.ms_p50 - one.ms_p50}
    for name, timing in timings.items():
        found |= named(name, timing)
    return found


def one_model(run: Run, geometry: str, layers: int) -> Callable[..., Any]:
    """The base model with random weights, patched with `flex`; compiled, but in a quick run."""
    model = new_base_model(geometry, layers, run.dtype, run.device)
    model.eval().requires_grad_(False)
    fv.patch_model(model, backend="flex")
    return model if run.quick else torch.compile(model, fullgraph=True)


# --- attention under either mask -----------------------------------------------------------------


@dataclass
class Live:
    """flex_attention under one mask, right, on its way to the clock."""

    variant: str
    forward: Callable[[], Tensor]
    backward: Callable[[], object] | None
    measures: dict[str, Any] = field(default_factory=dict)


class Attention:
    """The part "attention": flex_attention under our mask and under create_block_mask's.

    Args:
        kernel: FlexAttention's BACKEND; on the CPU "C++", or "dense" for none: its plain torch.
    """

    def __init__(self, run: Run, row: PackedRow, heads: Heads, kernel: str) -> None:
        self.run, self.row, self.heads, self.kernel = run, row, heads, kernel
        self.qkv, self.cotangent = random_inputs(run, row.tokens, heads)

    def measure(self, names: Sequence[str]) -> None:
        masks = {OURS: lambda: fv.document_block_mask(self.row.layout), THEIRS: self.their_mask()}
        first: dict[str, Answer] = {}
        found = [
            self.run.attempt(name, partial(self.prepare, name, masks[name], first))
            for name in names
        ]
        first.clear()
        self.finish([live for live in found if live is not None])
        self.run.clean()

    def their_mask(self) -> Callable[[], BlockMask]:
        # The eager one needs T² memory.
        compiled = torch.compile(create_block_mask, dynamic=False)
        return theirs(self.row, compiled if self.run.on_gpu else create_block_mask)

    def prepare(self, name: str, build: Callable[[], BlockMask], first: dict[str, Answer]) -> Live:
        """Compile, and judge the first answer on sampled documents and by that under our mask."""
        refusal = self.why_not()
        if refusal is not None:
            raise Unsupported(refusal)
        compiler = "eager" if self.kernel == "dense" else "inductor"
        call = own_flex_attention(f"{name}_{self.kernel}_{self.row.tokens}", compiler)
        options = {"BACKEND": self.kernel} if self.run.on_gpu else None
        mask = build()
        q, k, v = (x.transpose(0, 1)[None].contiguous().detach() for x in self.qkv)
        leaves = [x.requires_grad_(self.run.on_gpu) for x in (q, k, v)]
        cotangent = self.cotangent.transpose(0, 1)[None].contiguous()
        grouped = self.heads.num_heads != self.heads.num_kv_heads

        def forward() -> Tensor:
            return call(*leaves, block_mask=mask, enable_gqa=grouped, kernel_options=options)

        with watch_compilation() as stats:
            out = forward()
            backward = None
            if self.run.on_gpu:
                backward = partial(torch.autograd.grad, out, leaves, cotangent, retain_graph=True)
            gradients = () if backward is None else backward()
            self.run.synchronize()
        answer = Answer([x.detach()[0].transpose(0, 1) for x in (out, *gradients)])
        measures = self.row.measures() | {"compile_s": stats.compile_s}
        measures |= sampled_errors(answer, self.qkv, self.cotangent, self.row.lengths)
        reason = why_wrong(measures, self.run.dtype)
        if reason is not None:
            raise Wrong(reason, measures)
        if name == OURS:
            first[OURS] = answer
        elif OURS in first:
            measures |= disagreement(answer, first[OURS])
            reason = why_apart(measures, self.run.dtype)
            if reason is not None:
                raise Wrong(reason, measures)
        return Live(name, forward, backward, measures)

    def why_not(self) -> str | None:
        if self.kernel == "FLASH":
            if not self.run.on_gpu:
                return "BACKEND='FLASH' needs CUDA"
            try:
                found = importlib.util.find_spec("flash_attn.cute")
            except ModuleNotFoundError:
                found = None
            return None if found else "BACKEND='FLASH' needs flash_attn.cute, not installed"
        return None

    def finish(self, lives: Sequence[Live]) -> None:
        if not lives:
            return
        calls: dict[str, Callable[[], object]] = {}
        owner: dict[str, str] = {}
        for live in lives:
            for pass_, call in (("forward", live.forward), ("backward", live.backward)):
                if call is not None:
                    calls[f"{live.variant} {pass_}"] = call
                    owner[f"{live.variant} {pass_}"] = live.variant
        running = [lives[0].variant]  # the last is on the device, and no other

        def progress(name: str) -> None:
            running.append(owner[name])

        repeats, device = 3 if self.run.quick else 40, self.run.device
        try:
            timings = time_host_and_device(calls, device=device, repeats=repeats, progress=progress)
        except Exception as error:  # as in `Run.attempt`
            self.run.failed({live.variant: live.measures for live in lives}, error, running[-1])
            return
        for live in lives:
            for pass_ in ("forward", "backward"):
                timed = timings.get(f"{live.variant} {pass_}")
                if timed is not None:
                    live.measures |= named(f"{pass_}_", timed.device)
            self.run.write(live.variant, "ok", None, live.measures)


def own_flex_attention(name: str, compiler: str) -> Callable[..., Tensor]:
    """flex_attention compiled by itself: Dynamo keeps its code by a function's code and name."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return flex_attention(q, k, v, **options)

    own = types.FunctionType(attend.__code__.replace(co_name=f"flex_{name}"), globals())
    return torch.compile(own, backend=compiler, dynamic=False, fullgraph=True)


# --- long rows -----------------------------------------------------------------------------------


def long_row(run: Run, row: PackedRow, names: Sequence[str], heads: Heads) -> None:
    """`packed_attention` at a length past the int32 offsets of FlexAttention's templates."""
    for name in names:
        measures = run.attempt(name, partial(long_measures, run, row, heads, name))
        if measures is not None:
            run.write(name, "ok", None, measures)
    run.clean()


def long_measures(run: Run, row: PackedRow, heads: Heads, backend: str) -> dict[str, Any]:
    """Errors on sampled documents, then times of whole steps; raises `Wrong`."""
    qkv, cotangent = random_inputs(run, row.tokens, heads)
    with watch_compilation() as stats:
        answer, _ = long_step(run, row, qkv, cotangent, backend)
    measures = row.measures() | {"compile_s": stats.compile_s}
    measures |= sampled_errors(answer, qkv, cotangent, row.lengths)
    reason = why_wrong(measures, run.dtype)
    if reason is not None:
        raise Wrong(reason, measures)
    del answer
    if not run.on_gpu:
        return measures
    torch.cuda.reset_peak_memory_stats(run.device)
    steps = [long_step(run, row, qkv, cotangent, backend)[1] for _ in range(3)]
    measures["peak_mib"] = torch.cuda.max_memory_allocated(run.device) / 2**20
    for name, samples in zip(("forward_", "backward_"), zip(*steps, strict=True), strict=True):
        measures |= named(name, summarize(samples))
    return measures


def long_step(
    run: Run, row: PackedRow, qkv: list[Tensor], cotangent: Tensor, backend: str
) -> tuple[Answer, tuple[float, ...]]:
    """The answer of a step, mask included, and the ms of its forward and backward."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if run.on_gpu else []
    run.synchronize()
    if marks:
        marks[0].record()
    q, k, v = qkv
    out = fv.packed_attention(q, k, v, row.layout, backend=backend)
    assert isinstance(out, Tensor)
    if not marks:
        return Answer([out]), ()
    marks[1].record()
    gradients = torch.autograd.grad(out, qkv, cotangent)
    marks[2].record()
    run.synchronize()
    times = tuple(a.elapsed_time(b) for a, b in pairwise(marks))
    return Answer([out.detach(), *gradients]), times
