"""The cases of the suite "model", and the variants that each is measured on.

A variant is named `<batching>:<attention>`: how the documents are batched, and an attention of
`flexvarlen.verify.experiment.variant`: "packed:auto", "padded:transformers:sdpa", "serial:fa2".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flexvarlen.bench.suites.model import geometries
from flexvarlen.runner.suite import Options
from flexvarlen.verify.experiment.inputs import BATCHINGS, SORTED
from flexvarlen.verify.experiment.variant import require_known

Mode = Literal["eager", "compiled"]

STEP = "forward, next-token loss, backward, fused AdamW"
SEED, MEAN_DOC = 6, 2048

LONGEST_KEPT = {
    "qwen3-0.6b": 32_768,
    "llama-3.2-1b": 8192,
    "qwen3-1.7b": 8192,
    "qwen3-4b": 2048,
    "llama-3.1-8b": 2048,
}
"""Tokens of the longest step whose activations an H200 (141 GB) can keep beside weights, gradients,
AdamW's moments and the logits; in a longer one the layers are checkpointed."""
LARGE = ("qwen3-4b", "llama-3.1-8b")
"""A step of 128K tokens takes a quarter of a minute with these, so it has the fewest variants."""


@dataclass(frozen=True)
class ModelCase(geometries.GeometryCase):
    """One model on one set of documents.

    Attributes:
        mode: eager, or the base model under torch.compile.
        tokens: of all documents, padding not counted.
        documents: where their lengths come from: texts, one length, or log-normal.
        source: which texts; "" where the lengths come from none.
        mean_doc: mean tokens of a document, where that is not the texts' own; else None.
        longest_doc: tokens at which a text is cut; None where there are none.
        checkpointing: whether the backward computes the layers' insides again.
    """

    mode: Mode
    tokens: int
    documents: geometries.Documents
    source: str
    mean_doc: int | None
    longest_doc: int | None
    checkpointing: bool

    @property
    def name(self) -> str:
        tokens = f"{self.tokens // 1024}K" if self.tokens >= 1024 else str(self.tokens)
        return "-".join([self.geometry, self.mode, tokens, self.documents])

    def data(self) -> dict[str, Any]:
        return super().data() | {"step": STEP}

    def lengths(self, files: Sequence[Path] | None) -> list[int]:
        if self.documents == "text":
            return geometries.text_lengths(self.tokens, self.seed, files, self.longest_doc)
        assert self.mean_doc is not None
        return geometries.drawn_lengths(self.tokens, self.documents, self.mean_doc, self.seed)


def split_variant(variant: str) -> tuple[str, str]:
    """How a variant batches, and the attention's name.

    >>> split_variant("padded:transformers:sdpa")
    ('padded', 'transformers:sdpa')

    Raises:
        ValueError: it does not begin with a way of batching, or the attention is unknown.
    """
    batching, _, attention = variant.partition(":")
    if batching not in BATCHINGS or not attention:
        known = ", ".join(f"{name}:<attention>" for name in BATCHINGS)
        raise ValueError(
            f"variant must be one of {known}, got {variant!r}; say how its documents are batched."
        )
    require_known(attention)
    return batching, attention


# --- which cases ---------------------------------------------------------------------------------

WHOLE = "qwen3-1.7b"
"""The geometry of all cases and variants; the others have the contexts, on fewer variants."""
MEASURED = (WHOLE, "llama-3.2-1b", "llama-3.1-8b", "qwen3-4b", "qwen3-0.6b")
"""Geometries, those that matter most first."""


def cases_of(options: Options) -> list[ModelCase]:
    if options.is_small:
        return [
            _case("qwen3-tiny", 256, "text", options),
            _case("llama-tiny", 128, "log-normal", options, checkpointing=True),
            _case("qwen3-tiny", 128, "uniform", options, "compiled"),
        ]
    return [case for geometry in MEASURED for case in _geometry(geometry, options)]


