"""The variants of the suites of models: one attention each, all on the same parameters.

A variant's name is a backend of ours, or "transformers:" and an implementation of theirs. After an
"@" stands where the boundaries come from, if that is not the default: for ours a `PackedLayout`
made on the host, for transformers' position_ids, as its documentation tells users to pack. With
position_ids ours makes its shapes for patch_model's default capacity and bound. With cu_seq_lens
transformers' FlashAttention reads nothing back in its layers: its own fast form. "both" is
cu_seq_lens and seq_idx, which recurrent layers need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor.compile_fx import compile_fx
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.suites.model.utilisation import resolved_auto
from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.reference.model import share
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.suite import UnknownVariant
from flexvarlen.verify.variants import THEIRS, set_transformers, why_not_layers

# Variants of one class share their code objects, and Dynamo's limits go by code object.
LIMITS = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
FORMS = {True: ("position_ids", "cu_seq_lens", "both"), False: ("packed_layout", "position_ids")}
"""Where boundaries can come from, by whether the attention is transformers'; the default first."""


@dataclass(frozen=True)
class Sizes:
    """What shapes are made for, over all packings of a case."""

    tokens: int
    capacity: int
    max_seqlen_bound: int

    @classmethod
    def of(cls, tokens: int, *packings: Sequence[int]) -> Sizes:
        """For rows of `tokens` tokens and documents of these lengths, each rounded up."""
        longest = round_up_to_power_of_two(max(map(max, packings)))
        capacity = round_up_to_power_of_two(max(map(len, packings)))
        return cls(tokens, capacity, min(longest, tokens))


@dataclass(frozen=True)
class Variant:
    """A module with its own attention and shared parameters, and how to call it."""

    name: str
    model: PreTrainedModel
    sizes: Sizes

    @property
    def attention(self) -> str:
        """The name without the "@"."""
        return self.name.partition("@")[0]

    @property
    def theirs(self) -> bool:
        return self.name.startswith(THEIRS)

    @property
    def form(self) -> str:
        """Where the boundaries come from."""
        return self.name.partition("@")[2] or FORMS[self.theirs][0]

    def layout(
        self, lengths: Sequence[int], parents: Sequence[int] | None = None
    ) -> fv.PackedLayout:
        """Of documents; with `parents` of the segments of trees, as in `from_tree`."""
        make: Callable[..., fv.PackedLayout] = fv.PackedLayout.from_lengths
        if parents is not None:
            make = partial(fv.PackedLayout.from_tree, parents=parents)
        return make(
            lengths,
            device=self.model.device,
            total_tokens=self.sizes.tokens,
            capacity=self.sizes.capacity,
            max_seqlen_bound=self.sizes.max_seqlen_bound,
        )

    def inputs(
        self, lengths: Sequence[int], parents: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of a forward on a packed row, but for `input_ids`."""
        layout = self.layout(lengths, parents)
        if self.form == "packed_layout":
            return {"packed_layout": layout}
        found: dict[str, Any] = {"position_ids": layout.position_ids()[None], "use_cache": False}
        if self.form in ("cu_seq_lens", "both"):  # as DataCollatorWithFlattening makes them
            ends = torch.tensor([0, *lengths]).cumsum(0).to(self.model.device, torch.int32)
            found |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            found |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        if self.form == "both":
            numbers = torch.arange(len(lengths), dtype=torch.int32)
            documents = numbers.repeat_interleave(torch.tensor(lengths))
            found["seq_idx"] = documents[None].to(self.model.device)
        return found

    def attends(
        self,
        lengths: Sequence[int],
        parents: Sequence[int] | None = None,
        *,
        compiled: bool = False,
        needs_grad: bool = True,
    ) -> str | None:
        """The backend that attends; "auto" is resolved, and measures if it has not yet.

        Call it before anything is compiled: inside a graph nothing is measured. None for
        transformers' own, and for "auto" from position_ids: its sizes are known in the graph only.
        """
        if self.theirs or (self.attention == "auto" and self.form != "packed_layout"):
            return None
        if self.attention != "auto":
            return self.attention
        found = resolved_auto(
            self.model, self.layout(lengths, parents), compiled=compiled, needs_grad=needs_grad
        )
        return ", ".join(dict.fromkeys(found.values()))

    def compiled(
        self,
        compiler: str,
        *,
        fullgraph: bool | None = None,
        dynamic: bool | None = None,
        cuda_graphs: bool = False,
    ) -> Callable[..., Any]:
        """The module under torch.compile.

        Args:
            compiler: "inductor", or another backend of torch.compile.
            fullgraph: default: for ours; transformers' own break the graph, and would not run.
            dynamic: as in torch.compile.
            cuda_graphs: as `mode="reduce-overhead"` does.
        """

        backend = own_backend(compiler, cuda_graphs=cuda_graphs)
        fullgraph = not self.theirs if fullgraph is None else fullgraph
        return torch.compile(self.model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)

    def compile_layers(self, compiler: str) -> None:
        """Put each layer under torch.compile by itself; graph breaks are allowed."""
        backend = own_backend(compiler)
        for layer in self.model.layers:
            layer.compile(backend=backend)


def own_backend(compiler: str, *, cuda_graphs: bool = False) -> Callable[..., Any]:
    """A backend of torch.compile that is an object of its own.

    Dynamo keeps compiled code by code object, which all variants of a model class share; by their
    backends, none is served another's graphs.

    Args:
        compiler, cuda_graphs: as in `Variant.compiled`.
    """

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if compiler == "inductor":
            patches = {"triton.cudagraphs": cuda_graphs}
            return compile_fx(graph, inputs, config_patches=patches)
        return lookup_backend(compiler)(graph, inputs)

    return backend


def make_variant(
    name: str, base: PreTrainedModel, sizes: Sizes, *, needs_grad: bool = True
) -> Variant:
    """A variant of a model, whose parameters it shares; `base` itself is not patched.

    Raises:
        Unsupported: it cannot run here, or not train where `needs_grad`: a package is missing, or
            the kernel refuses.
        ValueError: an unknown name.
    """
    require_known(name)
    kind = name.partition("@")[0]
    model = share(base)
    if kind.startswith(THEIRS):
        set_transformers(model, kind.removeprefix(THEIRS))
        return Variant(name, model, sizes)
    reason = why_not_layers(kind, model, needs_grad=needs_grad)
    if reason is not None:
        raise Unsupported(reason)
    fv.patch_model(model, kind)
    return Variant(name, model, sizes)


def require_known(name: str) -> None:
    """Check a variant's name.

    Raises:
        ValueError: there is no such attention, or no such source of boundaries.
    """
    kind, _, form = name.partition("@")
    theirs = kind.startswith(THEIRS)
    if form not in ("", *FORMS[theirs]) or not (theirs or kind in (*fv.BACKENDS, "auto")):
        raise UnknownVariant(
            f"variant must be auto, a backend ({', '.join(fv.BACKENDS)}) or "
            f"{THEIRS}<attn_implementation>, and may end in @{' or @'.join(FORMS[theirs])}, got "
            f"{name!r}; choose one."
        )
