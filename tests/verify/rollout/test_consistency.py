"""Broken files are refused where they begin, and honest drift never is."""

from dataclasses import replace

import pytest
import torch

from flexvarlen.reference.model import own_parameters
from flexvarlen.verify.rollout.consistency import (
    Explanation,
    require_consistent,
    why_broken,
)
from flexvarlen.verify.rollout.drift import ratio_measures
from flexvarlen.verify.rollout.logprobs import trainer_logprobs
from flexvarlen.verify.rollout.responses import Response
from tests.sentences import is_one_sentence
from tests.verify.rollout.recorded import (
    at_temperature,
    earlier,
    from_token,
    generated,
    later,
    peaked_model,
    retokenized,
)

ROW = 256
AFTER, BEFORE = "of the tokens after their own", "of the tokens before their own"

BROKEN = {
    "off by one": (1.0, -1, later(0), f"{AFTER} (off by one) from token 0 of line 1 on"),
    "off by one the other way": (1.0, -1, earlier, f"{BEFORE} (off by one) from token"),
    "off by one from a token on": (1.0, 3, later(10), f"{AFTER} (off by one) from token 10 of"),
    "other ids from a token on": (1.0, 5, retokenized(14), "tokens from token 14 of line 5 on"),
    "temperature that is not said": (0.7, -1, at_temperature(1.0), "about 0.7 times the file's"),
    "raw beside a temperature": (1.0, -1, at_temperature(0.7), "temperature, about 1 from token"),
    "temperature from a line on": (1.0, -4, at_temperature(1.25), "about 1 from token 0 of line 4"),
}


def why(model, responses):
    try:
        require_consistent(model, responses, ROW)
    except ValueError as error:
        said = str(error)
        return said if is_one_sentence(said) else f"not one sentence: {said}"
    return "consistent"


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_passes_or_is_said_to_begin_elsewhere(name):
    temperature, line, change, words = BROKEN[name]
    broken = from_token(generated("sdpa", temperature), line, change)
    said = why(peaked_model(), broken)
    assert words in said
    assert said.startswith("responses must have ")


def test_other_model_passes():
    said = why(peaked_model(seed=1), generated("sdpa"))
    assert "must be of this model" in said
    assert "from token 0 of line 1 on, nearly everywhere" in said


def test_ids_of_another_vocabulary_index_the_embedding():
    first, *rest = generated("sdpa")
    bad = replace(first, completion=[*first.completion[:4], 1024, *first.completion[5:]])
    said = why(peaked_model(), [bad, *rest])
    assert "got 1024 at token 4 of the completion in line 1" in said


@pytest.mark.parametrize("head_scale", [1, 3, 12])
def test_honest_drift_is_refused(head_scale):
    """Of attentions and dtypes, of short files, and of an engine five times as far away."""
    model = peaked_model(head_scale=head_scale)
    for attention, temperature in (("eager", 1.0), ("sdpa", 0.7)):
        responses = generated(attention, temperature, head_scale)
        far = trainer_logprobs("sdpa", model, responses, ROW)
        engine = torch.tensor([x for each in responses for x in each.logprobs])
        assert 0 < ratio_measures(far - engine, responses)["log_ratio_rms"] < 0.2
        assert why(model, responses) == "consistent"
        assert why(own_parameters(model, torch.float32), responses) == "consistent"
        noise = iter(5 * (far - engine)[torch.randperm(len(far))])
        noisy = [
            replace(x, logprobs=[min(0.0, y + float(next(noise))) for y in x.logprobs])
            for x in responses
        ]
        assert why(model, noisy) == "consistent"
        for tokens in (1, 9):
            short = replace(
                responses[0],
                completion=responses[0].completion[:tokens],
                logprobs=responses[0].logprobs[:tokens],
            )
            assert why(model, [short]) == "consistent"


NUMBERS = 400


def drawn(off, other=None):
    """What is said of 400 tokens in lines of 100, where the engine is `off` by these.

    Args:
        off: the engine's log-probabilities minus the model's, `[400]`.
        other: how far they are from another explanation; None: there is none.
    """
    generator = torch.Generator().manual_seed(0)
    trainer = -3 + 1.5 * torch.randn(NUMBERS, generator=generator, dtype=torch.float64)
    engine = trainer + off
    responses = [Response(line, [1], [2] * 100, [-1.0] * 100, 1.0) for line in range(1, 5)]
    others = [] if other is None else [Explanation("another", "fix it", engine + other)]
    return why_broken(responses, engine, trainer, others) or "consistent"


def at(*runs, by):
    off = torch.full((NUMBERS,), 0.01, dtype=torch.float64)
    for start, end in runs:
        off[start:end] = by
    return off


def test_few_tokens_or_a_noisy_engine_are_a_broken_file():
    assert drawn(at((50, 57), by=2.0)) == "consistent"
    assert "from token 50 of line 1" in drawn(at((50, 90), by=2.0))
    # Routers that choose other experts move many tokens, but less than other tokens would.
    assert drawn(at((0, NUMBERS), by=0.4)) == "consistent"


def test_line_that_is_said_is_a_later_one():
    said = drawn(at((120, 140), (310, 400), by=2.0))
    assert "from token 20 of line 2 on" in said
    assert "20 tokens are 2 nats off" in said


def test_explanation_that_fits_little_better_counts():
    off, noise = at((0, NUMBERS), by=0.1), torch.tensor([0.01, -0.01] * 200)
    assert "got another from token 0 of line 1 on" in drawn(off, noise)
    assert drawn(off, at((0, NUMBERS), by=0.08)) == "consistent"
