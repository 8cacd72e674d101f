"""What every refusal's test asks: one sentence, and no kernel called before it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from flexvarlen import BACKENDS, PackedLayout, packed_attention
from flexvarlen.attention.backends.registry import get_backend

TOKENS = 16


@pytest.fixture(autouse=True)
def no_kernel_runs(monkeypatch):
    def attend(*_args, **_options):
        pytest.fail("a kernel was called")

    for name in BACKENDS:
        monkeypatch.setattr(type(get_backend(name)), "attend", attend)


def refused(error, contract, remedy, call):
    """`call` raises one sentence: the contract and what was given, a semicolon, and what to do."""
    with pytest.raises(error) as raised:
        call()
    sentence = str(raised.value)
    assert re.search(contract, sentence), sentence
    assert re.search(rf";[^;]*{remedy}", sentence), sentence
    assert is_one_sentence(sentence), sentence
    return sentence


def is_one_sentence(text: str) -> bool:
    """Whether it has the form that all refusals have: what is wrong; what to do."""
    return "; " in text and text.endswith(".") and "\n" not in text


def failed_refusals(
    cases: Iterable[tuple[str | tuple[str, ...], Any]],
    call: Callable[[Any], object],
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> list[str]:
    """The cases that are not refused by their sentence, each with what it raised; [] if all are.

    Args:
        cases: the sentence's first words, or those of several that may come, and what `call` takes.
    """
    failed = []
    for words, given in cases:
        raised = "nothing"
        try:
            call(given)
        except error as refusal:
            raised = str(refusal)
            if raised.startswith(words) and is_one_sentence(raised):
                continue
        except (Exception, pytest.fail.Exception) as other:  # a kernel was called
            raised = repr(other)
        failed.append(f"expected {words!r}, got {raised!r}")
    return failed


@contextmanager
def rows_without_a_case(module: ModuleType, table: str) -> Iterator[set[str]]:
    """The sentences of a table of refusals, less those of rows that refuse a call of the block.

    Args:
        module, table: the module that reads the table, and its name there, such as "TREES"; or that
            of a dict of tables.
    """
    of_table = getattr(module, table)
    by_name = of_table if isinstance(of_table, dict) else {"": of_table}
    without = {row.sentence for rows in by_name.values() for row in rows}

    def watched(row: Any) -> Any:
        def when(given: Any) -> Any:
            got = row.when(given)
            if got is not None and got is not False:
                without.discard(row.sentence)
            return got

        return row._replace(when=when)

    changed = {name: tuple(map(watched, rows)) for name, rows in by_name.items()}
    with mock.patch.object(module, table, changed if isinstance(of_table, dict) else changed[""]):
        yield without


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def tensor(tokens=TOKENS, heads=4, dim=8, dtype=torch.float32, device="cpu"):
    return torch.zeros(tokens, heads, dim, dtype=dtype, device=device)


def attend(given):
    """Call `packed_attention` on a row of two documents, with other tensors, layout or options."""
    given = {"layout": PackedLayout.from_lengths([10, 6]), **given}
    qkv = [given.pop(name, tensor()) for name in "qkv"]
    return packed_attention(*qkv, **given)
