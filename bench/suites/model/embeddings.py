"""Suite "embeddings": vectors of many short texts, by `embed` and by sentence-transformers.

A variant is a way to embed the same texts with the same weights in the same dtype:

    embed                           `flexvarlen.embed`
    unpad@N                         `SentenceTransformer.encode`, batch size N, whose transformer is
                                    patched with `patch_model(unpad=True)`
    sentence-transformers:KERNEL@N  the same, not patched, with that attn_implementation; with
                                    flash_attention_2 it packs each batch into one row itself

`encode` keeps its vectors on the device until the end (`convert_to_tensor=True`), which is faster
than its default. All times are of the wall, from texts to vectors on the host, tokenization too.
The texts' words are random, and each is a token.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

import flexvarlen as fv
from flexvarlen.bench.suites.model.geometries import GeometryCase
from flexvarlen.bench.suites.model.tables import made, model_title, number, where
from flexvarlen.measure import memory_meaning, peak_memory_mib
from flexvarlen.measure.timing import wall_seconds
from flexvarlen.report.records import Record, records_alike
from flexvarlen.report.table import NOTHING, Column, Table
from flexvarlen.runner.each import measure_each
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.suite import Finding, Findings, Options, Suite, require_known

OURS, UNPAD, THEIRS = "embed", "unpad", "sentence-transformers"
BATCH_SIZES = (32, 64, 128, 256, 512, 1024, 2048)
"""The first is the default of `encode`."""
KERNELS = ("flash_attention_2", "sdpa")
ALL = (
    OURS,
    *(f"{UNPAD}@{n}" for n in BATCH_SIZES),
    *(f"{THEIRS}:{kernel}@{n}" for kernel in KERNELS for n in BATCH_SIZES),
)
ON_ALL_TEXTS = (
    OURS,
    f"{UNPAD}@512",
    f"{THEIRS}:flash_attention_2@32",
    f"{THEIRS}:flash_attention_2@512",
)
FEW = (OURS, f"{UNPAD}@32", f"{UNPAD}@512", *(x for x in ALL if x.startswith(THEIRS)))
ON_CPU = (OURS, f"{UNPAD}@32", f"{THEIRS}:sdpa@32", f"{THEIRS}:sdpa@64")

SAMPLE = 256
"""Texts whose vectors are compared with those in fp32."""
WARM_UP = 2048
"""Texts that are embedded before the clock starts."""
ALLOWANCE = 1e-6
"""Allowed 1 - cosine beyond twice that of plain attention in the same dtype: fp32 rounding."""


@dataclass(frozen=True, kw_only=True)
class TextsCase(GeometryCase):
    """Texts and a model.

    Attributes:
        texts: their number.
        mean, sigma: of the log-normal number of words.
        longest: tokens at which a text is cut.
        at_most_s: seconds that a variant may take; a slower one gets fewer texts, and its record
            says how many.
    """

    texts: int
    geometry: str = "modernbert-base"
    layers: int = 22
    mean: float = 64.0
    sigma: float = 0.8
    longest: int = 512
    at_most_s: float = 4.0

    @property
    def name(self) -> str:
        return f"{self.geometry}-{self.texts}"


class Embeddings(Suite[TextsCase]):
    """The first texts at every batch size, then all of them with some variants."""

    name: ClassVar[str] = "embeddings"

    def cases(self, options: Options) -> Sequence[TextsCase]:
        if options.is_small:
            tiny = TextsCase(geometry="modernbert-tiny", layers=2, texts=300, mean=12.0, longest=64)
            return [replace(tiny, dtype=options.dtype)]
        return [TextsCase(texts=100_000, at_most_s=12.0), TextsCase(texts=20_000)]

    def variants(self, case: TextsCase, options: Options) -> Sequence[str]:
        if not options.on_gpu:
            return ON_CPU
        return FEW if case.texts <= 20_000 else ON_ALL_TEXTS

    def measure(self, case: TextsCase, variants: Sequence[str], options: Options) -> Findings:
        require_known(variants, ALL)
        with model_folder(case, options.device) as folder:
            run = _Run(case, folder, options)
            return measure_each(case.name, variants, run.finding, options.device)

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return map(_table, records_alike(records, ["variant"]))


def parts_of(variant: str) -> tuple[str, int]:
    """transformers' name of a variant's attention, "" if it is ours; and its batch size, or 0.

    >>> parts_of("sentence-transformers:sdpa@32"), parts_of("unpad@32"), parts_of("embed")
    (('sdpa', 32), ('', 32), ('', 0))
    """
    name, _, size = variant.partition("@")
    return name.partition(":")[2], int(size or 0)


def random_texts(case: TextsCase, vocab_size: int) -> list[str]:
    """Words w0, w1, ...; the lengths are log-normal."""
    rng = np.random.default_rng(case.seed)
    mu = np.log(case.mean) - case.sigma**2 / 2
    drawn = np.exp(rng.normal(mu, case.sigma, case.texts)).round().astype(int)
    lengths = drawn.clip(1, case.longest - 2)
    words = np.array([f"w{i}" for i in range(vocab_size)])
    ids = rng.integers(5, vocab_size, lengths.sum())
    return [" ".join(text) for text in np.split(words[ids], lengths.cumsum()[:-1])]


def new_tokenizer(vocab_size: int, longest: int) -> PreTrainedTokenizerFast:
    """A token for each word, one before them and one after."""
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w1"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.post_processor = TemplateProcessing("w3 $A w4", special_tokens=[("w3", 3), ("w4", 4)])
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="w1", pad_token="w0", model_max_length=longest
    )
    return tokenizer


@contextmanager
def model_folder(case: TextsCase, device: torch.device) -> Iterator[Path]:
    model = case.new_base_model(device)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model.save_pretrained(folder)
        new_tokenizer(model.config.vocab_size, case.longest).save_pretrained(folder)
        yield Path(folder)


def sentence_transformer(folder: Path, kernel: str, dtype: torch.dtype, device: Any) -> Any:
    """A SentenceTransformer of the folder's model: mean pooling and vectors of length 1.

    Raises:
        Unsupported: sentence-transformers is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import (
            Normalize,
            Pooling,
            Transformer,
        )
    except ImportError as error:
        raise Unsupported(
            "sentence-transformers is not installed here: pip install 'sentence-transformers>=6'"
        ) from error
    arguments = {"attn_implementation": kernel, "dtype": dtype}
    model = Transformer(str(folder), model_kwargs=arguments)
    pooling = Pooling(model.auto_model.config.hidden_size)
    return SentenceTransformer(modules=[model, pooling, Normalize()], device=str(device))


