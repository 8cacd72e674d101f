"""The variants of an experiment: one attention each, all on the same parameters.

A variant's name is a backend of ours, or "transformers:" and an implementation of theirs. After an
"@" stands how the documents are marked, one of `FORMS`, if not by the default: for ours a
`PackedLayout` made on the host; for transformers' what the caller's batch says, or, of a row that
no caller made, position_ids without a cache, as transformers' documentation tells users to pack.
With position_ids ours makes its shapes for patch_model's default capacity and bound. With
cu_seq_lens transformers' FlashAttention reads nothing back in its layers: its own fast form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexvarlen.attention.backends.registry import BACKENDS, our_name, refusal
from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.api import patch_model
from flexvarlen.patches.parts import ModelParts
from flexvarlen.reference.model import IGNORE_INDEX, share
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.suite import UnknownVariant
from flexvarlen.verify.experiment.batch import ModelInputs
from flexvarlen.verify.experiment.inputs import THEIRS, forms_of, inputs_of
from flexvarlen.verify.experiment.tree_batch import Row, TreeBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NOT_OURS = ("transformers", "sentence-transformers", "raw", "fixed", "unpatched")
"""Parts of the names of variants whose attention is not flexvarlen's."""


@dataclass(frozen=True)
class Sizes:
    """What shapes are made for, over all rows of an experiment; a row of trees keeps its own."""

    capacity: int
    max_seqlen_bound: int

    @classmethod
    def of(cls, *rows: Row) -> Sizes:
        """Room for the documents of these rows and of others like them: powers of two."""
        each = [row.samples.lengths for row in rows]
        longest = round_up_to_power_of_two(max(map(max, each)))
        capacity = round_up_to_power_of_two(max(map(len, each)))
        return cls(capacity, min(longest, max(map(sum, each))))


