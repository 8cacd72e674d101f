"""The images and videos of a chat: their tokens in the text, and their tensors, by a processor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexvarlen.packing.chat_messages import Message
from flexvarlen.packing.images import TOKEN_TYPES

Encode = Callable[[str], list[int]]
Media = tuple[str, Any]
"""The kind, "image" or "video", and what the message holds: a path, URL, or PIL image."""

_KEYS = {"image": ("image", "url", "path", "base64"), "video": ("video", "url", "path")}
"""Where transformers looks for the data of each kind."""

_OFFSETS = "text_replacement_offsets"


def take_media(messages: Sequence[Message]) -> tuple[list[Message], list[list[Media]]]:
    """Copies of the messages whose images and videos have no data, and the data of each message.

    Templates only ask whether a part has data; tools and searches in the text must not copy it.

    Raises:
        ValueError: an image or video has no data, or several.
        NotImplementedError: a part is audio.
    """
    bare, media = [], []
    for turn, message in enumerate(messages):
        parts: Any = message.get("content")
        found: list[Media] = []
        parts = parts.tolist() if hasattr(parts, "tolist") else parts  # pandas holds arrays
        if isinstance(parts, (list, tuple)):
            split = [_take(part, turn) for part in parts]
            message = {**message, "content": [part for part, _ in split]}
            found = [each for _, each in split if each is not None]
        bare.append(message)
        media.append(found)
    return bare, media


def _take(part: Any, turn: int) -> tuple[Any, Media | None]:
    """A part of a message without its data, and the data of an image or video."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":  # OpenAI's form
        kind, url = "image", part.get("image_url")
        part = {"type": kind, "url": url.get("url") if isinstance(url, Mapping) else url}
    if kind in ("audio", "input_audio"):
        raise NotImplementedError(f"message {turn} has audio, which cannot be packed; remove it.")
    if kind not in _KEYS:
        return part, None
    data = [part[key] for key in _KEYS[kind] if part.get(key) is not None]
    if len(data) != 1:
        raise ValueError(
            f"the {kind} of message {turn} must be given under one of {', '.join(_KEYS[kind])}, "
            f"got {len(data)} of them; with images in a column of their own, first call "
            "trl.data_utils.prepare_multimodal_messages(messages, images)."
        )
    # The key stays, as some templates search for it instead of the type.
    return {"type": kind, kind: kind}, (kind, data[0])


