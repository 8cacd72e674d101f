"""Whether two versions of flexvarlen give the same answers, bit for bit.

Each dump runs the flexvarlen that is first on PYTHONPATH, on tiny models of every verified family,
in every form of a batch and on every backend, and on `packed_attention` itself. It records a hash
of each output and of each gradient. What raises is recorded by the exception's type.

    PYTHONPATH=NEW python bench/contract/same_answers.py configs --out configs.json
    PYTHONPATH=OLD python bench/contract/same_answers.py dump --configs configs.json --out old.jsonl
    PYTHONPATH=NEW python bench/contract/same_answers.py dump --configs configs.json --out new.jsonl
    python bench/contract/same_answers.py compare old.jsonl new.jsonl

On CUDA each case runs twice, which shows where gradients are not deterministic: `compare` wants
equal bits elsewhere, and there a difference of no more than a rounding.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FLEXVARLEN_AUTO", "static")  # what `auto` measures differs between runs

import torch
import transformers
from same_answers_compare import (  # type: ignore[import-not-found]
    DTYPE,
    GRADIENT,
    compare,
    described,
)
from torch import Tensor

Tensors = dict[str, Tensor]
HEAD_DIM = {"cpu": 16, "cuda": 64}
NAMES = {"sdpa": "flexvarlen_doc"}
"""transformers' names of backends, where they are no "flexvarlen_" and the backend's."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    commands = parser.add_subparsers(dest="command", required=True)
    configs = commands.add_parser("configs", help="write the tiny configs of all families")
    configs.add_argument("--out", type=Path, required=True)
    dump = commands.add_parser("dump", help="run the cases and record their hashes")
    add = dump.add_argument
    add("--configs", type=Path, required=True, help="what `configs` wrote")
    add("--out", type=Path, required=True, help="JSON lines; compressed if it ends in .gz")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    some = dump.add_mutually_exclusive_group()
    some.add_argument("--all", action="store_true", help="all combinations; default: pairwise")
    some.add_argument("--sample", type=int, metavar="N", help="the first N of the pairwise sample")
    add("--families", nargs="+", metavar="TYPE", help="default: all, and packed_attention")
    add("--backends", nargs="+", metavar="NAME", help="default: all that this machine has")
    add("--only", default="", metavar="REGEX", help="on 'family, backend, form, mode'")
    add("--seconds", type=float, default=1e9, help="start no case later than this")
    add("--tensors", type=Path, metavar="FOLDER", help="also save each case's tensors")
    compare = commands.add_parser("compare", help="print what differs; exit 1 if anything does")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.add_argument("--common", action="store_true", help="leave out what one dump lacks")
    compare.add_argument("--show", type=int, default=40, help="differing cases to list")
    return parser.parse_args(argv)


# ---- configs ----


def write_configs(out: Path) -> None:
    """The tiny configs as plain JSON, for the head_dim of each device."""
    from flexvarlen.bench.contract.tiny_configs import tiny_config
    from flexvarlen.patches.models.families import FAMILIES

    found: dict[str, Any] = {}
    for family in FAMILIES:
        of_device = {}
        for device, head_dim in HEAD_DIM.items():
            every = device == "cuda"
            config = tiny_config(family.model_type, head_dim=head_dim, every_expert=every)
            of_device[device] = json.loads(config.to_json_string(use_diff=False))
        found[family.model_type] = {"task": family.task, **of_device}
    out.write_text(json.dumps(found, indent=1))


def new_model(model_type: str, family: dict[str, Any], device: str) -> Any:
    """A family's tiny model, always with the same weights."""
    settings = dict(family[device])
    settings.pop("model_type", None)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    config._experts_implementation = "batched_mm"  # the others cannot be traced in one graph
    torch.manual_seed(0)
    maker = getattr(transformers, f"AutoModelFor{family['task']}")
    model = maker.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):  # they start at 0
                parameter.normal_(std=0.2)
    return model.to(device, DTYPE[device]).eval()


# ---- cases ----


