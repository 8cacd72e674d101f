"""Chats as documents or samples: each answer follows the tokens that it is generated from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from flexvarlen.layout.arguments import integers
from flexvarlen.layout.labels import IGNORE_INDEX
from flexvarlen.packing.chat_images import ChatProcessor, Encode, take_media
from flexvarlen.packing.chat_messages import (
    ANSWER_IDS,
    PROMPT_IDS,
    Message,
    Train,
    for_template,
    one_chat,
    trained_turns,
)
from flexvarlen.packing.chat_template import ChatTemplate


class _Sample(NamedTuple):
    """The tokens of a prompt and of its answer, and the processor's columns for both."""

    prompt: list[int]
    answer: list[int]
    columns: Callable[[], dict[str, Any]] = dict


def tokenize_chat(
    messages: Sequence[Message],
    tokenizer: Any,
    *,
    train: Train = "all",
    tools: Sequence[Any] | str | None = None,
    **template_options: Any,
) -> list[dict[str, Any]]:
    """Tokenize a chat by its template; only the assistant's answers are trained on.

    An answer follows the tokens of its prompt, as the template renders the prompt for generation;
    the answer is what the rendered conversation adds, without trailing white space. A turn whose
    prompt continues the previous turn extends that document. Where the template rewrites earlier
    answers (Qwen3's drops their reasoning, Phi-3's the token after the last), the turn becomes a
    separate document. `{% generation %}` in a template has no effect.

    Chats with images or videos need the model's processor. It runs once for each document, and its
    tensors become columns of the document; the tokens are those of the processor. An answer that is
    trained on has only text.

    Args:
        messages: mappings with `role`, `content`, and optionally `reasoning_content` and
            `tool_calls`, whose arguments are mappings or JSON strings. Keys whose value is None are
            removed, as Arrow adds them; null in a JSON string is kept. Answers may hold recorded
            tokens, as in `conversation_samples`. A list of parts as content may have images:
            `{"type": "image", "image": image}`, a PIL image, path or URL; and videos, likewise.
        tokenizer: a transformers tokenizer or processor with a chat template. No special tokens
            are added to those that the template writes.
        train: "all" answers, the "last", or a function that is true for the messages to train on.
            Answers with a `weight` of 0 are context, as are assistant messages before the first
            user message; without a user message, the assistant message at index 0.
        tools: the tools that the template may offer to the assistant, as a list or its JSON. Keys
            whose value is None are removed from a list.
        template_options: variables of the template, such as `enable_thinking=False`, or another
            `chat_template`.

    Returns:
        Documents with `input_ids` and `assistant_masks`, lists of integers of the document's
        length, for `PackedDataset` or `PackedCollator`. Those with images also have the other
        outputs of the processor: lists of that length (`mm_token_type_ids`, `token_type_ids`), and
        tensors as it returns them (`pixel_values`, `image_grid_thw`, `image_sizes` and similar).

    Raises:
        ValueError: `messages`, `train` or a weight is malformed, or no answer is trained on; or the
            template raises an error, does not continue the prompt of an answer, does not end the
            answer, or omits content, reasoning, a tool call or an argument; or the tokenizer cannot
            split a prompt from its answer; or a chat has images and `tokenizer` is no processor, or
            an image has no data, or no placeholder in the text, or the processor returns other
            tokens than its tokenizer.
        NotImplementedError: a message has audio, or a chat with images has `prompt_token_ids`.
    """
    documents: list[tuple[dict[str, Any], _Sample]] = []
    ids: list[int] = []
    masks: list[int] = []
    for sample in _samples(messages, tokenizer, train, tools, template_options):
        prompt, answer, _ = sample
        if ids and prompt[: len(ids)] == ids:
            documents.pop()
        else:
            ids, masks = [], []
        masks = [*masks, *[0] * (len(prompt) - len(ids)), *[1] * len(answer)]
        ids = [*prompt, *answer]
        documents.append(({"input_ids": ids, "assistant_masks": masks}, sample))
    return [document | sample.columns() for document, sample in documents]


def conversation_samples(
    messages: Sequence[Message],
    tokenizer: Any,
    *,
    train: Train = "all",
    tools: Sequence[Any] | str | None = None,
    **template_options: Any,
) -> list[dict[str, Any]]:
    """Turn a recorded conversation into samples: what a policy saw and wrote at each turn.

    A sample is the prompt of a turn and its answer, as in `tokenize_chat`; only the answer has
    labels. `share_prefixes` makes one tree of the samples of all conversations of a task. For
    fine-tuning on packed rows of whole chats there is `tokenize_chat`.

    Assistant messages may contain the tokens of the inference engine, under the names of vLLM's
    responses: `token_ids` for the answer, `prompt_token_ids` for its prompt. With both, samples are
    these tokens, and nothing is rendered. With `token_ids` alone the template must reproduce them,
    as later prompts repeat them. Either all answers that are trained on have recorded tokens, or
    none.

    Args:
        messages, tokenizer, train, tools, template_options: as in `tokenize_chat`.

    Returns:
        Samples with `input_ids` and `labels`, one for each answer in order, for `share_prefixes`
        or `TreeCollator`; labels are aligned with input_ids, and are -100 in prompts. Samples with
        images also have the processor's outputs, as in `tokenize_chat`.

    Raises:
        ValueError: as in `tokenize_chat`; or the template does not reproduce an answer's tokens
            (the message names the first difference), or only some answers have recorded tokens.
        NotImplementedError: as in `tokenize_chat`.

    Example, with the tokens of an engine:

    >>> question = {"role": "user", "content": "2 + 2?"}
    >>> answer = {"role": "assistant", "prompt_token_ids": [5, 6], "token_ids": [7, 8]}
    >>> conversation_samples([question, answer], tokenizer=None)
    [{'input_ids': [5, 6, 7, 8], 'labels': [-100, -100, 7, 8]}]
    """
    return [
        {
            "input_ids": [*prompt, *answer],
            "labels": [*[IGNORE_INDEX] * len(prompt), *answer],
            **columns(),
        }
        for prompt, answer, columns in _samples(messages, tokenizer, train, tools, template_options)
    ]


