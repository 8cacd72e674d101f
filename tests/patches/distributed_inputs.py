"""What the two processes of test_distributed.py train: models, each rank's rows, and one step.

Rank 0 packs documents 0 to 3 in a row, rank 1 documents 4 and 5, of another length: what they learn
together is what one process learns of all six.
"""

from __future__ import annotations

from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

import flexvarlen as fv
from tests import forms
from tests.tiny_models import LENGTHS, batch_of, documents, new_model

WORLD = 2
ROWS = ((0, 1, 2, 3), (4, 5))
LABELS = sum(LENGTHS) - len(LENGTHS)


BEGINNING = 40  # tokens that all samples share
SAMPLE_LABELS = sum(LENGTHS) + len(LENGTHS) * (BEGINNING - 1)


def samples() -> list[list[int]]:
    """What the ranks learn from trees: texts with one beginning.

    Not made on import: the process that the ranks are forked from must not run torch.
    """
    beginning = documents()[2][:BEGINNING].tolist()
    return [[*beginning, *text.tolist()] for text in documents()]


def lora(model: nn.Module) -> nn.Module:
    """Adapters that are not zero at first."""
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def inputs_of(form: str = "position_ids", docs: tuple[int, ...] | None = None) -> dict[str, Any]:
    """This rank's row; ranks average their losses, so each is divided by its share of labels."""
    docs = ROWS[dist.get_rank()] if docs is None else docs
    batch = batch_of((docs,), row_tokens=sum(LENGTHS[i] for i in docs))
    beside = ("cu_seq_lens_k",) if form == "cu_seq_lens" else ()
    share = torch.tensor(LABELS / WORLD)
    return {
        "input_ids": batch.ids,
        "labels": batch.ids,
        "num_items_in_batch": share,
        **forms.given(form, batch, *beside),
    }


def padded_inputs() -> dict[str, Any]:
    """This rank's documents in a padded batch, one in each row."""
    docs = ROWS[dist.get_rank()]
    batch = batch_of(tuple((doc,) for doc in docs), row_tokens=max(LENGTHS), left=True)
    mask = (batch.document_ids > 0).long()
    share = torch.tensor(LABELS / WORLD)
    return {
        "input_ids": batch.ids,
        "labels": batch.ids.masked_fill(mask == 0, -100),
        "num_items_in_batch": share,
        "attention_mask": mask,
    }


def tree_inputs() -> dict[str, Any]:
    """This rank's samples as a tree."""
    every = samples()
    shared = fv.share_prefixes([every[i] for i in ROWS[dist.get_rank()]])
    return {**shared.batch(), "num_items_in_batch": torch.tensor(SAMPLE_LABELS / WORLD)}


def padded_samples() -> dict[str, Any]:
    """This rank's samples in a padded batch."""
    every = samples()
    own = [torch.tensor(every[i]) for i in ROWS[dist.get_rank()]]
    ids = pad_sequence(own, batch_first=True)
    mask = pad_sequence([torch.ones_like(x) for x in own], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    share = torch.tensor(SAMPLE_LABELS / WORLD)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "num_items_in_batch": share}


def step(model: nn.Module, **inputs: Any) -> dict[str, Any]:
    """Loss and gradients of all ranks together."""
    loss = model(**(inputs or inputs_of())).loss
    loss.backward()
    return {"loss": mean(loss), "gradients": gradients_of(model)}


def mean(loss: Tensor) -> Tensor:
    """The mean over the ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / WORLD


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients, under the names of the bare model."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        for prefix in ("_orig_mod.", "_fsdp_wrapped_module.", "module."):
            name = name.replace(prefix, "")
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        gradients[name] = whole.clone()
    return gradients


def model_of(kind: str = "qwen3", **changes: Any) -> Any:
    """A new model in train mode."""
    return new_model(kind, **changes).train()
