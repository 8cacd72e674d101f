"""One forward, and one backward, of any model on a batch in which some tokens are replaced.

Every run starts from the same state of the random generators and of the model's buffers, so that
dropout is the same; afterwards both are restored, and no parameter has received a gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.measure.random_state import RandomState
from flexvarlen.patches.isolation.documents import documents_of, units_of
from flexvarlen.patches.isolation.tokens import (
    outside,
    special_tokens,
    with_other_images,
    with_other_tokens,
)
from flexvarlen.patches.isolation.trace import Trace, by_token, tensors_in
from flexvarlen.upstream import required

if TYPE_CHECKING:
    from flexvarlen.verify.experiment.batch import PackedBatch

NO_LOSS = ("labels", "shift_labels", "label_counts", "num_items_in_batch")
"""Removed from the batch: a loss is over all documents, and may be computed without logits."""

BUFFER_BYTES = 1 << 24  # larger buffers hold weights (GPTQ's), which no forward writes to


class NoGradients(Exception):
    """The model has no gradient for its input embeddings; the message says why."""


@dataclass(frozen=True)
class RunResult:
    """Outputs and gradients of one run.

    Attributes:
        outputs: `[T, N]` logits, or last hidden states of a model without a head; detached.
        gradient: `[T, hidden]`, the gradient of the input embeddings; None without a backward.
    """

    outputs: Tensor
    gradient: Tensor | None


class IsolationRun:
    """Runs a model on a batch with replaced tokens.

    Args:
        model: a transformers model, or a wrapper of one.
        batch: see `verify_isolation`.
        layout: the documents, if the batch does not contain the boundaries.
        seed: random seed of the replaced tokens and of the loss.

    Attributes:
        units: the documents without padding, or the segments of trees; runs refer to them by index.
        word: the name of a unit, "document" or "segment".
        batch, row_tokens: B and S.
        forwards: the number of forwards that were run.
        gradients: whether runs have a backward; set by the caller.

    Raises:
        ValueError: see `verify_isolation`.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: PackedBatch | Mapping[str, Any],
        *,
        layout: PackedLayout | None,
        seed: int,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model must be a transformers model, or a wrapper of one, got {model!r:.80}; load "
                "it with AutoModelForCausalLM.from_pretrained."
            )
        # DDP's forward would wait for a backward of all parameters, and send buffers around.
        while isinstance(model, DistributedDataParallel):
            model = model.module
        self.model, self.inner, self.seed = model, transformers_model(model), seed
        stacks = [getattr(self.inner.base_model, name, None) for name in ("encoder", "decoder")]
        if self.inner.config.is_encoder_decoder and None not in stacks:
            raise ValueError(
                f"model must have one stack of layers, got {type(self.inner).__name__}, an encoder "
                "with a decoder; pass model.get_encoder()."
            )
        if not isinstance(batch, Mapping) and not hasattr(batch, "inputs"):
            raise ValueError(
                f"batch must be a mapping of a model's arguments, got {type(batch).__name__}; pass "
                "what PackedCollator returns."
            )
        inputs = dict(batch if isinstance(batch, Mapping) else batch.inputs())
        self.device = device_of_inputs(self.inner)
        self.inputs: dict[str, Any] = {
            key: x.to(self.device) if isinstance(x, Tensor | PackedLayout) else x
            for key, x in inputs.items()
            if key not in NO_LOSS
        }
        found = documents_of(self.inputs, layout)
        self.ids: Tensor = self.inputs["input_ids"]
        self.batch: int = self.ids.shape[0]
        self.row_tokens: int = self.ids.shape[1]
        self.units = units_of(found)
        self.word: Literal["document", "segment"] = (
            "document" if found.segments is None else "segment"
        )
        self.special = special_tokens(self.inner.config)
        self.vocabulary = int(self.inner.config.get_text_config().vocab_size)
        self.gradients = False
        self.forwards = 0
        self._state = _State(self.inner)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Restores random generators and buffers on exit."""
        try:
            yield
        finally:
            self._state.restore()

    def __call__(
        self,
        replaced: Sequence[int],
        losses: Sequence[int] | None = None,
        trace: Trace | None = None,
    ) -> RunResult:
        """One forward with the tokens of some units replaced, and a backward if asked for.

        Args:
            replaced: the units whose tokens are replaced.
            losses: the units with a loss, a fixed linear function of the outputs; None: all.
            trace: hooks the model for this run.

        Raises:
            NoGradients: there is no backward.
            ValueError: the model has no outputs for each token.
        """
        self._state.restore()
        self.forwards += 1
        tokens = [self.units[unit].tokens for unit in replaced]
        ids = with_other_tokens(
            self.ids.reshape(-1), tokens, self.vocabulary, self.seed, self.special
        ).view(self.ids.shape)
        # A cache in the batch would be filled.
        given = {
            key: x if isinstance(x, Tensor) else copy.deepcopy(x) for key, x in self.inputs.items()
        }
        image_token = getattr(self.inner.config, "image_token_id", None)
        given |= {"input_ids": ids, **with_other_images(self.inputs, tokens, image_token)}
        embeddings: list[Tensor] = []

        def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            embeddings.append(output.detach().requires_grad_())
            return embeddings[-1]

        with ExitStack() as stack:
            if self.gradients:
                lookup = self._lookup()
                stack.callback(lookup.register_forward_hook(cut).remove)
            if trace is not None:
                stack.enter_context(trace)
            with torch.set_grad_enabled(self.gradients):
                outputs = self._outputs(self.model(**given))
            if trace is not None:
                trace.stop()
            gradient = self._gradient(outputs, embeddings, losses) if self.gradients else None
        return RunResult(outputs.detach(), gradient)

    def outside(self, units: Sequence[int]) -> list[int]:
        """The units that see none of the given units."""
        return outside(units, self.units)

    def name(self, unit: int) -> str:
        """The unit in words."""
        tree = self.units[unit].tree
        return f"document {unit}" if tree is None else f"segment {unit} of tree {tree}"

    def _outputs(self, output: Any) -> Tensor:
        named = output if isinstance(output, Mapping) else {}
        first = [named[key] for key in ("logits", "last_hidden_state") if key in named]
        for x in tensors_in([*first, output]):
            rows = by_token(x, self.batch, self.row_tokens)
            if rows is not None and x.is_floating_point():
                return rows
        raise ValueError(
            f"model must return a vector for each of the {self.batch} x {self.row_tokens} tokens, "
            f"got {type(self.inner).__name__}, which does not; pass its base model "
            "(model.base_model), and remove logits_to_keep."
        )

    def _gradient(
        self, outputs: Tensor, embeddings: list[Tensor], losses: Sequence[int] | None
    ) -> Tensor:
        if not embeddings or not outputs.requires_grad:
            raise NoGradients(
                "its outputs have no gradient of the input embeddings (a compiled graph hides them)"
            )
        rng = torch.Generator().manual_seed(self.seed)
        weights = torch.randn(outputs.shape[1], generator=rng, device="cpu").to(outputs)
        grad_output = torch.zeros_like(outputs)
        for unit in range(len(self.units)) if losses is None else losses:
            grad_output[self.units[unit].tokens] = weights
        # Not backward(): parameters would get gradients, and DDP would reduce them.
        (gradient,) = torch.autograd.grad(outputs, embeddings[:1], grad_output, allow_unused=True)
        rows = None if gradient is None else by_token(gradient, self.batch, self.row_tokens)
        if rows is None:
            raise NoGradients("its outputs have no gradient of the input embeddings")
        return rows.detach()

    def _lookup(self) -> nn.Module:
        reason = why_no_gradients(self.model)
        if reason is not None:
            raise NoGradients(reason)
        lookup: nn.Module = self.inner.get_input_embeddings()
        return lookup


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model that a model is, or wraps.

    Raises:
        ValueError: there is no transformers model.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(
        f"model must be, or wrap, a transformers PreTrainedModel, got {type(model).__name__}; load "
        "it with AutoModel."
    )


def why_no_gradients(model: nn.Module) -> str | None:
    """Why gradients of the embeddings alone are unavailable (reentrant checkpointing), or None."""
    for module in model.modules():
        if not (module.training and getattr(module, "gradient_checkpointing", False)):
            continue
        name = "_gradient_checkpointing_func"
        checkpoint = required(module, name, "finding reentrant checkpoints")
        if getattr(checkpoint, "keywords", {}).get("use_reentrant"):
            return "its gradient checkpointing is reentrant (pass use_reentrant=False)"
    return None


def device_of_inputs(model: nn.Module) -> torch.device:
    """The device of a model's inputs; if accelerate has dispatched the model, its hook knows."""
    for module in model.modules():  # the root first, then the embeddings
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            device: Any = getattr(each, "execution_device", None)
            if device is not None:
                return torch.device(device)
    device = model.device
    return torch.device(device)


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Set training mode; restore each module's mode on exit."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


class _State:
    """The state of random generators and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._random = RandomState({parameter.device for parameter in model.parameters()})
        self._buffers = [
            (module, name, buffer, _copy(buffer))
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    def restore(self) -> None:
        self._random.restore()
        for owner, name, buffer, copied in self._buffers:
            owner._buffers[name] = buffer
            if buffer is not None and copied is not None and not torch.equal(buffer, copied):
                with torch.no_grad():
                    buffer.copy_(copied)


def _copy(buffer: Tensor | None) -> Tensor | None:
    if buffer is None or buffer.numel() * buffer.element_size() > BUFFER_BYTES:
        return None
    return buffer.detach().clone()
