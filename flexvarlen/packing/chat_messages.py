"""The messages of one chat: as templates read them, and which of its answers are trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Train = str | Callable[[Message], bool]
"""Which answers are trained on: "all", "last", or a function of the message."""

_CONTEXT = ("system", "developer", "assistant")  # what these alone say is no question
_ONE_CHAT = "messages must be one chat, mappings with role and content, got {}; call it per chat."


def read_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without None values, and with the arguments of tool calls as mappings.

    Arrow fills absent keys of a struct with None, which templates would write as null. OpenAI's
    interface returns arguments as JSON strings, which templates do not read; inference engines
    parse them too.

    Raises:
        ValueError: not one chat, or arguments that are no JSON object.
    """
    if isinstance(messages, (str, Mapping)):
        raise ValueError(_ONE_CHAT.format(f"a {type(messages).__name__}"))
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(_ONE_CHAT.format(repr(message)[:60]))
    return [_read_calls(without_none(x), i) for i, x in enumerate(messages)]


def without_none(value: Any) -> Any:
    """A copy of nested mappings and lists without the keys whose value is None."""
    if isinstance(value, Mapping):
        return {key: without_none(x) for key, x in value.items() if x is not None}
    if isinstance(value, (list, tuple)):
        return [without_none(x) for x in value]
    return value


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """The functions that a message calls, each with its path in the message."""
    calls = [(f"tool_calls[{i}]", x) for i, x in enumerate(message.get("tool_calls", ()))]
    calls += [("function_call", x) for x in [message.get("function_call")] if x]
    return [
        (f"{path}.function", x["function"]) if "function" in x else (path, x) for path, x in calls
    ]


def _read_calls(message: dict[str, Any], index: int) -> dict[str, Any]:
    for path, function in calls_of(message):
        if not isinstance(function, dict):
            raise ValueError(
                f"{path} of message {index} must be a mapping with name and arguments, got "
                f"{function!r:.60}; correct it, or remove the chat."
            )
        arguments = function.setdefault("arguments", {})
        try:
            read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except json.JSONDecodeError:
            read = None
        if not isinstance(read, dict):
            raise ValueError(
                f"{path}.arguments of message {index} must be a mapping or a JSON object, got "
                f"{arguments!r:.60}; correct it, or remove the chat."
            )
        function["arguments"] = without_none(read)
    return message


def trained_turns(messages: Sequence[Message], train: Train) -> list[int]:
    """The indices of the answers that are trained on.

    An answer is an assistant message behind a message of a user or a tool; a greeting before them
    is context.

    Raises:
        ValueError: there is none, or `train` or a weight is another.
    """
    if not callable(train) and train not in ("all", "last"):
        raise ValueError(f"train must be 'all', 'last' or a function of a message, got {train!r}.")
    roles = [message["role"] for message in messages]
    first = next((i for i, role in enumerate(roles) if role not in _CONTEXT), len(roles))
    turns = [
        i for i in range(first, len(roles)) if roles[i] == "assistant" and _weighs(messages, i)
    ]
    if callable(train):
        turns = [i for i in turns if train(messages[i])]
    if not turns:
        raise ValueError(
            "messages must hold an answer to train on: a message of the role 'assistant' behind "
            "one of a user or a tool, with no weight of 0; remove the chat."
        )
    return turns[-1:] if train == "last" else turns


def _weighs(messages: Sequence[Message], index: int) -> bool:
    weight = messages[index].get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(
            f"the weight of message {index} must be 0, not to train on it, or 1, got {weight!r}."
        )
    return bool(weight)
