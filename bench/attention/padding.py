"""The suite "padding": documents packed in one row against the same documents padded to lines.

    flexvarlen bench padding

Batch 8, lines of 2,048 tokens, embedding 1,024, 16 heads, BF16. Documents: random multiples of 64
tokens, as the source draws them; log-normal; all of full length. Attention alone, forward and
backward, and the whole attention module, forward. Padded SDPA under a boolean mask of the real
keys, and without any mask, as the source first called it: then padding is attended to, so that
without a causal mask its answers are wrong (the tests show it), and wrong answers are not timed
here. What such a call costs is timed on documents of full length: the very same call, on which it
is right.

Source of the claim: the pull request that brought `varlen_attn` to torch (pytorch/pytorch#164502):
"0.21750560760498047 ms" against "0.43171775817871094 ms" of SDPA with padding on one H100, 231.8
and 320.8 TFLOP/s, sparsity 0.453, 100 runs, not causal. Its timing script could not be found; what
it measured follows from its figures and from its test:

- The test's seed, 42, draws the lengths 448, 1280, 1856, 960, 704, 512, 1856, 1344: 8,960 tokens,
  padding 0.453 of 8 × 2,048. So these are the documents, and lines are 2,048 tokens.
- Both TFLOP/s times their milliseconds are 1.0078 times 4 · E · (sum of squared lengths): the FLOPs
  of attention alone, forward. The whole module would be 637 TFLOP/s for SDPA: what was timed is
  most likely attention alone. Both are measured here.
- SDPA's 320.8 TFLOP/s are those of a kernel without a mask; the test has none in the pull
  request's first version, and one of all heads and queries in the merged one.

Not known: which of these SDPA calls was timed, whether in no_grad, and the warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from flexvarlen.bench.attention.engine import (
    PASSES,
    RAW_PREFIX,
    Inputs,
    Prepare,
    Prepared,
    Unsupported,
    findings_of_all,
    measure_attention,
    ours,
    raw,
    ways_of,
)
from flexvarlen.bench.attention.padded import PACKED, PACKED_ON_CPU
from flexvarlen.bench.attention.padded_module import Module, packed_module, padded_module
from flexvarlen.bench.attention.sdpa_ways import sdpa, with_kernels
from flexvarlen.bench.suite import Case, Finding, Options, Suite
from flexvarlen.rows import Row, one_line

Documents = Literal["multiples", "log-normal", "full-length"]
Part = Literal["attention", "module"]

RUNS = 100  # as the source's, as far as time allows
STEP = 64  # documents are multiples of it
SOURCE_SEED = 42
SIGMA = 1.0  # of log-normal documents; their mean is a quarter of a line

MASKED, UNMASKED = "padded:masked", "padded:unmasked"
PADDED = (MASKED, UNMASKED)
RAW = (RAW_PREFIX + "varlen", RAW_PREFIX + "nested")
"""Kernels as their own users call them: what the source compared, and nested tensors."""


@dataclass(frozen=True)
class PaddingCase:
    """Documents, each in a line of `max_length` tokens, or all in one row."""

    documents: Documents
    causal: bool
    part: Part = "attention"
    batch: int = 8
    max_length: int = 2048
    embedding: int = 1024
    num_heads: int = 16
    dtype: str = "bfloat16"
    seed: int = SOURCE_SEED

    @property
    def name(self) -> str:
        """For `--cases`.

        >>> PaddingCase("multiples", False).name
        'attention-full-multiples'
        """
        return f"{self.part}-{'causal' if self.causal else 'full'}-{self.documents}"

    @property
    def passes(self) -> tuple[str, ...]:
        """The module's forward alone can be held against fp64."""
        return PASSES if self.part == "attention" else PASSES[:1]

    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document.

        >>> PaddingCase("multiples", False).lengths()
        (448, 1280, 1856, 960, 704, 512, 1856, 1344)
        """
        generator = torch.Generator().manual_seed(self.seed)
        if self.documents == "full-length":
            return (self.max_length,) * self.batch
        if self.documents == "multiples":
            most = self.max_length // STEP + 1
            drawn = (torch.randint(1, most, (1,), generator=generator) for _ in range(self.batch))
            return tuple(int(x) * STEP for x in drawn)
        mu = math.log(self.max_length / 4) - SIGMA**2 / 2
        normal = torch.randn(self.batch, generator=generator, dtype=torch.float64)
        drawn_lengths = (mu + SIGMA * normal).exp().round().clamp(1, self.max_length)
        return tuple(int(x) for x in drawn_lengths)

    def data(self) -> dict[str, Any]:
        """The fields, `tokens` of all documents, and what share of the lines is padding."""
        tokens = sum(self.lengths())
        sparsity = round(1 - tokens / (self.batch * self.max_length), 4)
        return asdict(self) | {"tokens": tokens, "sparsity": sparsity}


class Padding(Suite):
    """Packed against padded."""

    name = "padding"

    def cases(self, options: Options) -> Sequence[Case]:
        kinds: list[tuple[Documents, bool, Part]] = [
            ("multiples", False, "attention"),
            ("full-length", False, "attention"),
            ("multiples", False, "module"),
            ("full-length", False, "module"),
            ("multiples", True, "attention"),
            ("log-normal", True, "attention"),
        ]
        if options.on_gpu and not options.quick:
            kinds += [("log-normal", False, "attention"), ("multiples", True, "module")]
            return [PaddingCase(*kind) for kind in kinds]
        small: dict[str, Any] = {"batch": 3, "max_length": 128, "embedding": 32, "num_heads": 2}
        return [PaddingCase(*kind, **small) for kind in kinds]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        assert isinstance(case, PaddingCase)
        kernels = RAW if case.part == "attention" else ()
        return [*PADDED, *kernels, *(PACKED if options.on_gpu else PACKED_ON_CPU)]

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, PaddingCase)
        try:
            inputs, known = _prepared(case, options.device)
        except torch.OutOfMemoryError as error:
            return findings_of_all(variants, case.passes, "oom", one_line(error))
        ways = ways_of(variants, known)
        findings = measure_attention(inputs, ways, options, passes=case.passes, repeats=RUNS)
        padded = {name: way for name, way in ways.items() if name in PADDED}
        return with_kernels(findings, inputs, padded, needs_grad="backward" in case.passes)

    def section(self, rows: Sequence[Row]) -> str:
        from flexvarlen.bench.attention.padding_tables import padding_section

        return padding_section(rows)

    def figures(self, rows: Sequence[Row], folder: Path) -> Sequence[Path]:
        from flexvarlen.bench.attention.padding_tables import padding_figures

        return padding_figures(rows, folder)


SUITE = Padding()


def _prepared(case: PaddingCase, device: torch.device) -> tuple[Inputs, dict[str, Prepare]]:
    """The tensors of a case, and every way that is known on them."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    lengths, packed = case.lengths(), (*PACKED, *PACKED_ON_CPU)
    seen = not case.causal and min(lengths) < case.max_length
    refused: dict[str, Prepare] = {UNMASKED: _sees_padding} if seen else {}
    known: dict[str, Prepare]
    if case.part == "module":
        size = (sum(lengths), case.embedding, case.num_heads)
        module = Module.random(*size, dtype, device, case.seed)
        known = {
            name: padded_module(module, case.max_length, masked=name == MASKED) for name in PADDED
        }
        known |= {name: packed_module(module, name) for name in packed}
        return module.inputs(lengths, case.causal), known | refused
    heads = (case.num_heads, case.num_heads)
    head_dim = case.embedding // case.num_heads
    inputs = Inputs.random(lengths, heads, head_dim, dtype, device, case.causal, case.seed)
    known = {name: partial(sdpa, masked=name == MASKED, width=case.max_length) for name in PADDED}
    known |= {name: raw(name.removeprefix(RAW_PREFIX)) for name in RAW}
    return inputs, known | {name: ours(name) for name in packed} | refused


def _sees_padding(inputs: Inputs, needs_grad: bool) -> Prepared:
    raise Unsupported(
        "without a mask padding is attended to, and outputs are wrong; the same call is timed on "
        "documents of full length"
    )