def _geometry(geometry: str, options: Options) -> Iterator[ModelCase]:
    for tokens in (8192, 32_768, 131_072, 2048):
        yield _case(geometry, tokens, "text", options)
    if geometry == WHOLE:
        yield _case(geometry, 8192, "text", options, "compiled")
        yield _case(geometry, 32_768, "log-normal", options)
        yield _case(geometry, 32_768, "uniform", options)


def _case(
    geometry: str,
    tokens: int,
    documents: geometries.Documents,
    options: Options,
    mode: Mode = "eager",
    *,
    checkpointing: bool | None = None,
) -> ModelCase:
    texts = documents == "text"
    if checkpointing is None:
        checkpointing = tokens > LONGEST_KEPT.get(geometry, tokens)
    return ModelCase(
        geometry=geometry,
        layers=geometries.GEOMETRIES[geometry](None).num_hidden_layers,
        mode=mode,
        tokens=tokens,
        documents=documents,
        source=geometries.source_of(options.text) if texts else "",
        mean_doc=None if texts else min(MEAN_DOC, tokens // 8),
        longest_doc=max(1, tokens // geometries.LONGEST_SHARE) if texts else None,
        checkpointing=checkpointing,
        dtype=options.dtype,
        seed=SEED,
    )


# --- which variants ------------------------------------------------------------------------------

THEIR_FLASH = tuple(f"transformers:flash_attention_{x}@cu_seq_lens" for x in (2, 3))
"""With cu_seq_lens nothing is read back; with position_ids each layer reads."""
PACKED = (
    "auto",
    "fa3",
    "fa2",
    "flex",
    "varlen",
    "fa4",
    "flex_fa4",
    "transformers:flash_attention_2",
    "transformers:flash_attention_3",
    *THEIR_FLASH,
    "transformers:flex_attention",
    "transformers:sdpa",
    "transformers:eager",
)
UNPACKED = ("auto", "transformers:sdpa", "transformers:flash_attention_2")
TRAIN = (
    *(f"packed:{name}" for name in PACKED),
    *(f"padded:{name}" for name in (*UNPACKED, "transformers:eager")),
    *(f"{batching}:{name}" for batching in (SORTED, "serial") for name in UNPACKED),
)
# A compilation each takes most of the time; of padded documents, for any shape, minutes.
COMPILED = (
    *(f"packed:{name}" for name in ("auto", "fa3", "flex", *THEIR_FLASH)),
    "packed:transformers:flex_attention",
    "packed:transformers:sdpa",
    "padded-sorted:transformers:sdpa",
)
FEWEST = (
    "packed:auto",
    *(f"packed:{name}" for name in THEIR_FLASH),
    "padded-sorted:transformers:sdpa",
)
FEWER = (
    *FEWEST,
    "packed:flex",
    "packed:transformers:flex_attention",
    "packed:transformers:flash_attention_2",
    "padded:transformers:sdpa",
    "padded:transformers:flash_attention_2",
    "padded-sorted:transformers:flash_attention_2",
    "serial:transformers:sdpa",
)
LONGEST_WHOLE = 32_768  # tokens of a step on all variants
ON_A_CPU: dict[str, tuple[str, ...]] = {
    "eager": (
        "packed:auto",
        "packed:transformers:flash_attention_2",
        "padded:transformers:sdpa",
        "padded-sorted:transformers:sdpa",
        "serial:transformers:eager",
    ),
    "compiled": ("packed:sdpa",),
}


def variants_of(case: ModelCase, options: Options) -> tuple[str, ...]:
    """The variants that a case is measured on, if none are named."""
    if not options.on_gpu:
        return ON_A_CPU[case.mode]
    if case.mode == "compiled":
        return COMPILED
    whole = case.documents == "text" and (case.geometry == WHOLE or options.quick)
    if whole and case.tokens <= LONGEST_WHOLE:
        return TRAIN
    few = case.geometry in LARGE and case.tokens > LONGEST_WHOLE
    return FEWEST if few else FEWER
