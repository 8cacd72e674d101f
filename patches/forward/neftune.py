"""NEFTune's noise on embeddings: by the tokens of a document, or of the padded row, not of the row.

Its bound is alpha / sqrt(tokens · width). transformers' hook takes the tokens of the row that the
embeddings see, which holds many documents, or the whole batch under `unpad`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import neftune

from flexvarlen.patches.attention.context import PackedForward
from flexvarlen.patches.batch.unpacked_rows import one_document_per_row
from flexvarlen.patches.forward.wrapper import arguments_of_running_call
from flexvarlen.patches.state import CONTEXT, LAYER_MARK

_OF_ROWS = neftune.neftune_post_forward_hook


def scale_noise_by_document(model: Any) -> None:
    """Let NEFTune's hook on a model's embeddings read the documents of a patched forward.

    Called when the model is patched. Trainer adds the hook when training starts, so it is replaced
    in transformers' module, once per process. Without documents it does what transformers' does. A
    hook that was imported by its name before, and is registered by hand later, knows no documents.
    """
    neftune.neftune_post_forward_hook = _add_noise
    embeddings: nn.Module | None = model.get_input_embeddings()
    hooks: Any = {} if embeddings is None else embeddings._forward_hooks
    for key, hook in hooks.items():
        if hook is _OF_ROWS:
            hooks[key] = _add_noise


def _add_noise(embeddings: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """transformers' `neftune_post_forward_hook`, with the tokens of documents.

    Raises:
        NotImplementedError: in a compiled graph of a patched model.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and embeddings.training and LAYER_MARK in embeddings.__dict__:
        raise NotImplementedError(
            "neftune_noise_alpha must be used without torch.compile in a patched model, as its "
            "noise depends on the documents, got a compiled graph; leave one of them out."
        )
    packed = None if compiling else arguments_of_running_call().get(CONTEXT)
    if not (embeddings.training and isinstance(packed, PackedForward)):
        found: Tensor = _OF_ROWS(embeddings, args, output)
        return found
    tokens = _tokens_of_each(packed, output)
    bound = embeddings.neftune_noise_alpha / (tokens * output.shape[-1]) ** 0.5
    noisy: Tensor = output + (torch.zeros_like(output).uniform_(-1, 1) * bound).to(output.dtype)
    return noisy


def _tokens_of_each(packed: PackedForward, output: Tensor) -> Any:
    """The tokens of the row or the document of each embedding, an int or `[B, S, 1]`. No sync.

    Raises:
        NotImplementedError: documents are trees, or shards of a row.
    """
    layout, row_tokens = packed.layout, packed.padded_row_tokens
    if row_tokens is not None and packed.padded is not None:
        return row_tokens
    if layout.segments is not None or packed.group is not None:
        raise NotImplementedError(
            "neftune_noise_alpha needs documents that lie in one piece, got trees or a "
            "sequence_parallel_group; leave it out."
        )
    lengths = layout.cu_seqlens.diff().clamp(min=1)
    tokens = lengths[layout.document_ids().clamp(max=len(lengths) - 1)]
    if row_tokens is not None:  # padding counts where rows are padded documents, as unpatched
        one_each = one_document_per_row(layout, len(output)).to(tokens.device, non_blocking=True)
        tokens = torch.where(one_each, row_tokens, tokens)
    return tokens.view(*output.shape[:2], 1)
