"""What `verify_isolation` returns, and what it raises."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

_ANEW = (
    "call flexvarlen.patch_model on the model, if its type is verified; or pass both "
    "cu_seq_lens_q, for scans, and seq_idx, for convolutions, which transformers' own path needs, "
    "and install its kernels (flash-linear-attention or mamba-ssm, and causal-conv1d); or pad"
)

REMEDIES = {
    "attention": "call flexvarlen.patch_model(model), or with verify=True, or hand over "
    "the boundaries in a form that the model honours (a mask [B, 1, S, S], with layout=)",
    "linear attention": f"its state must start anew with each document: {_ANEW}",
    "state space": f"its state must start anew with each document: {_ANEW}",
    "convolution": f"it must not reach over the start of a document: {_ANEW}",
    "MoE experts": "experts whose capacity is shared, or whose kernel rounds by how many tokens "
    "it got, mix documents: lift the capacity; where the change is mere rounding, call "
    "model.set_experts_implementation('batched_mm')",
    "norm": "it must not take statistics over the row: normalise each token, or use eval()",
}
PATCHED = (
    "the model is patched, so use its own implementation, one document per row, and report this to "
    "flexvarlen, with model, backend and batch"
)
PATCHED_KINDS = ("attention", "linear attention", "state space", "convolution")
"""Kinds of modules that a patched model runs by document."""

OTHER_REMEDY = "it must treat each token alone, or each document alone"


class IsolationError(RuntimeError):
    """Information of one document reached another.

    Attributes:
        layer: the first layer (in the backward: the last) that shows the leak, from 0, in the order
            in which layers run; None if the leak is outside all layers.
        module: dotted name of the first module whose output changes for the target while its input
            does not (in the backward, its gradients likewise); "" is the model itself.
        kind: the kind of that module: "attention", "linear attention", "state space",
            "convolution", "MoE router", "MoE experts", "MLP", "norm", "embeddings", "linear",
            "rotary embedding", "layer", or "module".
        source: the document whose tokens (in the backward, also its loss) reach the other, by index
            in the batch, from 0; in trees, the segment, by index among the row's non-empty ones.
        target: the document whose outputs (in the backward, input gradients) are reached.
        direction: "forward" (also if the backward leaks too) or "backward".
        change: the largest absolute change there, which distinguishes a leak from rounding; None if
            only the outputs of the model itself show the leak.
    """

    def __init__(
        self,
        message: str,
        *,
        layer: int | None,
        source: int,
        target: int,
        module: str = "",
        kind: str = "module",
        direction: Literal["forward", "backward"] = "forward",
        change: float | None = None,
    ) -> None:
        super().__init__(message)
        self.layer, self.source, self.target = layer, source, target
        self.module, self.kind, self.direction, self.change = module, kind, direction, change

    def as_dict(self) -> dict[str, Any]:
        """The attributes and the message."""
        return {"message": str(self), **vars(self)}


class SameBitsError(RuntimeError):
    """A document's outputs have other bits in another row with as many tokens.

    Attributes:
        document: by index in the batch, from 0; in trees, the tree.
        row: what differs between the two rows.
        change: the largest absolute change of its outputs, or of its input gradients.
        gradients: whether it was the gradients, while the outputs kept their bits.
    """

    def __init__(
        self, message: str, *, document: int, row: str, change: float, gradients: bool = False
    ) -> None:
        super().__init__(message)
        self.document, self.row, self.change, self.gradients = document, row, change, gradients


@dataclass(frozen=True)
class IsolationReport:
    """What was tested, if nothing leaked.

    Attributes:
        documents: the documents whose tokens were replaced; every other document was watched. In
            trees, segments, by index in the row; every segment that does not see them was watched.
        num_docs: number of documents, or segments, in the batch, without padding.
        forwards: number of forwards that were run.
        layers: the layers that were watched, in the order in which they ran.
        gradients: how input gradients were tested: "bits" (they kept their bits, and were zero
            where only other documents had a loss), "zeros" (only the latter, as two backwards of
            the same batch differ in bits), or None.
        why_no_gradients: why `gradients` is None, unless the caller declined them.
        training: whether the model was in training mode.
        unit: what was replaced, documents or segments of trees.
        same_bits: with `same_bits=True`, what kept its bits in other rows of the same size:
            "outputs", or "outputs and input gradients"; else None.
    """

    documents: tuple[int, ...]
    num_docs: int
    forwards: int
    layers: int
    gradients: Literal["bits", "zeros"] | None
    why_no_gradients: str | None
    training: bool
    unit: Literal["document", "segment"] = "document"
    same_bits: str | None = None

    def __str__(self) -> str:
        return self.sentence()

    def sentence(self) -> str:
        """The report as a sentence."""
        how = {
            "bits": "gradients kept their bits too",
            "zeros": "gradients were zero where they had to be (their bits do not repeat)",
            None: f"gradients were not tested: {self.why_no_gradients or 'declined'}",
        }[self.gradients]
        tested = len(self.documents)
        whose = f"{tested} of {self.num_docs}" if tested < self.num_docs else f"{tested}"
        others = "another" if self.unit == "document" else "a token that must not see it"
        mode = "train" if self.training else "eval"
        return (
            f"No bit of {whose} {self.unit}s reached {others} in {self.layers} layers and the "
            f"outputs ({self.forwards} forwards, {mode} mode); {how}."
            + (
                f" In other rows of the same size, {self.same_bits} kept their bits."
                * bool(self.same_bits)
            )
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)
