"""Suite "drift-rollout": a model's log-probabilities of an engine's responses, beside the engine's.

Each backend runs in each pass of `PASSES`, which change one thing: the batch, the dtype of the
head, that of the whole model. The pass "packed" of the backend `reference` tells what
attention does, the pass "alone" what the batch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from flexvarlen.reference.model import own_parameters
from flexvarlen.runner.each import measure_passes
from flexvarlen.runner.suite import Finding, Findings, GivenCases, Options
from flexvarlen.verify.experiment.variant import variant_names
from flexvarlen.verify.rollout.logprobs import trainer_logprobs
from flexvarlen.verify.rollout.responses import Response, location

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE = "reference"
"""The backend whose attention is computed in fp32 at least, and rounded once."""
EAGER = "transformers:eager"
SLOW_ON_CPU = ("flex",)
LEAKING = "@default_cache"
QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)
BANDS = ((0.8, 1.2), (0.9, 1.1))


class Pass(NamedTuple):
    """How a backend runs."""

    packed: bool
    fp32_head: bool = False
    fp32_model: bool = False


PACKED, ALONE, FP32_HEAD, FP32_MODEL = "packed", "alone", "packed, fp32 head", "packed, fp32 model"
PASSES = {
    PACKED: Pass(True),
    ALONE: Pass(False),
    FP32_HEAD: Pass(True, fp32_head=True),
    FP32_MODEL: Pass(True, fp32_model=True),
}


@dataclass(frozen=True)
class RolloutCase:
    """One model on one file of responses.

    Attributes:
        model, dtype: of the model, as in records.
        file, crc32: name and checksum of the file.
        tokens: of a packed row.
        responses: of the file.
        base: the model, which is not changed.
    """

    model: str
    dtype: str
    file: str
    crc32: int
    tokens: int
    responses: tuple[Response, ...] = field(compare=False, repr=False)
    base: PreTrainedModel = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name in the progress bar."""
        return f"{self.model} {self.dtype} {self.file}"

    def data(self) -> dict[str, Any]:
        """The case as data of a record."""
        temperatures = sorted({each.temperature for each in self.responses})
        names = ("model", "dtype", "file", "crc32", "tokens")
        return {name: getattr(self, name) for name in names} | {"temperatures": temperatures}


class RolloutDrift(GivenCases[RolloutCase]):
    """The responses on each backend, in each pass."""

    name: ClassVar[str] = "drift-rollout"

    def variants(self, case: RolloutCase, options: Options) -> Sequence[str]:
        """All backends, and transformers' own; on the CPU none that compiles."""
        names = [*variant_names("all", options.device), EAGER]
        slow = () if options.on_gpu else SLOW_ON_CPU
        return [x for x in names if x not in ("auto", *slow) and LEAKING not in x]

    def measure(self, case: RolloutCase, variants: Sequence[str], options: Options) -> Findings:
        """How far each run is from the engine, and from the run that it changes one thing of."""
        in_fp32 = case.base.dtype == torch.float32
        wide = own_parameters(case.base, torch.float32)
        engine = [x for each in case.responses for x in each.logprobs]
        expected = torch.tensor(engine, dtype=torch.float64)
        runs: dict[tuple[str, str], Tensor] = {}

        def measured(of: str, name: str) -> Finding:
            how = PASSES[of]
            base, tokens = wide if how.fp32_model else case.base, case.tokens if how.packed else 0
            found = trainer_logprobs(name, base, case.responses, tokens, fp32_head=how.fp32_head)
            runs[of, name] = found
            if not bool(found.isfinite().all()):
                return Finding(name, "wrong", "log-probabilities are not finite.", pass_=of)
            measures = ratio_measures(found - expected, case.responses)
            other = runs.get((PACKED, REFERENCE if of == PACKED else name))
            if other is not None and other is not found:
                measures["moved_rms"] = _rms(found - other)
                measures["moved_outside_0.9_1.1"] = _outside(found - other, *BANDS[1])
            return Finding(name, "ok", None, measures, of)

        # The reference first: in the pass "packed" the others are compared with it.
        names = sorted(variants, key=lambda name: name != REFERENCE)
        passes = [
            of for of, how in PASSES.items() if not (in_fp32 and (how.fp32_head or how.fp32_model))
        ]
        each = {of: partial(measured, of) for of in passes}
        return measure_passes(case.name, names, each, options.device)


def ratio_measures(log_ratio: Tensor, responses: Sequence[Response]) -> dict[str, Any]:
    """The trainer against the engine, by token and by response.

    k1 and k3 estimate KL(engine ‖ trainer) from the engine's samples: the mean of -log r, and that
    of r - 1 - log r, which is never negative and varies less.

    Args:
        log_ratio: `[N]`, the trainer's log-probabilities minus the engine's.

    >>> one = Response(1, [1], [2, 3], [-1.0, -1.0], 1.0)
    >>> found = ratio_measures(torch.tensor([0.0, 0.5]).double(), [one])
    >>> found["outside_0.8_1.2"], found["kl_k1"], found["worst_token"]
    (0.5, -0.25, 'token 1 of line 1')
    """
    pieces = log_ratio.split([len(each.completion) for each in responses])
    worst = [_rms(piece) for piece in pieces]
    ratio = log_ratio.exp()
    at = torch.quantile(ratio, torch.tensor(QUANTILES, dtype=ratio.dtype)).tolist()
    return {
        "responses": len(pieces),
        "completion_tokens": len(log_ratio),
        "log_ratio_mean_abs": float(log_ratio.abs().mean()),
        "log_ratio_rms": _rms(log_ratio),
        "log_ratio_max_abs": float(log_ratio.abs().max()),
        "equal": float((log_ratio.abs() < 1e-6).double().mean()),
        **{f"ratio_p{100 * q:02.0f}": x for q, x in zip(QUANTILES, at, strict=True)},
        **{f"outside_{low}_{high}": _outside(log_ratio, low, high) for low, high in BANDS},
        "kl_k1": -float(log_ratio.mean()),
        "kl_k3": float((ratio - 1 - log_ratio).mean()),
        "responses_log_ratio": [float(piece.sum()) for piece in pieces],
        "response_rms": max(worst),
        "worst_line": responses[worst.index(max(worst))].line,
        "worst_token": location(responses, int(log_ratio.abs().argmax())),
    }


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _outside(log_ratio: Tensor, low: float, high: float) -> float:
    ratio = log_ratio.exp()
    return float(((ratio < low) | (ratio > high)).double().mean())
