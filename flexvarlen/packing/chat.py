"""Chats as documents: the tokens of a chat template, with masks of the assistant's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any


def tokenize_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, tools: Sequence[Any] | None = None
) -> list[dict[str, list[int]]]:
    """Tokenize a chat by its template; only the assistant's answers are to be learned.

    A template with `{% generation %}` marks the answers itself. With any other, whose masks
    transformers leaves all zero, an answer is what the template adds to the prompt of its turn,
    without the white space after it. Where it writes earlier answers in another way (Qwen3's
    leaves out their thoughts), each answer ends a document of its own, as it would be generated.

    Args:
        messages: mappings with `role` and `content`.
        tokenizer: a fast tokenizer of transformers.
        tools: what the template may offer to the assistant.

    Returns:
        Documents with `input_ids` and `assistant_masks`, for `PackedDataset` or `PackedCollator`.

    Raises:
        ValueError: there is no template or no answer, or an answer does not begin with the prompt.
    """
    render = partial(tokenizer.apply_chat_template, tools=tools)
    if "endgeneration" in tokenizer.get_chat_template(tools=tools):
        encoded = render(messages, return_dict=True, return_assistant_tokens_mask=True)
        found = [{name: encoded[name] for name in ("input_ids", "assistant_masks")}]
    else:
        render = partial(render, tokenize=False)
        found = [_masked(text, spans, tokenizer) for text, spans in _texts(messages, render)]
    if not any(any(document["assistant_masks"]) for document in found):
        raise ValueError(
            "messages must hold an answer, of the role 'assistant', got none; leave the chat out."
        )
    return found


def _texts(messages: Sequence[Mapping[str, Any]], render: Any) -> list[tuple[str, list[range]]]:
    """Texts that end with an answer, and where in them the answers are."""
    texts: list[tuple[str, list[range]]] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:turn], add_generation_prompt=True)
        text = render(messages[: turn + 1])
        if not text.startswith(prompt):
            raise ValueError(
                f"the chat template must mark answers, as it writes message {turn} otherwise than "
                "its prompt begins; put {% generation %} and {% endgeneration %} around them."
            )
        goes_on = texts and prompt.startswith(texts[-1][0])
        spans = texts.pop()[1] if goes_on else []
        texts.append((text, [*spans, range(len(prompt), len(text.rstrip()))]))
    return texts


def _masked(text: str, spans: list[range], tokenizer: Any) -> dict[str, list[int]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(start in span for span in spans)) for start, _ in encoded["offset_mapping"]]
    return {"input_ids": encoded["input_ids"], "assistant_masks": mask}
