"""A model's results for each document alone: in fp64 the reference, else the baseline.

transformers computes norms, softmax and routing in fp32 whatever the model's dtype. `Float64`
skips such conversions, so that everything computed from fp64 values is fp64. Only RoPE's tables
stay fp32: they are computed from positions, and are the same in every variant.

Shapes: L tokens of one document; H = num_heads, D = head_dim; V = vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from flexvarlen.reference.attention import PIECE_ELEMENTS, spans_of
from flexvarlen.reference.recurrences import plain_recurrences

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORE_INDEX = -100  # the label that transformers' losses ignore

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_NARROWING = (Tensor.float, Tensor.half, Tensor.bfloat16)

Loss = Callable[[int, Tensor], Tensor]
"""(a document's index, its hidden states `[L, hidden]`) -> a 0-d tensor to differentiate."""


class Float64(TorchFunctionMode):
    """Within it, a float64 tensor is never converted to a narrower float.

    Its scaled_dot_product_attention is computed a block of queries at a time; the backward computes
    the scores again.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with float64 in place of narrower dtypes."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.dtype != torch.float64:
            return func(*args, **kwargs)
        if func in _NARROWING:
            return first
        if func is scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if func in (Tensor.to, Tensor.type_as) and len(args) > 1 and isinstance(args[1], Tensor):
            other, *rest = args[1:]
            if other.dtype in _NARROW:
                return first.to(other.device, torch.float64, *rest, **kwargs)
        wide = [torch.float64 if x in _NARROW else x for x in args[1:] if not isinstance(x, Tensor)]
        rest = [x if isinstance(x, Tensor) else wide.pop(0) for x in args[1:]]
        if kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        return func(first, *rest, **kwargs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention in blocks of queries; `[B, H, L, D]`."""
    batch, heads, tokens, head_dim = query.shape
    if enable_gqa:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    query = query * (head_dim**-0.5 if scale is None else scale)
    step = max(1, PIECE_ELEMENTS // (batch * heads * key.shape[2]))
    blocks = []
    for begin in range(0, tokens, step):
        rows = slice(begin, min(begin + step, tokens))
        mask = attn_mask
        if attn_mask is not None and attn_mask.shape[-2] > 1:
            mask = attn_mask[..., rows, :]
        inputs = (query[:, :, rows], key, value, mask, begin if is_causal else None)
        if step >= tokens:
            return _attend_block(*inputs)
        blocks.append(checkpoint(_attend_block, *inputs, use_reentrant=False))
    return torch.cat(blocks, dim=2)


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, begin: int | None
) -> Tensor:
    """Attention of some queries, already scaled; if causal, the first is token `begin`."""
    scores = query @ key.mT
    if begin is not None:
        queries = begin + torch.arange(query.shape[2], device=query.device)
        later = queries[:, None] < torch.arange(key.shape[2], device=query.device)
        scores = scores.masked_fill(later, float("-inf"))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value


# ---- copies of a model ----


def share(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module tree and config over the same parameters."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, memo=shared)


def own_parameters(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy whose parameters all have separate gradients.

    In the model's dtype the values are shared, not copied. Buffers (RoPE's frequencies) keep their
    dtype; tied weights stay tied.
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


def without_router_loss(model: PreTrainedModel) -> PreTrainedModel:
    """Disable a router's loss in the config, as it is over all documents of a batch by design."""
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    return model


def float64_model(base: PreTrainedModel) -> PreTrainedModel:
    """A copy with fp64 parameters; run it, and its backward, within `Float64()`.

    Args:
        base: an unpatched model; it is not changed.
    """
    model = own_parameters(base, torch.float64)
    model.set_attn_implementation("sdpa" if _has_plain_attention(model) else "eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products have no fp64
    return model


def _has_plain_attention(model: PreTrainedModel) -> bool:
    """Whether SDPA computes the model's attention: it knows neither soft caps nor sinks."""
    text = model.config.get_text_config()
    softcap = getattr(text, "attn_logit_softcapping", None)
    return bool(getattr(model, "_supports_sdpa", False)) and softcap is None


def baseline_model(base: PreTrainedModel) -> PreTrainedModel:
    """`base` with transformers' eager attention, on the same parameters.

    This is the plain low-precision computation: matmuls in the dtype, softmax in fp32.
    """
    model = share(base)
    model.set_attn_implementation("eager")
    return model


# ---- documents alone ----


@dataclass(frozen=True)
class ModelResults:
    """The results of each document alone.

    Attributes:
        documents: indices of the documents of the row, in order.
        hidden: hidden states of the base model, `[L, hidden]` for each document.
        loss: the loss summed over the documents; 0 if not requested.
        gradients: gradients of the loss by parameter; empty for a forward alone.
        head: hidden -> logits; None for a base model.
    """

    documents: tuple[int, ...]
    hidden: tuple[Tensor, ...]
    loss: float
    gradients: dict[str, Tensor]
    head: Callable[[Tensor], Tensor] | None = None

    def logits(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield pieces of logits: document, its token at which the piece starts, `[tokens, V]`."""
        if self.head is None:
            raise ValueError("logits need a model with a head, got a base model; read hidden.")
        for document, hidden in zip(self.documents, self.hidden, strict=True):
            start = 0
            for piece in _pieces_of_logits(hidden, self.head):
                yield document, start, piece
                start += len(piece)


def _pieces_of_logits(hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    # Never a context around a yield: two such generators in turns would leave gradients off.
    with torch.no_grad():
        vocabulary = head(hidden[:1]).shape[-1]
    for rows in hidden.split(max(1, PIECE_ELEMENTS // vocabulary)):
        with torch.no_grad():
            logits = head(rows)
        yield logits


def run_alone(
    model: PreTrainedModel,
    input_ids: Tensor,
    lengths: Sequence[int],
    *,
    documents: Sequence[int] | None = None,
    loss: Loss | None = None,
    parameters: Sequence[str] | None = None,
    images: Callable[[int], Mapping[str, Tensor]] = lambda document: {},
) -> ModelResults:
    """Run each document alone through `model`, positions from 0; a `float64_model` in fp64.

    Recurrent layers run in plain torch.

    Args:
        model: a model with or without a head, in the mode (train or eval) to run in. It is not
            changed.
        input_ids: int64 `[1, T]`, the packed row.
        lengths: tokens of each document; their sum is T.
        documents: which documents to run; None: all.
        loss: the loss to differentiate, summed over documents; None: no gradients.
        parameters: parameters whose gradients are computed; None: all. Gradients are summed in at
            least fp32, so that only the model's dtype rounds.
        images: a document's index -> the keyword arguments of its images.
    """
    chosen = tuple(range(len(lengths)) if documents is None else documents)
    spans = spans_of(lengths)
    named = dict(model.named_parameters()) if loss is not None else {}
    if parameters is not None:
        named = {name: named[name] for name in parameters if named}
    sums = {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        for name, p in named.items()
    }
    hidden, total = [], 0.0
    is_float64 = next(model.parameters()).dtype == torch.float64
    mode = Float64() if is_float64 else torch.enable_grad()
    with mode, torch.set_grad_enabled(loss is not None), plain_recurrences(model):
        for document in chosen:
            tokens = slice(*spans[document])
            own = images(document)
            out = model.base_model(input_ids=input_ids[:, tokens], use_cache=False, **own)
            states = out.last_hidden_state[0]
            hidden.append(states.detach())
            if loss is None:
                continue
            term = loss(document, states)
            total += float(term.detach())
            found = torch.autograd.grad(term, list(named.values()), allow_unused=True)
            for name, gradient in zip(named, found, strict=True):
                if gradient is not None:  # an expert that got no token has no gradient
                    sums[name] += gradient
    head = None if model.get_output_embeddings() is None else _head_of(model)
    return ModelResults(chosen, tuple(hidden), total, sums, head)


def next_token_loss(
    model: PreTrainedModel,
    input_ids: Tensor,
    lengths: Sequence[int],
    documents: Sequence[int],
    *,
    piece_tokens: int | None = None,
) -> Loss:
    """The mean over all next tokens of the documents, each predicted by its own document.

    Args:
        piece_tokens: tokens whose logits exist at once, computed again in the backward; None: a
            whole document's.
    """
    head, spans = _head_of(model), spans_of(lengths)
    counted = max(1, sum(max(0, lengths[document] - 1) for document in documents))

    def piece_loss(states: Tensor, labels: Tensor) -> Tensor:
        logits = head(states)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return cross_entropy(logits.to(wide), labels, reduction="sum") / counted

    def loss(document: int, states: Tensor) -> Tensor:
        start, end = spans[document]
        labels = input_ids[0, start + 1 : end]
        if piece_tokens is None:
            return piece_loss(states[:-1], labels)
        pieces = zip(states[:-1].split(piece_tokens), labels.split(piece_tokens), strict=True)
        terms = [checkpoint(piece_loss, *each, use_reentrant=False) for each in pieces]
        return torch.stack(terms).sum()

    return loss


def weighted_loss(
    model: PreTrainedModel, labels: Sequence[Tensor], weights: Sequence[Tensor], counted: Tensor
) -> Loss:
    """The sum of each document's losses of given labels, each with a weight, over `counted`.

    Args:
        labels: for each document, int64 `[L]`, the next token of each of its tokens; -100 is
            ignored.
        weights: for each document, `[L]`.
        counted: divisor, a 0-d tensor.
    """
    head = _head_of(model)

    def loss(document: int, states: Tensor) -> Tensor:
        logits = head(states)
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses = cross_entropy(
            logits.to(wide), labels[document], ignore_index=IGNORE_INDEX, reduction="none"
        )
        return (losses * weights[document].to(wide)).sum() / counted

    return loss


class _GivenStates(nn.Module):
    """Replaces a base model: returns its `inputs_embeds` as last hidden states.

    It has the attributes of the base model, as heads read multipliers there.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        vars(self)["base"] = base  # not a submodule: its parameters are not this module's

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["base"], name)

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _GivenOutput:
        """Return `inputs_embeds`; all other arguments are ignored."""
        return _GivenOutput(inputs_embeds)


class _GivenOutput:
    """A base model's output with hidden states; all other fields are None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state


def _head_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The model's forward after its base model: hidden states `[n, hidden]` -> logits `[n, V]`.

    Not the output embeddings alone: some families scale or cap the logits.
    """
    after_base = copy.copy(model)
    given = _GivenStates(model.base_model)
    after_base._modules = {**model._modules, model.base_model_prefix: given}
    is_float64 = next(model.parameters()).dtype == torch.float64

    def head(states: Tensor) -> Tensor:
        with Float64() if is_float64 else nullcontext():
            logits: Tensor = after_base(inputs_embeds=states[None], use_cache=False).logits
        return logits[0]

    return head
