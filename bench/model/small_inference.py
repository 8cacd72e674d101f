"""`flexvarlen.bench.model.small_inference`: forward latency on one to four short documents.

Where the host, not the GPU, sets the time: each attention eagerly, compiled, and compiled with CUDA
graphs (`mode="reduce-overhead"`), ours beside transformers' own, in one run under `no_grad`.

    1. oracle    each document alone in fp64, for two packings of equal length
    2. variants  each way of running checked on the first packing, then on the second, which is
                 copied into the same tensors: a graph that kept the first is wrong, and not timed
    3. timing    all that is right, interleaved: CUDA events around the call on an idle device, so
                 that the host's time counts where the device waits for it (on the CPU: a clock)

2 and 3 mode by mode; the rows of a mode are written as soon as they are known.

After an "@" stands how a variant is told its documents. Without: ours by a `PackedLayout` made
ahead, transformers' by position_ids, which its layers read back. `@position_ids`: ours by the same.
`@cu_seq_lens`: transformers' FlashAttention by boundaries and longest document made ahead.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.bench_run import BenchRun
from flexvarlen.bench.model.accuracy import ORACLE_DTYPE, Answer, Errors, errors_of, per_document
from flexvarlen.bench.model.geometries import GEOMETRIES, new_base_model
from flexvarlen.bench.model.small_inference_inputs import Inputs, other_packing
from flexvarlen.bench.model.utilisation import noting_auto, resolved_auto
from flexvarlen.equivalence.oracle import share
from flexvarlen.equivalence.variants import Unsupported, set_transformers
from flexvarlen.measure import time_interleaved, watch_compilation
from flexvarlen.rows import Status, one_line

SUITE = "small-inference"
MODES = ("eager", "cuda graphs", "compiled")
OURS = ("auto", "auto@position_ids", "fa3", "fa4", "fa2", "varlen", "flex")
THEIRS = (
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "flash_attention_2@cu_seq_lens",
    "flash_attention_3@cu_seq_lens",
)
DEFAULT_VARIANTS = (*OURS, *(f"transformers:{name}" for name in THEIRS))
FORMS = {True: ("position_ids", "cu_seq_lens"), False: ("packed_layout", "position_ids")}
"""How documents can be told, by whether the variant is transformers' own; the default first."""

# What kernels, compilers and transformers raise; anything else is a mistake of this script.
ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.model.small_inference", description=summary
    )
    add = parser.add_argument
    add("--geometry", choices=sorted(GEOMETRIES), default="qwen3-1.7b")
    add("--layers", type=int, default=14)
    add("--documents", type=int, nargs="+", default=[128, 64, 40, 24], metavar="TOKENS")
    add("--seed", type=int, default=0)
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compiler", choices=["inductor", "aot_eager"], default="inductor")
    add("--variants", nargs="+", default=list(DEFAULT_VARIANTS), metavar="NAME")
    add("--modes", nargs="+", default=list(MODES), choices=MODES)
    add("--repeats", type=int, default=60)
    add("--start-until", type=float, default=450.0, metavar="S", help="begin no variant later")
    add("--commit", help="recorded in place of what git finds here")
    add("--out", type=Path, help="JSON lines to append to")
    add("--quick", action="store_true", help="a tiny model, to see that all works")
    args = parser.parse_args(argv)
    if args.quick:
        args.geometry, args.layers, args.repeats = "qwen3-tiny", 2, 3
        if torch.device(args.device).type == "cpu":
            args.dtype = "float32"
    return args


