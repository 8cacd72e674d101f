"""`python -m flexvarlen.bench.model.packings`: steps on packing after packing, ours and theirs.

One packed row of log-normal documents; random weights, shared by all variants; forward and backward
of the base model (no LM head: its logits would drown the difference), eagerly and compiled.

Whole training steps (with the loss and the optimizer), padded batches and generation are the suite
`model` of `flexvarlen bench`, `suite.py`; both check and run a step by `step.py`.

    1. oracle    each document alone in fp64; the peer: alone, in the model's own dtype
    2. variants  eager step, compiled step: checked against the oracle; what is wrong is not timed
    3. timing    all variants interleaved, eager and then compiled
    4. packings  other documents, as many tokens: recompilations; the last packing is checked again
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from flexvarlen.bench.model.geometries import GEOMETRIES
from flexvarlen.bench.model.packings_run import Run
from flexvarlen.bench.model.variants import DEFAULT_VARIANTS


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.model.packings", description=summary
    )
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--geometry", choices=sorted(GEOMETRIES), default="qwen3-1.7b")
    add("--layers", type=int, help="default: the model's own number")
    add("--tokens", type=int, default=32_768, help="tokens of the packed row")
    add("--mean", type=int, default=2048, help="mean tokens of a document")
    add("--sigma", type=float, default=1.0, help="of the logarithm of the lengths")
    add("--seed", type=int, default=0, help="of weights, tokens and documents")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--device", default="cuda" if cuda else "cpu")
    add("--compiler", choices=["inductor", "aot_eager"], help="default: inductor")
    add("--variants", nargs="+", default=list(DEFAULT_VARIANTS), metavar="NAME")
    add("--repeats", type=int, default=15, help="timed compiled steps a variant")
    add("--eager-repeats", type=int, default=5)
    add("--no-eager", dest="eager", action="store_false", help="measure compiled steps only")
    add("--packings", type=int, help="other packings to run compiled; default: 5 (--quick: 2)")
    add("--start-until", type=float, default=360.0, metavar="S", help="begin no variant later")
    add("--packings-until", type=float, default=480.0, metavar="S", help="run no packing later")
    add("--commit", help="recorded in place of what git finds here")
    add("--out", type=Path, help="JSON lines to append to")
    add("--quick", action="store_true", help="a tiny model on few tokens, to see that all works")
    args = parser.parse_args(argv)
    if args.quick:
        args.geometry, args.layers, args.tokens, args.mean = "qwen3-tiny", 2, 256, 32
        args.repeats, args.eager_repeats = 3, 2
        if torch.device(args.device).type == "cpu":
            args.dtype, args.compiler = "float32", args.compiler or "aot_eager"
    args.compiler = args.compiler or "inductor"
    if args.packings is None:
        args.packings = 2 if args.quick else 5
    return args


def main(argv: list[str] | None = None) -> None:
    run = Run(parse(argv))
    # Variants of one class share their code objects, and Dynamo's limits go by code object.
    limits = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
    with torch._dynamo.config.patch(limits), run.caches:
        run.say(f"{run.args.geometry} on {run.environment['gpu'] or run.environment['cpu']}")
        run.make_oracle()
        lives = [live for name in run.args.variants if (live := run.prepare(name)) is not None]
        if lives:
            run.time(lives)
        # Ours first: theirs may compile anew for each packing, until no time is left.
        lives.sort(key=lambda live: live.variant.name.startswith("transformers:"))
        run.finish(lives)


if __name__ == "__main__":
    main()
