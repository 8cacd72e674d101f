"""Documents in JSON lines: one object per line, with `text` or with the `messages` of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flexvarlen.packing.chat_messages import for_template, one_chat
from flexvarlen.packing.chat_template import ChatTemplate, require_written

SUFFIXES = (".jsonl", ".json")


def json_documents(text: str, file: Path, tokenizer: Any = None) -> list[str]:
    """Return one document for each line that is not blank.

    An object with `text` gives that text, whatever else it contains. An object with `messages`
    gives the text that the tokenizer's chat template renders from them (and from `tools`, if
    present); without a template, the contents of the messages, joined by newlines.

    Args:
        text: the file's content.
        file: its name, for messages.
        tokenizer: the tokenizer of the model that reads the documents, from `AutoTokenizer`.

    Raises:
        ValueError: a line is not a JSON object or has neither field, or messages are malformed or
            refused by the template.

    >>> chat = '{"messages": [{"role": "user", "content": "Hi"}, {"content": "Hello!"}]}'
    >>> json_documents('{"text": "one"}\\n\\n' + chat, Path("notes.jsonl"))
    ['one', 'Hi\\nHello!']
    """
    return [
        _document(line, found, f"line {number} of {str(file)!r}", tokenizer)
        for number, line, found in json_objects(text)
    ]


def json_objects(text: str) -> Iterator[tuple[int, str, dict[str, Any] | None]]:
    """Number, text and object of each line that is not blank; None where it is no object."""
    # str.splitlines also splits at characters that JSON allows inside a string, U+2028 for one.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                found = None
            yield number, line, found if isinstance(found, dict) else None


def _document(line: str, found: dict[str, Any] | None, where: str, tokenizer: Any) -> str:
    if found is None:
        raise ValueError(
            f"text must be a JSON object on each line of a JSON file, got {_short(line)} "
            f"in {where}; write JSON lines, or rename a file of plain text."
        )
    if isinstance(found.get("text"), str):
        return str(found["text"])
    if "text" not in found and "messages" in found:
        return _chat(found["messages"], found.get("tools"), where, tokenizer)
    raise ValueError(
        f"text must be objects with 'text' (a string) or 'messages' (a list), got {_short(line)} "
        f"in {where}; rename the field that holds the text."
    )


def _chat(messages: object, tools: Any, where: str, tokenizer: Any) -> str:
    if not (isinstance(messages, list) and all(isinstance(one, Mapping) for one in messages)):
        raise ValueError(
            f"text must be objects whose 'messages' are a list of objects, got "
            f"{_short(str(messages))} in {where}; give each a role and content."
        )
    if getattr(tokenizer, "chat_template", None) is None:
        return "\n".join(filter(None, (_content(message, where) for message in messages)))
    try:
        chat = for_template(one_chat(messages))
        text = ChatTemplate(tokenizer, tools).render(chat)
        require_written(chat, text)
        return text
    except ValueError as error:
        raise ValueError(f"text must be chats that can be rendered; in {where} {error}") from error


def _content(message: Mapping[str, Any], where: str) -> str:
    """The content of a message: a text, or the texts among its parts; "" without a text."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    if content is not None and not isinstance(content, str):
        raise ValueError(
            f"text must be messages whose content is a string or a list of parts, got "
            f"{_short(str(content))} in {where}; write a string."
        )
    return content or ""


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
