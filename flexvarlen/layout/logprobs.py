"""Log-probabilities of each token, and of the tokens of each document, without `[T, V]` logits;
and the loss of trees.

Shapes: T = total_tokens; N = documents, as in `per_document`; H = hidden size; V = vocabulary;
C = tokens of a chunk; K = token ids that an engine kept, at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from flexvarlen.layout.arguments import require_tensor, whole_numbers
from flexvarlen.layout.document_row import document_boundaries
from flexvarlen.layout.head_chunks import by_chunk, check_head
from flexvarlen.layout.labels import IGNORE_INDEX, unpredicted_tokens
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.per_document import accumulation_dtype, flat_tokens, sum_documents
from flexvarlen.layout.sampling import checked_sampling_mask, require_temperature, sampled_logits


class DocumentLogprobs(NamedTuple):
    """What `document_logprobs` returns; fp32, or fp64 for fp64 logits.

    N is `num_docs`, or `capacity` as for `pool`. The slots of empty documents, of padding runs and
    spare slots hold 0, and so do documents without a label that counts.
    """

    sums: Tensor
    """`[N]`: sum of the log-probabilities of a document's labels."""
    means: Tensor
    """`[N]`: their mean."""
    counts: Tensor
    """int64 `[N]`: number of labels that count."""
    per_token: Tensor
    """`[T]`: log-probability of the label at each token (predicted by the token before it); 0 where
    it does not count."""
    entropies: Tensor | None
    """`[T]`: entropy, in nats, of the distribution that predicted each token, at the temperature
    and over the tokens of the sampling mask; 0 where its label does not count. None unless
    requested."""


