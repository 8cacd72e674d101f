"""Render a chat by its template: the prompt of each turn, and its complete answer."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from flexvarlen.packing.chat_messages import (
    REASONING,
    Message,
    calls_of,
    require_documented,
    texts_of,
    without_none,
)

_FIRST_MARKER = 7_310_000  # numbers of seven digits, so that no marker is part of another


class ChatTemplate:
    """The chat template of a tokenizer, with its tools and variables.

    Args:
        tokenizer: a transformers tokenizer or processor.
        tools: for the template; keys whose value is None are removed, except in a JSON string.
        options: other variables of the template, or another `chat_template`.

    Raises:
        ValueError: the tokenizer has no template, or tools are not JSON.
        TypeError: an option is an argument of apply_chat_template itself.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | str | None, **options: Any) -> None:
        if not hasattr(tokenizer, "apply_chat_template"):
            raise ValueError(
                f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}; load "
                "it with AutoTokenizer."
            )
        own = {*inspect.signature(tokenizer.apply_chat_template).parameters} - {"chat_template"}
        if taken := own & options.keys():
            raise TypeError(
                f"{min(taken)} is an argument of apply_chat_template, not of the template."
            )
        try:
            tools = json.loads(tools) if isinstance(tools, str) else without_none(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"tools must be a list or its JSON, got {tools!r:.60}.") from error
        if hasattr(tokenizer, "get_chat_template"):  # a processor raises in `render`
            tokenizer.get_chat_template(options.get("chat_template"), tools)
        self._tokenizer = tokenizer
        self._options = dict(tools=tools, tokenize=False, **options)

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Render messages; as a prompt, up to where the model begins to write.

        Raises:
            ValueError: the template raises an error.
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
                f"{error}; correct the chat or its tools, or use another template."
            ) from error
        return text

    def prompt_and_answer(self, messages: Sequence[Message], turn: int) -> tuple[str, str]:
        """The prompt of a turn, as at generation, and what its message adds to the text.

        White space after the answer is removed: engines stop before it.

        Raises:
            ValueError: the message does not continue its prompt, lacks a part, or is not ended.
        """
        require_documented(messages[turn], turn)
        prompt, text = self.render(messages[:turn], prompt=True), self.render(messages[: turn + 1])
        require_written(messages[:turn], prompt)
        require_written(messages[: turn + 1], text, first=turn)
        if not text.startswith(prompt):
            common = len(commonprefix([prompt, text]))  # noqa: RUF071
            raise ValueError(
                f"the chat template must continue the prompt of message {turn}, which ends with "
                f"{prompt[common:]!r:.40}, got {text[common:]!r:.40} there in the answered chat; "
                "try a template variable such as enable_thinking=False, add the answer's "
                "reasoning, or use another template."
            )
        answer = text[len(prompt) :].rstrip()
        omitted = self._omitted_parts(messages, turn, prompt, answer)
        if omitted:
            raise ValueError(
                f"the chat template must write {omitted[0]} of message {turn}, but omits it; "
                "use a template that writes it (key names differ), or remove the chat."
            )
        is_list = isinstance(messages[turn].get("content"), list)
        yes = [{"type": "text", "text": "yes"}] if is_list else "yes"
        reply = self.render([*messages[:turn], {"role": "assistant", "content": yes}])
        if not answer or reply.rstrip().endswith("yes"):
            raise ValueError(
                f"the chat template must end message {turn}, or the model learns never to stop; "
                "use a template that writes the token that ends an answer."
            )
        return prompt, answer

    def _omitted_parts(
        self, messages: Sequence[Message], turn: int, prompt: str, answer: str
    ) -> list[str]:
        """The names of the parts of an answer that the template does not write.

        Values are replaced by unique markers, so that equal parts can be told apart; the texts
        themselves are also searched for, as a template may cut them depending on their content.
        """
        message = messages[turn]
        marked, markers = _with_markers(message)
        written = self.render([*messages[:turn], marked])
        omitted = [name for name, marker in markers if marker not in written]
        reasoning = next((name for name in REASONING if message.get(name)), REASONING[0])
        texts = [("content", text) for text in texts_of(message)]
        texts += [(name, message.get(name, "")) for name in (reasoning, "refusal")]
        omitted += [name for name, text in texts if not _ends_in(prompt, answer, text)]
        names = [function.get("name", "") for _, function in calls_of(message)]
        omitted += [f"tool call {name}" for name in names if answer.count(name) < names.count(name)]
        return omitted


def require_written(messages: Sequence[Message], text: str, *, first: int = 0) -> None:
    """Raise ValueError if a text omits a user's message, or prints a content list as data.

    Args:
        first: the index of the first message to search for.
    """
    squeezed = _squeezed(text)
    for turn, message in enumerate(messages[first:], first):
        content = message.get("content")
        is_list = bool(content) and isinstance(content, list)
        asks = message["role"] == "user"  # templates drop parts of earlier answers on purpose
        lost = asks and not all(_squeezed(x) in squeezed for x in texts_of(message))
        as_json = json.dumps(content, ensure_ascii=False, default=str) if is_list else ""
        if lost or (is_list and (repr(content) in text or as_json in text)):
            wanted = "a string" if is_list else "a list of parts"
            raise ValueError(
                f"the chat template must write the text of message {turn}; pass its content "
                f"as {wanted}."
            )


def _squeezed(text: str) -> str:
    """The text without white space, as templates trim and indent."""
    return "".join(text.split())


def _ends_in(prompt: str, answer: str, text: str) -> bool:
    """Whether a text ends in the answer; it may begin in the prompt, as `<think>` does."""
    before, after, own = _squeezed(prompt), _squeezed(answer), _squeezed(text)
    return own in before[max(0, len(before) - len(own) + 1) :] + after


def _with_markers(message: Message) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A copy of a message with a marker in place of each value, and the markers' names.

    Keys of arguments are replaced too: they stand for false and empty values, which are kept.
    """
    markers: list[tuple[str, str]] = []

    def mark(name: str, value: Any) -> Any:
        if not value or isinstance(value, bool):
            return value
        number = _FIRST_MARKER + len(markers)
        marker = number if isinstance(value, (int, float)) else f"Q{number}Q"
        markers.append((name, str(marker)))
        return marker

    def mark_all(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {mark(f"{name}.{k}", k): mark_all(x, f"{name}.{k}") for k, x in value.items()}
        if isinstance(value, list):
            return [mark_all(x, f"{name}[{i}]") for i, x in enumerate(value)]
        return mark(name, value)

    marked = copy.deepcopy(dict(message))
    if isinstance(marked.get("content"), list):
        for part in marked["content"]:
            part["text"] = mark("content", part["text"])
    elif "content" in marked:
        marked["content"] = mark("content", marked["content"])
    reasoning = [name for name in REASONING if marked.get(name)]
    if reasoning:  # one text; a template may read any of its names
        marked |= dict.fromkeys(reasoning, mark(reasoning[0], "reasoning"))
    for path, function in calls_of(marked):
        function["arguments"] = mark_all(function["arguments"], f"{path}.arguments")
    return marked, markers
