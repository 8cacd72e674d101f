"""`row_cost`: the FLOPs of a training step of a model, by token and by pair in attention."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn

from flexvarlen.mask.spec import MaskSpec
from flexvarlen.packing.row_cost import RowCost
from flexvarlen.patches.inner_model import transformers_model
from flexvarlen.patches.models.layers import kinds_of_layers
from flexvarlen.patches.parts import ModelParts

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
"""The names that configs give the number of experts of a token."""


def row_cost(model: nn.Module, *, padded: bool = False) -> RowCost:
    """Return what a packed row costs a model, for `BalancedSampler` and `PackedDataset`.

    Counted, in FLOPs of forward and backward:

    - for each token, the matrix products with the parameters that it uses. Of a layer of experts
      these are its top k; frozen ones have no gradient. Recurrent layers count in the same way.
    - for each query-key pair that a layer's mask allows, attention: full, with a window or chunks,
      causal or bidirectional.

    Not counted: embeddings, norms, vision towers, padding, and gradient checkpointing.

    Args:
        model: a transformers model, patched or not, also inside wrappers, with weights or on the
            meta device; before FSDP1 or ZeRO-3 shard it. Inactive adapters count too.
        padded: whether all rows are padded to one size (`total_tokens=`). Padding costs what tokens
            do, so only attention differs between such rows.

    Returns:
        A `RowCost`, in FLOPs.

    Raises:
        ValueError: there is no transformers model inside, or its parameters are sharded.
        NotImplementedError: the model's config does not say how many experts a token uses.

    >>> import flexvarlen as fv
    >>> from flexvarlen.verify.models import build_model
    >>> cost = fv.row_cost(build_model("llama")[0])
    >>> one_long, many_short = cost.of_rows([[8192], [512] * 16])
    >>> bool(one_long > many_short)
    True
    """
    inner = transformers_model(model)
    if any(not parameter.numel() for parameter in inner.parameters()):
        raise ValueError(
            "the model must have all its parameters, got some that are empty; call row_cost before "
            "the model is sharded."
        )
    parts = ModelParts.of(inner)
    tower = parts.text_tower(inner)
    per_pair: Counter[MaskSpec] = Counter()
    for kind in kinds_of_layers(tower, parts.config):
        # Two matrix products in the forward, and five in the backward, as FlashAttention counts.
        per_pair[kind.spec] += 14 * kind.num_heads * kind.head_dim  # type: ignore[assignment]
    if padded and per_pair:
        return RowCost(0.0, per_pair)
    head = {*inner.modules()} - {*parts.base(inner).modules()}
    per_token = sum(_flops(part, parts.config) for part in [*tower.modules(), *head])
    return RowCost(per_token, per_pair)


def _flops(module: nn.Module, config: Any) -> float:
    """FLOPs of a token in a module's own matrices, in forward and backward.

    Raises:
        NotImplementedError: the config does not say how many experts a token uses.
    """
    if isinstance(module, nn.Embedding):
        return 0.0
    if isinstance(module, nn.Linear):  # not its parameter's size, which quantization changes
        return _per_weight(module.weight) * module.in_features * module.out_features
    matrices = [x for x in module._parameters.values() if x is not None and x.ndim > 1]
    total = sum(_per_weight(matrix) * matrix.numel() for matrix in matrices)
    is_convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    experts = next((x.shape[0] for x in matrices if x.ndim == 3), None)
    if experts is None or is_convolution:
        return float(total)
    top_k = next((k for name in _TOP_K if (k := getattr(config, name, None))), None)
    if top_k is None:
        raise NotImplementedError(
            f"the config of {type(module).__name__} must say how many experts a token uses, got "
            f"none of {', '.join(_TOP_K)}; make a RowCost of the model's FLOPs."
        )
    return float(total * top_k / experts)


def _per_weight(weight: Tensor) -> int:
    """FLOPs of a token for each number in a matrix: of outputs, and of gradients of both."""
    return 6 if weight.requires_grad else 4
