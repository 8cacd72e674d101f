"""The parts "build" and "growth": what builds a document BlockMask, checked and then timed.

Shapes: T = tokens of the row; NQ = ceil(T / 128).
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexvarlen as fv
from flexvarlen.bench.mask_build.check import counts_of, difference, expected_tables
from flexvarlen.bench.mask_build.run import (
    Build,
    PackedRow,
    Run,
    TooLarge,
    TooSlow,
    Wrong,
    bound_of,
)
from flexvarlen.equivalence.variants import Unsupported
from flexvarlen.mask.table_shapes import DEFAULT_BLOCK_SIZE, Tables
from flexvarlen.measure import watch_compilation

# Eager create_block_mask evaluates T² pairs: 640 MiB at 8,192 tokens on an H200, torch 2.11.
EAGER_BYTES_A_PAIR = 10
MOST_BUILDER_S = 60.0  # one that would take longer at a size, over all its calls, is not timed
CALLS_OF_A_SLOW_BUILDER = 10


# --- builders ------------------------------------------------------------------------------------


MaskBuild = Callable[[], BlockMask]


def ours(run: Run, row: PackedRow) -> MaskBuild:
    """From a layout in hand."""
    return lambda: fv.document_block_mask(row.layout)


def ours_from_cu_seqlens(run: Run, row: PackedRow) -> MaskBuild:
    """From boundaries on the device, which are never read back."""
    bound = bound_of(row.lengths, row.tokens)

    def build() -> BlockMask:
        layout = fv.PackedLayout.from_cu_seqlens(
            row.cu_seqlens, total_tokens=row.tokens, max_seqlen_bound=bound, checks="device"
        )
        return fv.document_block_mask(layout)

    return build


def theirs(
    row: PackedRow, create: Callable[..., BlockMask], mask_mod: Callable[..., Any] | None = None
) -> MaskBuild:
    """torch's create_block_mask of causal documents, from boundaries on the device."""

    def build() -> BlockMask:
        mod = document_mask_mod(row.cu_seqlens, row.tokens) if mask_mod is None else mask_mod()
        device = row.cu_seqlens.device
        tokens, size = row.tokens, DEFAULT_BLOCK_SIZE
        return create(mod, None, None, tokens, tokens, device=device, BLOCK_SIZE=size)

    return build


def document_mask_mod(cu_seqlens: Tensor, tokens: int) -> Callable[..., Tensor]:
    """Causal documents as create_block_mask's users write them."""
    places = torch.arange(tokens, device=cu_seqlens.device, dtype=torch.int32)
    document = torch.searchsorted(cu_seqlens[1:], places, right=True, out_int32=True)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (document[q] == document[kv]) & (q >= kv)

    return mask_mod


def create_eagerly(run: Run, row: PackedRow) -> MaskBuild:
    _check_memory(run, row)
    return theirs(row, create_block_mask)


def create_compiled(run: Run, row: PackedRow) -> MaskBuild:
    if not run.on_gpu:
        raise Unsupported("compiled create_block_mask is measured on CUDA only")
    return theirs(row, torch.compile(create_block_mask, dynamic=False))


def create_as_transformers_does(run: Run, row: PackedRow) -> MaskBuild:
    """The flag that transformers sets wherever torch still has it: compiled anew each call."""
    if not run.on_gpu:
        raise Unsupported("compiled create_block_mask is measured on CUDA only")
    if "_compile" not in inspect.signature(create_block_mask).parameters:
        raise Unsupported("this torch's create_block_mask has no _compile")
    return theirs(row, partial(create_block_mask, _compile=True))


def attention_gym(run: Run, row: PackedRow) -> MaskBuild:
    """attention-gym's document mask_mod under create_block_mask, compiled on CUDA."""
    try:
        causal = importlib.import_module("attn_gym.masks").causal_mask
        documents = importlib.import_module("attn_gym.masks.document_mask").generate_doc_mask_mod
    except ImportError as error:
        raise Unsupported(f"attention-gym is not installed ({error})") from error
    create = torch.compile(create_block_mask, dynamic=False) if run.on_gpu else create_block_mask
    if not run.on_gpu:
        _check_memory(run, row)
    return theirs(row, create, lambda: documents(causal, row.cu_seqlens))


def _check_memory(run: Run, row: PackedRow) -> None:
    needed = row.tokens**2 * EAGER_BYTES_A_PAIR
    if run.on_gpu:
        there = torch.cuda.get_device_properties(run.device).total_memory
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise TooLarge(
            f"evaluating T² pairs would take about {needed / 2**30:,.0f} GiB of the device's "
            f"{there / 2**30:,.0f} GiB; not tried"
        )


