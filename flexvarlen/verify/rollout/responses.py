"""`Response`: a prompt, its completion and the engine's log-probabilities, from JSON lines.

A line is a response as an engine returns it, in one of the shapes of `READERS`; it may hold several
completions of one prompt. Beside it, or in an object `sampling_params`, stands how the engine
sampled, where the command does not say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flexvarlen.verify.corpus import read_text
from flexvarlen.verify.json_lines import json_objects

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
MODES = (RAW, PROCESSED)
"""vLLM's names of log-probabilities: of the model's logits; after temperature and processors."""

TRUNCATIONS: dict[str, tuple[Any, ...]] = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,)}
"""Processors that keep some tokens alone, as `PROCESSORS`."""
PROCESSORS: dict[str, tuple[Any, ...]] = TRUNCATIONS | {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "structured_outputs": (),
    "json_schema": (),
    "regex": (),
}
"""Processors of logits, with the values that leave logits as they are; null always does."""

LARGEST_LOGPROB = 1e-3  # fp32 log_softmax of a certain token may round to slightly above 0


@dataclass(frozen=True)
class Response:
    """One completion.

    Attributes:
        line: of the file, from 1.
        prompt, completion: token ids, at least one each.
        logprobs: the engine's, one for each token of the completion.
        temperature: by which the engine divided the logits that the log-probabilities are of.
    """

    line: int
    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    temperature: float


def location(responses: Sequence[Response], token: int) -> str:
    """Where a token of all completions is, in words."""
    for each in responses:
        if token < len(each.completion):
            return f"token {token} of line {each.line}"
        token -= len(each.completion)
    raise IndexError(token)


Values = Mapping[str, Any]
Unchecked = tuple[Any, Any, Any]
"""Prompt, completion and log-probabilities of one completion, as they stand in a line."""


def _plain(line: Values) -> Iterator[Unchecked]:
    yield line.get("prompt_ids"), line["completion_ids"], line.get("logprobs")


def _vllm(line: Values) -> Iterator[Unchecked]:
    for each in line["outputs"]:
        ids, found = each.get("token_ids"), each.get("logprobs")
        if isinstance(found, list) and isinstance(ids, list):
            pairs = zip(ids, found, strict=False)
            chosen = [x.get(str(i)) if isinstance(x, Mapping) else x for i, x in pairs]
            if None in chosen:
                at = chosen.index(None)
                raise ValueError(
                    f"the log-probability of each of its tokens, got none of {ids[at]} at token "
                    f"{at} (re-tokenized?); keep the ids that the engine sampled"
                )
            found = [x["logprob"] if isinstance(x, Mapping) else x for x in chosen]
            found += [math.nan] * (len(each["logprobs"]) - len(found))
        yield line.get("prompt_token_ids"), ids, found


def _openai(line: Values) -> Iterator[Unchecked]:
    for each in line["choices"]:
        prompt = each.get("prompt_token_ids") or line.get("prompt_token_ids")
        found: Any = each.get("logprobs") or {}
        content = found.get("content")
        by_token = found.get("token_logprobs")
        if content is not None:
            by_token = [token.get("logprob") for token in content]
        yield prompt, each.get("token_ids"), by_token


def _sglang(line: Values) -> Iterator[Unchecked]:
    about = line["meta_info"]
    triples: Any = about.get("output_token_logprobs") or []
    named = [triple[1] for triple in triples]
    ids = line.get("output_ids", named)
    for at, (token, other) in enumerate(zip(ids, named, strict=False)):
        if token != other:
            raise ValueError(
                f"one id for each token, got {token} in output_ids and {other} in "
                f"output_token_logprobs at token {at} (re-tokenized?); keep the sampled ids"
            )
    prompt = line.get("input_ids") or line.get("prompt_ids")
    prompt = prompt or [triple[1] for triple in about.get("input_token_logprobs") or []]
    yield prompt, ids, [triple[0] for triple in triples] or None


class Reader(NamedTuple):
    """One shape of a line.

    Attributes:
        key: the key that only this shape has.
        read: its completions.
        mode: what its log-probabilities are by default; None: the engine has a setting for it.
        ask: how to ask the engine for ids and log-probabilities.
        truncated: whether top_k, top_p and min_p change its log-probabilities.
    """

    key: str
    read: Callable[[Values], Iterator[Unchecked]]
    mode: str | None
    ask: str
    truncated: bool = True


READERS = (
    Reader("outputs", _vllm, None, "SamplingParams(logprobs=0) of vLLM"),
    Reader("choices", _openai, None, "logprobs and return_token_ids of vLLM's server"),
    Reader(
        "meta_info",
        _sglang,
        PROCESSED,
        "return_logprob=True and logprob_start_len=0 of SGLang",
        truncated=False,  # since SGLang 0.4.7; read in srt/layers/sampler.py of 0.5.23
    ),
    Reader("completion_ids", _plain, PROCESSED, "prompt_ids, completion_ids and logprobs"),
)


def temperature_of(line: Values, reader: Reader, temperature: Any, mode: str | None) -> float:
    """The temperature that the line's log-probabilities are at.

    Args:
        temperature, mode: as in `read_responses`.

    Raises:
        ValueError: they are at none, or it is unknown.
        NotImplementedError: a processor changed them.
    """
    said = {**line.get("sampling_params", {}), **line}
    temperature = said.get("temperature", temperature)
    mode = said.get("logprobs_mode", mode or reader.mode)
    if mode not in (None, *MODES):
        raise ValueError(f"logprobs_mode {' or '.join(MODES)}, got {mode!r}; name one")
    if mode == RAW:
        return 1.0
    changes = {
        name: said[name]
        for name, neutral in PROCESSORS.items()
        if said.get(name) is not None and said[name] not in neutral
        if reader.truncated or name not in TRUNCATIONS
    }
    if mode is None and (changes or temperature not in (1, None)):
        raise ValueError(
            f"logprobs_mode {' or '.join(MODES)}, got none beside "
            f"{', '.join(changes) or f'temperature {temperature}'}; say how vLLM ran, by "
            f"default {RAW}"
        )
    if changes:
        names = ", ".join(f"{name} {value}" for name, value in changes.items())
        raise NotImplementedError(
            f"log-probabilities over the whole vocabulary, got those after {names}; sample "
            f"without, or take {RAW} of vLLM"
        )
    if type(temperature) not in (int, float) or not 0 < temperature < math.inf:
        raise ValueError(
            f"a temperature above 0, got {temperature}; write it into the lines or pass "
            f"--temperature, and of greedy decoding take {RAW}"
        )
    return float(temperature)


def read_responses(
    file: Path, temperature: float | None = None, mode: str | None = None
) -> list[Response]:
    """The responses of a file of JSON lines.

    Args:
        temperature: of the sampling, for lines that do not say so.
        mode: of `MODES`, for lines that do not say so; None: that of the line's shape.

    Raises:
        ValueError: a line is no response, or has other than one log-probability for each token.
        NotImplementedError: log-probabilities that a processor of logits changed.
    """
    found = []
    for number, text, parsed in json_objects(read_text(file, "responses")):
        where = f" in line {number} of {file.name}"
        try:
            line, reader = _with_reader(parsed, text)
            given = list(reader.read(line))
            at = temperature_of(line, reader, temperature, mode)
            found += [_checked(number, each, reader, at) for each in given]
        except (ValueError, NotImplementedError) as error:
            what, _, todo = str(error).partition("; ")
            raise type(error)(f"responses must have {what}{where}; {todo}.") from error
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"responses must have {reader.key!r} as the engine returns it, got "
                f"{type(error).__name__}: {error}{where}; ask for {reader.ask}."
            ) from error
    if not found:
        raise ValueError(f"responses must have a line, got none in {file.name}; check the file.")
    return found


def _with_reader(line: Values | None, text: str) -> tuple[Values, Reader]:
    if line is None:
        raise ValueError(f"a JSON object on each line, got {text.strip()[:60]!r}; write JSON lines")
    for reader in READERS:
        if reader.key in line:
            return line, reader
    keys = ", ".join(f"{reader.key!r}" for reader in READERS)
    raise ValueError(
        f"one of the keys {keys} (vLLM's RequestOutput, its server, SGLang, plain), got "
        f"{', '.join(map(repr, line)) or 'none'}; write the engine's response as it is"
    )


def _checked(line: int, given: Unchecked, reader: Reader, temperature: float) -> Response:
    prompt, completion, logprobs = given
    for name, ids in (("prompt", prompt), ("completion", completion)):
        if not isinstance(ids, list) or not ids:
            raise ValueError(f"ids of a {name}, got {ids!r:.60}; ask for {reader.ask}")
        wrong = [at for at, x in enumerate(ids) if type(x) is not int or x < 0]
        if wrong:
            raise ValueError(
                f"integers as ids of the {name}, got {ids[wrong[0]]!r} at token {wrong[0]}; keep "
                "the engine's"
            )
    _require_logprobs(completion, logprobs, reader)
    return Response(line, prompt, completion, logprobs, temperature)


def _require_logprobs(ids: Sequence[int], logprobs: Any, reader: Reader) -> None:
    if not isinstance(logprobs, list):
        raise ValueError(f"log-probabilities, got {logprobs!r:.60}; ask for {reader.ask}")
    if len(logprobs) != len(ids):
        at = min(len(ids), len(logprobs))
        rest = "truncated" if len(logprobs) < len(ids) else "longer than the completion"
        raise ValueError(
            f"one log-probability for each of {len(ids)} tokens, got {len(logprobs)}: {rest} from "
            f"token {at} on; ask for all of them"
        )
    for at, value in enumerate(logprobs):
        known = type(value) in (int, float) and math.isfinite(value)
        if not known or value > LARGEST_LOGPROB:
            raise ValueError(
                f"finite log-probabilities of at most 0, got {value} at token {at}; ask for "
                f"{reader.ask}"
            )
