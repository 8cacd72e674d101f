"""What a model gives for each document alone: the fp64 oracle, and the peer in the tested dtype.

transformers computes norms and the softmax in fp32 whatever the model's dtype. In the oracle both
are fp64, so that its error is nothing beside any fp32 kernel's; RoPE's tables alone stay fp32: they
are the model's own, and the same in every variant. The peer is transformers' eager attention, the
plain low-precision way: matmuls in the dtype, the softmax in fp32, probabilities in the dtype.

Shapes: L tokens of one document; B = 1; H = num_heads, Hkv = num_kv_heads, D = head_dim; V =
vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from flexvarlen.equivalence.batch import IGNORE_INDEX, PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ORACLE_ATTENTION = "flexvarlen_oracle"  # a name of transformers' registry

# Logits are made and compared so many at a time: 0.5 GiB in fp64.
CHUNK_ELEMENTS = 2**26


@dataclass(frozen=True)
class Answer:
    """Each sampled document alone.

    Attributes:
        documents: which of the batch, in order.
        hidden: what the head gets, `[L, hidden]` for each of them.
        head: hidden -> logits, in the answer's dtype.
        loss: mean over the counted labels of these documents.
        gradients: of every parameter, by name; empty for a forward alone.
    """

    documents: tuple[int, ...]
    hidden: tuple[Tensor, ...]
    head: Callable[[Tensor], Tensor]
    loss: float
    gradients: dict[str, Tensor]

    def logits(self) -> Iterator[tuple[int, int, Tensor]]:
        """Pieces of logits: document, its token at which the piece starts, `[tokens, V]`."""
        for document, hidden in zip(self.documents, self.hidden, strict=True):
            start = 0
            for piece in _chunks(hidden, self.head):
                yield document, start, piece
                start += len(piece)


def _chunks(hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    # Never a context around a yield: two such generators in turns would leave gradients off.
    with torch.no_grad():
        vocabulary = head(hidden[:1]).shape[-1]
    for rows in hidden.split(max(1, CHUNK_ELEMENTS // vocabulary)):
        with torch.no_grad():
            logits = head(rows)
        yield logits


def share(model: PreTrainedModel) -> PreTrainedModel:
    """A module tree and config of its own over the very same parameters."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, memo=shared)


def own_parameters(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy whose parameters have gradients of their own, all of them.

    In the model's own dtype the values are shared, not copied. Buffers (RoPE's frequencies) keep
    their dtype; tied weights stay tied.
    """
    own = share(model)
    made: dict[int, nn.Parameter] = {}
    for module in own.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(parameter.detach().to(dtype))
            setattr(module, name, made[id(parameter)])
    own.config.dtype = dtype
    return own


def oracle_answer(
    base: PreTrainedModel, batch: PackedBatch, documents: Sequence[int], *, train: bool
) -> Answer:
    """Each of `documents` alone through an fp64 copy of `base`, which is not changed.

    Args:
        base: unpatched, with a head; on the batch's device.
        batch: where the documents are.
        documents: which of them.
        train: also the gradients of their loss.
    """
    model = own_parameters(base, torch.float64)
    compute_in_float64(model)
    answer = alone(model, batch, documents, train=train)
    gradients = {name: gradient.cpu() for name, gradient in answer.gradients.items()}
    return replace(answer, gradients=gradients)


def peer_answer(
    base: PreTrainedModel, batch: PackedBatch, documents: Sequence[int], *, train: bool
) -> Answer:
    """The same in the dtype of `base`, with transformers' eager attention."""
    return alone(peer_model(base), batch, documents, train=train)


def peer_model(base: PreTrainedModel) -> PreTrainedModel:
    """`base` with transformers' eager attention, on the same parameters."""
    model = share(base)
    model.set_attn_implementation("eager")
    return model


def alone(
    model: PreTrainedModel, batch: PackedBatch, documents: Sequence[int], *, train: bool
) -> Answer:
    """Each of the documents alone through `model` as it is.

    Gradients are summed over documents in at least fp32: their rounding is the dtype's alone.
    """
    model.train(train)
    named = list(model.named_parameters()) if train else []
    sums = {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        for name, p in named
    }
    labels = batch.labels(documents)
    counted = int((labels != IGNORE_INDEX).sum())
    spans = batch.spans()
    head: Callable[[Tensor], Tensor] = model.get_output_embeddings()
    hidden, loss = [], 0.0
    with torch.set_grad_enabled(train):
        for document in documents:
            start, end = spans[document]
            out = model.base_model(input_ids=batch.input_ids[:, start:end], use_cache=False)
            states = out.last_hidden_state[0]
            hidden.append(states.detach())
            if end - start == 1:  # nothing to foretell
                continue
            term = _loss_sum(head, states[:-1], labels[0, start + 1 : end]) / counted
            loss += float(term.detach())
            if train:
                found = torch.autograd.grad(term, [p for _, p in named])
                for (name, _), gradient in zip(named, found, strict=True):
                    sums[name] += gradient
    return Answer(tuple(documents), tuple(hidden), head, loss, sums)


def _loss_sum(head: Callable[[Tensor], Tensor], states: Tensor, labels: Tensor) -> Tensor:
    logits = head(states)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.to(wide), labels, reduction="sum", ignore_index=IGNORE_INDEX)


# ---- fp64 throughout ----

# Scores are made, and kept, so many at a time: 0.5 GiB.
SCORE_ELEMENTS = 2**26


def compute_in_float64(model: PreTrainedModel) -> None:
    """Let a model of fp64 parameters compute its norms and its attention in fp64, too, for good.

    Its attention then takes each row for one causal document.
    """
    _register_oracle_attention()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_rms_norm, module)
    model.set_attn_implementation(ORACLE_ATTENTION)


def _rms_norm(self: nn.Module, x: Tensor) -> Tensor:
    """RMSNorm in the dtype of its input."""
    eps: Any = self.variance_epsilon
    weight: Any = self.weight
    normed: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return normed


def _register_oracle_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ORACLE_ATTENTION, _attention)
    AttentionMaskInterface.register(ORACLE_ATTENTION, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one document, in the dtype of its input; `[1, L, H, D]`."""
    heads, tokens, head_dim = query.shape[1:]
    key, value = (x.repeat_interleave(heads // key.shape[1], dim=1) for x in (key, value))
    query = query * (head_dim**-0.5 if scaling is None else scaling)
    step = max(1, SCORE_ELEMENTS // (heads * tokens))
    if step >= tokens:
        out = _attend_from(0, query, key, value, sliding_window)
        return out.transpose(1, 2), None
    blocks = []
    for begin in range(0, tokens, step):  # of queries; the backward makes their scores again
        end = min(begin + step, tokens)
        inputs = (query[:, :, begin:end], key[:, :, :end], value[:, :, :end])
        blocks.append(checkpoint(_attend_from, begin, *inputs, sliding_window, use_reentrant=False))
    return torch.cat(blocks, dim=2).transpose(1, 2), None


def _attend_from(
    begin: int, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None
) -> Tensor:
    """Attention of the queries from token `begin` on; `query` is scaled. `[1, H, queries, D]`."""
    queries = begin + torch.arange(query.shape[2], device=query.device)
    behind = queries[:, None] - torch.arange(key.shape[2], device=query.device)
    hidden = behind < 0
    if sliding_window is not None:
        hidden |= behind >= sliding_window
    scores = query @ key.transpose(2, 3)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value
