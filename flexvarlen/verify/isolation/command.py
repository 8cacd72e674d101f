"""What `flexvarlen verify` does: a model, a packed batch in one of its forms, a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from flexvarlen.attention.backends.registry import BACKENDS, our_name
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.api import patch_model
from flexvarlen.patches.isolation.report import IsolationError, IsolationReport
from flexvarlen.patches.isolation.verify import verify_isolation
from flexvarlen.report.table import Column, Table
from flexvarlen.runner.failures import Unsupported
from flexvarlen.verify.experiment.variant import set_transformers
from flexvarlen.verify.models import build_model, parse_model

if TYPE_CHECKING:
    from rich.table import Table as RichTable

FORMS = ("position_ids", "packed_layout", "document_ids", "cu_seq_lens")
"""How documents are handed over; `cu_seq_lens` as DataCollatorWithFlattening does, with positions
that restart; `document_ids` is a 2D attention_mask that numbers them from 1."""

LENGTHS = (5, 70, 98, 1, 30, 52)  # the third crosses token 128, the boundary of two blocks of flex


@dataclass(frozen=True)
class Question:
    """What is verified.

    Attributes:
        backend: of ours; None: not patched.
        implementation: transformers' own attention, where not patched.
        form: one of `FORMS`.
        lengths: tokens of each document.
        use_cache: passed on; None: the model's default.
        train: training mode.
        gradients, documents, seed: as in `verify_isolation`.
    """

    backend: str | None = "auto"
    implementation: str = "sdpa"
    form: str = "position_ids"
    lengths: tuple[int, ...] = LENGTHS
    use_cache: bool | None = None
    train: bool = False
    gradients: bool | None = None
    documents: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.backend is not None:
            object.__setattr__(self, "backend", our_name(self.backend))
        if len(self.lengths) < 2:
            raise ValueError(
                f"lengths must give at least two documents, got {len(self.lengths)}; for example "
                "5,70."
            )
        if self.form not in FORMS:
            raise ValueError(
                f"form must be one of {', '.join(FORMS)}, got {self.form!r}; choose one."
            )
        if self.form == "packed_layout" and self.backend is None:
            raise ValueError(
                "form must be one that transformers knows, got 'packed_layout' with --unpatched; "
                "choose another."
            )
        if self.backend is not None and self.backend not in (*BACKENDS, "auto"):
            raise ValueError(
                f"backend must be auto, {', '.join(BACKENDS)}, got {self.backend!r}; choose one."
            )

    @property
    def attention(self) -> str:
        """What the table calls the attention."""
        return f"transformers:{self.implementation}" if self.backend is None else self.backend


@dataclass(frozen=True)
class Answer:
    """What was found: a report, or a leak."""

    model: str
    question: Question
    report: IsolationReport | None
    leak: IsolationError | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "attention": self.question.attention,
            "form": self.question.form,
            "lengths": list(self.question.lengths),
            "isolated": self.leak is None,
            "report": None if self.report is None else self.report.as_dict(),
            "leak": None if self.leak is None else self.leak.as_dict(),
        }


def parse_lengths(text: str) -> tuple[int, ...]:
    """Tokens of each document.

    >>> parse_lengths("5, 11,1")
    (5, 11, 1)

    Raises:
        ValueError: not numbers from 1 with commas between.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(
            f"lengths must be numbers from 1 with commas between, got {text!r}; give one per "
            "document, as in 5,70,98."
        )
    return tuple(int(part) for part in parts)


def packed_inputs(
    form: str, lengths: Sequence[int], vocabulary: int, seed: int, device: torch.device
) -> dict[str, Any]:
    """Keyword arguments of a forward: random tokens `[1, T]`, and the documents in that form."""
    layout = PackedLayout.from_lengths(lengths, device=device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (1, layout.total_tokens), generator=generator, device="cpu")
    ids = ids.to(device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if form == "packed_layout":
        return inputs | {"packed_layout": layout}
    if form == "document_ids":
        numbers = [number for number, n in enumerate(lengths, 1) for _ in range(n)]
        return inputs | {"attention_mask": torch.tensor([numbers], device=device)}
    inputs["position_ids"] = layout.position_ids()[None]
    if form == "cu_seq_lens":
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        inputs |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return inputs


def ask(name: str, question: Question, *, device: torch.device, dtype: torch.dtype) -> Answer:
    """Build the model, pack the batch, and verify.

    Raises:
        ValueError, NotImplementedError: the model cannot be loaded, or not run so here.
    """
    model, _ = build_model(name, device=device, dtype=dtype, seed=question.seed)
    if question.backend is None:
        try:
            set_transformers(model, question.implementation)
        except Unsupported as error:
            raise ValueError(str(error)) from error
    else:
        patch_model(model, question.backend)
    model.train(question.train)
    vocabulary = int(model.config.get_text_config().vocab_size)
    batch = packed_inputs(question.form, question.lengths, vocabulary, question.seed, device)
    if question.use_cache is not None:
        batch["use_cache"] = question.use_cache
    report, leak = None, None
    try:
        report = verify_isolation(
            model,
            batch,
            gradients=question.gradients,
            documents=question.documents,
            seed=question.seed,
        )
    except IsolationError as error:
        leak = error
    return Answer(parse_model(name).label, question, report, leak)


def _report(answer: Answer, text: Callable[[IsolationReport], str]) -> str:
    return "" if answer.report is None else text(answer.report)


def _leak(answer: Answer) -> str:
    leak = answer.leak
    if leak is None:
        return "none"
    where = "the outputs" if leak.layer is None else f"layer {leak.layer}"
    return f"{leak.source} → {leak.target}, {leak.direction}, {where}, {leak.kind}"


def _documents(answer: Answer) -> str:
    report = answer.report
    return str(len(answer.question.lengths if report is None else report.documents))


COLUMNS = (
    Column("model", lambda answer: answer.model),
    Column("attention", lambda answer: answer.question.attention),
    Column("form", lambda answer: answer.question.form),
    Column("documents", _documents),
    Column("layers", lambda answer: _report(answer, lambda report: str(report.layers))),
    Column("forwards", lambda answer: _report(answer, lambda report: str(report.forwards))),
    Column(
        "gradients",
        lambda answer: _report(answer, lambda report: report.gradients or "not tested"),
    ),
    Column("leak", _leak),
)


def table_of(answers: Sequence[Answer]) -> RichTable:
    """A line for each model."""
    return Table.of(answers, COLUMNS, is_bad=lambda answer: answer.leak is not None).rich()
