"""The variants of the model benchmark: one attention each, all on the same parameters.

A variant's name is a backend of ours, or "transformers:" and an implementation of theirs; after an
"@" stands where the boundaries come from, if not the default (ours: a `PackedLayout` made on the
host; transformers': position_ids, as its documentation tells users to pack). With position_ids ours
makes its shapes for patch_model's default capacity and bound. With cu_seq_lens transformers'
FlashAttention reads nothing back in its layers: its own fast form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.model.utilisation import resolved_auto
from flexvarlen.equivalence.oracle import share
from flexvarlen.equivalence.variants import Unsupported as Unsupported
from flexvarlen.equivalence.variants import set_transformers
from flexvarlen.layout.boundaries import round_up_to_power_of_two

DEFAULT_VARIANTS = (
    "transformers:sdpa",
    "transformers:flash_attention_2",
    "transformers:flash_attention_3",
    "transformers:flash_attention_3@cu_seq_lens",
    "transformers:flex_attention",
    "auto",
    "auto@position_ids",
    "fa3",
    "fa4",
    "flex_fa4",
    "flex",
    "fa2",
    "varlen",
)
"""What a plain run measures, in an order in which time that runs out skips what matters least; of
transformers' fast forms the newer kernel's alone, so that it ends within ten minutes. Also known:
any other backend, `…@position_ids`, `transformers:<name>@cu_seq_lens`."""

Compiler = Callable[[torch.fx.GraphModule, list[Tensor]], Any]


@dataclass(frozen=True)
class Sizes:
    """What shapes are made for, over all packings of a run."""

    tokens: int
    capacity: int
    max_seqlen_bound: int

    @classmethod
    def of(cls, tokens: int, *packings: Sequence[int]) -> Sizes:
        """For rows of so many tokens and documents of these lengths, each rounded up."""
        longest = round_up_to_power_of_two(max(map(max, packings)))
        capacity = round_up_to_power_of_two(max(map(len, packings)))
        return cls(tokens, capacity, min(longest, tokens))


@dataclass(frozen=True)
class Variant:
    """A module with its own attention and shared parameters, and how to call it."""

    name: str
    model: PreTrainedModel
    fullgraph: bool
    inputs: Callable[[Sequence[int]], dict[str, Any]]
    """Document lengths -> keyword arguments of a forward, but for `input_ids`."""
    resolved: Callable[[Sequence[int]], str | None]
    """Document lengths -> what attends: "auto" resolved (it measures, if it has not). None where
    that is transformers', and for "auto" from position_ids: a graph's sizes are not the layout's,
    so only a run tells (`flexvarlen.bench.model.utilisation.noting_auto`)."""

    def compiled(self, compiler: str) -> Callable[..., Any]:
        """The module under torch.compile.

        Dynamo keeps compiled code by code object, which all variants of a model class share. Each
        variant brings a backend object of its own, so that none is served another's graphs.
        """
        return compiled_alone(self.model, compiler, fullgraph=self.fullgraph)


def compiled_alone(
    model: PreTrainedModel, compiler: str, *, fullgraph: bool, dynamic: bool | None = None
) -> Callable[..., Any]:
    """A module under torch.compile, with a backend object of its own."""
    backend = _inductor() if compiler == "inductor" else _debug_backend(compiler)
    return torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)


def _inductor() -> Compiler:
    from torch._inductor.compile_fx import compile_fx

    def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_fx(graph, inputs)

    return inductor


def _debug_backend(name: str) -> Compiler:
    from torch._dynamo.backends.registry import lookup_backend

    compile_graph = lookup_backend(name)

    def wrapped(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_graph(graph, inputs)

    return wrapped


def make_variant(
    name: str, base: PreTrainedModel, sizes: Sizes, *, needs_grad: bool = True
) -> Variant:
    """A variant of `base` that shares its parameters.

    Raises:
        Unsupported: it cannot run here, or not train where `needs_grad`: a package is missing, or
            the kernel refuses.
        ValueError: an unknown name.
    """
    kind, _, boundaries = name.partition("@")
    theirs = kind.startswith("transformers:")
    known = ("", "position_ids", "cu_seq_lens") if theirs else ("", "position_ids")
    if boundaries not in known or not (theirs or kind in (*fv.BACKENDS, "auto")):
        raise ValueError(
            f"variant must be one of {', '.join(DEFAULT_VARIANTS)}, another backend of ours or "
            f"transformers:<attn_implementation>, got {name!r}"
        )
    model = share(base)
    if theirs:
        set_transformers(model, kind.removeprefix("transformers:"))
    else:
        patch_or_refuse(model, kind, needs_grad=needs_grad)
    device = next(base.parameters()).device

    def layout_of(lengths: Sequence[int]) -> fv.PackedLayout:
        return fv.PackedLayout.from_lengths(
            lengths,
            device=device,
            total_tokens=sizes.tokens,
            capacity=sizes.capacity,
            max_seqlen_bound=sizes.max_seqlen_bound,
        )

    def resolved(lengths: Sequence[int]) -> str | None:
        if kind != "auto" or boundaries:
            return None if theirs or kind == "auto" else kind
        found = resolved_auto(model, layout_of(lengths), base.dtype, needs_grad=needs_grad)
        return ", ".join(dict.fromkeys(found.values()))

    def inputs(lengths: Sequence[int]) -> dict[str, Any]:
        layout = layout_of(lengths)
        if not theirs and not boundaries:
            return {"packed_layout": layout}
        arguments: dict[str, Any] = {
            "position_ids": layout.position_ids()[None],
            "use_cache": False,
        }
        if boundaries == "cu_seq_lens":  # as DataCollatorWithFlattening makes them
            ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
            longest = max(lengths)
            arguments |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            arguments |= {"max_length_q": longest, "max_length_k": longest}
        return arguments

    # transformers' own break the graph: under fullgraph they would not run at all.
    return Variant(name, model, fullgraph=not theirs, inputs=inputs, resolved=resolved)


def patch_or_refuse(
    model: PreTrainedModel, backend: str, *, dtype: torch.dtype | None = None, needs_grad: bool
) -> None:
    """`patch_model`, in place.

    Args:
        backend: of ours, or "auto".
        dtype: that attention gets, where that is not the parameters' (under autocast).
        needs_grad: whether it is to train.

    Raises:
        Unsupported: a package is missing, or the kernel refuses.
    """
    config, parameter = model.config, next(model.parameters())
    reason = None
    if backend != "auto":
        reason = fv.why_not(
            backend,
            device=parameter.device,
            dtype=dtype or parameter.dtype,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            needs_grad=needs_grad,
        )
    if reason is not None:
        raise Unsupported(reason)
    fv.patch_model(model, backend)
