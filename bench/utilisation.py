"""Model FLOP utilisation: the work that a step needs, over what the GPU could do in its time.

Counted is what the mathematics needs, no recomputation: six operations a token for each parameter
that is a matrix product's (two forward, four backward; the embedding, which is looked up, is none),
and attention's unmasked pairs of query and key.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.attention import resolve_backend
from flexvarlen.patches.routing import kinds_of

PEAK_TFLOPS = {
    "H200": 989.4,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "B200": 2250.0,
}
"""Dense bf16 and fp16 peak by a part of the GPU's name, in 1e12 operations a second; the first part
found counts. Source: NVIDIA's data sheets, whose figures "with sparsity" are halved."""


def peak_tflops(gpu: str | None, dtype: str) -> float | None:
    """The GPU's peak for a dtype, or None where the table has none.

    >>> peak_tflops("NVIDIA H200", "bfloat16")
    989.4
    >>> peak_tflops("NVIDIA H200", "float32") is None
    True
    """
    if gpu is None or dtype not in ("bfloat16", "float16"):
        return None
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in gpu), None)


def step_tflop(model: PreTrainedModel, lengths: Sequence[int], *, backward: bool = True) -> float:
    """Operations (1e12) of one step of a base model over these documents."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = sum(module.weight.numel() for module in embeddings)
    products = sum(p.numel() for p in model.parameters()) - looked_up
    work = (6 if backward else 2) * products * sum(lengths)
    config = model.config
    layout = fv.PackedLayout.from_lengths(lengths)
    pairs: dict[int | None, int] = {}
    for layer in model.modules():
        if "is_causal" not in layer.__dict__:
            continue
        window = getattr(layer, "sliding_window", None)
        if window not in pairs:
            mask = fv.DocumentMask.of(layout, causal=bool(layer.is_causal), window=window)
            pairs[window] = mask.num_pairs()
        head_dim = getattr(layer, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        forward = 4 * pairs[window] * head_dim * config.num_attention_heads
        work += forward * 7 // 2 if backward else forward  # backward: 2.5 times forward
    return work / 1e12


def utilisation(tflop: float, ms: float, peak: float | None) -> float | None:
    """The share of the peak that a step reached, or None where the peak is unknown.

    >>> utilisation(98.94, 200.0, 989.4)
    0.5
    """
    return None if peak is None else tflop / (ms / 1e3) / peak


def resolved_auto(
    model: PreTrainedModel, layout: fv.PackedLayout, dtype: torch.dtype, *, needs_grad: bool = True
) -> dict[str, str]:
    """What "auto" resolves to on this model's layers, by layer type; measures if it has not."""
    return {
        kind.layer_type: resolve_backend(
            "auto",
            fv.DocumentMask(layout, kind.spec),
            dtype=dtype,
            num_heads=kind.num_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            needs_grad=needs_grad,
        )
        for kind in kinds_of(model)
    }