BUILDERS: dict[str, Callable[[Run, PackedRow], MaskBuild]] = {
    "flexvarlen": ours,
    "flexvarlen from cu_seqlens": ours_from_cu_seqlens,
    "create_block_mask eager": create_eagerly,
    "create_block_mask compiled": create_compiled,
    "create_block_mask(_compile=True)": create_as_transformers_does,
    "attention-gym": attention_gym,
}
COMPILED = ("create_block_mask compiled", "create_block_mask(_compile=True)", "attention-gym")


KINDS = (
    "bidirectional",
    "window=1024",
    "two-sided window=1024",
    "chunk=8192",
    "prefix=64",
    "cross",
)
"""Every kind of mask but plain causal."""


def kind_options(kind: str, row: PackedRow, device: torch.device) -> dict[str, Any]:
    """The arguments of `document_block_mask` for a kind."""
    prefix = torch.full((row.layout.capacity,), 64, dtype=torch.int32, device=device)
    keys = fv.PackedLayout.from_lengths(row.lengths[::-1], device=device)
    options: dict[str, dict[str, Any]] = {
        "bidirectional": {"causal": False},
        "window=1024": {"window": 1024},
        "two-sided window=1024": {"causal": False, "window": 1024},
        "chunk=8192": {"chunk": 8192},
        "prefix=64": {"prefix": prefix},
        "cross": {"layout_k": keys},
    }
    return options[kind]


# --- the parts -----------------------------------------------------------------------------------


@dataclass
class Live:
    """A builder that is right, on its way to the clock."""

    variant: str
    build: Build
    measures: dict[str, Any] = field(default_factory=dict)


def builds(run: Run, row: PackedRow, names: Sequence[str]) -> None:
    """Builders of causal documents against each other."""
    expected = expected_tables(row.layout)
    finish(run, [(name, partial(prepare, run, name, row, expected)) for name in names])


def kinds(run: Run, row: PackedRow, names: Sequence[str]) -> None:
    """The other kinds of masks, all by flexvarlen."""
    options = {name: kind_options(name, row, run.device) for name in names}
    finish(run, [(name, partial(prepare_kind, name, row, options[name])) for name in names])


def growth(run: Run, row: PackedRow, names: Sequence[str]) -> None:
    """Cost of flexvarlen's build at one point of a series, beside the blocks it keeps."""
    finish(run, [(name, partial(prepare_kind, name, row, {})) for name in names])


def prepare(run: Run, name: str, row: PackedRow, expected: Tables) -> Live:
    """The builder, once its first mask has been found right."""
    build = BUILDERS[name](run, row)
    with watch_compilation() as stats:
        mask = build()
        run.synchronize()
    reason = difference(mask, expected)
    measures = row.measures() | counts_of(mask)
    if name in COMPILED:
        measures["compile_s"] = stats.compile_s
    if reason is not None:
        raise Wrong(reason, measures)
    del mask
    run.clean()
    seconds = run.seconds(build)
    if seconds * CALLS_OF_A_SLOW_BUILDER > MOST_BUILDER_S:
        raise TooSlow(
            f"takes {seconds:.2g} s a build, more than {MOST_BUILDER_S:g} s in "
            f"{CALLS_OF_A_SLOW_BUILDER} of them; not timed"
        )
    return Live(name, build, measures)


def prepare_kind(name: str, row: PackedRow, options: dict[str, Any]) -> Live:
    """flexvarlen's builder of a kind, once its mask has been found right."""
    mask = fv.document_block_mask(row.layout, **options)
    reason = difference(mask, expected_tables(row.layout, **options))
    measures = row.measures() | counts_of(mask)
    if reason is not None:
        raise Wrong(reason, measures)
    return Live(name, lambda: fv.document_block_mask(row.layout, **options), measures)


def finish(run: Run, prepared: Sequence[tuple[str, Callable[[], Live]]]) -> None:
    """Time what is right, all interleaved; then device work and memory of each; then say all."""
    found = [run.attempt(name, make) for name, make in prepared]
    lives = [live for live in found if live is not None]
    if not lives:
        return
    running = [lives[0].variant]  # the last is on the device, and no other
    try:
        with watch_compilation() as stats:
            times = run.time_builds({live.variant: live.build for live in lives}, running.append)
    except Exception as error:  # as in `Run.attempt`
        run.failed({live.variant: live.measures for live in lives}, error, running[-1])
        return
    for live in lives:

        def rest(build: Build = live.build) -> dict[str, Any]:
            return run.peak(build) | run.gpu_work(build)

        live.measures["compilations_while_timing_all"] = stats.compilations
        more = run.attempt(live.variant, rest, live.measures)
        if more is not None:
            run.write(live.variant, "ok", None, live.measures | times[live.variant] | more)
    run.clean()