@dataclass(frozen=True)
class Variant:
    """A model with its own attention, and how to call it.

    Attributes:
        name: see the module.
        model: shares its parameters with all other variants.
        sizes: of the layouts that it is given.
        call: the model, or the compiled model.
        train: whether a step runs the backward.
        why_no_backward: why not, where training was asked for.
    """

    name: str
    model: PreTrainedModel
    sizes: Sizes
    call: Callable[..., Any]
    train: bool = True
    why_no_backward: str | None = None

    @property
    def attention(self) -> str:
        """The name without the "@"."""
        return self.name.partition("@")[0]

    @property
    def theirs(self) -> bool:
        """Whether the attention is transformers' own."""
        return self.name.startswith(THEIRS)

    @property
    def form(self) -> str:
        """How the documents are marked."""
        return self.name.partition("@")[2] or ("position_ids" if self.theirs else "packed_layout")

    def layout(self, row: Row) -> PackedLayout:
        """The row's documents, in this variant's sizes."""
        return row.layout(self.sizes.capacity, self.sizes.max_seqlen_bound)

    def given(self, row: Row) -> ModelInputs | None:
        """The caller's batch, where this variant runs it as it stands."""
        return row.given if self.theirs and "@" not in self.name else None

    def inputs(self, row: Row) -> dict[str, Any]:
        """Keyword arguments of a forward on `[1, T]`, all but those of single tokens."""
        marks = inputs_of(self.form, self.layout(row), row.samples.lengths)
        return row.images.packed(marks)

    def forward(self, row: Row, **of_tokens: Tensor) -> ModelInputs:
        """The packed row as a forward: the caller's batch as it stands, or `inputs`.

        Args:
            of_tokens: the other arguments, `[1, T, …]`, labels among them; or 0-d.

        Raises:
            Unsupported: transformers' attention gets trees, or a caller's batch with images and
                without their positions, which transformers makes of input_ids.
        """
        if self.theirs and isinstance(row, TreeBatch):
            raise Unsupported(f"{self.name} does not support a packed_layout of trees.")
        given = self.given(row)
        if given is None:
            return ModelInputs({**of_tokens, **self.inputs(row)})
        if row.images.positions is not None and given.inputs.get("position_ids") is None:
            raise Unsupported(
                f"{self.name} needs the position_ids of such images in a comparison, which passes "
                "inputs_embeds; make the batch with PackedCollator(model=model)."
            )
        assert given.real is not None
        placed = dict(of_tokens)
        for name, x in of_tokens.items():
            if x.ndim:
                fill = IGNORE_INDEX if name == "labels" else 0
                placed[name] = x.new_full((*given.real.shape, *x.shape[2:]), fill)
                placed[name][given.real] = x[0]
        return ModelInputs({**placed, **given.inputs, **row.images.columns}, given.real)

    def compiled(
        self,
        compiler: str,
        *,
        fullgraph: bool | None = None,
        dynamic: bool | None = None,
        cuda_graphs: bool = False,
    ) -> Variant:
        """The same under torch.compile.

        Args:
            compiler: "inductor", or another backend of torch.compile.
            fullgraph: default: for ours; transformers' own break the graph, and would not run.
            dynamic: as in torch.compile.
            cuda_graphs: as `mode="reduce-overhead"` does.
        """
        backend = own_backend(compiler, cuda_graphs=cuda_graphs)
        fullgraph = not self.theirs if fullgraph is None else fullgraph
        call = torch.compile(self.model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
        return replace(self, call=call)

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
    from torch._dynamo.backends.registry import lookup_backend
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if compiler == "inductor":
            patches = {"triton.cudagraphs": cuda_graphs}
            return compile_fx(graph, inputs, config_patches=patches)
        return lookup_backend(compiler)(graph, inputs)

    return backend


# ---- names ----


def is_ours(variant: str) -> bool:
    """Whether a wrong or failed variant is a finding: not so of others' attention, which may leak.

    >>> [is_ours(name) for name in ("fa2@serial", "packed:auto", "ddp", "flexvarlen:sdpa")]
    [True, True, True, True]
    >>> [is_ours(name) for name in ("unpatched", "raw:nested", "packed:transformers:sdpa")]
    [False, False, False]
    """
    return not any(word in _NOT_OURS for word in variant.split(":"))


def variant_names(backends: str | Sequence[str], device: torch.device) -> list[str]:
    """The variants that a comparison shows.

    Args:
        backends: "all", or names of backends (also transformers' names for the same kernels), or
            one name, or several with commas between.
        device: on CUDA, transformers' own kernels join, FlashAttention-3 where it is installed.

    Raises:
        ValueError: an unknown name.
    """
    from transformers.utils import is_flash_attn_3_available

    names = backends.split(",") if isinstance(backends, str) else list(backends)
    names = [our_name(name.strip()) for name in names]
    if names == ["all"]:
        of_transformers = ["sdpa", "sdpa@default_cache"]
        if device.type == "cuda":
            of_transformers += ["flex_attention", "flash_attention_2"]
            of_transformers += ["flash_attention_3"] if is_flash_attn_3_available() else []
        return [*BACKENDS, "auto", *(THEIRS + name for name in of_transformers)]
    require_known(*names, option="backends")
    return list(dict.fromkeys(names))


def require_known(*names: str, option: str = "variant") -> None:
    """Check variants' names.

    Args:
        option: what the user gave them as, for the message.

    Raises:
        UnknownVariant: there is no such attention, or no such source of boundaries.
    """
    for name in names:
        kind, _, form = name.partition("@")
        is_theirs = kind.startswith(THEIRS)
        known = forms_of(kind)
        if form not in ("", *known) or not (is_theirs or kind in (*BACKENDS, "auto")):
            raise UnknownVariant(
                f"{option} must be auto, a backend ({', '.join(BACKENDS)}) or "
                f"{THEIRS}<attn_implementation>, and may end in @{' or @'.join(known)}, "
                f"got {name!r}; choose one."
            )


# ---- making one ----


def make_variant(
    name: str,
    base: PreTrainedModel,
    sizes: Sizes,
    *,
    train: bool = True,
    or_forward: bool = False,
) -> Variant:
    """A variant of `base`, whose parameters it shares; `base` itself is not patched.

    Args:
        train: whether its steps run the backward; the model is put into that mode.
        or_forward: a backend of ours that has no backward here gets `train=False`, and says why.

    Raises:
        Unsupported: it cannot run here, or not train: a package or a GPU is missing, or the kernel
            refuses.
        UnknownVariant: an unknown name.
    """
    require_known(name)
    attention = name.partition("@")[0]
    model = share(base)
    why_no_backward = None
    if attention.startswith(THEIRS):
        set_transformers(model, attention.removeprefix(THEIRS))
        if "flash_attention" in attention and base.dtype not in (torch.float16, torch.bfloat16):
            raise Unsupported(f"{name} needs bfloat16 or float16, got {base.dtype}; change dtype.")
    else:
        why_no_backward = why_not_layers(attention, model, needs_grad=True) if train else None
        why_not = why_no_backward
        if or_forward or not train:
            why_not = why_not_layers(attention, model, needs_grad=False)
        if why_not is not None:
            raise Unsupported(why_not)
        try:
            patch_model(model, attention)
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
    train = train and why_no_backward is None
    model.train(train)
    return Variant(name, model, sizes, model, train, why_no_backward)


def why_not_layers(name: str, model: PreTrainedModel, *, needs_grad: bool) -> str | None:
    """Why a backend cannot serve some attention layer of a model, or None; None for "auto"."""
    kinds = () if name == "auto" else ModelParts.of(model).kinds
    calls = (kind.call(model.device, model.dtype, needs_grad=needs_grad) for kind in kinds)
    return next((reason for call in calls if (reason := refusal(name, call))), None)


def set_transformers(model: PreTrainedModel, implementation: str) -> None:
    """Give a model transformers' own attention; raises `Unsupported` where it is not that one."""
    try:
        model.set_attn_implementation(implementation)
    except (ImportError, ValueError) as error:
        raise Unsupported(" ".join(str(error).split())[:300]) from error
    found = model.config._attn_implementation
    if found != implementation:  # e.g. a kernel from the hub in place of the package
        raise Unsupported(f"transformers set {found!r} instead of {implementation!r}.")
