"""`same_bits`: pad every packed row, and every matrix product of a head, to one number of tokens.

Matrix-product kernels are chosen by the number of rows, and differ in the order of summation.

Shapes: B rows of S tokens; T = `same_bits` tokens of the packed row.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flexvarlen.layout.arguments import to_int_or_none
from flexvarlen.layout.labels import LABEL_COUNTS, SAMPLE_COUNTS
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.token_map import Padding
from flexvarlen.patches.batch.delivery import Delivery
from flexvarlen.patches.batch.given import Given, Inputs, fills_cache
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.forward.head_checks import HEAD, HeadReference
from flexvarlen.patches.forward.padding import for_head, run_packed
from flexvarlen.patches.forward.trees import TREES
from flexvarlen.patches.forward.wrapper import (
    Steps,
    call_own,
    of_wrappers,
    running_calls,
    scores_itself,
    unchanged,
    unwrap_marked,
    wrap_forward,
)
from flexvarlen.patches.models.layers import dtype_of_forward
from flexvarlen.patches.refusal import Refusal, refuse
from flexvarlen.upstream import required

HEAD_TOKENS = "_flexvarlen_head_tokens"
"""Attribute of a wrapped head: the number of tokens of each of its matrix products."""


def check_same_bits(same_bits: int | bool | None, multiple_of: int | None) -> int | None:
    """The argument `same_bits` of `patch_model`: a number of tokens, or None.

    Raises:
        ValueError: it is none, or comes with `unpad_to_multiple_of`.
    """
    if same_bits is None or same_bits is False:
        return None
    tokens = None if same_bits is True else to_int_or_none(same_bits)
    if tokens is None or tokens < 1:
        raise ValueError(
            "same_bits must be the number of tokens of every row, as the size of later batches is "
            f"not known to patch_model, got {same_bits!r}; pass the total_tokens of your collator, "
            "or the tokens of the largest padded batch, such as same_bits=16_384."
        )
    if multiple_of is not None:
        raise ValueError(
            "unpad_to_multiple_of must not be given with same_bits, which is the size of every "
            f"row, got {multiple_of} and same_bits={tokens}; remove it."
        )
    return tokens


# ---- rows ----


def _tokens(given: Given) -> int:
    batch, row_tokens = given.shape
    return batch * row_tokens


def _too_long(given: Given) -> str | None:
    tokens, size = _tokens(given), given.patch.same_bits or 0
    return f"{tokens} tokens with same_bits={size}" if tokens > size else None


def _counted(given: Given) -> bool:
    return any(given.inputs.get(name) is not None for name in (SAMPLE_COUNTS, LABEL_COUNTS))


ROW_SIZE = (
    Refusal(
        _too_long,
        "a row must have at most same_bits tokens, got {got}; pass a larger same_bits to "
        "patch_model, or fewer documents.",
    ),
    Refusal(
        _counted,
        "rows of fv.share_prefixes must have same_bits tokens themselves, as their labels and "
        "counts are by token, got fewer; pass total_tokens= to fv.share_prefixes.",
    ),
)


def fill_row(given: Given) -> Given:
    """The same documents in a row of `same_bits` tokens, of which those at the end are padding.

    Forwards that decode, or fill a cache, are not changed.
    """
    filled = _filled(given)
    return given if filled is None else run_packed(given, filled)


def fill_row_below_head(given: Given) -> Given | Inputs:
    """As `fill_row`, of a head whose base model fills the row."""
    filled = _filled(given)
    return given if filled is None else for_head(given, filled)


def _filled(given: Given) -> PaddedBatch | None:
    size, tokens = given.patch.same_bits, _tokens(given)
    is_row = given.why_unpacked is None and given.padded is None
    if size is None or tokens == size or not is_row or fills_cache(given.inputs):
        return None
    refuse(given, ROW_SIZE)
    batch, row_tokens = given.shape
    documents = given.documents()
    if documents.segments is not None:
        refuse(given, TREES)
    layout = longer(documents, size)
    offsets = torch.arange(size, device=layout.device).clamp(max=tokens)
    moves = Padding(offsets, batch, row_tokens)
    return PaddedBatch(layout, moves, False, Delivery(), several=True)


def longer(layout: PackedLayout, total_tokens: int) -> PackedLayout:
    """The same documents in a longer row; the tokens after them are padding. No sync; traces."""
    inside = layout.padding
    if inside is not None:
        inside = pad(inside, (0, total_tokens - len(inside)))
    if not torch.compiler.is_compiling():
        return layout.replace(total_tokens=total_tokens, has_padding=True, padding=inside)
    return PackedLayout(  # a field that is read, such as num_docs, would be guarded
        layout.cu_seqlens,
        cu_seqlens_host=None,
        total_tokens=total_tokens,
        max_seqlen_bound=layout.max_seqlen_bound,
        num_docs=None,
        max_seqlen=None,
        padding=inside,
        has_padding=True,
        segments=layout.segments,
    )


def check_row_size(given: Given, layout: PackedLayout, several: bool) -> None:
    """Refuse a row that was not checked, or of which the size is another one.

    Raises:
        ValueError: the model was moved or cast since, or the real tokens of a padded batch do not
            fit into a row.
    """
    size, checked = given.patch.same_bits, given.patch.checked_on
    device = given.tokens.device
    found = (device, dtype_of_forward(given.parts.text_tower(given.module), device))
    if checked != found:
        raise ValueError(
            f"same_bits was checked on {_words(checked)}, got a forward on {_words(found)}; call "
            "patch_model again where the model runs, and under the autocast that it runs in."
        )
    head: HeadReference | None = given.module.__dict__.get(HEAD)
    if head is not None and head.module is not None and scores_itself(head.module):
        raise ValueError(
            "same_bits must be set after TRL's trainer was made, whose fused head multiplies tiles "
            "of other sizes, got a model that was patched before; call "
            "patch_trainer(trainer, same_bits=...)."
        )
    if size is not None and given.padded is not None and layout.total_tokens > size:
        raise ValueError(
            f"the real tokens of a padded batch must be at most same_bits={size}, got "
            f"{_real_tokens(layout)}; pass a larger same_bits to patch_model, or smaller batches."
        )


def _words(where: tuple[torch.device, torch.dtype] | None) -> str:
    return "nothing" if where is None else f"{where[0]} in {where[1]}"


def _real_tokens(layout: PackedLayout) -> int:
    return int(layout.real_tokens().sum())


# ---- heads ----


def _in_pieces(module: nn.Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A linear head's outputs `[..., V]` of hidden states `[..., H]`, T of them at a time."""
    (hidden,) = args or kwargs.values()
    size: int | None = module.__dict__.get(HEAD_TOKENS)  # None: unpatched, below a hook
    rows: Tensor = hidden.flatten(0, -2)
    if size is None or len(rows) == size or any(map(fills_cache, running_calls())):
        return call_own(module, own, (hidden,), {})
    pieces = pad(rows, (0, 0, 0, -len(rows) % size)).split(size)
    outputs = [call_own(module, own, (piece[None],), {})[0] for piece in pieces]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined[: len(rows)].view(*hidden.shape[:-1], joined.shape[-1])


