"""What a chat template writes of a chat, and which of it an assistant's answers are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

NO_ANSWER = "messages must hold an answer, of the role 'assistant', got none; leave the chat out."
_REASONING = ("reasoning_content", "reasoning", "thinking")  # a template may read one of these


def renderer(
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


def turns_of(messages: Sequence[Message]) -> list[int]:
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


def answered(
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


def _not_written(name: str, turn: int) -> ValueError:
    return ValueError(
        f"the chat template must write {name}, without which message {turn} would be trained on; "
        "use one that does (names differ), or leave the chat out."
    )


def _writes(text: str, part: str, start: int) -> bool:
    """Whether a text holds a part that ends behind `start`, in other white space perhaps."""
    before, after, own = ("".join(x.split()) for x in (text[:start], text[start:], part))
    return own in before[max(0, len(before) - len(own) + 1) :] + after
