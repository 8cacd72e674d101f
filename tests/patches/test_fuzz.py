"""The fuzzer finds nothing in a fixed set of cases, and something as soon as a bug is planted."""

from __future__ import annotations

import pytest

from flexvarlen import PackedLayout
from flexvarlen.patches.batch import given, labels
from flexvarlen.patches.batch.positions import position_maker
from flexvarlen.patches.forward import pooling, stages
from tests import fuzz
from tests.cases import ENCODERS, FORMS, HEADS, RANDOM_MODES, draw


def test_no_mismatch(pytestconfig):
    tally = fuzz.fuzz(range(80) if pytestconfig.getoption("--slow") else range(96, 126))
    assert not tally.mismatches
    assert sum(tally.refused[name] for name in ("own", "none")) <= 4  # heads refuse many
    assert tally.drawn.keys() >= {*FORMS, *HEADS, *RANDOM_MODES}


# ---- planted bugs ----


def positions_from_the_first_real_token(parts):
    """A cached step behind a left-padded prompt counts the padding."""
    make = position_maker(parts)

    def changed(given, layout, several):
        made = make(given, layout, several)
        if made is None or given.inputs.get("position_ids") is not None:
            return made
        return layout.position_ids().view(made.shape)

    return changed


def one_document_per_row(given):
    return PackedLayout.from_rows(given.batch, given.row_tokens, device=given.device)


BUGS = {
    "positions_begin_at_the_first_real_token": (
        (stages, "position_maker"),
        positions_from_the_first_real_token,
        ("llama", "qwen3_windows"),
    ),
    "documents_see_one_another": ((given, "find_layout"), one_document_per_row, ("mistral",)),
    "labels_of_first_tokens_count": ((labels, "next_token_labels"), lambda *_: {}, ("qwen2",)),
}


def test_left_padding_under_a_head_is_found(monkeypatch):
    monkeypatch.setattr(pooling, "_refuse_hidden_first_token", lambda layout, batch: None)
    tally = fuzz.fuzz(range(300), families=ENCODERS, heads=True)
    ((_, wrong),) = tally.mismatches
    assert "is off by" in wrong


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(monkeypatch, capsys, bug):
    (module, name), function, families = BUGS[bug]
    monkeypatch.setattr(module, name, function)
    tally = fuzz.fuzz(range(200), families=families)
    ((seed, wrong),) = tally.mismatches
    assert "is off by" in wrong
    assert f"--case {seed} --family {','.join(families)}\n" in capsys.readouterr().out


def test_unexpected_refusal_is_a_mismatch(monkeypatch):
    def refuse(case):
        raise ValueError("position_ids must not be given")

    monkeypatch.setattr(fuzz, "run", refuse)
    ((seed, wrong),) = fuzz.fuzz(range(9)).mismatches
    assert seed == 0
    assert wrong.endswith("position_ids must not be given\n")


def test_family_that_is_only_ever_refused(monkeypatch):
    def refuse(case):
        raise NotImplementedError("flex returns no LSE on the CPU")

    monkeypatch.setattr(fuzz, "run", refuse)
    tally = fuzz.fuzz(range(30), families=("llama",))
    assert not tally.mismatches
    assert "llama" in tally.only_refused()


def test_case_of_a_seed():
    """A mismatch can be run again from its number, in another process too."""
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
