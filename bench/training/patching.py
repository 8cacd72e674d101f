"""A model patched with a backend, or the sentence that says why it cannot train with it here."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.equivalence.variants import Unsupported


def patch_to_train(model: PreTrainedModel, backend: str, dtype: torch.dtype) -> None:
    """`patch_model`, in place.

    Args:
        backend: of ours, or "auto".
        dtype: that attention gets; under autocast it is not the parameters'.

    Raises:
        Unsupported: a package is missing, or the kernel refuses.
    """
    config, reason = model.config, None
    if backend != "auto":
        reason = fv.why_not(
            backend,
            device=model.device,
            dtype=dtype,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            needs_grad=True,
        )
    if reason is not None:
        raise Unsupported(reason)
    fv.patch_model(model, backend)
