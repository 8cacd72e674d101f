"""Conversations as samples: what a policy saw and wrote at each of its turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from flexvarlen.layout.arguments import integers
from flexvarlen.layout.labels import IGNORE_INDEX
from flexvarlen.packing.chat_template import NO_ANSWER, Message, answered, renderer, turns_of

ANSWER_IDS, PROMPT_IDS = "token_ids", "prompt_token_ids"  # as in vLLM's responses
_GIVE_IDS = f"give each answer its {PROMPT_IDS} and {ANSWER_IDS}, or use another template"


def conversation_samples(
    messages: Sequence[Message],
    tokenizer: Any,
    *,
    tools: Sequence[Any] | None = None,
    **template_options: Any,
) -> list[dict[str, list[int]]]:
    """What a policy saw and wrote at each of its turns in a recorded conversation.

    A sample is the prompt of a turn, as the chat template writes it (Qwen3's leaves out the
    reasoning before the last question), and its answer; only the answer has labels. An answer is
    what the template adds to its prompt, without the white space after it. An assistant message at
    index 0 is context, not an answer. `share_prefixes` makes one tree of the samples of all
    conversations of a task. For fine-tuning on packed rows of whole chats there is `tokenize_chat`.

    Assistant messages may hold the tokens of the inference engine, under the names of vLLM's
    responses: `token_ids` of the answer and `prompt_token_ids`. With both, samples are these
    tokens, and nothing is rendered. With `token_ids` alone the template must reproduce them, as
    later prompts repeat them.

    Args:
        messages: mappings with `role`, `content`, and perhaps `reasoning_content`, `tool_calls` and
            these tokens, which all answers must have, or none.
        tokenizer: of transformers.
        tools: what the template may offer to the assistant.
        template_options: other arguments of the template, such as `enable_thinking`, or another
            `chat_template`.

    Returns:
        Samples with `input_ids` and `labels`, one for each answer in order, for `share_prefixes`
        or `TreeCollator`; labels are aligned with the input_ids, and -100 in prompts.

    Raises:
        ValueError: there is no answer or no template, or an answer does not continue its prompt,
            has no end, or has tool calls, reasoning or content that the template does not write, or
            arguments that it writes in quotes; or it does not reproduce an answer's tokens (the
            first difference is named), or some answers have tokens and others have none.

    Example, with the tokens of an engine:

    >>> question = {"role": "user", "content": "2 + 2?"}
    >>> answer = {"role": "assistant", "prompt_token_ids": [5, 6], "token_ids": [7, 8]}
    >>> conversation_samples([question, answer], tokenizer=None)
    [{'input_ids': [5, 6, 7, 8], 'labels': [-100, -100, 7, 8]}]
    """
    turns = turns_of(messages)
    if not turns:
        raise ValueError(NO_ANSWER)
    answers = _ids_of(messages, turns, ANSWER_IDS)
    prompts = _ids_of(messages, turns, PROMPT_IDS)
    if prompts and not answers:
        raise ValueError(f"{PROMPT_IDS} must come with {ANSWER_IDS}; give each answer both.")
    if prompts:
        pairs = list(zip(prompts, answers, strict=True))
    else:
        render, _ = renderer(messages, tokenizer, tools, **template_options)
        pairs = [
            _pair(*answered(messages, turn, render, _GIVE_IDS), turn, given, tokenizer)
            for turn, given in zip_longest(turns, answers)
        ]
    return [
        {"input_ids": [*prompt, *answer], "labels": [*[IGNORE_INDEX] * len(prompt), *answer]}
        for prompt, answer in pairs
    ]


def _ids_of(messages: Sequence[Message], turns: list[int], name: str) -> list[list[int]]:
    """The recorded tokens of each answer; empty if none has any.

    Raises:
        ValueError: some have none, or hold no integers.
    """
    without = [turn for turn in turns if messages[turn].get(name) is None]
    if without and len(without) < len(turns):
        raise ValueError(
            f"all answers must have {name}, or none, got none in message {without[0]}; record them "
            "of each answer."
        )
    if without:
        return []
    advice = "pass the ids that the engine returned"
    return [integers(f"{name} of message {x}", messages[x][name], advice) for x in turns]


def _pair(
    text: str, answer: range, turn: int, given: list[int] | None, tokenizer: Any
) -> tuple[list[int], list[int]]:
    """The tokens of a prompt, tokenized by itself as an engine does, and of its answer.

    Raises:
        ValueError: the answer's tokens are given, and the text has others.
    """

    def tokens(of: str) -> list[int]:
        return list(tokenizer(of, add_special_tokens=False)["input_ids"])

    prompt, written = tokens(text[: answer.start]), tokens(text[: answer.stop])
    if given is None and written[: len(prompt)] == prompt:
        return prompt, written[len(prompt) :]
    if given is None:  # a token that begins in the prompt and ends in the answer
        return prompt, tokens(text[answer.start : answer.stop])
    for position, pair in enumerate(zip_longest([*prompt, *given], written)):
        if pair[0] != pair[1]:
            seen, other = (
                "the end" if x is None else f"{tokenizer.decode([x])!r} ({x})" for x in pair
            )
            raise ValueError(
                f"the chat template must reproduce the {ANSWER_IDS} of message {turn}, got {seen} "
                f"at position {position} of its sample, where it writes {other}; {_GIVE_IDS}."
            )
    return prompt, given
