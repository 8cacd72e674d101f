"""What each of two ranks trains on for test_distributed.py.

Rank 0 has documents 0 to 3, rank 1 documents 4 and 5, of another length: what they learn together
is what one process learns of all six.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import flexvarlen as fv
from tests import forms
from tests.tiny_models import LENGTHS, batch_of, documents

WORLD = 2
DOCS = ((0, 1, 2, 3), (4, 5))
BEGINNING = 40  # tokens that all samples share
OF_SAMPLES = ("trees", "padded samples")  # the forms that hold samples; others hold documents


def samples() -> list[Tensor]:
    """Texts with one beginning.

    Not made on import: the process that the ranks are forked from must not run torch.
    """
    return [torch.cat([documents()[2][:BEGINNING], text]) for text in documents()]


def texts_of(form: str) -> Sequence[Tensor]:
    """What all ranks learn together."""
    return samples() if form in OF_SAMPLES else documents()


def inputs_of(form: str, docs: tuple[int, ...] | None = None) -> dict[str, Any]:
    """This rank's texts in a form of `FORMS`, in a padded batch, or as a tree.

    Ranks average their losses, so each is divided by half of all labels.

    Args:
        docs: default: all of this rank.
    """
    docs = DOCS[dist.get_rank()] if docs is None else docs
    every = texts_of(form)
    labels = sum(len(text) - 1 for text in every)
    own = [every[i] for i in docs]
    if form == "padded":
        made = padded(own, "left")
    elif form == "padded samples":
        made = padded(own, "right")
    elif form == "trees":
        made = fv.share_prefixes([text.tolist() for text in own]).batch()
    else:
        batch = batch_of((docs,), row_tokens=sum(LENGTHS[i] for i in docs))
        beside = ("cu_seq_lens_k",) if form == "cu_seq_lens" else ()
        made = {"input_ids": batch.ids, "labels": batch.ids, **forms.given(form, batch, *beside)}
    return {**made, "num_items_in_batch": torch.tensor(labels / WORLD)}


def padded(texts: list[Tensor], side: Literal["left", "right"]) -> dict[str, Tensor]:
    """One text a row, padded on this side."""
    ids = pad_sequence(texts, batch_first=True, padding_side=side)
    ones = [torch.ones_like(text) for text in texts]
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
