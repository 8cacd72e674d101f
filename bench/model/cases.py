"""The cases of the suite `model`, their documents, their variants.

A case is one model, one set of documents, one task and one way of running it. What is compared on
it are its variants, `<batching>:<attention>`: how the documents are batched, and a variant of
`flexvarlen.bench.model.variants`: "packed:auto", "padded:transformers:sdpa", "serial:fa2".
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flexvarlen.bench.attention.kernels_cells import SEED, document_lengths
from flexvarlen.bench.model.geometries import GEOMETRIES
from flexvarlen.bench.suite import Options
from flexvarlen.equivalence.corpus import VOCABULARY, read_documents, tokenize

Task = Literal["train", "generate"]
Mode = Literal["eager", "compiled"]
Documents = Literal["text", "uniform", "log-normal"]

BATCHINGS = ("packed", "padded", "serial")

STEPS = {
    "train": "forward, next-token loss, backward, fused AdamW",
    "generate": "prefill, greedy decoding",
}

LARGEST_SHARE = 2  # a text longer than half of the row is cut there, so that two share it
MEAN_DOC = 2048
NEW_TOKENS = 64

BUDGET_BYTES = 90e9
"""Weights, optimizer and activations beyond which layers are checkpointed: of an H200's 141 GB,
what leaves room for the logits, one layer's own tensors and the allocator's gaps."""

# Transformers' own sdpa over a packed row multiplies every pair of tokens: minutes a step.
LONGEST_PACKED_SDPA = 32_768


@dataclass(frozen=True)
class ModelCase:
    """One model on one set of documents.

    Attributes:
        geometry: of `flexvarlen.bench.model.geometries.GEOMETRIES`.
        layers: how many of them the model has here.
        task: a training step, or generation.
        mode: eager, or the base model under torch.compile.
        tokens: of all documents, pads not counted: of the packed row, or of all prompts.
        documents: where their lengths come from: texts, all alike, or log-normal.
        source: which texts; "" where the lengths come from none.
        mean_doc: mean tokens of a document, where that is not the texts' own; else None.
        new_tokens: generated for each prompt; 0 in training.
        checkpointing: whether the backward computes the layers' insides again.
        dtype: of weights and activations; of the optimizer's state too.
        seed: of weights, tokens, documents.
    """

    geometry: str
    layers: int
    task: Task
    mode: Mode
    tokens: int
    documents: Documents
    source: str
    mean_doc: int | None
    new_tokens: int
    checkpointing: bool
    dtype: str
    seed: int

    @property
    def name(self) -> str:
        """For `--cases`, the log and the progress bar."""
        return "-".join(
            [self.geometry, self.task, self.mode, _in_thousands(self.tokens), self.documents]
        )

    def data(self) -> dict[str, Any]:
        """The fields, and what a step is."""
        return asdict(self) | {"step": STEPS[self.task]}

    def lengths(self, files: Sequence[Path] | None) -> list[int]:
        """Tokens of each document; their sum is `tokens`."""
        if self.documents == "text":
            return text_lengths(self.tokens, self.seed, files)
        assert self.mean_doc is not None
        return list(document_lengths(self.tokens, self.documents, self.mean_doc, self.seed))


def text_lengths(tokens: int, seed: int, files: Sequence[Path] | None) -> list[int]:
    """Lengths of a collection's texts in random order, over again until they fill the row.

    Measured by a byte-level BPE of 1,024 tokens that is trained on the texts: a model's own
    tokenizer would find fewer tokens in each.

    Args:
        tokens: of the row; the last document is cut to fit, one longer than half of it at half.
        seed: of the order.
        files: as `flexvarlen.equivalence.corpus.read_documents` takes them; None: Python's topics.

    Raises:
        ValueError: no text in the files.
    """
    found = [len(ids) for ids in tokenize(read_documents(files or ()), vocabulary=VOCABULARY)]
    chance = random.Random(seed)
    longest = max(1, tokens // LARGEST_SHARE)
    lengths: list[int] = []
    left = tokens
    while left > 0:
        for length in chance.sample(found, len(found)):
            taken = min(length, longest, left)
            if taken:
                lengths.append(taken)
                left -= taken
    return lengths


def split_variant(variant: str) -> tuple[str, str]:
    """How a variant batches, and the attention's name.

    >>> split_variant("padded:transformers:sdpa")
    ('padded', 'transformers:sdpa')

    Raises:
        ValueError: it does not begin with a way of batching.
    """
    batching, colon, attention = variant.partition(":")
    if batching not in BATCHINGS or not attention:
        known = ", ".join(f"{name}{colon or ':'}<attention>" for name in BATCHINGS)
        raise ValueError(
            f"variant must be one of {known}, got {variant!r}; say how its documents are batched."
        )
    return batching, attention


# --- which variants ------------------------------------------------------------------------------

PACKED = (
    "auto",
    "fa3",
    "fa2",
    "flex",
    "varlen",
    "fa4",
    "flex_fa4",
    "transformers:flash_attention_2",
    "transformers:flash_attention_2@cu_seq_lens",
    "transformers:flash_attention_3",
    "transformers:flex_attention",
    "transformers:sdpa",
    "transformers:eager",
)
UNPACKED = ("auto", "transformers:sdpa", "transformers:flash_attention_2")
TRAIN = (
    *(f"packed:{name}" for name in PACKED),
    *(f"padded:{name}" for name in UNPACKED),
    "padded:transformers:eager",
    *(f"serial:{name}" for name in UNPACKED),
)
# A compilation each takes most of the time; of padded and single documents for any shape, minutes.
COMPILED = (
    "packed:auto",
    "packed:flex",
    "packed:transformers:flash_attention_2",
    "packed:transformers:flex_attention",
    "packed:transformers:sdpa",
    "padded:transformers:sdpa",
    "serial:transformers:sdpa",
)
OTHER_DOCUMENTS = (
    "packed:auto",
    "packed:transformers:flash_attention_2",
    "padded:transformers:sdpa",
    "padded:transformers:flash_attention_2",
    "serial:transformers:sdpa",
)
GENERATE = (
    *(f"padded:{name}" for name in ("auto", "fa3", "fa2", "flex", "varlen")),
    "padded:transformers:sdpa",
    "padded:transformers:flash_attention_2",
    "padded:transformers:flash_attention_3",
    "padded:transformers:eager",
    "serial:auto",
    "serial:transformers:sdpa",
)
ON_A_CPU: dict[str, tuple[str, ...]] = {
    "eager": (
        "packed:auto",
        "packed:transformers:sdpa",
        "packed:transformers:flash_attention_2",
        "padded:sdpa",
        "padded:transformers:sdpa",
        "serial:transformers:eager",
    ),
    "compiled": ("packed:sdpa", "serial:transformers:sdpa"),
    "generate": ("padded:sdpa", "padded:transformers:sdpa", "serial:transformers:eager"),
}


def variants_of(case: ModelCase, options: Options) -> tuple[str, ...]:
    """The variants that a case is measured on, if none are named."""
    if not options.on_gpu:
        return ON_A_CPU["generate" if case.task == "generate" else case.mode]
    if case.task == "generate":
        return GENERATE
    if case.mode == "compiled":
        return COMPILED
    if case.documents != "text":
        return OTHER_DOCUMENTS
    if case.tokens > LONGEST_PACKED_SDPA:
        return tuple(name for name in TRAIN if name != "packed:transformers:sdpa")
    return TRAIN


# --- which cases ---------------------------------------------------------------------------------

# Of an H200's memory: 128K tokens of the largest do not fit beside its weights and optimizer.
MEASURED = {
    "qwen3-1.7b": 131_072,
    "llama-3.2-1b": 131_072,
    "llama-3.1-8b": 32_768,
    "qwen3-4b": 131_072,
    "qwen3-0.6b": 131_072,
}
"""Geometries and their longest row, those that matter most first."""


def cases_of(options: Options) -> list[ModelCase]:
    """All cases: geometry by geometry, each about 20 minutes of an H200."""
    if options.quick or not options.on_gpu:
        return list(_quick(options))
    return [case for geometry in MEASURED for case in _geometry(geometry, options)]


def _geometry(geometry: str, options: Options) -> Iterator[ModelCase]:
    def train(tokens: int, documents: Documents = "text", mode: Mode = "eager") -> ModelCase:
        return _case(geometry, "train", tokens, documents, options, mode)

    yield train(8192)
    yield train(32_768)
    yield _case(geometry, "generate", 8192, "text", options)
    yield train(8192, mode="compiled")
    if MEASURED[geometry] >= 131_072:
        yield train(131_072)
    yield train(2048)
    yield train(32_768, "log-normal")
    yield train(32_768, "uniform")


def _quick(options: Options) -> Iterator[ModelCase]:
    yield _case("qwen3-tiny", "train", 256, "text", options)
    yield _case("llama-tiny", "train", 128, "log-normal", options, checkpointing=True)
    yield _case("qwen3-tiny", "train", 128, "uniform", options, "compiled")
    yield _case("llama-tiny", "generate", 96, "log-normal", options)


def _case(
    geometry: str,
    task: Task,
    tokens: int,
    documents: Documents,
    options: Options,
    mode: Mode = "eager",
    *,
    checkpointing: bool | None = None,
) -> ModelCase:
    layers = GEOMETRIES[geometry](None).num_hidden_layers
    if checkpointing is None:
        checkpointing = task == "train" and training_bytes(geometry, tokens) > BUDGET_BYTES
    return ModelCase(
        geometry=geometry,
        layers=layers,
        task=task,
        mode=mode,
        tokens=tokens,
        documents=documents,
        source=source_of(options.text) if documents == "text" else "",
        mean_doc=None if documents == "text" else min(MEAN_DOC, tokens // 8),
        new_tokens=(NEW_TOKENS if options.on_gpu else 6) if task == "generate" else 0,
        checkpointing=checkpointing,
        dtype="bfloat16" if options.on_gpu else "float32",
        seed=SEED,
    )


def training_bytes(geometry: str, tokens: int) -> float:
    """Bytes that an eager step without checkpointing holds, about: what decides on checkpointing.

    Weights, gradients and AdamW's two moments in 16 bits; of each token and layer the tensors that
    transformers' eager Llama and Qwen layers keep for the backward: about 25 of the hidden size
    (norms in fp32, projections' inputs, q and k before and after their rotation) and 4 of the MLP.
    """
    config = GEOMETRIES[geometry](None)
    hidden, mlp = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads + config.num_key_value_heads
    layer = 2 * hidden * config.head_dim * heads + 3 * hidden * mlp
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    parameters: int = config.num_hidden_layers * layer + embeddings
    activations: int = tokens * config.num_hidden_layers * (25 * hidden + 4 * mlp)
    return 2.0 * (4 * parameters + activations)


def source_of(files: Sequence[Path] | None) -> str:
    """What texts a run's lengths come from, for its rows."""
    if files is None:
        return "Python's help topics"
    return ", ".join(Path(file).name for file in files)


def _in_thousands(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)
