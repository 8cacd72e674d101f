"""A tiny model of each kind in docs/compatibility.md, a packed row for it, and what it must learn.

Everything is in fp64, so that what is left is a difference in meaning: transformers computes norms,
softmaxes and auxiliary losses in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.patches.forward import test_router_logits as router
from tests.patches.models import images
from tests.patches.models.contract import CASES, Text, own_labels
from tests.tiny_models import documents, new_model, one_row


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        family: of the tiny model, a name of `tests/tiny_models.py`.
        changes: of its config.
        images: whether it gets any.
    """

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    images: bool = False

    @property
    def case(self) -> Text:
        """What it gets, and what that gives one by one."""
        name = f"{self.family}, images" if self.images else self.family
        return CASES.get(name, Text(self.family))

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
    "images": Kind("qwen2_5_vl", images=True),
    "hybrid": Kind("qwen3_5_text"),
}
CAUSAL_TEXT = tuple(kind for kind in KINDS if kind not in ("encoder", "images"))


def examples(kind: str) -> list[dict[str, Any]]:
    """The documents, as a dataset or a processor gives them; of images all tokens are learned."""
    if kind == "images":
        return [
            {
                "input_ids": x.ids,
                "labels": x.ids,
                "mm_token_type_ids": x.types,
                "pixel_values": x.patches,
                "image_grid_thw": x.grid,
            }
            for x in images.documents()
        ]
    labels = own_labels() if kind == "encoder" else documents()
    pairs = zip(documents(), labels, strict=True)
    return [{"input_ids": ids.tolist(), "labels": own.tolist()} for ids, own in pairs]


def row_of(kind: str) -> dict[str, Any]:
    """All documents in one row, and their labels: the keywords of a forward."""
    inputs = KINDS[kind].case.inputs("packed_layout")
    floating = {name: x.double() for name, x in inputs.items() if name == "pixel_values"}
    return {**inputs, **floating}


def alone(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unpatched model, each document in a forward of its own."""
    if kind == "MoE, router loss":
        loss, _, gradients = router.apart(KINDS[kind].family, one_row())
        return loss, gradients
    exact, _ = KINDS[kind].case.alone("packed_layout")
    return exact.loss, exact.gradients


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