def gradients_of(model: Any) -> Tensors:
    found = {GRADIENT + n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def train_step(model: Any, inputs: dict[str, Any], call: Any = None) -> Tensors:
    """Logits, loss and gradients of one step with labels."""
    model.train()
    model.zero_grad(set_to_none=True)
    call = model if call is None else call
    outputs = call(**inputs, labels=inputs_module().labels_of(inputs))
    outputs.loss.backward()
    return {"logits": outputs.logits, "loss": outputs.loss, **gradients_of(model)}


def forward(model: Any, inputs: dict[str, Any]) -> Tensors:
    with torch.no_grad():
        return {"logits": model.eval()(**inputs).logits}


def generate(model: Any, inputs: dict[str, Any]) -> Tensors:
    """Four greedy tokens and their logits."""
    given = {name: value for name, value in inputs.items() if name != "use_cache"}
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    found = model.eval().generate(**given, **settings, return_dict_in_generate=True)
    return {"tokens": found.sequences, "logits": torch.stack(found.logits)}


def run_model(model: Any, case: Any, inputs: dict[str, Any]) -> Tensors:
    """One case of a model, which is left unpatched."""
    import flexvarlen as fv

    guarantees = {"deterministic": "deterministic", "batch invariant": "batch_invariant"}
    options: Any = {guarantees[case.mode]: True} if case.mode in guarantees else {}
    getattr(model, "base_model", model).rope_deltas = None  # what a vision model keeps of a batch
    try:
        if case.mode == "by name":
            model.set_attn_implementation(NAMES.get(case.backend, f"flexvarlen_{case.backend}"))
            return train_step(model, inputs)
        fv.patch_model(model, case.backend, **options)
        if case.mode == "eval":
            return forward(model, inputs)
        if case.mode == "generate":
            return generate(model, inputs)
        if case.mode == "unpatched":
            forward(model, inputs)
            fv.unpatch_model(model)
            return forward(model, inputs)
        if case.mode == "compiled":
            torch._dynamo.reset()
            compiler = "inductor" if model.device.type == "cuda" else "aot_eager"
            return train_step(model, inputs, torch.compile(model, backend=compiler, fullgraph=True))
        if case.mode == "checkpoint":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return train_step(model, inputs)
    finally:
        if case.mode == "checkpoint":
            model.gradient_checkpointing_disable()
        fv.unpatch_model(model)
        if case.mode == "by name":
            model.set_attn_implementation("eager")


def run_attention(case: Any, device: str) -> Tensors:
    """One call of `packed_attention`, and the mask's tables."""
    import flexvarlen as fv

    kind = inputs_module().KINDS[case.form]
    layout = fv.PackedLayout.from_lengths(
        kind.lengths, total_tokens=kind.total_tokens, device=device
    )
    keys = None if kind.keys is None else fv.PackedLayout.from_lengths(kind.keys, device=device)
    tokens_k = (keys or layout).total_tokens
    dim, v_dim = (HEAD_DIM[device] // (3 - n) for n in kind.dims or (2, 2))
    num_heads, num_kv_heads = kind.heads
    shapes = {
        "q": (layout.total_tokens, num_heads, dim),
        "k": (tokens_k, num_kv_heads, dim),
        "v": (tokens_k, num_kv_heads, v_dim),
        "cotangent": (layout.total_tokens, num_heads, v_dim),
    } | ({"sinks": (num_heads,)} if kind.sinks else {})
    order = torch.Generator().manual_seed(3)
    made = {name: torch.randn(shape, generator=order) for name, shape in shapes.items()}
    made = {name: x.to(device, DTYPE[device]) for name, x in made.items()}
    cotangent = made.pop("cotangent")
    leaves = {name: x.requires_grad_(case.mode != "eval") for name, x in made.items()}
    options: dict[str, Any] = dict(kind.options)
    if case.mode in ("deterministic", "batch invariant"):
        options[case.mode.replace(" ", "_")] = True
    result = fv.packed_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        layout,
        layout_k=keys,
        sinks=leaves.get("sinks"),
        backend=case.backend,
        **options,
    )
    out, lse = result if isinstance(result, tuple) else (result, None)
    found = {"out": out} | ({} if lse is None else {"lse": lse})
    if case.mode != "eval":
        gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
        found |= {GRADIENT + n: x for n, x in zip(leaves, gradients, strict=True)}
    of_mask = ("causal", "window", "chunk", "prefix", "align")
    mask = {name: value for name, value in kind.options.items() if name in of_mask}
    tables = fv.document_block_mask(layout, layout_k=keys, **mask).as_tuple()
    return found | {f"table {i}": x for i, x in enumerate(tables) if isinstance(x, Tensor)}


# ---- recording ----


def inputs_module() -> Any:
    """`same_answers_inputs.py`, which imports flexvarlen: `compare` does without."""
    import same_answers_inputs  # type: ignore[import-not-found]

    return same_answers_inputs


def record(run: Callable[[], Tensors], repeats: int) -> tuple[dict[str, Any], Tensors]:
    """What a case gave, or the type of what it raised."""
    runs: list[Tensors] = []
    try:
        for _ in range(repeats):
            torch.manual_seed(1)
            runs.append(run())
    except Exception as error:  # any: the two versions must raise the same
        return {"outcome": type(error).__name__, "why": str(error)[:200]}, {}
    found = [{name: described(name, x) for name, x in tensors.items()} for tensors in runs]
    varies = sorted({n for other in found for n in other if other[n][0] != found[0][n][0]})
    return {"outcome": "ok", "tensors": found[0], "varies": varies}, runs[0]


def dump(args: argparse.Namespace) -> None:
    import flexvarlen as fv

    device, dtype = args.device, DTYPE[args.device]
    torch.set_num_threads(1)
    # Each family compiles flex anew; without room for that, Dynamo would give up.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 1024
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    kind = {"dtype": dtype, "head_dim": HEAD_DIM[device], "needs_grad": False}
    usable = [n for n in fv.BACKENDS if fv.why_not(n, device=device, **kind) is None]
    families = json.loads(args.configs.read_text())
    wanted = {name: families[name] for name in args.families or families}
    cases = list(
        inputs_module().every_case(list(wanted), args.backends or [*usable, "auto"], device)
    )
    if not args.all:
        cases = inputs_module().pairwise(cases, args.sample)
    cases = [case for case in cases if re.search(args.only, ", ".join(vars(case).values()))]
    cases.sort(key=lambda case: ["attention", *families].index(case.family))
    ids = inputs_module().token_ids(torch.device(device))
    model: Any = None
    name, begin = "", time.perf_counter()
    with opened(args.out) as out:
        out.write(json.dumps({"machine": machine(device)}) + "\n")
        for case in cases:
            if time.perf_counter() - begin > args.seconds:
                break
            if case.family not in (name, "attention"):
                sys.stderr.write(f"{time.perf_counter() - begin:6.0f} s  {case.family}\n")
                torch._dynamo.reset()
                name, model = case.family, new_model(case.family, families[case.family], device)

            def run(case: Any = case, model: Any = model) -> Tensors:
                if case.family == "attention":
                    return run_attention(case, device)
                return run_model(model, case, inputs_module().FORMS[case.form](ids))

            found, tensors = record(run, 2 if device == "cuda" else 1)
            out.write(json.dumps({"case": vars(case), **found}) + "\n")
            out.flush()
            if args.tensors:
                args.tensors.mkdir(parents=True, exist_ok=True)
                file = re.sub(r"\W+", "-", " ".join(vars(case).values())) + ".pt"
                torch.save({n: x.detach().cpu() for n, x in tensors.items()}, args.tensors / file)
    sys.stderr.write(f"{time.perf_counter() - begin:6.0f} s  {len(cases)} cases\n")


def machine(device: str) -> dict[str, str]:
    """What must be the same for two dumps to be compared."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"gpu": gpu, "device": device, "dtype": str(DTYPE[device]), **versions}


def opened(path: Path) -> IO[str]:
    """For writing."""
    return gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w")


if __name__ == "__main__":
    arguments = parse()
    if arguments.command == "configs":
        write_configs(arguments.out)
    elif arguments.command == "dump":
        dump(arguments)
    else:
        sys.exit(compare(arguments.a, arguments.b, show=arguments.show, common=arguments.common))
