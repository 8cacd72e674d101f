"""The messages of one chat: which answers are trained on, and how chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Train = str | Callable[[Message], bool]

ANSWER_IDS, PROMPT_IDS = "token_ids", "prompt_token_ids"  # as in vLLM's responses
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read reasoning; most read one of them."""

_NOT_ASKING = ("system", "developer", "assistant")
_ONE_CHAT = "messages must be mappings with role and content, got {}; pass one chat at a time."


def one_chat(messages: Iterable[Message]) -> list[Message]:
    """The messages as a list.

    Raises:
        ValueError: they are not the messages of one chat.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        raise ValueError(_ONE_CHAT.format(f"a {type(messages).__name__}"))
    messages = list(messages)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(_ONE_CHAT.format(repr(message)[:60]))
    return messages


def trained_turns(messages: Sequence[Message], train: Train) -> list[int]:
    """The indices of the answers that are trained on, as `tokenize_chat` describes them.

    Raises:
        ValueError: no answer is trained on, or `train` or a weight is invalid.
    """
    if not callable(train) and train not in ("all", "last"):
        raise ValueError(f"train must be 'all', 'last' or a function of a message, got {train!r}.")
    roles = [message["role"] for message in messages]
    first = next((i for i, role in enumerate(roles) if role not in _NOT_ASKING), 1)
    turns = [
        i for i in range(first, len(roles)) if roles[i] == "assistant" and _weighs(messages, i)
    ]
    if callable(train):
        turns = [i for i in turns if train(messages[i])]
    if not turns:
        raise ValueError(
            "messages must contain an answer to train on: a message with the role 'assistant' that "
            "answers another, and whose weight is not 0; remove the chat."
        )
    return turns[-1:] if train == "last" else turns


def _weighs(messages: Sequence[Message], index: int) -> bool:
    weight = messages[index].get("weight")
    if not (weight is None or (isinstance(weight, (int, float)) and weight in (0, 1))):
        raise ValueError(
            f"the weight of message {index} must be 0 (not trained on) or 1, got {weight!r}."
        )
    return weight != 0


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages in the form that chat templates document.

    Keys whose value is None are removed: Arrow fills structs with them, and templates would write
    null. Arguments of tool calls that are JSON are parsed, as inference engines do.
    """
    own = ("weight", ANSWER_IDS, PROMPT_IDS)
    copies: list[dict[str, Any]] = [
        without_none({key: x for key, x in message.items() if key not in own})
        for message in messages
    ]
    for message in copies:
        for _, function in calls_of(message):
            function["arguments"] = _parsed(function.get("arguments", {}))
    return copies


def without_none(value: Any) -> Any:
    """A copy of nested mappings and lists without the keys whose value is None."""
    if isinstance(value, Mapping):
        return {key: without_none(x) for key, x in value.items() if x is not None}
    if hasattr(value, "tolist"):  # numpy's arrays, as pandas holds lists
        value = value.tolist()
    return [without_none(x) for x in value] if isinstance(value, (list, tuple)) else value


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return arguments


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """The functions that a message calls, each with its path; only mappings are considered."""
    calls = message.get("tool_calls", ())
    named = enumerate(calls if isinstance(calls, list) else ())
    functions = [
        (f"tool_calls[{i}].function", call["function"])
        if isinstance(call, dict) and "function" in call
        else (f"tool_calls[{i}]", call)
        for i, call in named
    ]
    return [(path, function) for path, function in functions if isinstance(function, dict)]


def require_documented(message: Message, turn: int) -> None:
    """Raise ValueError unless all parts of an answer have a form that chat templates document.

    Args:
        message: from `for_template`.
    """
    calls, parts = message.get("tool_calls", []), message.get("content", "")
    reasons = {message[name] for name in REASONING if isinstance(message.get(name), str)}
    why = None
    if "function_call" in message:
        why = "function_call must be given as tool_calls, which chat templates read"
    elif not isinstance(calls, list) or len(calls_of(message)) < len(calls):
        why = f"tool_calls must be a list of mappings with name and arguments, got {calls!r:.60}"
    elif not (isinstance(parts, str) or all(map(_is_text, parts))):
        why = f"content must be a string, or parts of type text, got {parts!r:.60}"
    elif len(reasons - {""}) > 1:
        why = f"reasoning must be one text, got different ones as {', '.join(REASONING)}"
    for path, function in calls_of(message):
        arguments = function["arguments"]
        if not isinstance(arguments, dict):
            why = f"{path}.arguments must be a mapping or its JSON, got {arguments!r:.60}"
    if why is not None:
        raise ValueError(f"{why}, in message {turn}; fix the message, or do not train on it.")


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def texts_of(message: Message) -> list[str]:
    """The texts of a message's content."""
    content = message.get("content", "")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str)]
