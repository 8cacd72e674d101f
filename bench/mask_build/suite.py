"""Suite "mask-build": building document BlockMasks, ours beside create_block_mask's.

Packed rows of log-normal documents, boundaries on the device. What is wrong is never timed. Parts,
whose variants are:

    build      every builder of causal documents, interleaved
    kinds      every other kind of mask, by ours
    growth     ours over tokens, and over the length of documents: cost against blocks kept
    share      ours beside one decoder layer's forward
    attention  flex_attention under our mask and under create_block_mask's
    long       backends past the int32 offsets of torch's templates, against fp64
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch._dynamo.config
import torch._functorch.config

from flexvarlen.attention.backends.registry import BACKENDS
from flexvarlen.bench.mask_build.attention import OURS, THEIRS, Attention, Heads, long_row, share
from flexvarlen.bench.mask_build.builders import BUILDERS, KINDS, builds, growth, kinds
from flexvarlen.bench.mask_build.figure import drawn
from flexvarlen.bench.mask_build.run import SEED, SIGMA, Run
from flexvarlen.bench.mask_build.tables import mask_build_groups, mask_build_section
from flexvarlen.bench.series_figure import figure_path, save_figure
from flexvarlen.bench.suite import Case, Finding, Options, Suite
from flexvarlen.mask.table_shapes import DEFAULT_BLOCK_SIZE
from flexvarlen.rows import Row

PARTS = ("build", "kinds", "growth", "share", "attention", "long")

Size = tuple[int, int]  # tokens of the row, mean tokens of a document


@dataclass(frozen=True)
class MaskCase:
    """One part at one size.

    Attributes:
        more: what else tells the part's cases apart: a series, a geometry, heads, a kernel.
    """

    part: str
    tokens: int
    mean_doc: int
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """For `--cases` and the progress bar.

        >>> MaskCase("growth", 4096, 512, (("series", "tokens"),)).name
        'growth-tokens-t4096-mean512'
        """
        said = [str(value) for key, value in self.more if key in ("series", "kernel")]
        return "-".join([self.part, *said, f"t{self.tokens}", f"mean{self.mean_doc}"])

    def data(self) -> dict[str, Any]:
        shape = {"tokens": self.tokens, "mean_doc": self.mean_doc, "sigma": SIGMA, "seed": SEED}
        return {"part": self.part, **dict(self.more), **shape, "block_size": DEFAULT_BLOCK_SIZE}


@dataclass(frozen=True)
class Sizes:
    """What each part measures."""

    build: tuple[Size, ...]
    growth: tuple[tuple[str, Size], ...]
    geometry: str
    share: Size
    heads: Heads
    kernels: tuple[str, ...]
    attention: tuple[Size, ...]
    long: tuple[Size, ...]


FULL = Sizes(
    build=((8192, 512), (32_768, 2048), (131_072, 4096), (1_048_576, 8192)),
    growth=(
        *(("tokens", (2**power, 2048)) for power in range(12, 21)),
        *(("documents", (131_072, 2**power)) for power in range(9, 16)),
    ),
    geometry="qwen3-1.7b",
    share=(32_768, 2048),
    heads=Heads(num_heads=32, num_kv_heads=8, head_dim=128),
    kernels=("TRITON", "FLASH"),
    attention=((8192, 512), (32_768, 2048), (131_072, 4096)),
    long=((600_000, 8192), (1_048_576, 8192)),
)
QUICK = Sizes(
    build=((1000, 128),),
    growth=(("tokens", (256, 64)), ("tokens", (512, 64)), ("documents", (512, 128))),
    geometry="qwen3-tiny",
    share=(256, 64),
    heads=Heads(num_heads=4, num_kv_heads=2, head_dim=16),
    kernels=("TRITON", "FLASH"),
    attention=((512, 64),),
    long=((1000, 128),),
)
CPU_KERNELS = {False: ("C++",), True: ("dense",)}
"""In place of `kernels`; by whether the run is quick: the C++ one takes 10 s to compile."""


def sizes_of(options: Options) -> Sizes:
    return QUICK if options.quick else FULL


class MaskBuild(Suite):
    """The suite; rows of parts share `tokens`, `mean_doc`, `sigma`, `seed`, `block_size`."""

    name: ClassVar[str] = "mask-build"

    def cases(self, options: Options) -> Sequence[Case]:
        sizes = sizes_of(options)
        kernels = sizes.kernels if options.on_gpu else CPU_KERNELS[options.quick]
        heads = tuple(asdict(sizes.heads).items())
        return [
            *(MaskCase(part, *size) for size in sizes.build for part in ("build", "kinds")),
            MaskCase("share", *sizes.share, (("geometry", sizes.geometry),)),
            *(
                MaskCase("attention", *size, (("kernel", kernel), *heads))
                for size in sizes.attention
                for kernel in kernels
            ),
            *(MaskCase("growth", *size, (("series", series),)) for series, size in sizes.growth),
            *(MaskCase("long", *size, heads) for size in sizes.long),
        ]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        part = case.data()["part"]
        if part == "long":  # FlexAttention's C++ kernel has no backward, and takes long to compile
            return ("flex",) if options.on_gpu else ("sdpa",)
        return VARIANTS.get(part, (OURS,))

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, MaskCase)
        run, sizes = Run(options), sizes_of(options)
        known = BACKENDS if case.part == "long" else VARIANTS.get(case.part, (OURS,))
        for name in variants:
            if name not in known:
                why = f"{name} is no variant of part {case.part}; there are {', '.join(known)}"
                run.write(name, "unsupported", why)
        variants = [name for name in variants if name in known]
        row = run.row(case.tokens, case.mean_doc)
        # Dynamo's limits go by code object, and sizes are compiled apart; a backward that is timed
        # again and again keeps its buffers.
        limits = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
        keep = torch._functorch.config.patch(donated_buffer=False)
        torch._dynamo.reset()
        with torch._dynamo.config.patch(limits), keep:
            if case.part in SIMPLE:
                SIMPLE[case.part](run, row, variants)
            elif case.part == "share":
                share(run, row, variants, sizes.geometry)
            elif case.part == "attention":
                kernel = dict(case.more)["kernel"]
                Attention(run, row, sizes.heads, kernel).measure(variants)
            else:
                long_row(run, row, variants, sizes.heads)
        return run.findings

    def section(self, rows: Sequence[Row]) -> str:
        return mask_build_section(rows)

    def figures(self, rows: Sequence[Row], folder: Path) -> Sequence[Path]:
        return [
            save_figure(drawn(group), figure_path(folder, self.name, group))
            for group in mask_build_groups(rows)
        ]


VARIANTS = {"build": tuple(BUILDERS), "kinds": KINDS, "attention": (OURS, THEIRS)}
"""Of parts that have others than ours alone; those of "long" are backends."""

SIMPLE = {"build": builds, "kinds": kinds, "growth": growth}
"""Parts that need nothing but a row."""

SUITE = MaskBuild()
