"""Chats as documents: the tokens of a chat template, with masks of the assistant's answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import Any

from flexvarlen.layout.arguments import integers
from flexvarlen.layout.labels import IGNORE_INDEX

Message = Mapping[str, Any]

_Text = tuple[str, list[range]]
"""A rendered text, and the characters of its answers."""

_MARK = re.compile(r"(\{%[-+]?\s*)(?:end)?generation(\s*[-+]?%\})")
_SEEN = "\0"  # written where a mark stands; no text holds it

_ADD_MARKS = "put {% generation %} and {% endgeneration %} around answers, with their last tokens"
ANSWER_IDS, PROMPT_IDS = "token_ids", "prompt_token_ids"  # as in vLLM's responses
_REASONING = ("reasoning_content", "reasoning", "thinking")  # a template may read one of these
_GIVE_IDS = f"give each answer its {PROMPT_IDS} and {ANSWER_IDS}, or use another template"


def tokenize_chat(
    messages: Sequence[Message], tokenizer: Any, *, tools: Sequence[Any] | None = None
) -> list[dict[str, list[int]]]:
    """Tokenize a chat by its template; only the assistant's answers are to be learned.

    A template with `{% generation %}` marks the answers itself. With any other, whose masks
    transformers leaves all zero, an answer is what the template adds to the prompt of its turn,
    without the white space after it; a message before all others answers nothing, and is not
    learned. Where the template writes earlier answers in another way (Qwen3's leaves out their
    thoughts), each answer ends a document of its own, as it would be generated.

    Args:
        messages: mappings with `role` and `content`.
        tokenizer: a fast tokenizer of transformers.
        tools: what the template may offer to the assistant.

    Returns:
        Documents with `input_ids` and `assistant_masks`, for `PackedDataset` or `PackedCollator`.

    Raises:
        ValueError: the tokenizer is not fast or has no template, or there is no answer, or one does
            not begin with its prompt, has no end, or has tool calls, reasoning or content that the
            template does not write, or arguments that it writes in quotes.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "tokenizer must be a fast one, which knows where in a text its tokens are, got "
            f"{type(tokenizer).__name__}; load it by AutoTokenizer, or convert it."
        )
    render, template = _renderer(messages, tokenizer, tools)
    texts: list[_Text] = []
    if _MARK.search(template):
        texts.append(_marked(messages, render, template))
    else:
        for turn in _turns(messages):
            text, answer = _answered(messages, turn, render, _ADD_MARKS)
            goes_on = texts and text[: answer.start].startswith(texts[-1][0])
            spans = texts.pop()[1] if goes_on else []
            texts.append((text, [*spans, answer]))
    found = [_masked(*text, tokenizer) for text in texts]
    if not any(any(document["assistant_masks"]) for document in found):
        raise ValueError(_NO_ANSWER)
    return found


