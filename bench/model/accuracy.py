"""Per-document outputs and gradients of a model, and the error of packed ones against them.

The oracle runs each document alone in fp64, norms and attention included (RoPE's tables stay as
they are); scores are made a block of queries at a time, so that long documents fit.
The peer runs each document alone in the model's own dtype: its error is what that dtype costs, and
a packed variant is right within twice that in its outputs, three times in its gradients. Outputs
are judged document by document too: in the norm of a long row a short document's leak is not seen.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from flexvarlen.equivalence.oracle import compute_in_float64

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
ORACLE_DTYPE = torch.float64

Cotangent = Callable[[Tensor, slice], Tensor]
"""Outputs `[1, L, hidden]` of a document and its rows of the packed row -> their gradient."""

_DOCUMENT_ATTENTION = "bench_one_document"


@dataclass(frozen=True)
class Answer:
    """Outputs `[T, hidden]`, and gradients of some parameters by name (empty if not asked for).

    `lengths`: of an oracle, the rows of each document, of sum T; empty: they are not told apart.
    """

    outputs: Tensor
    gradients: dict[str, Tensor]
    lengths: tuple[int, ...] = ()

    def on(self, device: torch.device) -> Answer:
        """The same on a device."""
        return self._moved(lambda tensor: tensor.to(device))

    def on_host(self) -> Answer:
        """The same in the host's memory, where an oracle is in no one's peak.

        In locked pages, if it is a GPU's: every variant has the gradients copied back, gigabytes.
        """

        def kept(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)

        return self._moved(kept)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Answer:
        found = {name: move(gradient) for name, gradient in self.gradients.items()}
        return Answer(move(self.outputs), found, self.lengths)


@dataclass(frozen=True)
class Errors:
    """Relative errors ‖x − oracle‖ / ‖oracle‖: of outputs, and the largest among the gradients.

    `documents`: of each document's outputs; empty where they are not told apart.
    """

    outputs: float
    gradients: float | None
    documents: tuple[float, ...] = ()

    @property
    def worst_document(self) -> float:
        """The largest error of a document's outputs, NaN if one is; of all, if not told apart."""
        found = self.documents or (self.outputs,)
        return max(found, key=lambda error: (math.isnan(error), error))

    def why_wrong(self, peer: Errors, dtype: torch.dtype) -> str | None:
        """The sentence that says how far off this is, or None if it is within bounds.

        A document may be as far off as twice its own peer, or the whole row's where that is larger:
        over a few tokens the peer may be right by chance.

        Args:
            peer: the errors of each document alone, of the same documents.
            dtype: of the model.

        Raises:
            ValueError: the peer's documents are others.
        """
        if len(self.documents) != len(peer.documents):
            raise ValueError(
                f"peer must hold {len(self.documents)} documents' errors, got "
                f"{len(peer.documents)}; make it of the same documents."
            )
        rounding = torch.finfo(dtype).eps
        pairs = [("outputs", self.outputs, peer.outputs, OUTPUT_FACTOR)]
        if self.gradients is not None and peer.gradients is not None:
            pairs.append(("gradients", self.gradients, peer.gradients, GRADIENT_FACTOR))
        for what, error, allowed, factor in pairs:
            limit = factor * (allowed + rounding)
            if not error <= limit:  # also when the error is NaN
                return (
                    f"relative error of the {what} is {error:.2g}, more than {limit:.2g} "
                    f"({factor:g} x the error of running each document alone in {dtype})"
                )
        wrong = []
        for index, (error, own) in enumerate(zip(self.documents, peer.documents, strict=True)):
            limit = OUTPUT_FACTOR * (max(own, peer.outputs) + rounding)
            if not error <= limit:
                wrong.append((error, index, limit))
        if not wrong:
            return None
        error, index, limit = max(wrong, key=lambda found: (math.isnan(found[0]), found[0]))
        return (
            f"relative error of the outputs of document {index} is {error:.2g}, more than "
            f"{limit:.2g} ({OUTPUT_FACTOR:g} x the error of running it alone in {dtype}); "
            f"{len(wrong)} of {len(self.documents)} documents are wrong"
        )


