"""`flexvarlen.bench.mask_build`: building document BlockMasks, ours beside create_block_mask's.

Packed rows of log-normal documents, boundaries on the device. What is wrong is never timed.

    build      every builder of causal documents, interleaved; then every other kind of ours
    growth     ours over tokens, and over the length of documents: cost against blocks kept
    share      a build beside one decoder layer's forward
    attention  flex_attention under our mask and under create_block_mask's
    long       attention past the int32 offsets of torch's templates, against fp64
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo.config
import torch._functorch.config

from flexvarlen.bench.mask_build_attention import Attention, Heads, long_row, share
from flexvarlen.bench.mask_build_builders import Builds, growth
from flexvarlen.bench.mask_build_run import Run

PARTS = ("build", "growth", "share", "attention", "long")

Size = tuple[int, int]  # tokens of the row, mean tokens of a document


@dataclass(frozen=True)
class Sizes:
    """What each part measures."""

    build: tuple[Size, ...]
    growth: tuple[tuple[str, Size], ...]
    geometry: str
    share: Size
    heads: Heads
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
    attention=((8192, 512), (32_768, 2048), (131_072, 4096)),
    long=((600_000, 8192), (1_048_576, 8192)),
)
QUICK = Sizes(
    build=((512, 64), (1000, 128)),
    growth=(("tokens", (256, 64)), ("tokens", (512, 64)), ("documents", (512, 128))),
    geometry="qwen3-tiny",
    share=(256, 64),
    heads=Heads(num_heads=4, num_kv_heads=2, head_dim=16),
    attention=((512, 64),),
    long=((1000, 128),),
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.mask_build", description=summary
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--repeats", type=int, default=200, help="timed builds at most, of each builder")
    add("--start-until", type=float, default=480.0, metavar="S", help="begin no case later")
    add("--commit", help="recorded in place of what git finds here")
    add("--out", type=Path, help="JSON lines to append to")
    add("--quick", action="store_true", help="tiny rows, to see that all works")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    run = Run(parse(argv))
    run.say(f"{run.environment['gpu'] or run.environment['cpu']}, torch {torch.__version__}")
    sizes, parts = (QUICK if run.args.quick else FULL), run.args.parts
    # Dynamo's limits go by code object, and sizes are compiled apart; a backward that is timed
    # again and again keeps its buffers.
    limits = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
    keep = torch._functorch.config.patch(donated_buffer=False)
    with torch._dynamo.config.patch(limits), keep:
        if "build" in parts:
            builds = Builds(run)
            for size in sizes.build:
                builds.measure(*size)
        if "growth" in parts:
            for series, size in sizes.growth:
                growth(run, series, *size)
        if "share" in parts:
            share(run, sizes.geometry, *sizes.share)
        if "attention" in parts:
            for size in sizes.attention:
                Attention(run, *size, sizes.heads).measure()
        if "long" in parts:
            for size in sizes.long:
                long_row(run, *size, sizes.heads)


if __name__ == "__main__":
    main()
