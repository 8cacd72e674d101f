"""What `patch_model(verify=True)` checks, on a small random batch, once for each kind of model.

The documents must give what each gives alone, unpatched, and no bit of one may reach another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flexvarlen._version import __version__
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.isolation.model_run import IsolationRun, device_of_inputs, training_mode
from flexvarlen.patches.isolation.report import IsolationError, SameBitsError
from flexvarlen.patches.isolation.same_bits import compare_bits
from flexvarlen.patches.isolation.tokens import special_tokens
from flexvarlen.patches.isolation.verify import verify_isolation
from flexvarlen.patches.models.layers import attention_layers, text_config_of
from flexvarlen.patches.models.verified import is_verified
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.state import LostDocuments, Patch

_LENGTHS = (5, 1, 300, 7)  # tokens of the documents, if the model has as many positions
_SEED = 0
_DOCUMENT_ALONE = "use the model's own attention, one document per row."

_passed: set[tuple[object, ...]] = set()  # by `_key`, in this process


def refuse_unloaded(inner: PreTrainedModel, *, gradients: bool) -> None:
    """Refuse a model that the checks of `patch_model` cannot run, whatever its kind.

    Args:
        gradients: whether the check has a backward.

    Raises:
        NotImplementedError: it is on the meta device, or quantized so that it cannot be
            differentiated.
    """
    quantizer: Any = getattr(inner, "hf_quantizer", None)
    if device_of_inputs(inner).type == "meta":
        raise NotImplementedError(
            "verify=True and same_bits run the model, so its weights must not be on the meta "
            "device; load them before patch_model."
        )
    if gradients and quantizer is not None and not quantizer.is_trainable:
        raise NotImplementedError(
            "verify=True checks gradients, so weights must be differentiable, got "
            f"{type(quantizer).__name__}; verify the model before it is quantized."
        )


class Verification:
    """The check of one model that is about to be patched.

    Args:
        inner: a model that may be patched with `verify`.
        patch: its patch.
    """

    def __init__(self, inner: PreTrainedModel, patch: Patch) -> None:
        self.inner = inner
        # Heads with one output per document or row have none per token: their base is checked.
        parts = patch.parts
        self.model = parts.base(inner) if parts.head.pools else inner
        self.is_verified_type = is_verified(parts.model_class, parts.model_config.model_type)
        self.is_sharded = patch.sequence_parallel_group is not None
        self.key = _key(inner, patch)
        self.lengths = _lengths_of_documents(parts)
        self.ids = _random_tokens(inner, sum(self.lengths))
        self.alone: list[Tensor] = []

    @property
    def has_passed(self) -> bool:
        """Whether a model of this kind has been checked in this process."""
        return self.key in _passed

    def before_patch(self) -> None:
        """Run each document alone, for a model type that is not among the verified families.

        Raises:
            NotImplementedError: the patch is for rows that are sharded over ranks, or the model
                does not run.
        """
        if self.is_sharded:
            raise NotImplementedError(
                "verify=True runs whole rows, so sequence_parallel_group must be None the first "
                "time; call patch_model(model, verify=True), then again with the group."
            )
        if self.is_verified_type:
            return
        with training_mode(self.inner), _attention(self.inner, "eager"), _experts(self.inner):
            self.inner.eval()
            with _must_run(self.inner, "on input_ids alone", (*_RAW_ERRORS, ValueError)):
                self.alone = [self._outputs({"input_ids": ids}) for ids in self._documents()]

    def after_patch(self) -> None:
        """Check the patched model.

        Raises:
            IsolationError: a document reaches another.
            NotImplementedError: attention layers that do not call ours, or without the documents;
                other outputs than those of the documents alone; no gradients.
        """
        layout = PackedLayout.from_lengths(self.lengths)
        batch = {"input_ids": self.ids, "packed_layout": layout}
        runs = _must_run(self.inner, "on packed documents", _RAW_ERRORS)
        with runs, training_mode(self.inner), _experts(self.inner):
            self.inner.eval()
            with _recorded_calls(self.inner) as called:
                packed = self._outputs(batch)
            self._check_calls(called)
            report = verify_isolation(self.model, batch, seed=_SEED)
            if report.gradients is None:
                raise NotImplementedError(
                    "verify=True checks gradients, so the model must have gradients of its input "
                    f"embeddings, but {report.why_no_gradients}; patch it before it is "
                    "compiled, or choose a backend that has a backward."
                )
            self._check_outputs(packed)
            self.inner.train()
            with suppress(NotImplementedError):  # what refuses to be trained cannot leak there
                verify_isolation(self.model, batch, seed=_SEED)
        _passed.add(self.key)

    def _documents(self) -> list[Tensor]:
        ends = torch.tensor((0, *self.lengths)).cumsum(0).tolist()
        return [self.ids[:, start:end] for start, end in pairwise(ends)]

    def _outputs(self, batch: dict[str, Any]) -> Tensor:
        """`[T, V]`: logits, or the hidden states of a base model."""
        run = IsolationRun(self.model, batch, layout=None, seed=_SEED)
        with run.as_before():
            return run([]).outputs

    def _check_calls(self, called: set[nn.Module]) -> None:
        """Refuse layers with an attention of their own."""
        names = {module: name for name, module in self.model.named_modules()}
        other = called.symmetric_difference(attention_layers(self.model))
        if other and not self.is_verified_type:
            name = min(names.get(module, type(module).__name__) for module in other)
            raise NotImplementedError(
                "each attention layer, and nothing else, must call transformers' attention "
                f"interface, got {type(self.inner).__name__}, where {name} differs; "
                f"{_DOCUMENT_ALONE}"
            )

    def _check_outputs(self, packed: Tensor) -> None:
        """Compare each token with the document alone.

        The relative error may be sqrt(eps) of the dtype: a wrong mask, position or scale moves all
        tokens that follow. In models with experts rounding may send a token elsewhere: one in 20
        may differ.
        """
        if not self.alone:
            return
        expected = torch.cat(self.alone).double()
        errors = (packed.double() - expected).norm(dim=1) / expected.norm(dim=1)
        may_differ = len(errors) // 20 if self.inner._can_set_experts_implementation() else 0
        error = errors.sort().values[len(errors) - 1 - may_differ]
        limit = torch.finfo(self.inner.dtype).eps ** 0.5
        if not float(error) <= limit:
            raise NotImplementedError(
                "packed documents must give what each gives alone with the model's own attention, "
                f"got {type(self.inner).__name__}, whose outputs differ by {error:.2g} of their "
                f"size, more than {limit:.2g}; {_DOCUMENT_ALONE}"
            )


class SizeCheck:
    """The check of `same_bits`, of one model that is about to be patched with it."""

    def __init__(self, inner: PreTrainedModel, patch: Patch) -> None:
        self.inner, self.tokens = inner, patch.same_bits or 0
        self.positions = _positions(patch.parts)
        kernels = (torch.get_num_threads(), torch.get_float32_matmul_precision())
        self.key = (*_key(inner, patch), patch.same_bits, patch.checked_on, *kernels)

    @property
    def has_passed(self) -> bool:
        """Whether a model of this kind has been checked in this process."""
        return self.key in _passed

    def before_patch(self) -> None:
        """Nothing is compared with the model as it was."""

    def after_patch(self) -> None:
        """Run the patched model on rows that hold the same documents in other ways.

        Raises:
            SameBitsError: a document's outputs have other bits.
            NotImplementedError: the model does not run.
        """
        lengths = _lengths_that_fill(self.tokens, self.positions)
        ids = _random_tokens(self.inner, sum(lengths))
        batch = {"input_ids": ids, "packed_layout": PackedLayout.from_lengths(lengths)}
        runs = _must_run(self.inner, "on packed documents", _RAW_ERRORS)
        with runs, training_mode(self.inner):
            self.inner.eval()
            run = IsolationRun(self.inner, batch, layout=None, seed=_SEED)
            with run.as_before():
                compare_bits(run)
        _passed.add(self.key)


def checks_of(inner: PreTrainedModel, patch: Patch) -> list[Verification | SizeCheck]:
    """What `patch_model` checks of a model, as its arguments ask for."""
    checks: list[Verification | SizeCheck] = [Verification(inner, patch)] if patch.verify else []
    return checks if patch.same_bits is None else [*checks, SizeCheck(inner, patch)]


def _key(inner: PreTrainedModel, patch: Patch) -> tuple[object, ...]:
    """Everything that determines what layers do, except a `forward` replaced on an instance."""
    config = inner.config.to_dict()
    del config["_name_or_path"]
    backend = patch.backend if isinstance(patch.backend, str) else tuple(patch.backend.items())
    guarantees = (patch.deterministic, patch.batch_invariant)
    versions = (torch.__version__, transformers.__version__, __version__)
    modules = tuple(map(type, inner.modules()))
    return (
        type(inner),
        modules,
        repr(config),
        inner.dtype,
        inner.device,
        backend,
        *guarantees,
        *versions,
    )


def _lengths_of_documents(parts: ModelParts) -> list[int]:
    """Tokens of each document; differences beyond them are not detected."""
    positions = _positions(parts)
    return [min(length, positions) for length in _LENGTHS]


def _lengths_that_fill(tokens: int, positions: int) -> list[int]:
    """Lengths of documents that fill a row, as kernels may treat its last tokens otherwise.

    >>> _lengths_that_fill(512, 4096), _lengths_that_fill(64, 16)
    ([170, 128, 56, 32, 126], [16, 16, 7, 4, 16, 5])
    """
    parts = (1 / 3, 1 / 4, 1 / 9, 1 / 16)
    lengths = [min(int(tokens * part), positions) for part in parts]
    while sum(lengths) < tokens:
        lengths.append(min(tokens - sum(lengths), positions))
    return [length for length in lengths if length > 0]


def _positions(parts: ModelParts) -> int:
    """The most tokens of a document."""
    declared = getattr(parts.config, "max_position_embeddings", None)
    return int(parts.max_positions or declared or max(_LENGTHS))


def _random_tokens(inner: PreTrainedModel, count: int) -> Tensor:
    """int64 `[1, T]`, none of them special."""
    special = torch.tensor(sorted(special_tokens(inner.config)), dtype=torch.int64)
    words = torch.arange(inner.config.get_text_config().vocab_size)
    words = words[~torch.isin(words, special)]
    rng = torch.Generator().manual_seed(_SEED)
    return words[torch.randint(len(words), (1, count), generator=rng)]


_RAW_ERRORS = (AttributeError, LookupError, RuntimeError, TypeError)
"""Errors that a model's own code may raise; ours are ValueError and the refusals."""


