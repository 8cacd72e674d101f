"""The loss by which a head balances experts, where tokens stand for several samples."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flexvarlen.layout.labels import SAMPLE_COUNTS
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.given import Given, Inputs
from flexvarlen.patches.batch.row import PackedRow
from flexvarlen.patches.models.layers import text_config_of
from flexvarlen.patches.models.verified import is_verified
from flexvarlen.patches.parts import ModelParts


def weigh_tokens(given: Given, row: PackedRow, packed: PackedForward, inputs: Inputs) -> None:
    """Give a head that balances experts the weights of tokens as its padding mask.

    These losses weigh each token by the mask, so where tokens stand for several samples it counts
    these.
    """
    counts: Tensor | None = given.inputs.get(SAMPLE_COUNTS)
    has_counts = counts is not None or row.targets.loss is not None
    if returns_router_logits(given) and (has_counts or row.layout.segments is not None):
        inputs["attention_mask"] = _token_weights(given.parts, row.layout, counts)


def returns_router_logits(given: Given) -> bool:
    """Whether the forward returns the logits of its experts' routers."""
    asked = given.inputs.get("output_router_logits")
    return bool(getattr(given.config, "output_router_logits", False) if asked is None else asked)


def _token_weights(parts: ModelParts, layout: PackedLayout, counts: Tensor | None) -> Tensor:
    """int64 `[1, T]`: for how many samples each token counts in a router's loss, 0 at padding.

    The head gets it as attention_mask, by which `load_balancing_loss_func` multiplies each token.

    Args:
        counts: the sample_counts.

    Raises:
        ValueError: none, or of another number of tokens.
        NotImplementedError: a head that may read the weights as a mask of ones, as Doge's does.

    No sync; traces under `fullgraph=True`.
    """
    if not is_verified(parts.model_class, parts.model_config.model_type):
        raise NotImplementedError(
            "output_router_logits must be False with sample_counts, or a packed_layout of trees, "
            "in a model that is not of a verified family, whose auxiliary loss may count a shared "
            f"token once, got True for {parts.model_class.__name__}; pack each path as a document."
        )
    if counts is None or counts.numel() != layout.total_tokens:
        got = "none" if counts is None else f"shape {tuple(counts.shape)}"
        raise ValueError(
            "sample_counts must give the samples that share each token, "
            f"[1, {layout.total_tokens}], with output_router_logits=True and a packed_layout of "
            f"trees, got {got}; take them from fv.share_prefixes."
        )
    return (counts.reshape(-1) * layout.real_tokens())[None]


def balance_loss(head: nn.Module, outputs: Any) -> Tensor | float:
    """What transformers' heads add to their loss to balance experts; 0 if they add none."""
    loss = outputs.get("aux_loss")
    if not isinstance(loss, Tensor):
        return 0.0
    coefficient: float | None = getattr(head, "router_aux_loss_coef", None)
    if coefficient is None:  # a head over images and text
        coefficient = text_config_of(head.config).router_aux_loss_coef
    return coefficient * loss
