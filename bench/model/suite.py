"""The suite `model`: training and generation of whole models, packed, padded, one by one.

Llama and Qwen geometries with random weights, 2K to 128K tokens of context; documents of a text
collection's lengths, log-normal, or all alike. Every variant of a case shares the weights, the
documents and the process.

    1. oracle    each document alone in fp64; the peer:
                 alone, in the model's own dtype
    2. variants  one step each (or one generation), held against it; what is wrong is not timed
    3. memory    the peak of the second step
    4. timing    all that is right, interleaved

Throughput counts the documents' tokens, never pads. A training step is forward, next-token loss,
backward and fused AdamW (`train.py`); generation is prefill and greedy decoding, told apart
(`generate.py`). `packings.py` is the narrower benchmark beside it, by the same
steps and checks: forward and backward of the base model without a loss, and what other packings
recompile.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from flexvarlen.bench.model.cases import ModelCase, cases_of
from flexvarlen.bench.model.compared import variants_of
from flexvarlen.bench.model.generate import Generation
from flexvarlen.bench.model.measure import Measurement
from flexvarlen.bench.model.step import free
from flexvarlen.bench.model.train import Training
from flexvarlen.bench.suite import Case, Finding, Options, Suite
from flexvarlen.rows import Row


class Model(Suite):
    """Training and generation of whole models."""

    name = "model"

    def cases(self, options: Options) -> Sequence[ModelCase]:
        return cases_of(options)

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        assert isinstance(case, ModelCase)
        return variants_of(case, options)

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, ModelCase)
        kind: type[Measurement] = Training if case.task == "train" else Generation
        torch._dynamo.reset()  # what another case compiled, and the models it holds
        try:
            return kind(case, options).measure(variants)
        finally:
            torch._dynamo.reset()
            free(options.device)

    def section(self, rows: Sequence[Row]) -> str:
        from flexvarlen.bench.model.tables import section

        return section(rows)

    def figures(self, rows: Sequence[Row], folder: Path) -> Sequence[Path]:
        from flexvarlen.bench.model.figures import figures

        return figures(rows, folder)


SUITE = Model()
