"""A process of `same_speed.py`: makes and times what it is asked for, with one flexvarlen.

It reads one JSON object a line and answers each by one: `prepare` a figure, `measure` it, `release`
it. What a figure is made of comes from the parent, so both versions get the same inputs.

Shapes: T tokens in one packed row, H query heads, Hkv key and value heads, D = head_dim.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import flexvarlen as fv

BUSY_WRITES = 40  # of 256 MiB, 0.06 ms each on an H200: the host gets ahead, and L2 is evicted
UNSUPPORTED = (NotImplementedError, ImportError)


class Worker:
    """One figure at a time; a model is kept from one figure to the next."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.on_gpu = device == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        size = 2**26 if self.on_gpu else 1
        self.scratch = torch.empty(size, dtype=torch.int32, device=self.device)
        self.model: tuple[str, Any] = ("", None)
        self.call: Callable[[], Any] = lambda: None

    # ---- figures ----

    def layout(self, lengths: list[int]) -> Any:
        return fv.PackedLayout.from_lengths(lengths, device=self.device)

    def prepare(self, figure: dict[str, Any]) -> dict[str, Any]:
        """Make the figure's call and run it once; what there is to say of it."""
        self.figure = figure
        torch._dynamo.reset()
        self.free()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        found: dict[str, Any] = getattr(self, f"prepare_{figure['kind']}")(**figure["of"])
        return found

    def prepare_attention(
        self,
        backend: str,
        heads: tuple[int, int],
        head_dim: int,
        lengths: list[int],
        passes: str,
    ) -> dict[str, Any]:
        """`passes`: "forward", "forward for a backward" or "forward and backward"."""
        layout = self.layout(lengths)
        needs_grad = passes != "forward"
        shapes = [(sum(lengths), h, head_dim) for h in (heads[0], heads[1], heads[1], heads[0])]
        q, k, v, cotangent = (torch.randn(s, dtype=self.dtype, device=self.device) for s in shapes)
        leaves = tuple(x.requires_grad_(needs_grad) for x in (q, k, v))

        def forward() -> Any:
            return fv.packed_attention(q, k, v, layout, backend=backend)

        def both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(forward(), leaves, cotangent)

        self.call = both if passes == "forward and backward" else forward
        self.call()
        found: dict[str, Any] = {"digest": digest(forward())}
        if backend == "auto":
            kind: dict[str, Any] = {
                "num_heads": heads[0],
                "num_kv_heads": heads[1],
                "head_dim": head_dim,
            }
            kind |= {"dtype": self.dtype, "needs_grad": needs_grad}
            found["chosen"] = fv.explain(layout, **kind).chosen
        return found

    def prepare_mask(self, lengths: list[int]) -> dict[str, Any]:
        layout = self.layout(lengths)
        self.call = lambda: fv.document_block_mask(layout)
        tables = self.call().as_tuple()
        return {"digest": digest(*(x for x in tables if isinstance(x, Tensor)))}

    def prepare_model(
        self,
        config: dict[str, Any],
        backend: str,
        lengths: list[int],
        *,
        train: bool,
        compiled: bool = False,
    ) -> dict[str, Any]:
        """A packed row through a model: a step with labels, or a forward without gradients."""
        key = json.dumps(config)
        if self.model[0] != key:
            self.model = ("", None)
            self.free()
            with self.device:
                made = transformers.AutoModelForCausalLM.from_config(
                    transformers.Qwen3Config(**config), dtype=self.dtype, attn_implementation="sdpa"
                )
            self.model = (key, made)
        model = fv.patch_model(self.model[1], backend).train(train)
        run = torch.compile(model) if compiled else model
        shape = (1, sum(lengths))
        ids = torch.randint(config["vocab_size"], shape, device=self.device)
        layout = self.layout(lengths)

        def forward(own: Any = layout) -> Any:
            with torch.no_grad():
                return run(input_ids=ids, packed_layout=own, use_cache=False).logits

        def step(own: Any = layout) -> Any:
            model.zero_grad(set_to_none=True)
            outputs = run(input_ids=ids, labels=ids, packed_layout=own, use_cache=False)
            outputs.loss.backward()
            return outputs.loss.detach()

        self.call = step if train else forward
        if not compiled:
            return {"digest": digest(self.call())}
        from torch._dynamo.utils import counters

        graphs = counters["stats"]["unique_graphs"]
        breaks = sum(counters["graph_break"].values())
        first_s = self.seconds(self.call)
        first_graphs = counters["stats"]["unique_graphs"]
        found = {"digest": digest(self.call())}
        step(self.layout(lengths[::-1]))  # other documents must compile nothing
        return found | {
            "compile_s": first_s - min(self.seconds(self.call) for _ in range(2)),
            "graphs": first_graphs - graphs,
            "graph_breaks": sum(counters["graph_break"].values()) - breaks,
            "recompilations": counters["stats"]["unique_graphs"] - first_graphs,
        }

    # ---- clocks: milliseconds or microseconds of a call ----

    def measure(self) -> dict[str, Any]:
        """The median of some calls, and the memory at the most."""
        figure = self.figure
        for _ in range(figure["warmup"]):
            self.call()
        gc.collect()
        gc.disable()
        clock = getattr(self, f"{figure['clock']}_time")
        samples = [clock(figure.get("calls", 1)) for _ in range(figure["samples"])]
        gc.enable()
        found = {"value": statistics.median(samples), "peak_mib": self.peak_mib()}
        if figure["kind"] == "model":
            self.free()
        return found

    def device_time(self, _: int) -> float:
        """Milliseconds of the device's work, which waits behind other work for the host."""
        if not self.on_gpu:
            return self.seconds(self.call) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(BUSY_WRITES):
            self.scratch.zero_()
        begin.record()
        self.call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))

    def step_time(self, _: int) -> float:
        """Milliseconds until the device is done, from an idle device on."""
        return self.seconds(self.call) * 1e3

    def host_time(self, calls: int) -> float:
        """Microseconds of the host a call, over many that the device is not waited for."""
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            self.call()
        spent = time.perf_counter() - begin
        self.synchronize()
        return spent / calls * 1e6

    def seconds(self, call: Callable[[], Any]) -> float:
        self.synchronize()
        begin = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - begin

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def peak_mib(self) -> float:
        """Of what torch allocated since `prepare`; on the CPU of the process, ever."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated() / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    def release(self) -> dict[str, Any]:
        self.call = lambda: None
        self.free()
        return {}

    def free(self) -> None:
        """Give back what the other process may need."""
        if self.model[1] is not None:
            self.model[1].zero_grad(set_to_none=True)
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


def digest(*tensors: Tensor) -> str:
    """Of the bytes; equal for both versions if their outputs are."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    """Serve the parent until it closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes elsewhere
    folder, device = Path(sys.argv[1]).resolve(), sys.argv[2]
    if folder not in Path(fv.__file__).resolve().parents:
        raise SystemExit(f"flexvarlen must come from {folder}, got {fv.__file__}; set PYTHONPATH.")
    transformers.logging.set_verbosity_error()
    torch._dynamo.config.recompile_limit = 64
    worker = Worker(device)
    gpu = torch.cuda.get_device_name() if worker.on_gpu else "none"
    machine = {"gpu": gpu, "torch": torch.__version__, "transformers": transformers.__version__}
    answers.write(json.dumps(machine) + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["op"] == "prepare":
                found = worker.prepare(order["figure"])
            else:
                found = worker.measure() if order["op"] == "measure" else worker.release()
        except (*UNSUPPORTED, RuntimeError, ValueError, TypeError, AttributeError) as error:
            status = "unsupported" if isinstance(error, UNSUPPORTED) else "failed"
            found = {"status": status, "reason": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
