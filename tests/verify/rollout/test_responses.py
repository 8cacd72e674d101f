"""Responses in the shapes of engines, and lines that are refused."""

import json

import pytest

from flexvarlen.verify.rollout.responses import (
    PROCESSORS,
    TRUNCATIONS,
    Response,
    read_responses,
)
from tests.sentences import failed_refusals, is_one_sentence

PLAIN = {"prompt_ids": [5, 6], "completion_ids": [7, 8], "logprobs": [-0.5, -1.5]}
VLLM = {
    "request_id": "0",
    "prompt_token_ids": [5, 6],
    "outputs": [
        {
            "index": 0,
            "token_ids": [7, 8],
            "logprobs": [
                {"7": {"logprob": -0.5, "rank": 2}, "9": {"logprob": -0.1, "rank": 1}},
                {"8": {"logprob": -1.5, "rank": 1}},
            ],
        }
    ],
}
CHAT = {
    "prompt_token_ids": [5, 6],
    "choices": [
        {
            "token_ids": [7, 8],
            "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"logprob": -1.5}]},
        }
    ],
}
COMPLETIONS = {
    "choices": [
        {
            "prompt_token_ids": [5, 6],
            "token_ids": [7, 8],
            "logprobs": {"token_logprobs": [-0.5, -1.5], "tokens": ["a", "b"]},
        }
    ]
}
SGLANG = {
    "text": "ab",
    "output_ids": [7, 8],
    "meta_info": {
        "input_token_logprobs": [[None, 5, None], [-3.0, 6, None]],
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]],
    },
}


@pytest.fixture
def read(tmp_path):
    def read_line(line, **sampling):
        file = tmp_path / "r.jsonl"
        file.write_text(line if isinstance(line, str) else json.dumps(line) + "\n\n")
        return read_responses(file, **sampling)

    return read_line


@pytest.mark.parametrize("line", [PLAIN, VLLM, CHAT, COMPLETIONS, SGLANG])
def test_shape_of_an_engine_is_read_wrongly(read, line):
    same = Response(1, [5, 6], [7, 8], [-0.5, -1.5], 1.0)
    assert read(line, temperature=1.0) == [same]
    assert read(line | {"sampling_params": {"temperature": 1.0, "top_k": -1}}) == [same]
    raw = {"temperature": 0.5, "top_p": 0.9, "logprobs_mode": "raw_logprobs"}
    assert read(line | raw) == [same]
    processed = line | {"temperature": 0.5}
    assert read(processed, mode="processed_logprobs")[0].temperature == 0.5


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_truncated_sampling_of_sglang_is_refused(read, name):
    """Its log-probabilities are of the whole vocabulary."""
    assert read(SGLANG | {"sampling_params": {"temperature": 0.5, name: 0.37}})


def test_samples_of_one_prompt_are_lost(read):
    two = VLLM | {"outputs": VLLM["outputs"] * 2}
    assert [each.line for each in read(two, temperature=1.0)] == [1, 1]


def changed(line, **keys):
    return line | keys


def of_output(**keys):
    return VLLM | {"outputs": [VLLM["outputs"][0] | keys]}


HEATED = PLAIN | {"temperature": 1.0}
REFUSED = (
    ("responses must have a JSON object on each line, got 'text'", "text"),
    ("responses must have one of the keys", {"text": "a"}),
    ("responses must have a temperature above 0, got None in line 1", PLAIN),
    ("responses must have a temperature above 0, got 0", changed(PLAIN, temperature=0)),
    ("responses must have one log-probability for each of 2 tokens, got 1: truncated from token 1",
     changed(HEATED, logprobs=[-0.5])),
    ("responses must have one log-probability for each of 2 tokens, got 3: longer",
     changed(HEATED, logprobs=[-0.5] * 3)),
    ("responses must have finite log-probabilities of at most 0, got None at token 1",
     changed(HEATED, logprobs=[-0.5, None])),
    ("responses must have finite log-probabilities of at most 0, got 0.5 at token 0",
     changed(HEATED, logprobs=[0.5, -1.0])),
    ("responses must have log-probabilities, got None", changed(HEATED, logprobs=None)),
    ("responses must have ids of a prompt, got None", changed(HEATED, prompt_ids=None)),
    ("responses must have integers as ids of the completion, got 'a' at token 1",
     changed(HEATED, completion_ids=[1, "a"])),
    ("responses must have the log-probability of each of its tokens, got none of 3 at token 1",
     of_output(token_ids=[7, 3])),
    ("responses must have one log-probability for each of 3 tokens, got 2: truncated from token 2",
     changed(of_output(token_ids=[7, 8, 9]), temperature=1)),
    ("responses must have one id for each token, got 3 in output_ids and 8",
     changed(SGLANG, output_ids=[7, 3])),
    ("responses must have 'choices' as the engine returns it", {"choices": [1]}),
    ("responses must have logprobs_mode raw_logprobs or processed_logprobs, got 'raw_logits'",
     changed(PLAIN, logprobs_mode="raw_logits")),
    ("responses must have logprobs_mode raw_logprobs or processed_logprobs, got none beside "
     "temperature 0.7", changed(VLLM, temperature=0.7)),
    ("responses must have logprobs_mode raw_logprobs or processed_logprobs, got none beside top_p",
     changed(CHAT, temperature=1.0, top_p=0.9)),
    *((f"responses must have log-probabilities over the whole vocabulary, got those after {name}",
       changed(HEATED, **{name: 0.37})) for name in PROCESSORS),
    *((f"responses must have log-probabilities over the whole vocabulary, got those after {name}",
       changed(SGLANG, temperature=1.0, **{name: 0.37}))
      for name in PROCESSORS.keys() - TRUNCATIONS.keys()),
    ("responses must have a line", ""),
)  # fmt: skip


def test_line_that_is_not_whole_is_read(read):
    errors = (ValueError, NotImplementedError)
    assert failed_refusals(REFUSED, read, errors) == []


def test_refusal_does_not_name_the_line(read):
    with pytest.raises(ValueError, match=r"in line 1 of r\.jsonl; ") as raised:
        read(changed(HEATED, logprobs=[-0.5]))
    assert is_one_sentence(str(raised.value))
