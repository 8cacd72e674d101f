"""Chats as documents: the tokens of a chat template, with masks of the assistant's answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from flexvarlen.packing.chat_template import NO_ANSWER, Message, answered, renderer, turns_of

_Text = tuple[str, list[range]]
"""A rendered text, and the characters of its answers."""

_MARK = re.compile(r"(\{%[-+]?\s*)(?:end)?generation(\s*[-+]?%\})")
_SEEN = "\0"  # written where a mark stands; no text holds it

_ADD_MARKS = "put {% generation %} and {% endgeneration %} around answers, with their last tokens"


def tokenize_chat(
    messages: Sequence[Message], tokenizer: Any, *, tools: Sequence[Any] | None = None
) -> list[dict[str, list[int]]]:
    """Tokenize a chat by its template; only the assistant's answers are trained on.

    A template with `{% generation %}` marks the answers itself. With any other, whose masks
    transformers leaves all zero, an answer is what the template adds to the prompt of its turn,
    without the white space after it; a message before all others answers nothing, and is not
    trained on. Where the template writes earlier answers in another way (Qwen3's leaves out their
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
    render, template = renderer(messages, tokenizer, tools)
    texts: list[_Text] = []
    if _MARK.search(template):
        texts.append(_marked(messages, render, template))
    else:
        for turn in turns_of(messages):
            text, answer = answered(messages, turn, render, _ADD_MARKS)
            goes_on = texts and text[: answer.start].startswith(texts[-1][0])
            spans = texts.pop()[1] if goes_on else []
            texts.append((text, [*spans, answer]))
    found = [_masked(*text, tokenizer) for text in texts]
    if not any(any(document["assistant_masks"]) for document in found):
        raise ValueError(NO_ANSWER)
    return found


def _marked(messages: Sequence[Message], render: Callable[..., str], template: str) -> _Text:
    """The text of a chat whose template marks the answers.

    The masks of transformers are wrong where an answer begins or ends with a space (they keep
    the rest of the chat, or nothing of it) or ends with a character of several tokens.
    """
    seen = _MARK.sub(rf"\1if true %}}{_SEEN}{{% endif\2", template)  # keeps the white space
    parts = render(messages, chat_template=seen).split(_SEEN)
    ends = list(accumulate(map(len, parts)))
    return "".join(parts), list(map(range, ends[0::2], ends[1::2]))


def _masked(text: str, spans: list[range], tokenizer: Any) -> dict[str, list[int]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    mask = [int(any(x < span.stop and span.start < end for span in spans)) for x, end in offsets]
    return {"input_ids": encoded["input_ids"], "assistant_masks": mask}
