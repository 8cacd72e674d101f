"""NEFTune's noise on embeddings: by the tokens of a document, or of the padded row, not of the row.

Its bound is alpha / sqrt(tokens · width). transformers' hook takes the tokens of the row that the
embeddings see, which holds many documents, or the whole batch under `unpad`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.unpacked_rows import one_document_per_row
from flexvarlen.patches.forward.wrapper import arguments_of_running_call
from flexvarlen.patches.state import CONTEXT
from flexvarlen.upstream import required


def scale_noise_by_document(embeddings: nn.Module) -> None:
    """Let the hook of NEFTune on a model's embeddings read the documents of a patched forward.

    Called in forwards in training, as Trainer adds the hook when training starts. The hook
    keeps its handle; without documents it does what transformers' does.

    Raises:
        NotImplementedError: under `fullgraph=True`; other compiled graphs break here.
    """
    hooks: Any = embeddings._forward_hooks
    if not any(hook in (neftune_post_forward_hook, _add_noise) for hook in hooks.values()):
        return
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "neftune_noise_alpha must be used without torch.compile in a patched model, as its "
            "noise depends on the documents, got a compiled graph; remove one of them."
        )
    for key, hook in hooks.items():
        if hook is neftune_post_forward_hook:
            hooks[key] = _add_noise


def _add_noise(embeddings: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """transformers' `neftune_post_forward_hook`, with the tokens of documents. No sync.

    Raises:
        NotImplementedError: documents are trees, or shards of a row.
    """
    packed = arguments_of_running_call().get(CONTEXT)
    if not (embeddings.training and isinstance(packed, PackedForward)):
        found: Tensor = neftune_post_forward_hook(embeddings, args, output)
        return found
    layout, row_tokens = packed.layout, packed.row.padded_row_tokens
    tokens: Any = row_tokens
    if row_tokens is None or packed.row.padded is None:
        if layout.segments is not None or not layout.shard.is_whole:
            raise NotImplementedError(
                "neftune_noise_alpha needs documents that lie in one piece, got trees or a "
                "sequence_parallel_group; remove neftune_noise_alpha."
            )
        lengths = layout.cu_seqlens.diff().clamp(min=1)
        tokens = lengths[layout.document_ids().clamp(max=len(lengths) - 1)]
        if row_tokens is not None:  # padding counts where rows are padded documents, as unpatched
            one_each = one_document_per_row(layout, len(output)).to(
                tokens.device, non_blocking=True
            )
            tokens = torch.where(one_each, row_tokens, tokens)
        tokens = tokens.view(*output.shape[:2], 1)
    alpha = required(embeddings, "neftune_noise_alpha", "NEFTune's noise by document")
    bound = alpha / (tokens * output.shape[-1]) ** 0.5
    noisy: Tensor = output + (torch.zeros_like(output).uniform_(-1, 1) * bound).to(output.dtype)
    return noisy
