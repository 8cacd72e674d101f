"""What the rows of one call share, and how what breaks becomes a row: of all drift of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

import flexvarlen as fv
from flexvarlen.equivalence.batch import PackedBatch
from flexvarlen.equivalence.oracle import own_parameters
from flexvarlen.equivalence.variants import Sizes, Unsupported, Variant, make_variant
from flexvarlen.rows import Status, one_line, run_environment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASELINE = "sdpa"
"""Runs and differentiates anywhere; what others are held against unless another is named."""

LEAN_COMPILED = (BASELINE,)
LEAN_LEFT_OUT = ("flex",)
"""On the CPU, where a run of all backends must end within a minute: those whose model is compiled,
and those that compile by themselves, anew for each shape. Asked for without the others they run."""

DEFAULT_TOKENS = {"cpu": 1024, "cuda": 8192}

Progress = Callable[[int, int, str], None]
"""Called with the comparisons done, all of them, and what is being done."""


def is_lean(names: Sequence[str], device: torch.device) -> bool:
    """Whether what compiles long is left out: on the CPU, where all backends are asked for."""
    return device.type == "cpu" and set(fv.BACKENDS) <= set(names)


def left_out(backend: str) -> str:
    """The reason of a row that `is_lean` leaves out."""
    return f"compiling takes too long on the CPU to be part of all; name {backend} to have it."


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
        batch: PackedBatch | Mapping[str, Any] | None,
        *,
        dtype: torch.dtype | None,
        train: bool,
        tokens: int | None,
        seed: int,
        name: str | None,
        commit: str | None,
    ) -> ModelSetting:
        """Of a model, which is not changed; arguments as in `model_drift`.

        Raises:
            ValueError: a batch that breaks the contract.
            NotImplementedError: the model type is not verified.
        """
        from flexvarlen.patches import unpatch_model
        from flexvarlen.patches.families import require_verified

        require_verified(model.config.model_type)
        base = unpatch_model(own_parameters(model, model.dtype if dtype is None else dtype))
        packed = packed_batch(base, batch, tokens, seed)
        label = name or str(model.config.name_or_path or model.config.model_type)
        return cls(base, packed, train, seed, label, run_environment(base.device, commit))

    def case(self, **own: Any) -> dict[str, Any]:
        """A row's case: what all share, and `own`."""
        shared = {
            "model": self.label,
            "dtype": dtype_name(self.base),
            "tokens": self.batch.total_tokens,
            "documents": len(self.batch.lengths),
            "seed": self.seed,
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


Broken = tuple[Status, str]
"""Status and reason of what did not run."""


@contextmanager
def caught(broken: list[Broken]) -> Iterator[None]:
    """What kernels, compilers and refusals raise is a finding, not a crash: it goes to the list."""
    try:
        yield
    except (Unsupported, NotImplementedError, ImportError) as error:
        broken.append(("unsupported", " ".join(str(error).split())[:300]))
    except torch.OutOfMemoryError as error:
        broken.append(("oom", one_line(error)))
    except Exception as error:  # Kernel packages assert, and raise types of their own.
        broken.append(("failed", one_line(error)))


def packed_batch(
    model: PreTrainedModel,
    batch: PackedBatch | Mapping[str, Any] | None,
    tokens: int | None,
    seed: int,
) -> PackedBatch:
    """The batch on the model's device; without one, real text of so many tokens."""
    if batch is None:
        from flexvarlen.equivalence.corpus import packed_text

        wanted = DEFAULT_TOKENS.get(model.device.type, 1024) if tokens is None else tokens
        batch = packed_text(vocabulary=model.config.vocab_size, tokens=wanted, seed=seed)
    return PackedBatch.of(batch).to(model.device)