def document_logprobs(
    x: Tensor,
    labels: Tensor,
    layout: PackedLayout,
    *,
    head: Callable[[Tensor], Tensor] | None = None,
    entropy: bool = False,
    temperature: float = 1.0,
    sampling_mask: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> DocumentLogprobs:
    """The log-probability of each document's labels: sum, mean and count, and for each token.

    Position t predicts the label at t + 1, inside each document alone: a document's first label and
    labels at padding do not count. Softmax and sums are in fp32.

    With `head` the logits of only `chunk_tokens` tokens exist at a time: the head is called on one
    chunk after the other, and again in the backward, where its parameters must be the same.

    Args:
        x: logits `[T, V]` or `[B, S, V]`; with `head`, hidden states `[T, H]` or `[B, S, H]`.
            B·S = T, on the layout's device.
        labels: int64 `[B, S]` or `[T]`, below V (not checked), aligned with the tokens as for
            transformers (not shifted); -100 is ignored.
        layout: the documents.
        head: maps hidden states `[C, H]` to logits `[C, V]`: `flexvarlen.lm_head(model)`.
            `model.lm_head` lacks the scale or cap that some families apply after it; that of a
            patched model then raises.
        entropy: whether to compute `entropies` too.
        temperature, sampling_mask: as in `token_logprobs`.
        chunk_tokens: as in `token_logprobs`.

    Returns:
        `DocumentLogprobs`.

    Raises:
        ValueError: x or labels have the wrong shape, dtype or device, `head` is a whole model or
            lacks what its model does to the logits, the temperature or `chunk_tokens` is not
            positive, a chunk is too small for such a head, or a sampling mask lacks a label.

    Differentiable once. No sync, but one for a sampling mask; traces under `fullgraph=True`.

    >>> from flexvarlen import PackedLayout
    >>> layout = PackedLayout.from_lengths([3, 2])
    >>> labels = torch.tensor([[0, 1, 1, 0, -100]])
    >>> found = document_logprobs(torch.zeros(1, 5, 2), labels, layout)  # 2 equal logits
    >>> found.sums, found.counts
    (tensor([-1.3863,  0.0000]), tensor([2, 0]))
    """
    x_TH, cu_seqlens = flat_tokens(x, layout), document_boundaries(layout)
    require_labels("labels", labels, layout.total_tokens, layout.device)
    labels_T = labels.reshape(-1).masked_fill(unpredicted_tokens(layout), IGNORE_INDEX)
    next_T = labels_T.roll(-1)  # the row's first label, ignored, comes last
    kept_TK = checked_sampling_mask(sampling_mask, next_T)
    names = ("log_probs", "entropy") if entropy else ("log_probs",)
    found = _by_chunk(x_TH, next_T, names, head, temperature, kept_TK, chunk_tokens)
    # From the position that predicts to the token that it predicts.
    per_token, *rest = (each.roll(1) for each in found)
    sums = sum_documents(per_token, cu_seqlens)
    counts = sum_documents((labels_T != IGNORE_INDEX).double(), cu_seqlens).long()
    means = sums / counts.clamp(min=1)
    return DocumentLogprobs(sums, means, counts, per_token, rest[0] if entropy else None)


def token_logprobs(
    x: Tensor,
    shift_labels: Tensor,
    *,
    head: Callable[[Tensor], Tensor] | None = None,
    temperature: float = 1.0,
    sampling_mask: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """The log-probability of each token's next token.

    It takes `shift_labels`, so it serves trees (`share_prefixes`) and shards (`shard_row`) too. For
    sums of documents there is `document_logprobs`. Under DDP or FSDP call it in the forward of the
    module that is wrapped, or gradients are not summed over the ranks.

    With `head` the logits of only `chunk_tokens` tokens exist at a time, in the backward too.

    Args:
        x: with `head` hidden states `[..., H]`; without, logits `[..., V]`.
        shift_labels: int64 `[...]`, the next token of each, below V (not checked); -100 where none
            counts. From `share_prefixes`, or from `shard_row`.
        head: maps hidden states `[C, H]` to logits `[C, V]`: `flexvarlen.lm_head(model)`.
        temperature: by which the logits are divided, in fp32.
        sampling_mask: `[..., K]` of any integer dtype, the ids, below V (not checked), of the
            tokens that the engine kept for each next token, -1 after the last
            (`flexvarlen.sampling_masks`): the log-probabilities are then normalised over these
            alone. A token without ids keeps the whole vocabulary.
        chunk_tokens: C, at least 1; default: 1,024. A head with `parameters` that learn in half
            precision has at most 64 chunks, as autograd sums their gradients in that dtype, and a
            larger default.

    Returns:
        `[...]` in fp32, or fp64 of fp64 logits; 0 where the label is -100.

    Raises:
        ValueError: as `document_logprobs`.

    Differentiable once. No sync, but one for a sampling mask; traces under `fullgraph=True`.

    >>> token_logprobs(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]))  # 2 equal logits
    tensor([[-0.6931, -0.6931,  0.0000]])
    """
    require_tensor("x", x)
    require_labels("shift_labels", shift_labels, x.shape[:-1].numel(), x.device)
    (found,) = token_scores(
        x,
        shift_labels,
        ("log_probs",),
        head=head,
        temperature=temperature,
        kept=checked_sampling_mask(sampling_mask, shift_labels.reshape(-1)),
        chunk_tokens=chunk_tokens,
    )
    return found


def tree_loss(
    logits: Tensor,
    shift_labels: Tensor,
    label_counts: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    *,
    head: Callable[[Tensor], Tensor] | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """The cross entropy that the samples would have had if each was computed by itself.

    A label of a row of trees counts once for each sample in which it is not -100.

    Args:
        logits: `[T, V]` or `[1, T, V]`, computed in at least fp32; with `head`, hidden states
            `[T, H]` or `[1, T, H]` instead.
        shift_labels: integer `[T]` or `[1, T]`, the next token of each token, -100 where there is
            none.
        label_counts: integer `[T]` or `[1, T]`, in how many samples each label counts.
        num_items_in_batch: labels of all samples together, by which the sum is divided; None:
            those of this row.
        head, chunk_tokens: as in `token_logprobs`.

    Returns:
        0-d, fp32 or wider; NaN if no token has a label, as cross_entropy gives.

    Raises:
        ValueError: other numbers of tokens, or labels or counts that are not integers.

    Differentiable. No sync; traces under `fullgraph=True`.

    >>> logits = torch.zeros(3, 4)
    >>> tree_loss(logits, torch.tensor([1, 2, -100]), torch.tensor([2, 1, 1])).item()
    1.3862943649291992
    """
    for name, given in (("shift_labels", shift_labels), ("label_counts", label_counts)):
        require_tensor(name, given)
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        raise ValueError(
            f"logits must be a tensor [T, V] or [1, T, V], got {getattr(logits, 'shape', logits)}; "
            "pass the model's."
        )
    labels_T = whole_numbers("shift_labels", shift_labels).reshape(-1)
    counts_T = whole_numbers("label_counts", label_counts).reshape(-1)
    x_TH = logits.flatten(0, -2)
    if not len(x_TH) == len(labels_T) == len(counts_T):
        raise ValueError(
            "logits, shift_labels and label_counts must have the same tokens, got "
            f"{len(x_TH)}, {len(labels_T)} and {len(counts_T)}; take the latter two from "
            "fv.share_prefixes."
        )
    if head is None:
        logits_TV = x_TH.to(accumulation_dtype(x_TH))
        losses_T = cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="none")
    else:
        losses_T = -token_logprobs(x_TH, labels_T, head=head, chunk_tokens=chunk_tokens)
    if num_items_in_batch is None:
        num_items_in_batch = torch.where(labels_T == IGNORE_INDEX, 0, counts_T).sum()
    return (losses_T * counts_T).sum() / num_items_in_batch


def token_scores(
    x: Tensor,
    shift_labels: Tensor,
    names: Sequence[str],
    *,
    head: Callable[[Tensor], Tensor] | None,
    temperature: float,
    kept: Tensor | None,
    chunk_tokens: int | None,
) -> list[Tensor]:
    """What `names` in `SCORES` say of each token's next token, as `token_logprobs`.

    Args:
        kept: int64 `[T, K]`, of `checked_sampling_mask`, which is not checked again.

    Returns:
        For each name `[...]`; 0 where the label is -100.
    """
    x_TH, next_T = x.flatten(0, -2), shift_labels.reshape(-1)
    found = _by_chunk(x_TH, next_T, names, head, temperature, kept, chunk_tokens)
    return [each.view(shift_labels.shape) for each in found]


def require_labels(name: str, labels: Any, tokens: int, device: torch.device) -> None:
    """Raise ValueError unless there is an int64 label for each token, on their device."""
    require_tensor(name, labels)
    if labels.numel() != tokens or labels.dtype != torch.int64:
        raise ValueError(
            f"{name} must be int64 with one label for each of {tokens} tokens, got "
            f"{labels.dtype} {tuple(labels.shape)}; pass them as to the model."
        )
    if labels.device != device:
        raise ValueError(
            f"{name} must be on the tokens' device {device}, got {labels.device}; call {name}.to()."
        )


def _by_chunk(
    x_TH: Tensor,
    next_T: Tensor,
    names: Sequence[str],
    head: Any,
    temperature: float,
    kept_TK: Tensor | None,
    chunk_tokens: int | None,
) -> list[Tensor]:
    """`_scores` of one chunk after the other, each `[T]`."""
    check_head(head)
    temperature = require_temperature(temperature)

    def score(logits_CV: Tensor, next_C: Tensor, kept_CK: Tensor | None) -> tuple[Tensor, ...]:
        dtype = accumulation_dtype(logits_CV)
        return _scores(sampled_logits(logits_CV, temperature, kept_CK, dtype), next_C, names)

    return by_chunk(score, head, chunk_tokens, x_TH, next_T, kept_TK)


def _scores(logits_CV: Tensor, next_C: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
    """The named scores `[C]` of the labels; 0 where they are ignored."""
    logp_CV = log_softmax(logits_CV, dim=-1, dtype=accumulation_dtype(logits_CV))
    counted = next_C != IGNORE_INDEX
    index = next_C.masked_fill(~counted, 0)
    scores = (SCORES[name](logits_CV, logp_CV, index) for name in names)
    return tuple(torch.where(counted, each, 0) for each in scores)


def _entropy(logits_CV: Tensor, logp_CV: Tensor, next_C: Tensor) -> Tensor:
    # A token masked by a logit of -inf adds 0, not 0 · inf.
    finite = logp_CV.clamp(min=torch.finfo(logp_CV.dtype).min)
    return -(logp_CV.exp() * finite).sum(-1)


SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "log_probs": lambda logits, logp, index: logp.gather(1, index[:, None])[:, 0],
    "entropy": _entropy,
    "mean_logits": lambda logits, logp, index: logits.mean(-1, dtype=logp.dtype),
    "is_top1": lambda logits, logp, index: (logits.argmax(-1) == index).to(logp.dtype),
    "log_sum_sq_probs": lambda logits, logp, index: (2 * logp).logsumexp(-1),
}
"""Scores `[C]` of labels `[C]`, from logits and log-probabilities `[C, V]`, under TRL's names."""
