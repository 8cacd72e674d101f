"""What a chat template writes of a chat: the prompt of each turn, and its answer, in full."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flexvarlen.packing.chat_messages import Message, calls_of, without_none

_REASONING = ("reasoning_content", "reasoning", "thinking")  # a template may read one of these


class ChatTemplate:
    """The chat template of a tokenizer, with the tools and the variables that it is given."""

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | str | None, **options: Any) -> None:
        """`tools` may be a JSON string, as data sets hold it; options are those of the template.

        Raises:
            ValueError: the tokenizer has no template.
            TypeError: an option is what tells prompts and answers apart.
        """
        for name in ("add_generation_prompt", "continue_final_message", "tokenize"):
            if name in options:
                raise TypeError(f"{name} is set for each prompt and answer; remove it.")
        tools = without_none(json.loads(tools) if isinstance(tools, str) else tools)
        tokenizer.get_chat_template(options.get("chat_template"), tools)
        self._tokenizer = tokenizer
        self._options = dict(tools=tools, tokenize=False, **options)

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The text of messages; as a prompt, up to where the model begins to write.

        Raises:
            ValueError: the template raises an error, or writes a list as Python does.
        """
        from jinja2 import TemplateError

        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=prompt, **self._options
                )
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(
                f"the chat template cannot write the chat up to message {len(messages) - 1}: "
                f"{error}; correct the chat, or use another template."
            ) from error
        for turn, message in enumerate(messages):
            content = message.get("content")
            if content and isinstance(content, list) and repr(content) in text:
                raise ValueError(
                    f"the content of message {turn} must be a string with this chat template, got "
                    "a list, which it writes as Python does; join its texts."
                )
        return text

    def answer(self, messages: Sequence[Message], turn: int) -> tuple[str, str]:
        """The prompt of a turn, as at generation, and what the message adds to it.

        White space behind the answer is left out: engines stop before it.

        Raises:
            ValueError: the message does not continue its prompt, or lacks a part.
        """
        prompt, text = self.render(messages[:turn], prompt=True), self.render(messages[: turn + 1])
        if not text.startswith(prompt):
            raise ValueError(
                f"the chat template must continue the prompt of message {turn}, and writes "
                "another; pass template variables or another template with which it does."
            )
        answer = text[len(prompt) :].rstrip()
        probe, parts = probed(messages[turn])
        written = self.render([*messages[:turn], probe])
        missing = [name for name, mark in parts if mark not in written]
        missing += [name for name, own in _texts(messages[turn]) if not _holds(prompt, answer, own)]
        if missing:
            raise ValueError(
                f"the chat template must write {missing[0]} of message {turn}, and leaves it out; "
                "use a template that writes it (names differ), or remove the chat."
            )
        return prompt, answer

    def require_end(self, messages: Sequence[Message], turn: int) -> None:
        """Raise ValueError unless the template writes something behind an answer."""
        is_list = isinstance(messages[turn].get("content"), list)  # as templates for images take it
        yes = [{"type": "text", "text": "yes"}] if is_list else "yes"
        reply = {"role": "assistant", "content": yes}
        if self.render([*messages[:turn], reply]).rstrip().endswith("yes"):
            raise ValueError(
                f"the chat template must end message {turn}, or the model learns to answer without "
                "an end; use a template that writes the token that ends an answer."
            )


def _texts(message: Message) -> list[tuple[str, list[str]]]:
    """The texts of a message, each with its name and all that it may be written as."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [("content", [x.get("text") if isinstance(x, dict) else x]) for x in parts]
    texts += [("refusal", [message.get("refusal")])]
    names = [name for name in _REASONING if message.get(name)]
    texts += [(names[0], [message[name] for name in names])] if names else []
    found = [(name, [x for x in own if isinstance(x, str) and x]) for name, own in texts]
    return [(name, own) for name, own in found if own]


def _holds(prompt: str, answer: str, texts: Sequence[str]) -> bool:
    """Whether one of the texts ends in the answer; its beginning the prompt may hold.

    White space does not count: templates trim and indent.
    """
    before, after = ("".join(x.split()) for x in (prompt, answer))
    owns = ["".join(x.split()) for x in texts]
    return any(own in before[max(0, len(before) - len(own) + 1) :] + after for own in owns)


def probed(message: Message) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A message of the same shape whose parts can be found in any text, and the parts' names.

    Each text, function name, key and value is replaced by one that occurs nowhere else; false and
    empty values are kept, as their keys stand for them.
    """
    parts: list[tuple[str, str]] = []

    def mark(name: str, value: Any = "") -> Any:
        if not value or isinstance(value, bool):
            return value
        number = 7_310_000 + len(parts)
        new = number if isinstance(value, (int, float)) else f"Q{number}Q"
        parts.append((name, str(new)))
        return new

    def replace(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {mark(f"{name}.{k}", k): replace(x, f"{name}.{k}") for k, x in value.items()}
        if isinstance(value, list):
            return [replace(x, f"{name}[{i}]") for i, x in enumerate(value)]
        return mark(name, value)

    probe = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        probe["content"] = [
            x | {"text": mark("content", x["text"])} if isinstance(x, dict) and "text" in x else x
            for x in content
        ]
    for name in ("content", "refusal"):
        if isinstance(message.get(name), str):
            probe[name] = mark(name, message[name])
    reasoning = {name: x for name in _REASONING if (x := message.get(name))}
    if reasoning:
        probe |= dict.fromkeys(reasoning, mark(next(iter(reasoning)), "reasoning"))
    probe |= without_none({name: message.get(name) for name in ("tool_calls", "function_call")})
    for path, function in calls_of(probe):
        for name in ("name", "arguments"):
            function[name] = replace(function.get(name, ""), f"{path}.{name}")
    return probe, parts