HEAD_STEPS = Steps(unchanged, call=_in_pieces)


# ---- TRL's fused head, which multiplies by the weights of a linear head itself ----

_SCORES = "_ChunkedLogProbFunction"
"""TRL's function of hidden states and a head's weights, in the module of its fused head."""


class _OfWholeChunks:
    """As that function, of hidden states `[N, H]` with N a multiple of its chunk of tokens."""

    def __init__(self, function: Any) -> None:
        self.function = function
        where = sys.modules[function.__module__]
        self.chunk: int = required(where, "TOKEN_CHUNK_SIZE", "same_bits in TRL's fused head")

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *others: Any
    ) -> tuple[Tensor | None, ...]:
        tokens = len(hidden)
        spare = -tokens % self.chunk
        rows, of_rows = pad(hidden, (0, 0, 0, spare)), pad(targets, (0, spare))
        outputs = self.function.apply(rows, weight, bias, of_rows, *others)
        return tuple(None if x is None else x[:tokens] for x in outputs)


def call_with_whole_chunks(
    module: nn.Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a model's own forward; if that is TRL's fused head, in tiles of one size."""
    functions = of_wrappers(own) if kwargs.get("fused_lm_head") else ()
    found = (getattr(x, "__globals__", {}) for x in functions)
    names: dict[str, Any] = next((x for x in found if _SCORES in x), {})
    before = names.get(_SCORES)
    if before is None:
        return call_own(module, own, args, kwargs)
    names[_SCORES] = _OfWholeChunks(before)
    try:
        return call_own(module, own, args, kwargs)
    finally:
        names[_SCORES] = before


def fix_head_size(head: nn.Module, tokens: int) -> None:
    """Make every matrix product of a linear head one of `tokens` hidden states."""
    head.__dict__[HEAD_TOKENS] = tokens
    wrap_forward(head, HEAD_STEPS)


def free_head_size(model: nn.Module) -> None:
    """Undo `fix_head_size` of a model's head, also of one that was wrapped since."""
    unwrap_marked(model, HEAD_TOKENS)
