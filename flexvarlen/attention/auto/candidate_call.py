"""Run a candidate backend forward and backward on random tensors, isolated from the user's call.

Shape legend: T, Tk = tokens of the query and the key row, H = num_heads, Hkv = num_kv_heads,
D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.document_mask import DocumentMask

Result = TypeVar("Result")


class RandomTensors(NamedTuple):
    """q `[T, H, D]`, k and v `[Tk, Hkv, D]`, sinks `[H]` or None, and the output's gradient."""

    q_THD: Tensor
    k_THD: Tensor
    v_THD: Tensor
    sinks_H: Tensor | None
    grad_THD: Tensor

    @classmethod
    def of(cls, call: AttentionCall, mask: DocumentMask) -> RandomTensors:
        """Make the tensors, which depend only on the call and the mask's numbers of tokens."""
        generator = torch.Generator(call.device).manual_seed(0)

        def random(*shape: int, requires_grad: bool = call.needs_grad) -> Tensor:
            values = torch.randn(shape, generator=generator, device=call.device, dtype=call.dtype)
            return values.requires_grad_(requires_grad)

        queries = (mask.layout.total_tokens, call.num_heads, call.head_dim)
        keys = (mask.layout_k.total_tokens, call.num_kv_heads, call.head_dim)
        return cls(
            random(*queries),
            random(*keys),
            random(*keys),
            random(call.num_heads) if call.sinks else None,
            random(*queries, requires_grad=False),
        )

    @property
    def inputs(self) -> list[Tensor]:
        """Return the tensors for which gradients are computed."""
        return [x for x in self[:4] if x is not None]


class CandidateCall:
    """A candidate backend applied to fixed tensors. The plan is built once, at the first call."""

    def __init__(
        self, name: str, call: AttentionCall, mask: DocumentMask, tensors: RandomTensors
    ) -> None:
        self.backend = get_backend(name)
        self.call, self.mask, self.tensors = call, mask, tensors
        self.planned = False

    def __call__(self) -> None:
        """Run forward and backward and discard the results, for timing."""
        self.results(self.tensors.grad_THD)

    def results(self, grad_THD: Tensor) -> dict[str, Tensor]:
        """Return the output, LSE and gradients by name, as far as the call requests them."""
        if not self.planned:
            invariant = self.call.batch_invariant
            self.plan = self.backend.plan(self.mask, batch_invariant=invariant)
            self.planned = True
        x = self.tensors
        out_THD, lse_HT = self.backend.attend(
            x.q_THD, x.k_THD, x.v_THD, x.sinks_H, self.call, self.mask, self.plan
        )
        found = {"output": out_THD}
        if lse_HT is not None:
            found["LSE"] = lse_HT
        if self.call.needs_grad:
            grads = torch.autograd.grad(out_THD, x.inputs, grad_THD)
            found |= zip(GRADIENTS, grads, strict=False)
        return found


GRADIENTS = ("dq", "dk", "dv", "dsinks")


def in_own_thread(
    device: torch.device, work: Callable[[], Result], *, needs_grad: bool = True
) -> Result:
    """Run `work` in a new thread; see `in_own_threads`."""
    return in_own_threads(device, [work], needs_grad=needs_grad)[0]


def in_own_threads(
    device: torch.device, works: Sequence[Callable[[], Result]], *, needs_grad: bool = True
) -> list[Result]:
    """Run each of `works` in a new thread, isolated from the state of the calling thread.

    The caller's grad mode, autocast, dispatch modes and saved-tensor hooks (as in gradient
    checkpointing) do not apply, but its stream does. The cuBLAS workspaces of these threads and of
    the backward's stay allocated. RNG states are restored: `works` of several threads must draw
    from separate generators. Must not be called while a CUDA graph is captured, or inside
    a backward, where it would deadlock.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def in_context(work: Callable[[], Result]) -> Result:
        with ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
            ours = [] if stream is None else [stream.device_index]
            stack.enter_context(torch.random.fork_rng(ours, device_type="cuda"))
            stack.enter_context(torch.set_grad_enabled(needs_grad))
            return work()

    threads = ThreadPoolExecutor(len(works), thread_name_prefix="flexvarlen-auto")
    try:
        with torch.autograd.set_detect_anomaly(False), threads:  # global to all threads
            return list(threads.map(in_context, works))
    finally:
        if stream is not None:
            torch.cuda.empty_cache()  # return the memory that `works` used to the device


def why_nothing_runs(device: torch.device) -> str | None:
    """Return why no kernel can be run at this point of the caller's program, or None."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    if torch._C._current_graph_task_id() != -1:  # torch.utils.checkpoint tests it in the same way
        return "the call is inside a backward"
    return None