def _samples(
    messages: Iterable[Message],
    tokenizer: Any,
    train: Train,
    tools: Sequence[Any] | str | None,
    options: dict[str, Any],
) -> list[_Sample]:
    """A sample for each answer that is trained on."""
    messages = one_chat(messages)
    turns = trained_turns(messages, train)
    answers, prompts = (_recorded_ids(messages, turns, name) for name in (ANSWER_IDS, PROMPT_IDS))
    if prompts and not answers:
        raise ValueError(f"{PROMPT_IDS} must come with {ANSWER_IDS}; pass both for each answer.")
    messages, media = take_media(messages)
    if prompts and any(media):
        raise NotImplementedError(f"a chat with images cannot have {PROMPT_IDS}; remove them.")
    if prompts:
        return [_Sample(*tokens) for tokens in zip(prompts, answers, strict=True)]
    processor = ChatProcessor(tokenizer, media)
    template, messages = ChatTemplate(tokenizer, tools, **options), for_template(messages)
    texts = [template.prompt_and_answer(messages, turn) for turn in turns]
    encode = processor.encoder(texts, turns, _encoder(processor.tokenizer))
    samples = []
    for (prompt, answer), turn, given in zip_longest(texts, turns, answers):
        ids = _tokens(prompt, answer, turn, given, processor.tokenizer, encode)
        columns = partial(processor.columns, prompt + answer, turn, [*ids[0], *ids[1]], encode)
        samples.append(_Sample(*ids, columns))
    return samples


def _recorded_ids(messages: Sequence[Message], turns: list[int], name: str) -> list[list[int]]:
    """The recorded tokens of each answer; empty if none has any.

    Raises:
        ValueError: only some answers have recorded tokens, or they are not integers.
    """
    without = [turn for turn in turns if messages[turn].get(name) is None]
    if without and len(without) < len(turns):
        raise ValueError(
            f"all answers that are trained on must have {name}, or none, got message {without[0]} "
            f"without {name}; record them, or exclude the message with train=."
        )
    if without:
        return []
    advice = "pass the ids that the engine returned"
    return [integers(f"{name} of message {x}", messages[x][name], advice) for x in turns]


def _encoder(tokenizer: Any) -> Encode:
    """An encoder that tokenizes each text between two special tokens only once.

    A fast tokenizer first splits a text at its special tokens, so each such piece has the same
    tokens in every later prompt that repeats it.
    """

    @cache
    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    if not getattr(tokenizer, "is_fast", False) or tokenizer.split_special_tokens:
        return tokens
    added = [x for x in tokenizer.added_tokens_decoder.values() if not x.normalized]
    plain = {x.content for x in added if not (x.lstrip or x.single_word)}
    longest_first = sorted((re.escape(x.content) for x in added), key=len, reverse=True)
    special = re.compile("|".join(longest_first) or "(?!)")

    def encode(text: str) -> list[int]:
        starts = [x.start() for x in special.finditer(text) if x[0] in plain and x.start()]
        cuts = pairwise([0, *starts, len(text)])
        return [token for start, stop in cuts for token in tokens(text[start:stop])]

    return encode


def _tokens(
    prompt: str,
    answer: str,
    turn: int,
    given: list[int] | None,
    tokenizer: Any,
    encode: Encode,
) -> tuple[list[int], list[int]]:
    """The tokens of a prompt, tokenized separately as an engine does, and of its answer.

    Raises:
        ValueError: the text has other tokens than those recorded; or the answer's tokens do not
            continue the prompt's.
    """

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    prompt_ids, written = encode(prompt), encode(prompt + answer)
    if given is not None:
        _require_reproduced([*prompt_ids, *given], written, turn, decode)
        return prompt_ids, given
    if written[: len(prompt_ids)] == prompt_ids:
        return prompt_ids, written[len(prompt_ids) :]
    # One token of the text begins in the prompt and ends in the answer. The answer is tokenized
    # after a line break, as some tokenizers put a space at the start of a text.
    line, answer_ids = encode("\n"), encode("\n" + answer)
    answer_ids = answer_ids[len(line) :] if answer_ids[: len(line)] == line else encode(answer)
    if decode([*prompt_ids, *answer_ids]) != decode(written):
        raise ValueError(
            f"the tokenizer must split message {turn} from its prompt, which ends with "
            f"{prompt[-12:]!r}; use a chat template whose prompt ends with a whole token."
        )
    return prompt_ids, answer_ids


def _require_reproduced(
    sample: list[int], written: list[int], turn: int, decode: Callable[[list[int]], str]
) -> None:
    """Raise ValueError where recorded tokens and the template's differ."""
    for position, pair in enumerate(zip_longest(sample, written)):
        if pair[0] != pair[1]:
            seen, other = ("the end" if x is None else f"{decode([x])!r} ({x})" for x in pair)
            raise ValueError(
                f"the chat template does not reproduce the {ANSWER_IDS} of message {turn}: at "
                f"position {position} of the sample {seen} was recorded, and the template writes "
                f"{other}; give each answer its {PROMPT_IDS} too, or use another template."
            )