class ChatProcessor:
    """Expands the placeholders of a chat's images as a processor does, and returns its tensors.

    The processor runs once on each text that it is asked for, over all images of the text.

    Args:
        tokenizer: a transformers tokenizer or processor.
        media: the images and videos of each message, as `take_media` returns them.

    Raises:
        ValueError: there are images, but no processor.
    """

    def __init__(self, tokenizer: Any, media: Sequence[Sequence[Media]]) -> None:
        is_processor = hasattr(tokenizer, "tokenizer")
        if any(media) and not is_processor:
            raise ValueError(
                f"a chat with images needs the model's processor, got {type(tokenizer).__name__}; "
                "load it with AutoProcessor."
            )
        self._processor, self._media = tokenizer, media
        self.tokenizer = tokenizer.tokenizer if is_processor else tokenizer
        tokens = {kind: getattr(tokenizer, f"{kind}_token", None) for kind in _KEYS}
        self._kinds = {x: kind for kind, x in tokens.items() if x and is_processor}
        self._placeholder = re.compile("|".join(map(re.escape, self._kinds)) or "(?!)")
        self._outputs: dict[str, dict[str, Any]] = {}

    def encoder(
        self, texts: Sequence[tuple[str, str]], turns: Sequence[int], encode: Encode
    ) -> Encode:
        """An encoder of prompts and answers that first expands their placeholders.

        Args:
            texts: the prompt and the answer of each turn, with placeholders.
            turns: the index of each answer's message.
            encode: the tokens of an expanded text.

        Raises:
            ValueError: a text does not have one placeholder for each image.
        """
        for (prompt, answer), turn in zip(texts, turns, strict=True):
            self._require_placeholders(prompt, turn)
            self._require_placeholders(prompt + answer, turn + 1)
        if not any(self._media[: turns[-1]]):
            return encode
        (offsets,) = self._processed("".join(texts[-1]), turns[-1])[_OFFSETS]
        replacements = [each["replacement"] for each in offsets]

        def encode_expanded(text: str) -> list[int]:
            expansions = iter(replacements)  # every text begins as the last one, which has them all
            return encode(self._placeholder.sub(lambda _: next(expansions), text))

        return encode_expanded

    def _require_placeholders(self, text: str, length: int) -> None:
        """Raise ValueError unless a text has a placeholder for each image of the first messages."""
        written = [self._kinds[x] for x in self._placeholder.findall(text)]
        given = [kind for message in self._media[:length] for kind, _ in message]
        if written != given:
            raise ValueError(
                "the chat template must write one placeholder for each image and video up to "
                f"message {length - 1}, which are {given}, got {written}; use the processor's own "
                f"template, and do not write {' or '.join(self._kinds) or 'placeholders'} in texts."
            )

    def columns(self, text: str, turn: int, ids: list[int], encode: Encode) -> dict[str, Any]:
        """All outputs of the processor for a text; none if it has no image or video.

        Args:
            text: the prompt and the answer of a turn.
            turn: the index of the answer's message.
            ids: the tokens of the prompt, and those of the answer.
            encode: from `encoder`.

        Returns:
            Tensors over images, such as `pixel_values`, as the processor returns them; columns of
            tokens, such as `mm_token_type_ids`, as lists of the length of ids.

        Raises:
            ValueError: the processor tokenizes the text in another way.
        """
        if not any(self._media[:turn]):
            return {}
        outputs = dict(self._processed(text, turn))
        written = outputs.pop("input_ids")[0].tolist()
        if written != encode(text):
            raise ValueError(
                f"{type(self._processor).__name__} must return the tokens of its tokenizer for the "
                f"chat up to message {turn}, but they differ; use its default options."
            )
        for name in outputs.keys() & TOKEN_TYPES:
            outputs[name] = _of_tokens(name, outputs[name][0].tolist(), written, ids)
        left_out = ("attention_mask", _OFFSETS)  # a document has no padding
        return {name: value for name, value in outputs.items() if name not in left_out}

    def _processed(self, text: str, turn: int) -> dict[str, Any]:
        """The processor's outputs for the prompt and the answer of a turn."""
        if text not in self._outputs:
            media = [each for message in self._media[:turn] for each in message]
            data = {kind: [x for own, x in media if own == kind] for kind in _KEYS}
            outputs = self._processor(
                text=[text],
                **{f"{kind}s": [found] for kind, found in data.items() if found},
                add_special_tokens=False,  # the template writes them
                return_tensors="pt",
                return_text_replacement_offsets=True,
            )
            if _OFFSETS not in outputs:
                raise NotImplementedError(
                    f"{type(self._processor).__name__} does not tell where it expands images; "
                    "tokenize these chats yourself."
                )
            self._outputs[text] = dict(outputs)
        return self._outputs[text]


def _of_tokens(name: str, values: list[int], written: list[int], ids: list[int]) -> list[int]:
    """A column of a text's tokens, for the tokens of its prompt and its answer.

    They are the text's tokens, except where one of these begins in the prompt and ends in the
    answer. There values are 0, as for all text, provided that each depends on its token alone.

    Raises:
        ValueError: they do not.
    """
    if ids == written:
        return values
    value_of = dict(zip(written, values, strict=True))
    found = [value_of.get(token, 0) for token in ids]
    is_same = [value_of[token] for token in written] == values
    if not is_same or list(filter(None, found)) != list(filter(None, values)):
        raise ValueError(
            f"{name} must depend on the token alone, as a chat's prompt and answer are tokenized "
            "separately; use a chat template whose prompt ends with a whole token."
        )
    return found