def probed_parameters(model: nn.Module) -> list[str]:
    """Parameters whose gradients are compared, in the first, middle and last layer."""
    layers = len(model.layers)  # type: ignore[arg-type]
    probes = (
        (0, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layers // 2, ("self_attn.k_proj", "mlp.down_proj")),
        (layers - 1, ("self_attn.v_proj", "self_attn.o_proj")),
    )
    names = [f"layers.{layer}.{name}.weight" for layer, parts in probes for name in parts]
    return list(dict.fromkeys(names))


def per_document(
    base: PreTrainedModel,
    input_ids: Tensor,
    lengths: Sequence[int],
    cotangent: Tensor | Cotangent,
    *,
    dtype: torch.dtype,
    gradients: bool = True,
    checkpointing: bool = False,
) -> Answer:
    """Run each document alone, positions from 0, in `dtype`; gradients are summed in fp32 or wider.

    Args:
        base: the base model; it is copied, never changed.
        input_ids: `[1, T]`, the packed row.
        lengths: tokens of each document; their sum is T.
        cotangent: `[1, T, hidden]`, what the backward starts from, or what makes it of the outputs.
        dtype: of the copy; fp64 makes the oracle.
        gradients: whether to run the backward.
        checkpointing: keep the layers' inputs only, and compute the rest again in the backward.
    """
    model = copy.deepcopy(base)
    for parameter in model.parameters():  # not the buffers: RoPE's frequencies must stay fp32
        parameter.data = parameter.data.to(dtype)
    if dtype == ORACLE_DTYPE:
        compute_in_float64(model)
    else:
        _register_document_attention()
        model.set_attn_implementation(_DOCUMENT_ATTENTION)
    if checkpointing:
        checkpoint_layers(model.train())
    names = probed_parameters(model) if gradients else []
    probed = [model.get_parameter(name) for name in names]
    sums: list[Tensor] = [
        torch.zeros_like(p, dtype=torch.promote_types(dtype, torch.float32)) for p in probed
    ]
    outputs = []
    offset = 0
    with torch.set_grad_enabled(gradients):
        for length in lengths:
            rows = slice(offset, offset + length)
            out = model(input_ids=input_ids[:, rows], use_cache=False).last_hidden_state
            if gradients:
                start = (
                    cotangent[:, rows].to(dtype)
                    if isinstance(cotangent, Tensor)
                    else cotangent(out, rows)
                )
                found = torch.autograd.grad(out, probed, start)
                for total, gradient in zip(sums, found, strict=True):
                    total += gradient
            outputs.append(out.detach()[0])
            offset += length
    return Answer(torch.cat(outputs), dict(zip(names, sums, strict=True)), tuple(lengths))


def checkpoint_layers(model: PreTrainedModel, keep: Sequence[torch._ops.OpOverload] = ()) -> None:
    """Gradient checkpointing of every layer, by torch's way that is not reentrant.

    Args:
        keep: operators whose outputs are kept, and not computed again.
    """
    # transformers 5.2x calls it activation checkpointing, and warns of the old name.
    enable = getattr(model, "activation_checkpointing_enable", None)
    how: dict[str, Any] = {"use_reentrant": False}
    if keep:
        how["context_fn"] = partial(create_selective_checkpoint_contexts, list(keep))
    (enable or model.gradient_checkpointing_enable)(how)


def packed_answer(model: nn.Module, outputs: Tensor) -> Answer:
    """The answer of a packed variant, whose backward has filled the parameters' `.grad`."""
    named = dict(model.named_parameters())
    grads = {name: named[name].grad for name in probed_parameters(model)}
    return Answer(outputs.detach()[0], {name: g for name, g in grads.items() if g is not None})


def errors_of(answer: Answer, oracle: Answer) -> Errors:
    """Relative errors; a gradient that is missing counts as infinitely wrong.

    Documents are told apart where the oracle has their lengths. Syncs.
    """
    worst = None
    for name, expected in oracle.gradients.items():
        found = answer.gradients.get(name)
        error = float("inf") if found is None else relative_error(found, expected)
        worst = error if worst is None or not error <= worst else worst  # keeps NaN
    documents = document_errors(answer.outputs, oracle.outputs, oracle.lengths)
    return Errors(relative_error(answer.outputs, oracle.outputs), worst, documents)


def document_errors(found: Tensor, expected: Tensor, lengths: Sequence[int]) -> tuple[float, ...]:
    """`relative_error` of each document.

    Args:
        found, expected: `[T, hidden]`, on one device.
        lengths: rows of each document, none of them 0; their sum is T, or there are none.
    """
    if not lengths:
        return ()
    off, whole = (
        torch.stack([rows.sum() for rows in squares.split(list(lengths))])
        for squares in (
            (found.to(expected.dtype) - expected).square().sum(-1, dtype=torch.float64),
            expected.square().sum(-1, dtype=torch.float64),
        )
    )
    return tuple((off / whole).sqrt().tolist())


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in the wider dtype. Syncs."""
    return float((found.to(expected.dtype) - expected).norm() / expected.norm())


def _register_document_attention() -> None:
    """Causal SDPA of one document; K and V repeated, so that no dtype needs the T² math kernel."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        if query.device.type == "cpu":  # has no other kernel for some dtypes
            kernels.append(SDPBackend.MATH)
        with sdpa_kernel(kernels):
            out = nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=query.shape[2] > 1, scale=scaling
            )
        return out.transpose(1, 2).contiguous(), None

    def no_mask(*args: Any, **kwargs: Any) -> None:
        return None

    AttentionInterface.register(_DOCUMENT_ATTENTION, attention)
    AttentionMaskInterface.register(_DOCUMENT_ATTENTION, no_mask)