@contextmanager
def _must_run(
    inner: PreTrainedModel, how: str, errors: tuple[type[Exception], ...]
) -> Iterator[None]:
    """Turn errors of the model's own code into a refusal.

    Args:
        how: describes what the model is run on.
        errors: errors that its own code may raise.
    """
    name = type(inner).__name__
    try:
        yield
    except LostDocuments as error:
        raise NotImplementedError(
            "a model must pass **kwargs, which carry the documents, through its base model to each "
            f"attention layer, got {name}, which does not; {_DOCUMENT_ALONE}"
        ) from error
    except (IsolationError, SameBitsError, NotImplementedError, torch.OutOfMemoryError):
        raise
    except errors as error:
        raise NotImplementedError(
            f"verify=True runs the model {how}, which must work, got {type(error).__name__} in "
            f"{name}, {str(error)!r:.200}; make that work first, or {_DOCUMENT_ALONE}"
        ) from error


@contextmanager
def _attention(inner: PreTrainedModel, name: str) -> Iterator[None]:
    before = inner.config._attn_implementation
    inner.set_attn_implementation(name)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


@contextmanager
def _experts(inner: PreTrainedModel) -> Iterator[None]:
    """Experts whose rounding does not depend on how many tokens each gets."""
    before = inner.get_experts_implementation()
    if not inner._can_set_experts_implementation():
        yield
        return
    inner.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        inner.set_experts_implementation(before)


@contextmanager
def _recorded_calls(inner: PreTrainedModel) -> Iterator[set[nn.Module]]:
    """The modules that call the attention function of the model's implementation."""
    name = text_config_of(inner.config)._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS[name]
    called: set[nn.Module] = set()

    def recording(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.add(module)
        return function(module, *args, **kwargs)

    AttentionInterface.register(name, recording)
    try:
        yield called
    finally:
        AttentionInterface.register(name, function)
