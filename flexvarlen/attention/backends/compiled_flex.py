"""Compile FlexAttention for both flex backends, with one compiled function per kind of call.

Shape legend: T, Tk = tokens of the query and the key row, H = num_heads, Hkv = num_kv_heads,
D = head_dim.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable
from functools import cache, partial
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flexvarlen.attention.call import INT32_ELEMENTS, AttentionCall
from flexvarlen.mask.document_mask import DocumentMask


class FlexOptions(NamedTuple):
    """Static options with which FlexAttention is compiled.

    Attributes:
        kernel: FlexAttention's `BACKEND` kernel option on a GPU, "TRITON" or "FLASH".
        scale, softcap: as in `AttentionCall`.
        with_lse: whether to return the LSE.
        tiles: key of `FORWARD_TILES`, or None for torch's default.
        whole_blocks: whether the row's length is a multiple of the block size.
    """

    kernel: str
    scale: float
    softcap: float | None
    with_lse: bool
    tiles: str | None
    whole_blocks: bool


def flex(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    call: AttentionCall,
    mask: DocumentMask,
    block_mask: BlockMask,
    kernel: str,
    *,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the output `[T, H, D]` and, if `with_lse`, the LSE `[H, T]`, both without sinks."""
    on_cpu = q_THD.device.type == "cpu"
    if on_cpu:  # torch rejects tensors that require grad on the CPU, even under no_grad
        q_THD, k_THD, v_THD = q_THD.detach(), k_THD.detach(), v_THD.detach()
    q, k, v = (_as_BHTD(x, kernel) for x in (q_THD, k_THD, v_THD))
    options = FlexOptions(
        kernel,
        call.scale,
        call.softcap,
        with_lse,
        forward_tiles(q, mask, call) if kernel == "TRITON" else None,
        call.batch_invariant,
    )
    ordered_backward = call.ordered_backward and not on_cpu
    if torch.compiler.is_compiling():
        if ordered_backward:
            _require_fixed_choices()
        out, lse = _flex(q, k, v, block_mask, options)
    else:
        if ordered_backward:
            for x in (q, k, v):
                torch._dynamo.maybe_mark_dynamic(x, 2)  # one kernel for rows of any length
        kind = (
            *(q.device.type, q.device.index, q.dtype, q.shape[1], k.shape[1], q.shape[3]),
            mask.spec.ends_at_query,
            mask.spec.cross,
            mask.spec.tree and mask.spec.is_limited,
            mask.spec.tree,
            *options,
            # The C++ template does not compile for symbolic T (torch 2.13).
            (q.shape[2], k.shape[2]) if on_cpu else None,
            torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
        )
        out, lse = _call_compiled(kind, call.ordered_backward, (q, k, v, block_mask, options))
    return out[0].transpose(0, 1), None if lse is None else lse[0]


def _as_BHTD(x_THD: Tensor, kernel: str) -> Tensor:
    """Return the tensor as `[1, H, T, D]`: a copy where views do not serve, otherwise a view."""
    if not torch.compiler.is_compiling():
        # Each order of strides would be compiled for, and partial rotary embeddings give another.
        x_THD = x_THD.contiguous()
    elif x_THD.device.type == "cpu" or kernel == "FLASH":
        # The C++ template does not accept views. Nor does FLASH: Inductor gives the batch dimension
        # of a view stride 0 and that of the output stride 1, which is not aligned. `repeat` adds
        # that dimension: Inductor removes copies that change neither shape nor strides.
        return x_THD.transpose(0, 1).repeat(1, 1, 1, 1)
    x_BHTD = x_THD.transpose(0, 1)[None]
    # The templates of torch up to 2.13 would overflow offsets.
    return x_BHTD.contiguous() if x_THD.numel() >= INT32_ELEMENTS else x_BHTD


def _flex(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, options: FlexOptions
) -> tuple[Tensor, Tensor | None]:
    kernel_options: Any = None
    if q.device.type == "cuda":
        # Under AUTO fewer than 128 queries would use the decoding kernel, which supports only other
        # block sizes.
        kernel_options = {"BACKEND": options.kernel}
        if options.tiles is not None:
            kernel_options |= FORWARD_TILES[options.tiles]
        if options.whole_blocks:
            kernel_options |= WHOLE_BLOCKS
    result = flex_attention(
        q,
        k,
        v,
        score_mod=None if options.softcap is None else _softcap(options.softcap),
        block_mask=block_mask,
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=kernel_options,
        return_aux=AuxRequest(lse=True) if options.with_lse else None,
    )
    if options.with_lse:
        out, aux = result
        return out, aux.lse
    assert isinstance(result, Tensor)
    return result, None


