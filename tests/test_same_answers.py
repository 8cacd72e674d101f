"""`python -m tests.same_answers` finds what differs between two checkouts, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.cases import Combination
from tests.same_answers.__main__ import main
from tests.same_answers.cases import case_of, sample
from tests.same_answers.child import GRADIENT, run_all
from tests.same_answers.compare import differences

ROOT = Path(__file__).parents[1]
LLAMA = "llama | own | packed_layout | train | sdpa"
REFUSED = "phi3 | own | tree | eval | sdpa"


@pytest.fixture(scope="module")
def answers():
    """Of two cases, one of which raises."""
    return run_all([case_of(Combination(*x.split(" | ")), "cpu") for x in (LLAMA, REFUSED)], "cpu")


def changed(answers, name, **tensors):
    return answers | {name: answers[name] | tensors}


def test_equal_answers_do_not_differ(answers):
    assert GRADIENT + "lm_head.weight" in answers[LLAMA]
    assert isinstance(answers[REFUSED], str)
    assert differences(answers, answers) == []


@pytest.mark.parametrize("tensor", ["logits", GRADIENT + "lm_head.weight"])
def test_one_bit_of_one_number(answers, tensor):
    other = answers[LLAMA][tensor].clone()
    other.view(torch.int32).flatten()[-1] ^= 1
    (line,) = differences(answers, changed(answers, LLAMA, **{tensor: other}))
    assert line.startswith(f"{LLAMA}: 1 of ")
    assert tensor in line


def test_a_gradient_that_is_missing(answers):
    fewer = dict(answers[LLAMA])
    del fewer[GRADIENT + "lm_head.weight"]
    (line,) = differences(answers, answers | {LLAMA: fewer})
    assert line == f"{LLAMA}: only one has {GRADIENT}lm_head.weight"


def test_another_sentence_and_none(answers):
    for other in ("ValueError: no.", answers[LLAMA]):
        (line,) = differences(answers, answers | {REFUSED: other})
        assert line.startswith(f"{REFUSED}: NotImplementedError: a packed_layout of trees")


@pytest.mark.parametrize(("times", "lines"), [(2, 0), (4, 1)])
def test_noise_of_the_old_checkout(answers, times, lines):
    name = GRADIENT + "lm_head.weight"
    gradient = answers[LLAMA][name]
    again, new = (
        changed(answers, LLAMA, **{name: gradient * (1 + x)}) for x in (1e-3, times * 1e-3)
    )
    assert len(differences(answers, new, again)) == lines


def test_the_sample_is_fixed_and_holds_every_family_on_every_batch():
    cases = sample()
    assert cases == sample()
    assert len({*cases}) == len(cases)
    assert {x.family for x in sample(seed=1)} == {x.family for x in cases}


# The command, which starts three processes; what it finds in answers: above.
@pytest.mark.slow
def test_a_checkout_with_one_number_changed(tmp_path, capsys):
    for folder in ("flexvarlen", "patches"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    kernel = tmp_path / "flexvarlen/attention/backends/sdpa.py"
    text = kernel.read_text()
    assert "scale=scale" in text
    kernel.write_text(text.replace("scale=scale", "scale=1.001 * scale"))
    assert main([str(tmp_path), str(ROOT), "--cases", "6", "--only", "| sdpa"]) == 1
    *lines, summary = capsys.readouterr().out.splitlines()
    assert any("gradients differ by" in line for line in lines)
    assert f"{len(lines)} DIFFER" in summary