def conversation_samples(
    messages: Sequence[Message],
    tokenizer: Any,
    *,
    tools: Sequence[Any] | None = None,
    **template_options: Any,
) -> list[dict[str, list[int]]]:
    """What a policy saw and wrote at each of its turns in a recorded conversation.

    A sample is the prompt of a turn, as the chat template writes it (Qwen3's leaves out the
    reasoning before the last question), and the answer, which alone is learned. An answer is what
    the template adds to its prompt, without the white space after it; a message before all others
    answers nothing. `share_prefixes` makes one tree of the samples of all conversations of a task.
    For fine-tuning on packed rows of whole chats there is `tokenize_chat`.

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
    turns = _turns(messages)
    if not turns:
        raise ValueError(_NO_ANSWER)
    answers = _ids_of(messages, turns, ANSWER_IDS)
    prompts = _ids_of(messages, turns, PROMPT_IDS)
    if prompts and not answers:
        raise ValueError(f"{PROMPT_IDS} must come with {ANSWER_IDS}; give each answer both.")
    if prompts:
        pairs = list(zip(prompts, answers, strict=True))
    else:
        render, _ = _renderer(messages, tokenizer, tools, **template_options)
        pairs = [
            _pair(*_answered(messages, turn, render, _GIVE_IDS), turn, given, tokenizer)
            for turn, given in zip_longest(turns, answers)
        ]
    return [
        {"input_ids": [*prompt, *answer], "labels": [*[IGNORE_INDEX] * len(prompt), *answer]}
        for prompt, answer in pairs
    ]


_NO_ANSWER = "messages must hold an answer, of the role 'assistant', got none; leave the chat out."


def _renderer(
    messages: Sequence[Message], tokenizer: Any, tools: Sequence[Any] | None, **options: Any
) -> tuple[Callable[..., str], str]:
    """What writes messages as a text, and its template.

    Raises:
        ValueError: see `tokenize_chat`.
    """
    template = tokenizer.get_chat_template(options.get("chat_template"), tools)
    calls = [turn for turn, message in enumerate(messages) if message.get("tool_calls")]
    if calls and not re.search(r"\btool_calls\b", template):
        raise _not_written("tool_calls", calls[0])

    def render(messages: Sequence[Message], **more: Any) -> str:
        how = dict(tools=tools, tokenize=False, **options, **more)
        text = str(tokenizer.apply_chat_template(messages, **how))
        for turn, content in enumerate(message.get("content") for message in messages):
            if content and isinstance(content, list) and repr(content) in text:
                raise ValueError(
                    f"the content of message {turn} must be a string with this chat template, got "
                    "a list, which it writes as Python does; join its texts."
                )
        return text

    return render, template


def _not_written(name: str, turn: int) -> ValueError:
    return ValueError(
        f"the chat template must write {name}, without which message {turn} would be learned; use "
        "one that does (names differ), or leave the chat out."
    )


def _marked(messages: Sequence[Message], render: Callable[..., str], template: str) -> _Text:
    """The text of a chat whose template marks the answers.

    The masks of transformers are wrong where an answer begins or ends with a space (the rest of
    the chat is learned, or nothing of it) or ends with a character of several tokens.
    """
    seen = _MARK.sub(rf"\1if true %}}{_SEEN}{{% endif\2", template)  # keeps the white space
    parts = render(messages, chat_template=seen).split(_SEEN)
    ends = list(accumulate(map(len, parts)))
    return "".join(parts), list(map(range, ends[0::2], ends[1::2]))


def _turns(messages: Sequence[Message]) -> list[int]:
    """The indices of answers; a message before all others answers nothing.

    Raises:
        ValueError: not one chat.
    """
    other = next((each for each in messages if not isinstance(each, Mapping)), None)
    if other is not None:
        raise ValueError(
            "messages must be those of one chat, mappings with role and content, got "
            f"{type(other).__name__}; call it for each chat."
        )
    return [i for i, each in enumerate(messages) if i and each["role"] == "assistant"]


def _answered(
    messages: Sequence[Message], turn: int, render: Callable[..., str], advice: str
) -> tuple[str, range]:
    """The text of a chat up to an answer, and where in it the answer is."""
    prompt = render(messages[:turn], add_generation_prompt=True)
    text = render(messages[: turn + 1])
    if not text.startswith(prompt):
        raise ValueError(
            f"the chat template must continue the prompt of message {turn}, and writes another; "
            f"{advice}."
        )
    is_list = isinstance(messages[turn].get("content"), list)  # as templates for images take it
    yes = [{"type": "text", "text": "yes"}] if is_list else "yes"
    if render([*messages[:turn], {"role": "assistant", "content": yes}]).rstrip().endswith("yes"):
        raise ValueError(
            f"the chat template must end message {turn}, or the model learns to answer without an "
            f"end; {advice}."
        )
    _require_whole(messages[turn], turn, text, len(prompt))
    return text, range(len(prompt), len(text.rstrip()))


def _require_whole(message: Message, turn: int, text: str, start: int) -> None:
    """Raise ValueError if an answer, which begins at `start`, lacks a part or has it in quotes."""
    for names in (("content",), _REASONING):
        given = {name: x for name in names if isinstance(x := message.get(name), str) and x}
        if given and not any(_writes(text, part, start) for part in given.values()):
            raise _not_written(next(iter(given)), turn)
    for call in message.get("tool_calls") or ():
        arguments = call.get("function", call).get("arguments")
        if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in text[start:]:
            raise ValueError(
                "the arguments of tool calls must be mappings with this chat template, got a "
                f"string in message {turn}, which it writes in quotes; pass json.loads() of it."
            )


def _writes(text: str, part: str, start: int) -> bool:
    """Whether a text holds a part that ends behind `start`, in other white space perhaps."""
    before, after, own = ("".join(x.split()) for x in (text[:start], text[start:], part))
    return own in before[max(0, len(before) - len(own) + 1) :] + after


def _masked(text: str, spans: list[range], tokenizer: Any) -> dict[str, list[int]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    mask = [int(any(x < span.stop and span.start < end for span in spans)) for x, end in offsets]
    return {"input_ids": encoded["input_ids"], "assistant_masks": mask}


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