def _softcap(limit: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return score_mod


# ---- tiles ----

FORWARD_TILES = {
    "hopper": {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4},
    "wide_float32": {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1},
}
"""Tile sizes of the forward kernel.

On Hopper in half precision, less of each tile is masked out than with torch's 128 queries, which at
head_dim 64 also need too many registers. `flexvarlen bench kernels` compares them: `flex` uses
these tiles, `raw:flex` torch's. In float32, torch's tiles for most head dims above 128 do not fit
into an H200's shared memory.
"""

TORCHS_WIDEST_FLOAT32 = 128

WHOLE_BLOCKS = {"IS_DIVISIBLE": True}
"""Kernel options for a row of block-aligned documents, whose T is a multiple of 128.

By default, Inductor detects this for a static T but not for a dynamic one, so the same document
could run on two different kernels.
"""

LONGEST_OF_TILES = 32768
"""At head_dim 128, torch's tiles are faster if documents may be longer than this."""


def forward_tiles(q_BHTD: Tensor, mask: DocumentMask, call: AttentionCall) -> str | None:
    """Return the `FORWARD_TILES` key for the Triton kernel, or None for torch's default.

    With batch invariance, it does not depend on the row, because different tiles round differently.
    """
    if q_BHTD.device.type != "cuda":
        return None
    head_dim = index(q_BHTD.shape[3])
    if q_BHTD.dtype == torch.float32:
        return "wide_float32" if head_dim > TORCHS_WIDEST_FLOAT32 else None
    short = mask.layout_k.max_seqlen_bound <= LONGEST_OF_TILES
    if head_dim == 128 and not short and not call.batch_invariant:
        return None
    return "hopper" if _tiles_are_known(q_BHTD.device.index, q_BHTD.dtype, head_dim) else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tiles_are_known(device_index: int | None, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the Hopper tiles were measured for this GPU, dtype and head_dim.

    False if Inductor autotunes (`torch._inductor.config.max_autotune`). The modes and options
    of torch.compile are not known while it traces.
    """
    from torch._inductor import config

    return (
        torch.version.hip is None
        and torch.cuda.get_device_capability(device_index) == (9, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and not config.max_autotune
    )


# ---- compilation ----

FIXED_CHOICES = "deterministic"
"""Inductor option with which it chooses kernels by fixed rules.

Otherwise it chooses by timing, including for the small kernel in FlexAttention's backward that sums
`grad * out` over head_dim, and the order of summation depends on the choice. On an H200 with
head_dim 128, two compilations of one call gave bitwise different dq and dk.
"""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _require_fixed_choices() -> bool:
    """Raise in a user's compiled graph unless torch and Inductor are in deterministic mode.

    torch's setting implies Inductor's. Inductor's alone is not enough: Dynamo restores torch's
    setting, and with it Inductor's, after the first graph and before the backward is compiled.
    """
    from torch._inductor import config

    if torch.are_deterministic_algorithms_enabled() and getattr(config, FIXED_CHOICES):
        return True
    raise NotImplementedError(
        "flex is bitwise reproducible across compilations only while torch's and Inductor's "
        "deterministic modes are on; call torch.use_deterministic_algorithms(True) and leave both "
        "on, or use backend='fa3' or 'fa2'."
    )


def _call_compiled(
    kind: tuple[object, ...], ordered_backward: bool, args: tuple[Any, ...]
) -> tuple[Tensor, Tensor | None]:
    """Call the compiled kernel for a kind of call, even beyond Dynamo's recompile limit.

    Rows of one token and rows shorter than a block may each add a graph. At the limit, the kind
    gets a new function, whose count starts at 0.
    """
    while True:
        generation = _generations.get(kind, 0)
        try:
            with _ONE_AT_A_TIME:
                return _compiled(kind, ordered_backward, generation)(*args)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            _generations[kind] = generation + 1
            warnings.warn(
                "flexvarlen: flex has compiled as many graphs for this kind of call as Dynamo "
                "allows (torch._dynamo.config.recompile_limit) and will compile more; rows of one "
                "size, padded to total_tokens, need one.",
                stacklevel=2,
            )


_ONE_AT_A_TIME = threading.RLock()
"""torch 2.13 counts the compiled frames of `fullgraph=True` globally for all threads, so one of two
concurrent calls may raise as if none had been compiled (fixed in pytorch pull request 185138)."""

_generations: dict[tuple[object, ...], int] = {}
"""Number of functions that have reached the recompile limit, by kind of call."""


@cache
def _compiled(
    kind: tuple[object, ...], ordered_backward: bool, generation: int
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Compile the kernel for one kind of call, with only T dynamic.

    Dynamo counts recompilations and tracks dynamic sizes per code object and name, so each kind
    gets its own function.
    """
    name = "flex_" + "_".join(map(str, (*kind, ordered_backward, generation)))
    own = types.FunctionType(_flex.__code__.replace(co_name=name), _flex.__globals__)
    # The C++ template does not compile for symbolic T (torch 2.13), so on the CPU T is part of the
    # kind.
    dynamic = False if kind[0] == "cpu" else None
    options = {FIXED_CHOICES: True} if ordered_backward else None
    backend = partial(_inductor_keeping_buffers, options=options)
    return torch.compile(own, fullgraph=True, dynamic=dynamic, backend=backend)


def _inductor_keeping_buffers(
    graph: torch.fx.GraphModule, inputs: list[Tensor], *, options: dict[str, Any] | None
) -> Any:
    """Compile with Inductor, without donated buffers, so that a backward may run twice.

    By default, a backward overwrites what the forward saved for it, and raises under
    `retain_graph=True`.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(donated_buffer=False):  # also keeps such graphs apart in torch's caches
        return compile_fx(
            graph, inputs, inner_compile=_compile_without_donations, config_patches=options
        )


def _compile_without_donations(
    graph: torch.fx.GraphModule, inputs: list[Any], **options: Any
) -> Any:
    """Compile a forward or backward graph, and record that it donates no buffer.

    Under `donated_buffer=False` AOTAutograd leaves the list of donated buffers at None, which it
    takes for a list that is not empty when the backward runs, where the setting is back to True.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    metadata = torch._guards.TracingContext.get().fw_metadata
    if metadata is not None:
        metadata.bw_donated_idxs = []
    return compile_fx_inner(graph, inputs, **options)
