"""Chats as documents: the tokens of a chat template, with masks of the assistant's answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

_Text = tuple[str, list[range]]
"""A rendered text, and the characters of its answers."""

_MARK = re.compile(r"(\{%[-+]?\s*)(?:end)?generation(\s*[-+]?%\})")
_SEEN = "\0"  # written where a mark stands; no text holds it


def tokenize_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, tools: Sequence[Any] | None = None
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
            not begin with its prompt, has no end, or has tool calls that no template writes.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "tokenizer must be a fast one, which knows where in a text its tokens are, got "
            f"{type(tokenizer).__name__}; load it by AutoTokenizer, or convert it."
        )
    render = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
    template = tokenizer.get_chat_template(tools=tools)
    if "tool_calls" not in template and any(each.get("tool_calls") for each in messages):
        raise ValueError(
            "the chat template must write tool_calls, which else are learned as empty answers; use "
            "one that does, or leave the chat out."
        )
    has_marks = _MARK.search(template)
    texts = [_marked(messages, render, template)] if has_marks else _unmarked(messages, render)
    found = [_masked(*text, tokenizer) for text in texts]
    if not any(any(document["assistant_masks"]) for document in found):
        raise ValueError(
            "messages must hold an answer, of the role 'assistant', got none; leave the chat out."
        )
    return found


def _marked(messages: Sequence[Mapping[str, Any]], render: Any, template: str) -> _Text:
    """The text of a chat whose template marks the answers.

    The masks of transformers are wrong where an answer begins or ends with a space (the rest of
    the chat is learned, or nothing of it) or ends with a character of several tokens.
    """
    seen = _MARK.sub(rf"\1if true %}}{_SEEN}{{% endif\2", template)  # keeps the white space
    parts = render(messages, chat_template=seen).split(_SEEN)
    ends = list(accumulate(map(len, parts)))
    return "".join(parts), list(map(range, ends[0::2], ends[1::2]))


def _unmarked(messages: Sequence[Mapping[str, Any]], render: Any) -> list[_Text]:
    """Texts that end with an answer, and where in them the answers are."""
    texts: list[_Text] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or not turn:
            continue
        prompt = render(messages[:turn], add_generation_prompt=True)
        text = render(messages[: turn + 1])
        if not text.startswith(prompt):
            raise ValueError(
                f"the chat template must mark answers, as it writes message {turn} otherwise than "
                "its prompt begins; put {% generation %} and {% endgeneration %} around them."
            )
        answer, content = text[len(prompt) :].rstrip(), message.get("content")
        if isinstance(content, str) and content.strip() and answer.endswith(content.strip()):
            raise ValueError(
                f"the chat template must end message {turn}, or the model learns to answer without "
                "an end; put {% generation %} and {% endgeneration %} around answers, with the "
                "token after them."
            )
        goes_on = texts and prompt.startswith(texts[-1][0])
        spans = texts.pop()[1] if goes_on else []
        texts.append((text, [*spans, range(len(prompt), len(prompt) + len(answer))]))
    return texts


def _masked(text: str, spans: list[range], tokenizer: Any) -> dict[str, list[int]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    mask = [int(any(x < span.stop and span.start < end for span in spans)) for x, end in offsets]
    return {"input_ids": encoded["input_ids"], "assistant_masks": mask}
