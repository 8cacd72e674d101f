"""A tiny model of each kind in docs/compatibility.md, a packed row for it, and what it must learn.

Everything is in fp64, so that what is left is a difference in meaning: transformers computes norms,
softmaxes and auxiliary losses in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests import forms
from tests.patches.forward import test_router_logits as router
from tests.patches.models import test_encoders as encoders
from tests.patches.models import test_vision_families as vision
from tests.tiny_models import documents, exact_and_baseline, new_model, one_row


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        family: of the tiny model, a name of `tests/tiny_models.py`.
        changes: of its config.
    """

    family: str
    changes: dict[str, Any] = field(default_factory=dict)

    def model(self) -> Any:
        """A new unpatched one, in fp64 and train mode."""
        return new_model(self.family, **self.changes).double().train()


ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
KINDS = {
    "dense": Kind("qwen3"),
    "windows": Kind("qwen3_windows"),
    "MoE, router loss": Kind("mixtral", ROUTER_LOSS),
    "longrope": Kind("phi3"),
    "encoder": Kind("modernbert"),
    "images": Kind("qwen2_5_vl"),
    "hybrid": Kind("qwen3_5_text"),
}
CAUSAL_TEXT = tuple(kind for kind in KINDS if kind not in ("encoder", "images"))


def examples(kind: str) -> list[dict[str, Any]]:
    """The documents, as a dataset of text has them."""
    if kind == "encoder":
        pairs = zip(documents(), encoders.labels(), strict=True)
        return [{"input_ids": ids.tolist(), "labels": own.tolist()} for ids, own in pairs]
    return [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in documents()]


def row_of(kind: str) -> dict[str, Any]:
    """All documents in one row, and their labels: the keywords of a forward."""
    if kind == "images":
        inputs = vision.inputs_of(vision.documents(), torch.float64)
        return {**inputs, "labels": inputs["input_ids"], "packed_layout": vision.layout()}
    batch = one_row()
    labels = encoders.labels_of(batch) if kind == "encoder" else batch.ids
    return {"input_ids": batch.ids, "labels": labels, **forms.given("packed_layout", batch)}


def alone(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unpatched model, each document in a forward of its own."""
    family, order = KINDS[kind].family, one_row().order
    if kind == "MoE, router loss":
        loss, _, gradients = router.apart(family, one_row())
    elif kind == "images":
        _, loss, gradients, _ = vision.one_by_one(family, torch.float64)
    elif kind == "encoder":
        (_, loss, gradients), _ = encoders.exact_and_baseline(family, order)
    else:
        exact, _ = exact_and_baseline(family, order)
        loss, gradients = exact.loss, exact.gradients
    return loss, gradients


def assert_learned_alone(
    kind: str, loss: Tensor, gradients: dict[str, Tensor], times: float = 1.0
) -> None:
    """A step's loss and gradients are `times` those of the documents one by one."""
    expected, each = alone(kind)
    torch.testing.assert_close(loss.double(), times * expected.double(), rtol=1e-5, atol=0)
    assert gradients.keys() == each.keys()
    for name, gradient in gradients.items():
        error = (gradient - times * each[name]).norm()
        assert error <= 1e-4 * times * each[name].norm() + 1e-7, f"{name} is off by {error}"


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Those that there are."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