class _Run:
    """A case's texts, and the vectors of a sample in fp32 and in plain attention."""

    def __init__(self, case: TextsCase, folder: Path, options: Options) -> None:
        self.case, self.folder, self.options = case, folder, options
        self.dtype = case.torch_dtype
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.texts = random_texts(case, len(self.tokenizer))
        self.reference = self.sample_in(torch.float32)
        self.plain = _distances(self.sample_in(self.dtype), self.reference)

    def sample_in(self, dtype: torch.dtype) -> Tensor:
        """Vectors of the sample, by sentence-transformers' plain attention."""
        model = sentence_transformer(self.folder, "eager", dtype, self.options.device)
        return _encode(model, 32)(self.texts[:SAMPLE])

    def finding(self, variant: str) -> Finding:
        """Embed some texts, then as many as there is time for, on the clock."""
        embed = self.way(variant)
        warm_up = self.texts[:WARM_UP]
        embed(warm_up)
        device = self.options.device
        rate = len(warm_up) / wall_seconds(partial(embed, warm_up), device)
        texts = self.texts[: max(SAMPLE, int(rate * self.case.at_most_s))]
        found: list[Tensor] = []
        seconds: list[float] = []

        def timed() -> None:
            seconds.append(wall_seconds(lambda: found.append(embed(texts)), device))

        peak_mib = peak_memory_mib(timed, device)
        distances = _distances(found[0][:SAMPLE], self.reference)
        allowed = 2 * self.plain.max().item() + ALLOWANCE
        others = cosine_similarity(self.reference, self.reference.roll(1, 0), dim=-1)
        measures = {
            "texts": len(texts),
            "seconds": seconds[0],
            "texts_per_s": len(texts) / seconds[0],
            "tokens_per_s": sum(text.count(" ") + 3 for text in texts) / seconds[0],  # special too
            "peak_mib": peak_mib,
            "peak_meaning": memory_meaning(device),
            "lowest_cosine": 1 - distances.max().item(),
            "plain_lowest_cosine": 1 - self.plain.max().item(),
            "highest_cosine_of_two_texts": others.max().item(),
            "tokenizers_parallelism": os.environ.get("TOKENIZERS_PARALLELISM", "unset"),
        }
        self.options.say(f"{variant}: {measures['texts_per_s']:,.0f} texts/s")
        if not distances.max().item() <= allowed:
            reason = f"1 - cosine must be at most {allowed:.1e}, got {distances.max().item():.1e}"
            return Finding(variant, "wrong", reason, measures)
        return Finding(variant, "ok", None, measures)

    def way(self, variant: str) -> Callable[[list[str]], Tensor]:
        """What embeds texts, with a model of its own."""
        device = self.options.device
        if variant == OURS:
            model = AutoModel.from_pretrained(self.folder, dtype=self.dtype).to(device)
            pooled: dict[str, Any] = {"pooling": "mean", "normalize": True, "progress": False}
            return partial(fv.embed, model, tokenizer=self.tokenizer, **pooled)
        kernel, batch_size = parts_of(variant)
        found = sentence_transformer(self.folder, kernel or "sdpa", self.dtype, device)
        if not kernel:
            fv.patch_model(found[0].auto_model, unpad=True)
        return _encode(found, batch_size)


