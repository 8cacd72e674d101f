"""The batch of a comparison: the user's batch, or real text, tokenized and packed into one row.

Without files, the documents are the topics of `pydoc_data.topics` in Python's standard library: 79
texts of 200 to 62,000 characters.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.tree_batch import Row, row_from
from flexvarlen.verify.json_lines import SUFFIXES, json_documents

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Default tokens of the packed row, by device type."""

VOCABULARY = 1024
"""Vocabulary of the BPE that is trained on the documents, for models without a tokenizer."""

SMALLEST_VOCABULARY = 257  # 256 bytes and one merge

# No document may fill the row: isolation needs neighbours. Where a long document is cut varies, so
# that boundaries fall anywhere in a kernel's blocks.
CUT_SHARES = (16, 4)


def row_of(
    model: PreTrainedModel,
    batch: PackedBatch | Mapping[str, Any] | None,
    *,
    tokens: int | None = None,
    seed: int = 0,
) -> Row:
    """The documents that a model is compared on, on its device.

    Args:
        model: provides the vocabulary and the device.
        batch: a row, or a forward's keyword arguments; None: real text.
        tokens: number of tokens of real text; default `DEFAULT_TOKENS`.
        seed: random seed of its packing.

    Raises:
        ValueError: the batch breaks the contract.
    """
    if batch is None:
        if tokens is None:
            tokens = DEFAULT_TOKENS.get(model.device.type, DEFAULT_TOKENS["cpu"])
        vocabulary = int(model.config.get_text_config().vocab_size)
        batch = packed_text(vocabulary=vocabulary, tokens=tokens, seed=seed)
    return row_from(batch, model) if isinstance(batch, Mapping) else batch.to(model.device)


def read_documents(files: Sequence[str | Path] = (), tokenizer: Any = None) -> tuple[str, ...]:
    """The documents to pack.

    Args:
        files: `.jsonl` and `.json`: each line is a document, as `json_documents` reads it. Plain
            text: each of several files is a document; a single file is split at form feeds if it
            has any; else at runs of two or more blank lines if it has any; else at blank lines.
            None: the topics of `pydoc_data`.
        tokenizer: its chat template turns `messages` into text.

    Returns:
        Texts that are not blank.

    Raises:
        ValueError: a file is missing or not UTF-8, JSON has no documents, or all files are blank.
    """
    if not files:
        from pydoc_data.topics import topics

        return tuple(text for _, text in sorted(topics.items()))
    texts: list[str] = []
    for file in map(Path, files):
        text = read_text(file)
        if file.suffix.lower() in SUFFIXES:
            texts += json_documents(text, file, tokenizer)
        else:
            texts += _split(text) if len(files) == 1 else [text]
    documents = tuple(text for text in texts if text.strip())
    if not documents:
        raise ValueError(
            f"text must contain a document, got blank files: {', '.join(map(str, files))}; "
            "name a file with text."
        )
    return documents


def read_text(file: Path, name: str = "text") -> str:
    """A file's content; raises a ValueError about `name` where it is no UTF-8 text."""
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise ValueError(
            f"{name} must name a readable file, got {str(file)!r} ({error.strerror}); check the "
            "path."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} must be UTF-8, got invalid bytes in {str(file)!r}; convert the file."
        ) from error


def _split(text: str) -> list[str]:
    if "\f" in text:
        return text.split("\f")
    far_apart = re.split(r"\n(?:[ \t]*\n){2,}", text.strip())
    return far_apart if len(far_apart) > 1 else re.split(r"\n[ \t]*\n", text.strip())


@cache
def train_tokenizer(documents: tuple[str, ...], vocabulary: int = VOCABULARY) -> Any:
    """Train a byte-level BPE `tokenizers.Tokenizer`, which encodes any text losslessly.

    Raises:
        ValueError: the vocabulary is too small for the 256 bytes.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    if vocabulary < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocabulary must be at least {SMALLEST_VOCABULARY}, got {vocabulary}, as a byte-level "
            "BPE contains every byte; use a model with a larger vocab_size."
        )
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = ByteLevelDecoder()  # type: ignore[assignment]
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        initial_alphabet=sorted(ByteLevel.alphabet()),  # type: ignore[call-arg]
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def tokenize(
    documents: tuple[str, ...], *, vocabulary: int, tokenizer: Any = None
) -> list[list[int]]:
    """Token ids of each document, all below `vocabulary`.

    Args:
        documents: texts.
        vocabulary: the model's vocab_size.
        tokenizer: the model's, from `AutoTokenizer`; ids past the vocabulary are clipped to its
            last token. None: a BPE is trained on the documents.
    """
    if tokenizer is None:
        trained = train_tokenizer(documents, min(VOCABULARY, vocabulary))
        return [encoding.ids for encoding in trained.encode_batch(list(documents))]
    return [
        [min(token, vocabulary - 1) for token in tokenizer.encode(text, add_special_tokens=False)]
        for text in documents
    ]


def pack(documents: Sequence[Sequence[int]], tokens: int, seed: int, source: str) -> PackedBatch:
    """Pack documents in random order until the row has `tokens` tokens.

    A long document is cut after a random 1/16 to 1/4 of the row, so that several fit; the last is
    cut where the row ends. A corpus that is too small is repeated; `source` says so.

    Raises:
        ValueError: there are fewer than 2 tokens, or no document has a token.
    """
    if tokens < 2:
        raise ValueError(f"tokens must be at least 2, got {tokens}; raise the budget.")
    pieces = [list(document) for document in documents if document]
    if not pieces:
        raise ValueError("documents must contain at least one token; pass other text.")
    rng = random.Random(seed)
    cuts = [max(1, tokens // share) for share in CUT_SHARES]
    ids: list[int] = []
    lengths: list[int] = []
    rounds = 0
    while len(ids) < tokens:
        rounds += 1
        for piece in rng.sample(pieces, len(pieces)):
            taken = piece[: min(rng.randint(*cuts), tokens - len(ids))]
            if taken:
                ids += taken
                lengths.append(len(taken))
    if rounds > 1:
        source = f"{source}; the texts repeated {rounds} times"
    return PackedBatch(torch.tensor([ids], dtype=torch.int64, device="cpu"), tuple(lengths), source)


def packed_text(
    *,
    vocabulary: int,
    tokens: int,
    seed: int = 0,
    files: Sequence[str | Path] = (),
    tokenizer: Any = None,
) -> PackedBatch:
    """Read, tokenize and pack; arguments as in the functions above."""
    texts = read_documents(files, tokenizer)
    names = [Path(file).name for file in files]
    what = ", ".join(names) if len(names) < 4 else f"{len(names)} files"
    what = what or "Python's pydoc topics"
    how = (
        f"byte-level BPE of {min(VOCABULARY, vocabulary):,} tokens trained on them"
        if tokenizer is None
        else "the model's own tokenizer"
    )
    ids = tokenize(texts, vocabulary=vocabulary, tokenizer=tokenizer)
    return pack(ids, tokens, seed, f"{what}, {how}")
