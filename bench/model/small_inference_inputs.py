"""What `small_inference.py` calls a model with: two packings, in tensors that stay the same."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import flexvarlen as fv


def other_packing(lengths: list[int]) -> list[int]:
    """Other documents that make as many tokens, in no more slots than `slots_for` gives.

    >>> other_packing([128, 64]), other_packing([64, 64]), other_packing([9])
    ([64, 128], [42, 86], [3, 6])
    """
    if lengths[::-1] != lengths:
        return lengths[::-1]
    third = sum(lengths) // 3
    return [third, sum(lengths) - third]


def slots_for(lengths: list[int]) -> int:
    """Document slots for both packings."""
    return max(4, len(lengths))


class Inputs:
    """The tensors of a variant, always the same ones; `fill` writes other documents into them.

    `form` is what tells the documents: "packed_layout" (ours), "position_ids" (ours from its first
    look at them in each call; transformers': from a look in each layer) or "cu_seq_lens"
    (transformers' own fast form, which looks at nothing: boundaries and the longest document are
    given, as its DataCollatorWithFlattening makes them).
    """

    def __init__(self, ids: Tensor, lengths: list[int], form: str) -> None:
        self.ids, self.form = ids, form
        self.slots = slots_for(lengths)
        self.layout = self.layout_of(lengths)
        self.position_ids = self.layout.position_ids()[None].clone()
        both = (lengths, other_packing(lengths))
        # No spare slot unless one packing has more documents; a bound that holds for both.
        self.ends = 1 + max(map(len, both))
        self.longest = max(map(max, both))
        self.cu_seq_lens = self.cu_seq_lens_of(lengths)

    def layout_of(self, lengths: list[int]) -> fv.PackedLayout:
        """Documents in fixed shapes."""
        tokens = self.ids.shape[1]
        return fv.PackedLayout.from_lengths(
            lengths, device=self.ids.device, capacity=self.slots, max_seqlen_bound=tokens
        )

    def cu_seq_lens_of(self, lengths: list[int]) -> Tensor:
        """int32 `[ends]`; the last end again where there are fewer documents."""
        ends = [0, *accumulate(lengths)]
        ends += ends[-1:] * (self.ends - len(ends))
        return torch.tensor(ends, dtype=torch.int32, device=self.ids.device)

    def fill(self, lengths: list[int]) -> None:
        """Other documents, where the graphs look for them."""
        self.layout.copy_(self.layout_of(lengths))
        self.position_ids.copy_(self.layout.position_ids()[None])
        self.cu_seq_lens.copy_(self.cu_seq_lens_of(lengths))

    def arguments(self) -> dict[str, Any]:
        """What the model is called with."""
        if self.form == "packed_layout":
            return {"input_ids": self.ids, "packed_layout": self.layout}
        found: dict[str, Any] = {
            "input_ids": self.ids,
            "position_ids": self.position_ids,
            "use_cache": False,
        }
        if self.form == "cu_seq_lens":
            found |= {"cu_seq_lens_q": self.cu_seq_lens, "cu_seq_lens_k": self.cu_seq_lens}
            found |= {"max_length_q": self.longest, "max_length_k": self.longest}
        return found
