"""`TreeCollator`: a row of trees of each batch of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

from flexvarlen.layout.arguments import checked_sizes
from flexvarlen.packing.collator import pad_token_id_of
from flexvarlen.packing.loader_pass import DISPATCH_NOTHING, is_dispatched
from flexvarlen.packing.prefixes import checked_tree_sizes, share_prefixes
from flexvarlen.packing.tree_images import rope_index_of


@dataclass(frozen=True)
class TreeCollator:
    """Collates samples into one row of trees, for a patched model.

    The model's loss is then `tree_loss`, which equals the loss of the samples computed one by one.
    Batches of equal total_tokens, capacity, max_seqlen_bound and max_depth share one compiled
    graph.

    Args:
        tokenizer: the model's tokenizer, or None; its pad token fills the padding if `pad_token_id`
            is None.
        total_tokens and all others: as in `share_prefixes`; keyword arguments, checked when the
            collator is made.
    """

    tokenizer: Any = None
    _: KW_ONLY
    total_tokens: int | None = None
    pad_token_id: int | None = None
    capacity: int | None = None
    max_seqlen_bound: int | None = None
    max_depth: int | None = None
    min_tokens: int = 1
    model: Any = None

    def __post_init__(self) -> None:
        if self.model is not None:
            object.__setattr__(self, "model", rope_index_of(self.model))
        checked_sizes(self.total_tokens, self.capacity, self.max_seqlen_bound)
        checked_tree_sizes(self.min_tokens, self.max_depth)
        pad_token_id_of(self.tokenizer, self.pad_token_id)

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """The keyword arguments of the model.

        Args:
            features: samples, or nested lists or iterators of them (groups, and rows of groups).

        Raises:
            ValueError: as in `share_prefixes`.
        """
        if is_dispatched():
            self.check_dispatched()
        options = {name: value for name, value in vars(self).items() if name != "tokenizer"}
        options["pad_token_id"] = pad_token_id_of(self.tokenizer, self.pad_token_id)
        return share_prefixes(_samples(features), **options).batch()

    def check_dispatched(self) -> None:
        """Raise: trees cannot be sent to other processes."""
        raise ValueError(
            "TreeCollator must run in each process, but accelerate loads the batches of all "
            f"processes in one; {DISPATCH_NOTHING}."
        )


def _samples(features: Any) -> Iterator[Any]:
    if not isinstance(features, Iterable):
        raise ValueError(
            f"features must be samples, or lists of them, got {type(features).__name__}; pass "
            "token ids or mappings with input_ids."
        )
    for each in features:
        if isinstance(each, Iterator):  # which can be read once
            each = list(each)
        if isinstance(each, Mapping | Tensor | str) or (
            isinstance(each, Iterable) and not isinstance(next(iter(each), 0), Iterable)
        ):
            yield each
        else:
            yield from _samples(each)
