"""The command `flexvarlen verify`: verify a model on a packed batch in one of its forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flexvarlen.patches.api import patch_model
from flexvarlen.patches.isolation.report import IsolationError, IsolationReport
from flexvarlen.patches.isolation.verify import verify_isolation
from flexvarlen.report.table import Column, Table
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.inputs import THEIRS, forms_of, inputs_of
from flexvarlen.verify.experiment.variant import set_transformers
from flexvarlen.verify.models import build_model, parse_model

if TYPE_CHECKING:
    from rich.table import Table as RichTable

LENGTHS = (5, 70, 98, 1, 30, 52)  # the third crosses token 128, the boundary of two blocks of flex


@dataclass(frozen=True)
class Answer:
    """The result for a model: a report, or a leak.

    Attributes:
        attention: a backend, or "transformers:" and one of its implementations.
        form: how documents are marked, as in `inputs_of`.
        lengths: tokens of each document.
    """

    model: str
    attention: str
    form: str
    lengths: tuple[int, ...]
    report: IsolationReport | None = None
    leak: IsolationError | None = None

    def as_dict(self) -> dict[str, Any]:
        """The answer as data for JSON."""
        return vars(self) | {
            "isolated": self.leak is None,
            "report": None if self.report is None else self.report.as_dict(),
            "leak": None if self.leak is None else self.leak.as_dict(),
        }


def parse_lengths(text: str) -> tuple[int, ...]:
    """Tokens of each document.

    >>> parse_lengths("5, 11,1")
    (5, 11, 1)

    Raises:
        ValueError: the text is not two or more comma-separated numbers of at least 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) < 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(
            f"lengths must be two or more comma-separated numbers of at least 1, got {text!r}; "
            "give one per document, as in 5,70,98."
        )
    return tuple(int(part) for part in parts)


def require_form(form: str, attention: str) -> None:
    """Check a form's name; raises a ValueError."""
    known = forms_of(attention)
    if form not in known:
        whose = " of transformers' own attention" if attention.startswith(THEIRS) else ""
        raise ValueError(
            f"form must be one of {', '.join(known)}{whose}, got {form!r}; choose one."
        )


def ask(
    name: str,
    attention: str,
    form: str,
    lengths: tuple[int, ...],
    *,
    train: bool,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Answer:
    """Build the model, pack random documents, and verify.

    Args:
        attention, form, lengths: as in `Answer`.
        train: whether the model is in training mode.

    Raises:
        ValueError, NotImplementedError, Unsupported: the model cannot be loaded or run this way.
    """
    model, _ = build_model(name, device=device, dtype=dtype, seed=seed)
    if attention.startswith(THEIRS):
        set_transformers(model, attention.removeprefix(THEIRS))
    else:
        patch_model(model, attention)
    model.train(train)
    vocabulary = int(model.config.get_text_config().vocab_size)
    row = PackedBatch.random(lengths, vocabulary, seed).to(device)
    batch = {"input_ids": row.input_ids, **inputs_of(form, row.layout(), lengths)}
    answer = (parse_model(name).label, attention, form, lengths)
    try:
        return Answer(*answer, report=verify_isolation(model, batch, seed=seed))
    except IsolationError as leak:
        return Answer(*answer, leak=leak)


def _leak(answer: Answer) -> str:
    leak = answer.leak
    if leak is None:
        return "none"
    where = "the outputs" if leak.layer is None else f"layer {leak.layer}"
    return f"{leak.source} → {leak.target}, {leak.direction}, {where}, {leak.kind}"


COLUMNS = (
    Column("model", lambda answer: answer.model),
    Column("attention", lambda answer: answer.attention),
    Column("form", lambda answer: answer.form),
    Column("documents", lambda answer: str(len(answer.lengths))),
    Column("layers", lambda answer: str(answer.report.layers) if answer.report else ""),
    Column("forwards", lambda answer: str(answer.report.forwards) if answer.report else ""),
    Column("gradients", lambda x: (x.report.gradients or "not tested") if x.report else ""),
    Column("leak", _leak),
)


def table_of(answers: Sequence[Answer], width: int) -> RichTable:
    """A table with a line for each model, or a column if lines do not fit into `width`."""
    return Table.of(answers, COLUMNS, is_bad=lambda answer: answer.leak is not None).rich(width)
