"""The variants of a comparison: one attention each, on the same parameters; and one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import flexvarlen as fv
from flexvarlen.attention.backends.registry import our_name
from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.patches.parts import ModelParts
from flexvarlen.reference.model import share
from flexvarlen.runner.failures import Unsupported
from flexvarlen.verify.tree_batch import Row, TreeBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

THEIRS = "transformers:"

_NOT_OURS = ("transformers", "sentence-transformers", "raw", "fixed", "unpatched")
"""Parts of the names of variants whose attention is not flexvarlen's."""


@dataclass(frozen=True)
class Sizes:
    """What shapes are made for, over all packings of a comparison."""

    capacity: int
    max_seqlen_bound: int

    @classmethod
    def of(cls, batch: Row) -> Sizes:
        """Room for the batch and for others like it: powers of two. Of trees, their own."""
        if isinstance(batch, TreeBatch):
            return cls(batch.trees.capacity, batch.trees.max_seqlen_bound)
        longest = round_up_to_power_of_two(max(batch.lengths))
        return cls(
            round_up_to_power_of_two(len(batch.lengths) + 1),
            min(longest, batch.total_tokens),
        )


@dataclass(frozen=True)
class StepResult:
    """What a step gives; the parameters' gradients are in their `.grad`.

    Attributes:
        logits: `[T, V]`, detached.
        loss: over the labels given.
        embedding_gradients: `[T, hidden]`, of the embeddings looked up; None without training.
    """

    logits: Tensor
    loss: float
    embedding_gradients: Tensor | None


@dataclass(frozen=True)
class Variant:
    """A model with its own attention, and how to call it.

    Attributes:
        name: a backend of ours, or "transformers:" and an implementation of theirs.
        model: shares its parameters with all other variants.
        call: the model, or the compiled model.
        train: whether a step runs the backward.
        why_no_backward: why not, where training was asked for.
    """

    name: str
    model: PreTrainedModel
    call: Callable[..., Any]
    sizes: Sizes
    train: bool
    why_no_backward: str | None = None

    def step(
        self, batch: Row, labels: Tensor, counted: Tensor, *, gradients: bool = False
    ) -> StepResult:
        """One step without the optimizer: forward, loss, and backward if the variant trains.

        The embedding lookup is not in the compiled part: `call` gets `inputs_embeds`, so that a
        token's own gradient can be seen. The loss is transformers' own, of trees `tree_loss`,
        divided by `counted` (as Trainer does).

        Args:
            batch: the packed row.
            labels: int64 `[1, T]`.
            counted: 0-d tensor, what the loss is divided by.
            gradients: keep the embeddings' gradients.
        """
        self.model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(self.train):
            embeds: Tensor = self.model.get_input_embeddings()(batch.input_ids)
            if gradients and self.train:
                embeds.retain_grad()
            out = self.call(
                inputs_embeds=embeds,
                **batch.loss_inputs(labels, counted),
                **self.boundaries(batch),
            )
            if self.train:
                out.loss.backward()
        found = embeds.grad[0] if gradients and embeds.grad is not None else None
        return StepResult(out.logits.detach()[0], float(out.loss.detach()), found)

    def boundaries(self, batch: Row) -> dict[str, Any]:
        """Ours get the layout; transformers' get position_ids, all else left at its default."""
        layout = batch.layout(self.sizes.capacity, self.sizes.max_seqlen_bound)
        if self.name.startswith(THEIRS):
            return {"position_ids": layout.position_ids()[None]}
        return {"packed_layout": layout}


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
        device: on CUDA, transformers' own kernels join.

    Raises:
        ValueError: an unknown name.
    """
    names = backends.split(",") if isinstance(backends, str) else list(backends)
    names = [our_name(name.strip()) for name in names]
    if names == ["all"]:
        theirs = ["sdpa"]
        if device.type == "cuda":
            theirs += ["flex_attention", "flash_attention_2"]
        return [*fv.BACKENDS, "auto", *(THEIRS + name for name in theirs)]
    for name in names:
        if not name.startswith(THEIRS) and name not in (*fv.BACKENDS, "auto"):
            raise ValueError(
                f"backends must be all, {', '.join(fv.BACKENDS)}, auto or {THEIRS}<implementation>,"
                f" got {name!r}; choose among these."
            )
    return list(dict.fromkeys(names))


def make_variant(
    name: str, base: PreTrainedModel, sizes: Sizes, *, train: bool, compile: bool
) -> Variant:
    """A variant of `base`.

    A backend of ours that has a forward but no backward here gets `train=False`, and says why.

    Raises:
        Unsupported: a package or a GPU is missing, or the kernel refuses.
    """
    model = share(base)
    why_no_backward = None
    if name.startswith(THEIRS):
        if "flash_attention" in name and base.dtype not in (torch.float16, torch.bfloat16):
            raise Unsupported(f"{name} needs bfloat16 or float16, got {base.dtype}; change dtype.")
        set_transformers(model, name.removeprefix(THEIRS))
    else:
        refusal = why_not_layers(name, model, needs_grad=False)
        if refusal is not None:
            raise Unsupported(refusal)
        why_no_backward = why_not_layers(name, model, needs_grad=True) if train else None
        try:
            fv.patch_model(
                model, name, capacity=sizes.capacity, max_seqlen_bound=sizes.max_seqlen_bound
            )
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
    trains = train and why_no_backward is None
    model.train(trains)
    call: Callable[..., Any] = _compiled(model) if compile else model
    return Variant(name, model, call, sizes, trains, why_no_backward)


def why_not_layers(name: str, model: PreTrainedModel, *, needs_grad: bool) -> str | None:
    """Why a backend cannot serve some attention layer of a model, or None; None for "auto"."""
    if name == "auto":
        return None
    for kind in ModelParts.of(model).kinds:
        reason = fv.why_not(
            name,
            device=model.device,
            dtype=model.dtype,
            num_heads=kind.num_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            needs_grad=needs_grad,
        )
        if reason is not None:
            return reason
    return None


def set_transformers(model: PreTrainedModel, implementation: str) -> None:
    """Give a model transformers' own attention; raises `Unsupported` where it is not that one."""
    try:
        model.set_attn_implementation(implementation)
    except (ImportError, ValueError) as error:
        raise Unsupported(" ".join(str(error).split())[:300]) from error
    found = model.config._attn_implementation
    if found != implementation:  # e.g. a kernel from the hub in place of the package
        raise Unsupported(f"transformers set {found!r} instead of {implementation!r}.")


def _compiled(model: nn.Module) -> Callable[..., Any]:
    """The model under torch.compile, graph breaks allowed: they are counted.

    Dynamo keeps compiled code by code object, which all variants of a model class share. Each
    variant brings a backend object of its own, so that none is served another's graphs.
    """
    from torch._inductor.compile_fx import compile_fx

    def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_fx(graph, inputs)

    return torch.compile(model, backend=inductor)
