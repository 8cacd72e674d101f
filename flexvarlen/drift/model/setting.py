"""What the rows of one call share, and how what breaks becomes a row: of all drift of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import torch

from flexvarlen.drift.op.failures import LOST, DeviceLostError, is_lost, status_of
from flexvarlen.equivalence.batch import PackedBatch
from flexvarlen.equivalence.corpus import batch_of
from flexvarlen.equivalence.oracle import own_parameters
from flexvarlen.equivalence.variants import Sizes, Unsupported, Variant, make_variant
from flexvarlen.rows import Status, run_environment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASELINE = "sdpa"
"""Runs and differentiates anywhere; what others are held against unless another is named."""

LEAN_COMPILED = (BASELINE,)
LEAN_LEFT_OUT = ("flex",)
"""On the CPU, where a run of all backends must end within a minute: those whose model is compiled,
and those that compile by themselves, anew for each shape. Asked for by name they run."""

Progress = Callable[[int, int, str], None]
"""Called with the comparisons done, all of them, and what is being done."""


def is_lean(backends: str | Sequence[str], device: torch.device) -> bool:
    """Whether these words of a user leave out what compiles long: "all", on the CPU.

    Whoever hands on names made of them, or only some of those, hands on this answer too.
    """
    return device.type == "cpu" and backends in ("all", ["all"], ("all",))


def left_out(backend: str) -> str:
    """The reason of a row that a lean run leaves out."""
    return f"compiling takes too long on the CPU to be part of all; name {backend} to have it."


class Shared(TypedDict, total=False):
    """Options of both `model_drift` and `attribute`.

    Keys:
        dtype: to run in; default: the model's.
        train: forward and backward (the default); else the forward alone, under `no_grad`.
        tokens: of the default batch; default 1,024 on the CPU, 8,192 on CUDA.
        seed: of all that is random; default 0.
        name: the model's, for the rows.
        commit: for the rows' environment, see `run_environment`.
    """

    dtype: torch.dtype | None
    train: bool
    tokens: int | None
    seed: int
    name: str | None
    commit: str | None


@dataclass(frozen=True)
class ModelSetting:
    """What all rows of one call share.

    Attributes:
        base: an unpatched copy of the model with gradients of its own.
        batch: the documents, on its device.
        train: whether gradients are asked for.
        seed, label: for the rows.
        environment: the rows'.
    """

    base: PreTrainedModel
    batch: PackedBatch
    train: bool
    seed: int
    label: str
    environment: dict[str, Any] = field(repr=False)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        batch: PackedBatch | Mapping[str, Any] | None = None,
        **shared: Unpack[Shared],
    ) -> ModelSetting:
        """Of a model, which is not changed.

        Raises:
            ValueError: a batch that breaks the contract.
            TypeError: an option that is none of `Shared`.
            NotImplementedError: the model type is not verified.
        """
        from flexvarlen.patches import unpatch_model
        from flexvarlen.patches.models.families import require_verified

        unknown = shared.keys() - Shared.__annotations__.keys()
        if unknown:
            raise TypeError(f"unknown options: {', '.join(sorted(unknown))}; see the docstring.")
        require_verified(model.config.model_type)
        base = unpatch_model(own_parameters(model, shared.get("dtype") or model.dtype))
        seed = shared.get("seed", 0)
        packed = batch_of(base, batch, tokens=shared.get("tokens"), seed=seed)
        label = shared.get("name") or str(model.config.name_or_path or model.config.model_type)
        environment = run_environment(base.device, shared.get("commit"))
        return cls(base, packed, shared.get("train", True), seed, label, environment)

    def case(self, **own: Any) -> dict[str, Any]:
        """A row's case: what all share, and `own`."""
        shared = {
            "model": self.label,
            "dtype": dtype_name(self.base),
            "tokens": self.batch.total_tokens,
            "documents": len(self.batch.lengths),
            "seed": self.seed,
            "train": self.train,
        }
        return shared | own

    def variant(self, name: str) -> Variant:
        """A backend on the parameters of `base`; raises `Unsupported`."""
        sizes = Sizes.of(self.batch)
        return make_variant(name, self.base, sizes, train=self.train, compile=False)

    def in_dtype(self, dtype: torch.dtype) -> ModelSetting:
        """The same with the parameters in another dtype."""
        return replace(self, base=own_parameters(self.base, dtype))


def dtype_name(model: PreTrainedModel) -> str:
    """As in a row, e.g. "bfloat16"."""
    return str(model.dtype).removeprefix("torch.")


class Broken(NamedTuple):
    """What did not run.

    Attributes:
        status, reason: of its row.
        lost: what it raised, if the device is of no use after it.
    """

    status: Status
    reason: str
    lost: BaseException | None = None

    @classmethod
    def of(cls, error: Exception, device: torch.device) -> Broken:
        """Asks the device whether it is lost."""
        status, reason = status_of(error)
        if isinstance(error, Unsupported):
            status = "unsupported"
        if status == "unsupported":  # its own sentence
            reason = " ".join(str(error).split())[:300]
        return cls(status, reason, error if is_lost(error, device) else None)

    @property
    def measures(self) -> dict[str, Any]:
        """Of its row."""
        return {} if self.lost is None else {LOST: True}

    def end_if_lost(self, where: str) -> None:
        """Raise `DeviceLostError`, if the device is lost: when the row is written."""
        if self.lost is not None:
            raise DeviceLostError.after(where, self.lost) from self.lost


@contextmanager
def caught(broken: list[Broken], device: torch.device) -> Iterator[None]:
    """What kernels, compilers and refusals raise is a finding, not a crash: it goes to the list.

    Waits for a CUDA device at the end, so that what goes wrong there is found here. The
    `DeviceLostError` of a block within, whose row is known, goes on.
    """
    try:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except DeviceLostError:
        raise
    except Exception as error:  # Kernel packages assert, and raise types of their own.
        broken.append(Broken.of(error, device))
