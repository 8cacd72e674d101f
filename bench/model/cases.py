"""The cases of the suite `model`, their documents, how a variant is named.

A case is one model, one set of documents, one task and one way of running it. What is compared on
it are its variants, `<batching>:<attention>`: how the documents are batched, and a variant of
`flexvarlen.bench.model.variants`: "packed:auto", "padded:transformers:sdpa", "serial:fa2".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flexvarlen.bench.attention.kernels_cells import SEED, document_lengths
from flexvarlen.bench.model.documents import longest_of, prompt_lengths, source_of, text_lengths
from flexvarlen.bench.model.geometries import GEOMETRIES
from flexvarlen.bench.suite import Options

Task = Literal["train", "generate"]
Mode = Literal["eager", "compiled"]
Documents = Literal["text", "uniform", "log-normal"]

SORTED = "padded-sorted"
BATCHINGS = ("packed", "padded", SORTED, "serial")

STEPS = {
    "train": "forward, next-token loss, backward, fused AdamW",
    "generate": "prefill, greedy decoding",
}

MEAN_DOC = 2048
NEW_TOKENS = 32
PROMPTS = 16  # a batch of generation

BUDGET_BYTES = 90e9
"""Weights, optimizer and activations beyond which layers are checkpointed: of an H200's 141 GB,
what leaves room for the logits, one layer's own tensors and the allocator's gaps."""


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
        longest_doc: tokens at which a text is cut; None where no text is, and in generation.
        prompts: of texts, all cut at one length; None in training, and where lengths are drawn.
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
    longest_doc: int | None
    prompts: int | None
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
        if self.prompts is not None:
            return prompt_lengths(self.prompts, self.tokens, self.seed, files)
        if self.documents == "text":
            return text_lengths(self.tokens, self.seed, files, self.longest_doc)
        assert self.mean_doc is not None
        return list(document_lengths(self.tokens, self.documents, self.mean_doc, self.seed))


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


# --- which cases ---------------------------------------------------------------------------------

WHOLE = "qwen3-1.7b"
"""The geometry of all cases and variants; the others have the contexts, on fewer variants."""
MEASURED = (WHOLE, "llama-3.2-1b", "llama-3.1-8b", "qwen3-4b", "qwen3-0.6b")
"""Geometries, those that matter most first."""


def cases_of(options: Options) -> list[ModelCase]:
    """All cases, geometry by geometry."""
    if options.quick or not options.on_gpu:
        return list(_quick(options))
    return [case for geometry in MEASURED for case in _geometry(geometry, options)]


def _geometry(geometry: str, options: Options) -> Iterator[ModelCase]:
    def train(tokens: int, documents: Documents = "text", mode: Mode = "eager") -> ModelCase:
        return _case(geometry, "train", tokens, documents, options, mode)

    yield train(8192)
    yield train(32_768)
    yield _case(geometry, "generate", 8192, "text", options)
    yield train(131_072)
    yield train(2048)
    if geometry == WHOLE:
        yield train(8192, mode="compiled")
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
    texts = documents == "text"
    if checkpointing is None:
        checkpointing = task == "train" and training_bytes(geometry, tokens) > BUDGET_BYTES
    return ModelCase(
        geometry=geometry,
        layers=layers,
        task=task,
        mode=mode,
        tokens=tokens,
        documents=documents,
        source=source_of(options.text) if texts else "",
        mean_doc=None if texts else min(MEAN_DOC, tokens // 8),
        longest_doc=longest_of(tokens) if texts and task == "train" else None,
        prompts=PROMPTS if texts and task == "generate" else None,
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
    activations: int = tokens * config.num_hidden_layers * (25 * hidden + 4 * mlp)
    return 2.0 * (4 * parameters_of(geometry) + activations)


def parameters_of(geometry: str) -> int:
    """Of projections and embeddings."""
    config = GEOMETRIES[geometry](None)
    hidden, mlp = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads + config.num_key_value_heads
    layer = 2 * hidden * config.head_dim * heads + 3 * hidden * mlp
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    found: int = config.num_hidden_layers * layer + embeddings
    return found


def _in_thousands(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)
