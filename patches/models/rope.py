"""Rotary tables: per document, and computed once per compiled forward.

`longrope` uses other frequencies for rows longer than the model's original context, so the
longest document would decide for all. Here each document gets its own. `dynamic` recomputes
them from the longest position seen so far, and is refused.

Inductor would fuse `cos` and `sin` into every layer's rotation, forward and backward: the same
trigonometry for every head of every layer. An opaque operator materializes the tables. In
short, launch-bound rows, reading them is slower than recomputing them.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flexvarlen.layout.launch_sizes import SHORT_ROW
from flexvarlen.patches.models.verified import NOT_PATCHED


@torch.library.custom_op("flexvarlen::materialize", mutates_args=())
def materialize(x: Tensor) -> Tensor:
    """A copy of `x` that Inductor stores instead of recomputing it at each use."""
    return x.clone()


@materialize.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def why_not_dynamic(config: Any, rotary_type: str | None = None) -> str | None:
    """Why a rotary embedding's frequencies cannot be computed per document, or None.

    Args:
        config: of the text tower.
        rotary_type: `rope_type` of the rotary module, or None where only layers are at hand.
            HunYuan's has fixed frequencies under `dynamic` with an `alpha`, and then a type of its
            own.
    """
    if rotary_type == "ntk_alpha":
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    by_type = [x for x in parameters.values() if isinstance(x, dict)]
    types = [x.get("rope_type") for x in by_type or [parameters]]
    if rotary_type is None and parameters.get("alpha"):
        return (
            "rope_type 'dynamic' with a fixed alpha can only be checked on the whole model, "
            f"{NOT_PATCHED}"
        )
    if "dynamic" in types or (by_type and "longrope" in types):
        return (
            f"rope_type must be one whose frequencies are the same for all documents, got "
            f"{'dynamic' if 'dynamic' in types else 'longrope by layer type'}, which takes them "
            "from the longest position in the batch; choose 'yarn', 'linear' or 'llama3' in "
            "config.rope_parameters."
        )
    return None


def why_not_by_layer(config: Any) -> str | None:
    """Why rotary tables need `patch_model`, as they are built before any layer runs, or None."""
    why = why_not_dynamic(config)
    if why is None and has_longrope(config):  # all documents would get those of the longest one
        return (
            "rope_type 'longrope' takes its frequencies from the longest position in the batch, "
            f"{NOT_PATCHED}"
        )
    return why


def has_longrope(config: Any) -> bool:
    """Whether frequencies depend on how long a document is."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters.get("rope_type") == "longrope"


def patch_rotary(base: nn.Module) -> None:
    """Make `base.rotary_emb` compute its tables per document, once per compiled forward."""
    unpatch_rotary(base)
    rotary = getattr(base, "rotary_emb", None)
    if rotary is None:
        return
    if getattr(rotary, "rope_type", None) == "longrope":
        setattr(rotary, LONG, _long_frequencies(rotary, rotary.inv_freq.device))
        vars(rotary)[_forward_attribute(rotary)] = MethodType(forward, rotary)
    rotary.register_forward_hook(_materialize_outputs)


def unpatch_rotary(base: nn.Module) -> None:
    """Undo `patch_rotary`."""
    rotary = getattr(base, "rotary_emb", None)
    if rotary is None:
        return
    hooks = rotary._forward_hooks
    for key in [key for key, hook in hooks.items() if hook is _materialize_outputs]:
        del hooks[key]
    if vars(rotary).pop(LONG, None) is not None:
        place = _forward_attribute(rotary)
        del vars(rotary)[place]
        if place != "forward":
            vars(rotary)[place] = MethodType(type(rotary).forward, rotary)


LONG = "_flexvarlen_long_inv_freq"


def _forward_attribute(rotary: nn.Module) -> str:
    """The attribute that holds the instance's forward; accelerate's hooks rename it."""
    return "_old_forward" if "_old_forward" in vars(rotary) else "forward"


def _short_length(rotary: nn.Module) -> int:
    """Longest document, in tokens, that uses the short frequencies."""
    parameters: dict[str, Any] = rotary.config.rope_parameters  # type: ignore[union-attr, assignment]
    length: int = parameters["original_max_position_embeddings"]
    return length


def _long_frequencies(rotary: nn.Module, device: Any) -> Tensor:
    """fp32 `[head_dim / 2]`: frequencies of documents longer than `_short_length`."""
    init = ROPE_INIT_FUNCTIONS["longrope"]
    long: Tensor = init(rotary.config, device, seq_len=_short_length(rotary) + 1)[0]
    return long


class _Frequencies:
    """The attributes that a rotary embedding's forward reads, with a static rope_type."""

    rope_type = "default"

    def __init__(self, inv_freq: Tensor, attention_scaling: float) -> None:
        self.inv_freq, self.attention_scaling = inv_freq, attention_scaling


# Named `forward` so that unpickling resolves to the class's own forward.
def forward(self: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
    """cos and sin `[B, S, head_dim]` of longrope, chosen by the length of each token's document.

    A document is a run of positions that increase by 1. transformers would choose one set of
    frequencies for the whole batch (in 5.17 with a device sync).
    """
    begins_BS = torch.nn.functional.pad(position_ids.diff(dim=1) != 1, (1, 0))
    run_BS = begins_BS.cumsum(1)
    last_BR = torch.zeros_like(position_ids).scatter_reduce(1, run_BS, position_ids, "amax")
    is_long_BS = last_BR.gather(1, run_BS) >= _short_length(self)
    dtype: Any = self.inv_freq.dtype
    tables, long = [], getattr(self, LONG)
    if long.device != x.device:  # not a buffer, as `to_empty` would fill it with garbage
        long = _long_frequencies(self, x.device)
        if not torch.compiler.is_compiling():
            setattr(self, LONG, long)
    for inv_freq in (long, self.original_inv_freq):
        frequencies = _Frequencies(inv_freq.to(x.device, dtype), self.attention_scaling)  # type: ignore[arg-type]
        tables.append(type(self).forward(frequencies, x, position_ids))
    return tuple(torch.where(is_long_BS[..., None], a, b) for a, b in zip(*tables, strict=True))


def _materialize_outputs(rotary: nn.Module, args: Any, output: Any) -> Any:
    """`output`: cos and sin `[B, S, head_dim]`, or one table for both.

    A graph with a dynamic S guards on whether B·S is short.
    """
    if not torch.compiler.is_compiling():
        return output
    table = output if isinstance(output, Tensor) else output[0]
    if table.shape[0] * table.shape[1] <= SHORT_ROW:
        return output
    return materialize(output) if output is table else tuple(map(materialize, output))
