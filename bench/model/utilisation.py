"""Model FLOP utilisation: the work that a step needs, over what the GPU could do in its time.

Counted is what the mathematics needs, no recomputation: six operations a token for each parameter
that is a matrix product's (two forward, four backward; the embedding, which is looked up, is none),
and attention's unmasked pairs of query and key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.attention import choose
from flexvarlen.patches.models.layers import kinds_of

PEAK_TFLOPS = {
    "GB200": 2500.0,  # GB200 NVL72 data sheet: 360 PFLOPS with sparsity over 72 GPUs
    "B200": 2250.0,  # HGX B200: 36 PFLOPS with sparsity over 8 GPUs
    "H200 NVL": 835.5,  # H200 data sheet: 1,671 with sparsity
    "H200": 989.4,  # H200 data sheet, SXM: 1,979 with sparsity
    "GH200": 989.4,  # GH200 data sheet: 1,979 with sparsity
    "H100 PCIe": 756.5,  # H100 data sheet of 2022: 1,513 with sparsity
    "H100 NVL": 835.5,  # H100 data sheet: 1,671 with sparsity
    "H100": 989.4,  # H100 data sheet, SXM: 1,979 with sparsity
    "A100": 312.0,  # A100 data sheet: 624 with sparsity
    "L40S": 362.0,  # L40S data sheet: 733 with sparsity, 362.05 without
}
"""Dense bf16 and fp16 peak by words of the GPU's name, in 1e12 operations a second; the first words
found count, so what is longer stands before what is in it. Source: NVIDIA's data sheets, whose
figures "with sparsity" are halved."""


def peak_tflops(gpu: str | None, dtype: str) -> float | None:
    """The GPU's peak for a dtype, or None where the table has none (nor of a MIG slice).

    >>> peak_tflops("NVIDIA H200", "bfloat16")
    989.4
    >>> peak_tflops("NVIDIA H200", "float32") is None
    True
    """
    if gpu is None or "MIG" in gpu.split() or dtype not in ("bfloat16", "float16"):
        return None
    found = (peak for words, peak in PEAK_TFLOPS.items() if re.search(rf"\b{words}\b", gpu))
    return next(found, None)


def step_tflop(
    model: PreTrainedModel, lengths: Sequence[int], *, backward: bool = True, head: int = 0
) -> float:
    """Operations (1e12) of one step of a base model over these documents.

    Args:
        model: the base model.
        lengths: tokens of each document; pads are no work.
        backward: a backward too.
        head: parameters of an LM head that every token passes, tied or not.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = sum(module.weight.numel() for module in embeddings)
    products = sum(p.numel() for p in model.parameters()) - looked_up + head
    work: float = (6 if backward else 2) * products * sum(lengths)
    config = model.config
    layout = fv.PackedLayout.from_lengths(lengths)
    pairs: dict[tuple[bool, int | None], int] = {}
    for layer in model.modules():
        if "is_causal" not in layer.__dict__:
            continue
        window = getattr(layer, "sliding_window", None)
        which = (bool(layer.is_causal), window)
        if which not in pairs:
            mask = fv.DocumentMask.of(layout, causal=which[0], window=window)
            pairs[which] = mask.num_pairs()
        head_dim = getattr(layer, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        forward = 4 * pairs[which] * head_dim * config.num_attention_heads
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
        kind.layer_type: choose.choose(
            "auto",
            kind.call(layout.device, dtype, needs_grad=needs_grad),
            fv.DocumentMask(layout, kind.spec),
        )
        for kind in kinds_of(model)
    }


@contextmanager
def noting_auto() -> Iterator[list[str]]:
    """What "auto" takes inside the block, call by call, eagerly or while a graph is traced.

    A graph takes what is known for its own sizes, which need not be those of the eager call: where
    only the device knows the documents, the sizes are patch_model's defaults.
    """
    chosen: list[str] = []
    decision_for = choose.decision_for

    def noting(call: Any, sizes: Any, mask: Any, *args: Any, **options: Any) -> Any:
        found = decision_for(call, sizes, mask, *args, **options)
        chosen.append(found.compiled if mask is None else found.backend)
        return found

    with mock.patch.object(choose, "decision_for", noting):
        yield chosen
