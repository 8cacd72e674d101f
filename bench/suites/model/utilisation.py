"""Model FLOP utilisation, and what "auto" takes.

Utilisation is the work that a step needs, over what the GPU could do in its time.

Counted is what the mathematics needs, without recomputation: six operations per token for each
parameter of a matrix product (two forward, four backward; the embedding is only looked up), and
attention's pairs of query and key, causal and within a document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.attention.auto.keys import sizes
from flexvarlen.attention.choose import decision_for
from flexvarlen.measure import environment
from flexvarlen.patches.parts import ModelParts
from flexvarlen.verify.experiment.tree_batch import Row
from flexvarlen.verify.experiment.variant import Variant

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
"""Dense bf16 and fp16 peak by words of the GPU's name, in 1e12 operations per second; the first
words found count, so a longer name stands before one that it contains. NVIDIA's figures "with
sparsity" are halved."""


def peak_tflops(gpu: str | None, dtype: str) -> float | None:
    """The GPU's peak for a dtype, or None where the table has none (nor of a MIG slice).

    >>> peak_tflops("NVIDIA H200", "bfloat16"), peak_tflops("NVIDIA H200", "float32")
    (989.4, None)
    """
    if gpu is None or "MIG" in gpu.split() or dtype not in ("bfloat16", "float16"):
        return None
    found = (peak for words, peak in PEAK_TFLOPS.items() if re.search(rf"\b{words}\b", gpu))
    return next(found, None)


def step_tflop(
    model: PreTrainedModel, lengths: Sequence[int], *, backward: bool = True, head: int = 0
) -> float:
    """Operations (1e12) of one step of a causal base model over these documents.

    Args:
        model: the base model; every layer is causal and has no window.
        lengths: tokens of each document; padding is no work.
        backward: a backward too.
        head: parameters of an LM head that every token passes, tied or not.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = sum(module.weight.numel() for module in embeddings)
    products = sum(p.numel() for p in model.parameters()) - looked_up + head
    config = model.config
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    layers = config.num_hidden_layers
    forward = 4 * pairs * config.head_dim * config.num_attention_heads * layers
    attention = forward * 7 // 2 if backward else forward  # backward: 2.5 times forward
    work: float = (6 if backward else 2) * products * sum(lengths) + attention
    return work / 1e12


def utilisation(tflop: float, ms: float, peak: float | None) -> float | None:
    """The share of the peak that a step reached, or None where the peak is unknown.

    >>> utilisation(98.94, 200.0, 989.4)
    0.5
    """
    return None if peak is None else tflop / (ms / 1e3) / peak


def utilised(
    model: PreTrainedModel,
    lengths: Sequence[int],
    ms: float,
    dtype: str,
    *,
    head: int = 0,
    steps: int = 1,
) -> dict[str, float | None]:
    """The measures of a step, where `steps` took `ms`; other arguments as in `step_tflop`."""
    tflop = step_tflop(model, lengths, head=head) / steps
    peak = peak_tflops(environment(model.device)["gpu"], dtype)
    return {"model_tflop": tflop, "peak_tflops": peak, "mfu": utilisation(tflop, ms / steps, peak)}


def attends(
    variant: Variant,
    row: Row,
    *,
    packed: bool = True,
    compiled: bool = False,
    needs_grad: bool = True,
) -> str | None:
    """The backend that attends to a row; "auto" is resolved, and measures if it has not yet.

    Call it before anything is compiled: inside a graph nothing is measured. None for transformers'
    own, for "auto" from position_ids, whose sizes are known in the graph only, and for "auto" where
    the documents are not packed.
    """
    if variant.theirs:
        return None
    if variant.attention != "auto":
        return variant.attention
    if variant.form != "packed_layout" or not packed:
        return None
    layout = variant.layout(row)
    return taken_by_auto(variant.model, layout, compiled=compiled, needs_grad=needs_grad)


def taken_by_auto(
    model: PreTrainedModel,
    layout: fv.PackedLayout,
    dtype: torch.dtype | None = None,
    *,
    needs_grad: bool = True,
    compiled: bool = False,
) -> str:
    """What "auto" takes for a model's layers, once each."""
    found = {}
    for kind in ModelParts.of(model).kinds:
        mask = fv.DocumentMask.of(layout, causal=kind.causal, window=kind.window, chunk=kind.chunk)
        call = kind.call(layout.device, dtype or model.dtype, needs_grad=needs_grad)
        call = call._replace(spec=mask.spec)
        decision = decision_for(call, sizes(mask), mask, compiled=compiled)
        found[kind.layer_type] = decision.backend
    return ", ".join(dict.fromkeys(found.values()))


def taken_for(model: PreTrainedModel, batch: Mapping[str, Any], dtype: torch.dtype) -> str:
    """The kernel that "auto" takes for a packed batch."""
    return taken_by_auto(model, batch["packed_layout"].to(model.device), dtype)
