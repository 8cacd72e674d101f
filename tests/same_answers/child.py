"""Run cases on the flexvarlen that is first on the path; started by `python -m tests.same_answers`.

Uses public names alone: the checkout may be an older one, whose modules are named otherwise.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import flexvarlen as fv

GRADIENT = "gradient of "
Tensors = dict[str, Tensor]


def run_all(cases: list[dict[str, Any]], device: str, seconds: float = 1e9) -> dict[str, Any]:
    """By the case's name, its tensors, or the sentence that it raises; no case begins later."""
    found: dict[str, Any] = {}
    end = time.perf_counter() + seconds
    for case in cases:
        begin = time.perf_counter()
        if begin > end:
            break
        torch._dynamo.reset()
        try:
            tensors = run(case, device)
            outcome: Any = {name: x.detach().cpu() for name, x in tensors.items()}
        except Exception as error:  # any: both checkouts must raise the same
            outcome = sentence_of(error)
        found[case["name"]] = outcome
        raised = f": {outcome}" if isinstance(outcome, str) else ""
        sys.stderr.write(f"{time.perf_counter() - begin:6.2f} s  {case['name']}{raised}\n")
    return found


def sentence_of(error: Exception) -> str:
    """Type and first line: what follows in an error of torch.compile quotes lines of the source."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def run(case: dict[str, Any], device: str) -> Tensors:
    """Outputs, and the gradients of all parameters unless the mode has none."""
    model = new_model(case, device)
    inputs = {name: on_device(x, device) for name, x in case["inputs"].items()}
    if "samples" in inputs:
        inputs = fv.share_prefixes(inputs["samples"], device=device).batch()
    mode, call = case["mode"], model
    if mode["patch"] == "name":
        name = "doc" if case["backend"] == "sdpa" else case["backend"]
        model.set_attn_implementation(f"flexvarlen_{name}")
    else:
        fv.patch_model(model, case["backend"], **mode["options"])
    if mode["patch"] == "undone":
        fv.unpatch_model(model)
        for name in ("packed_layout", "sample_counts", "label_counts"):  # unknown to transformers
            inputs.pop(name, None)
    if mode["reentrant"] is not None:
        model.gradient_checkpointing_enable({"use_reentrant": mode["reentrant"]})
    if mode["call"] == "compiled":
        call = torch.compile(model, backend="aot_eager" if device == "cpu" else "inductor")
    torch.manual_seed(1)
    if mode["call"] == "generate":
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        out = model.generate(**inputs, **settings, output_logits=True, return_dict_in_generate=True)
        return {"tokens": out.sequences, "logits": torch.stack(out.logits)}
    with (
        torch.set_grad_enabled(mode["gradients"]),
        torch.autocast(device, torch.bfloat16, enabled=mode["autocast"]),
    ):
        out = outputs_of(call.train(mode["train"])(**inputs))
        loss = out["loss"] if "loss" in out else weighted(next(iter(out.values())))
    if not mode["gradients"]:
        return out
    loss.backward()
    named = model.named_parameters()
    return out | {GRADIENT + name: x.grad for name, x in named if x.grad is not None}


def new_model(case: dict[str, Any], device: str) -> Any:
    """Always with the same weights, in float32 on the CPU, else in bfloat16."""
    settings = {name: x for name, x in case["config"].items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(case["model_type"], **settings)
    config._experts_implementation = "batched_mm"  # the others cannot be traced in one graph
    torch.manual_seed(0)
    loader = getattr(transformers, case["class"])
    model = loader.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):  # they start at 0
                parameter.normal_(std=0.2)
            elif name.endswith("A_log"):  # a state that is forgotten at once hides what differs
                parameter.sub_(4.0)
    return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16).eval()


def on_device(x: Any, device: str) -> Any:
    """A tensor, or a layout from its lengths and parents; what is neither, as it is."""
    if isinstance(x, dict):
        make = fv.PackedLayout.from_tree if "parents" in x else fv.PackedLayout.from_lengths
        return make(**x, device=device)
    if not isinstance(x, Tensor):
        return x
    is_pixels = x.is_floating_point() and device != "cpu"
    return x.to(device, torch.bfloat16 if is_pixels else None)


def outputs_of(out: Any) -> Tensors:
    return {name: x for name, x in out.items() if isinstance(x, Tensor)}


def weighted(x: Tensor) -> Tensor:
    """A scalar whose gradient differs at each element."""
    weights = torch.linspace(-1, 1, x.numel(), device=x.device)
    return (x.float().flatten() * weights).sum() / len(weights) ** 0.5


def main(cases: str, out: str, device: str, checkout: str, seconds: str) -> None:
    if not Path(fv.__file__).resolve().is_relative_to(checkout):
        raise SystemExit(f"flexvarlen must come from {checkout}, got {fv.__file__}.")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.save(run_all(torch.load(cases), device, float(seconds)), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