def compiled(model: PreTrainedModel, mode: str, compiler: str, fullgraph: bool) -> Any:
    """The model under torch.compile, with a compiler object of its own.

    Dynamo keeps compiled code by code object, which all variants of a model class share; what
    another compiler made is none of theirs. `reduce-overhead` is inductor with CUDA graphs.
    """
    if compiler == "aot_eager":
        from torch._dynamo.backends.registry import lookup_backend

        plain = lookup_backend("aot_eager")
        return torch.compile(model, backend=lambda g, x: plain(g, x), fullgraph=fullgraph)
    from torch._inductor.compile_fx import compile_fx

    patches = {"triton.cudagraphs": mode == "cuda graphs"}

    def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_fx(graph, inputs, config_patches=patches)

    return torch.compile(model, backend=inductor, fullgraph=fullgraph)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model over the shared parameters, and how it is told its documents."""

    name: str
    model: PreTrainedModel
    form: str

    @property
    def theirs(self) -> bool:
        return self.name.startswith("transformers:")


@dataclasses.dataclass
class Live:
    """A way of running a variant that is right, and so will be timed."""

    case: dict[str, Any]
    call: Callable[[], Tensor]
    measures: dict[str, Any]


class Run(BenchRun):
    """The shared state of one run: model, packings, oracles, file."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(SUITE, args)
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        torch.manual_seed(args.seed)
        self.base = new_base_model(args.geometry, args.layers, self.dtype, self.device).eval()
        tokens = sum(args.documents)
        self.ids = torch.randint(self.base.config.vocab_size, (1, tokens), device=self.device)
        self.packings = (args.documents, other_packing(args.documents))
        self.oracles = [self.alone(lengths, ORACLE_DTYPE) for lengths in self.packings]
        self.peers = [
            errors_of(self.alone(lengths, self.dtype), oracle)
            for lengths, oracle in zip(self.packings, self.oracles, strict=True)
        ]

    def alone(self, lengths: list[int], dtype: torch.dtype) -> Answer:
        none = torch.empty(0)  # where a backward would start from
        return per_document(self.base, self.ids, lengths, none, dtype=dtype, gradients=False)

    def run(self) -> None:
        variants = [found for name in self.args.variants if (found := self.variant(name))]
        for mode in self.args.modes:
            lives = [live for each in variants if (live := self.prepare(each, mode)) is not None]
            if lives:
                self.time(lives)

    def variant(self, name: str) -> Variant | None:
        """A variant by its name; None if its rows say why there is none."""
        kind, _, form = name.partition("@")
        theirs = kind.startswith("transformers:")
        if form not in ("", *FORMS[theirs]):
            raise ValueError(
                f"after @ in a variant of {kind} must stand {' or '.join(FORMS[theirs])}, got "
                f"{name!r}"
            )
        form = form or FORMS[theirs][0]
        model = share(self.base)
        status: Status = "unsupported"
        try:
            if theirs:
                set_transformers(model, kind.removeprefix("transformers:"))
            else:
                fv.patch_model(model, kind)
            if kind == "auto" and form == "packed_layout":
                # Measures, if it has not, before anything is compiled.
                layout = Inputs(self.ids, self.packings[0], form).layout
                with torch.no_grad():
                    resolved_auto(model, layout, self.dtype, needs_grad=False)
            return Variant(name, model, form)
        except Unsupported as error:
            reason = str(error)
        except (NotImplementedError, ImportError) as error:
            reason = one_line(error)
        except ERRORS as error:
            status, reason = "failed", one_line(error)
        for mode in self.args.modes:
            self.write(self.case(name, mode), status, reason)
        return None

    def prepare(self, variant: Variant, mode: str) -> Live | None:
        """Run on both packings; None if a row says why it will not be timed."""
        name, model = variant.name, variant.model
        case = self.case(name, mode)
        if self.seconds_since_begin() > self.args.start_until:
            self.write(case, "skipped", f"not begun within {self.args.start_until:g} s of the run")
            return None
        if mode == "cuda graphs" and self.device.type != "cuda":
            self.write(case, "unsupported", f"there are no CUDA graphs on {self.device.type}")
            return None
        inputs = Inputs(self.ids, self.packings[0], variant.form)
        how = self.args.compiler
        run = model if mode == "eager" else compiled(model, mode, how, fullgraph=not variant.theirs)

        def call() -> Tensor:
            if mode == "cuda graphs":
                torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                outputs: Tensor = run(**inputs.arguments()).last_hidden_state
            return outputs

        try:
            with noting_auto() as chosen:
                measures, reason = self.check(call, inputs)
        except (NotImplementedError, ImportError) as error:
            self.write(case, "unsupported", one_line(error))
        except torch.OutOfMemoryError as error:
            self.write(case, "oom", one_line(error))
        except ERRORS as error:
            self.write(case, "failed", one_line(error))
        else:
            if not variant.theirs:  # a named backend asks "auto" nothing
                measures["attends"] = ", ".join(dict.fromkeys(chosen)) or name.partition("@")[0]
            if reason is None:
                self.say(f"{name}, {mode}: right, {measures}")
                return Live(case, call, measures)
            self.write(case, "wrong", reason, measures)
        return None

    def check(
        self, call: Callable[[], Tensor], inputs: Inputs
    ) -> tuple[dict[str, Any], str | None]:
        """Errors on both packings, and what was compiled; why it is wrong, or None."""
        from torch._dynamo.utils import counters

        skips = counters["inductor"]["cudagraph_skips"]
        with watch_compilation() as first:
            for _ in range(3):  # a graph is recorded at the second call and replayed at the third
                error = self.error(call(), 0)
        with watch_compilation() as later:
            inputs.fill(self.packings[1])
            other = self.error(call(), 1)
            inputs.fill(self.packings[0])
            again = self.error(call(), 0)
        measures = {
            "error": error.outputs,
            "error_other_packing": other.outputs,
            "peer_error": self.peers[0].outputs,
            "compile_s": first.compile_s,
            "graphs": first.compilations,
            "graph_breaks": first.graph_breaks,
            "recompilations": later.compilations,
            "cudagraph_skips": counters["inductor"]["cudagraph_skips"] - skips,
        }
        for which, (found, peer) in enumerate(
            [(error, self.peers[0]), (other, self.peers[1]), (again, self.peers[0])]
        ):
            reason = found.why_wrong(peer, self.dtype)
            if reason is not None:
                return measures, f"{('first', 'other', 'first again')[which]} packing: {reason}"
        return measures, None

    def error(self, outputs: Tensor, packing: int) -> Errors:
        return errors_of(Answer(outputs[0], {}), self.oracles[packing])

    def time(self, lives: list[Live]) -> None:
        """Times of one mode, interleaved, and its rows; what raises while timed is a row too."""
        calls: dict[str, Callable[[], object]] = {live.case["variant"]: live.call for live in lives}
        try:
            with watch_compilation() as stats:
                timings = time_interleaved(
                    calls,
                    device=self.device,
                    warmup=5,
                    repeats=self.args.repeats,
                    flush_l2=False,
                    lead_in=2,
                )
        except ERRORS as error:
            reason = f"right, but timing this mode raised {one_line(error)}"
            for live in lives:
                self.write(live.case, "failed", reason, live.measures)
            return
        for live in lives:
            live.measures |= dataclasses.asdict(timings[live.case["variant"]])
            live.measures["compilations_while_timing_all"] = stats.compilations
            self.write(live.case, "ok", None, live.measures)

    def case(self, name: str, mode: str) -> dict[str, Any]:
        args = self.args
        return {
            "variant": name,
            "mode": mode,
            "geometry": args.geometry,
            "layers": args.layers,
            "documents": args.documents,
            "seed": args.seed,
            "dtype": args.dtype,
            "compiler": args.compiler,
            "passes": "forward",
        }

    def write(
        self,
        case: dict[str, Any],
        status: Status,
        reason: str | None,
        measures: dict[str, Any] | None = None,
    ) -> None:
        shown = reason or f"{(measures or {}).get('ms_p50', 0):.3f} ms"
        self.say(f"{case['variant']}, {case['mode']}: {status}, {shown}")
        self.append(case, status, reason, measures or {})


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    # Variants of one class share their code objects, and Dynamo's limits go by code object.
    limits = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
    with torch._dynamo.config.patch(limits):
        Run(args).run()


if __name__ == "__main__":
    main()
