"""Random chats, and what an independent reading of a template says that they train.

The oracle renders with the template and tokenizes the prompt alone; it knows the chat without what
Arrow and OpenAI's interface make of it, and which of its answers are to be trained.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from flexvarlen.packing import conversation_samples, tokenize_chat

WORDS = (
    "yes",
    "no",
    "the answer",
    "why?",
    "Größe",
    "日本語",
    "🙂",
    "a\0b",
    "<b>",
    "'quoted'",
    "1, 2",
    "{x}",
)
ENDS = ("", "", "", " ", "\n", "\n\n", "\t")


@dataclass
class Chat:
    """A chat, its spelling in a data set, and which answers are trained."""

    messages: list[dict[str, Any]]
    given: list[dict[str, Any]]
    turns: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    train: Any = "all"


def text(rng: random.Random) -> str:
    """Words that no other text holds, with white space at either end."""
    words = [*rng.choices(WORDS, k=rng.randint(0, 3)), f"x{rng.randrange(10**9):09}"]
    rng.shuffle(words)
    return rng.choice(ENDS) + rng.choice((" ", "\n", "  ")).join(words) + rng.choice(ENDS)


def value(rng: random.Random, deep: int = 2) -> Any:
    """An argument: long enough to be found, or false, or one that holds others."""
    kinds = ["text", "text", "int", "float", "bool", "zero", "empty"] + ["list", "dict"] * (
        deep > 0
    )
    match rng.choice(kinds):
        case "text":
            return text(rng)
        case "int":
            return rng.randrange(10**8, 10**9)
        case "float":
            return rng.randrange(10**8, 10**9) + 0.5
        case "bool":
            return rng.random() < 0.5
        case "zero":
            return 0
        case "empty":
            return ""
        case "list":
            return [value(rng, deep - 1) for _ in range(rng.randint(1, 2))]
        case _:
            return {f"k{rng.randrange(10**8)}": value(rng, deep - 1) for _ in range(2)}


def answer(rng: random.Random, calls: int, reasons: str | None) -> dict[str, Any]:
    """A message of the assistant."""
    content: Any = "" if calls and rng.random() < 0.7 else text(rng)
    if content and rng.random() < 0.1:
        content = [{"type": "text", "text": content}]
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if reasons and rng.random() < 0.6:
        found[reasons] = text(rng)
    if calls:
        own = [
            {
                "name": f"f{rng.randrange(10**8)}",
                "arguments": {
                    f"a{rng.randrange(10**8)}": value(rng) for _ in range(rng.randint(0, 3))
                },
            }
            for _ in range(calls)
        ]
        found["tool_calls"] = [{"type": "function", "id": "123456789", "function": x} for x in own]
    return found


def random_chat(seed: int) -> Chat:
    """One chat; the same seed gives the same chat."""
    rng = random.Random(seed)
    reasons = rng.choice((None, None, "reasoning_content", "reasoning_content", "thinking"))
    agent = rng.random() < 0.4
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": text(rng)})
    if rng.random() < 0.15:
        messages.append({"role": "assistant", "content": text(rng)})
    first = len(messages)
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": text(rng)})
        while agent and rng.random() < 0.5:
            calls = rng.randint(1, 2)
            messages.append(answer(rng, calls, reasons))
            names = [x["function"]["name"] for x in messages[-1]["tool_calls"]]
            messages += [
                {"role": "tool", "name": x, "tool_call_id": "123456789", "content": text(rng)}
                for x in names
            ]
        messages.append(answer(rng, 0, reasons))
    if rng.random() < 0.1:
        messages.append({"role": "user", "content": text(rng)})
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    weights = {i: rng.choice((0, 1, 1, 1)) for i in turns} if rng.random() < 0.2 else {}
    turns = [i for i in turns if weights.get(i, 1)] or turns
    weights = weights if all(weights.get(i, 1) for i in turns) else {}
    train: Any = rng.choice(("all", "all", "all", "last", "content"))
    if train == "last":
        turns = turns[-1:]
    if train == "content":
        kept = [i for i in turns if messages[i]["content"]]
        train, turns = (lambda message: bool(message["content"]), kept) if kept else ("all", turns)
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["enable_thinking"] = rng.random() < 0.5
    if agent and rng.random() < 0.5:
        parameters = {
            "type": "object",
            "properties": {"a0": {"type": "string", "description": "x"}},
        }
        options["tools"] = [
            {
                "type": "function",
                "function": {"name": "f", "description": "look", "parameters": parameters},
            }
        ]
    given = [
        _spelled(rng, x) | ({"weight": weights[i]} if i in weights else {})
        for i, x in enumerate(messages)
    ]
    return Chat(messages, given, turns, options, train)


def _spelled(rng: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    """The message as Arrow returns it, with None for absent keys, or with JSON strings."""
    found = json.loads(json.dumps(message))
    if rng.random() < 0.3:
        found |= {"refusal": None} | ({} if "tool_calls" in found else {"tool_calls": None})
    quote, fill = rng.random() < 0.3, rng.random() < 0.3
    for call in found.get("tool_calls") or ():
        own = call["function"]
        own["arguments"] |= {"zone": None} if fill and not quote else {}
        own["arguments"] = json.dumps(own["arguments"]) if quote else own["arguments"]
    return found


# ---- what a template writes of it ----


def _squeezed(x: str) -> str:
    """Without white space and what escapes it or quotes."""
    return re.sub(r"\\[ntr]|\\|\s", "", x)


def _leaves(of: Any, name: str = "") -> list[tuple[str, Any]]:
    """Values with the keys that lead to them."""
    if isinstance(of, dict):
        return [x for key, own in of.items() for x in [*_leaves(own, key)]]
    if isinstance(of, list):
        return [x for own in of for x in _leaves(own, name)]
    return [(name, of)]


def _written(leaf: tuple[str, Any], where: str) -> bool:
    key, own = leaf
    if not own or own is True:
        return key in where
    if isinstance(own, str):
        quoted = [json.dumps(own), json.dumps(own, ensure_ascii=False), repr(own)]
        forms = [own, *(x[1:-1] for x in quoted)]
        return any(_squeezed(form) in where for form in forms)
    return str(own) in where


def expected(chat: Chat, tokenizer: Any, template: str) -> list[tuple[list[int], str]] | str:
    """Of each turn the tokens of its prompt and the text of both; or why it must be refused."""
    render = partial(
        tokenizer.apply_chat_template, chat_template=template, tokenize=False, **chat.options
    )
    found = []
    for turn in chat.turns:
        message, seen = chat.messages[turn], chat.messages[: turn + 1]
        try:
            prompt = render(chat.messages[:turn], add_generation_prompt=True)
            whole = render(chat.messages[: turn + 1])
            short = render([*chat.messages[:turn], {"role": "assistant", "content": "yes"}])
        except Exception as error:
            return f"error: {error}"
        if not whole.startswith(prompt):
            return "another prompt"
        if short.rstrip().endswith("yes"):
            return "no end"
        own = _squeezed(whole[len(prompt) :])
        content = message["content"]
        texts = [content] if isinstance(content, str) else [x["text"] for x in content]
        lists = [x["content"] for x in seen if isinstance(x["content"], list)]
        if any(
            data in whole for x in lists for data in (repr(x), json.dumps(x, ensure_ascii=False))
        ):
            return "a list as Python or JSON writes it"
        asked = [x["content"] for x in seen if x["role"] == "user"]
        if any("".join(x.split()) not in "".join(whole.split()) for x in asked):
            return "a question is not written"
        texts += [message.get("reasoning_content") or "", message.get("thinking") or ""]
        if any(_squeezed(x) not in own for x in texts):
            return "a text is not written"
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in own:
                return "a call is not written"
            if not all(_written(x, own) for x in _leaves(call["function"]["arguments"])):
                return "an argument is not written"
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        found.append((ids, whole.rstrip()))
    return found


def assert_as_expected(chat: Chat, tokenizer: Any, template: str) -> bool:
    """Hold samples and documents of a chat against the oracle; whether they are accepted."""
    options = {"train": chat.train, "chat_template": template} | chat.options
    turns = expected(chat, tokenizer, template)
    if isinstance(turns, str):
        with pytest.raises(ValueError, match=r"must|cannot write the chat"):
            conversation_samples(chat.given, tokenizer, **options)
        with pytest.raises(ValueError, match=r"must|cannot write the chat"):
            tokenize_chat(chat.given, tokenizer, **options)
        return False
    samples = conversation_samples(chat.given, tokenizer, **options)
    for (prompt, text), sample in zip(turns, samples, strict=True):
        ids, n = sample["input_ids"], len(prompt)
        assert ids[:n] == prompt
        assert sample["labels"] == [-100] * n + ids[n:]
        written = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert decoded(tokenizer, ids) == decoded(tokenizer, written)
    documents = tokenize_chat(chat.given, tokenizer, **options)
    learned = [run for each in documents for run in _runs(**each)]
    prompts = [len(prompt) for prompt, _ in turns]
    assert learned == list(zip([x["input_ids"] for x in samples], prompts, strict=True))
    starts = [
        each[: len(last["input_ids"])] != last["input_ids"]
        for last, (each, _) in zip(samples, turns[1:], strict=False)
    ]
    assert len(documents) == 1 + sum(starts)
    return True


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _runs(input_ids: list[int], assistant_masks: list[int]) -> list[tuple[list[int], int]]:
    """The runs of learned tokens: the document up to the end of each, and where it begins."""
    masks = [0, *assistant_masks, 0]
    begins = [i for i in range(len(input_ids)) if masks[i : i + 2] == [0, 1]]
    ends = [i for i in range(1, len(masks)) if masks[i - 1 : i + 1] == [1, 0]]
    return [(input_ids[: end - 1], begin) for begin, end in zip(begins, ends, strict=True)]