def _encode(model: Any, batch_size: int) -> Callable[[list[str]], Tensor]:
    def encode(texts: list[str]) -> Tensor:
        vectors: Tensor = model.encode(
            texts, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
        )
        return vectors.float().cpu()

    return encode


def _distances(vectors: Tensor, reference: Tensor) -> Tensor:
    """1 - cosine of each text."""
    return 1 - cosine_similarity(vectors.double(), reference.double(), dim=-1)


# --- the table -----------------------------------------------------------------------------------


def _speed(record: Record) -> float:
    return record.measures["texts_per_s"] if record.status == "ok" else 0.0


def _shown(record: Record) -> str:
    if record.case["variant"] == OURS:
        return "`fv.embed`"
    return f"{THEIRS}, `{parts_of(record.case['variant'])[0] or 'unpad=True'}`"


def _table(records: Sequence[Record]) -> Table:
    columns = [
        Column("embeds", _shown),
        Column("batch size", lambda r: str(parts_of(r.case["variant"])[1] or NOTHING)),
        number("texts/s", "texts_per_s", ",.0f", outcome=True),
        number("tokens/s", "tokens_per_s", ",.0f"),
        number("seconds", "seconds", ".1f"),
        number("texts", "texts", ",.0f"),
        number("peak GiB", "peak_mib", ".2f", 1 / 1024),
        made("1 − lowest cosine", lambda r: f"{1 - r.measures['lowest_cosine']:.0e}"),
    ]
    case = records[0].case
    title = (
        f"{case['texts']:,} texts of {case['mean']:.0f} words on average, "
        f"{model_title(records[0], ' geometry')}, {where(records)}"
    )
    fastest_first = sorted(records, key=_speed, reverse=True)
    plain = [r.measures["plain_lowest_cosine"] for r in fastest_first if r.status == "ok"]
    notes = [
        "Seconds are from texts to vectors on the host, tokenization included. The cosine is with "
        f"vectors in fp32; plain attention in this dtype has {1 - lowest:.0e}. A variant that "
        f"would take more than {case['at_most_s']:.0f} seconds gets fewer texts."
        for lowest in plain[:1]
    ]
    return Table.of(fastest_first, columns, title, notes=notes)


SUITE = Embeddings()
