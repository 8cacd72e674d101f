"""JSON lines are documents, never text to train on as they stand."""

import json
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from flexvarlen.verify.corpus import packed_text, read_documents, train_tokenizer

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


TEMPLATE = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('a user must begin') }}{% endif %}"
    "{{ tools[0].name if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@cache
def chat_tokenizer():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer((TEMPLATE,), 300))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def lines(tmp_path):
    """A file of JSON lines."""

    def write(*objects, name="notes.jsonl"):
        file = tmp_path / name
        texts = [one if isinstance(one, str) else json.dumps(one) for one in objects]
        file.write_text("\n".join(texts), encoding="utf-8")
        return file

    return write


PARTS = [{"type": "image"}, {"type": "text", "text": "What is it?"}]


@pytest.mark.parametrize(
    ("name", "objects", "documents"),
    [
        ("a.jsonl", [{"text": "a\n\n\nb\fc"}, "", {"text": "d", "id": 3}], ["a\n\n\nb\fc", "d"]),
        ("a.json", [{"text": "a"}, " \t"], ["a"]),
        ("A.JSONL", ['{"text": "a\u2028b\u0085c"}\r'], ["a\u2028b\u0085c"]),
        (
            "chat.jsonl",
            [{"messages": [{"role": "user", "content": PARTS}, {"role": "a", "content": None}]}],
            ["What is it?"],
        ),
    ],
)
def test_each_line_is_a_document(lines, name, objects, documents):
    assert list(read_documents([lines(*objects, name=name)])) == documents


def test_several_files_and_plain_text_mix(lines):
    plain = lines("a\n\nb", name="plain.txt")
    assert read_documents([lines({"text": "x"}, {"text": "y"}), plain]) == ("x", "y", "a\n\nb")


def test_chats_use_the_template_if_there_is_one(lines):
    file = lines(
        {"messages": CHAT},
        {"messages": CHAT, "tools": [{"name": "look"}]},
        {"text": "z", "messages": 0},
    )
    with_template = read_documents([file], chat_tokenizer())
    assert with_template == ("<user>Hi<assistant>Hello!", "look<user>Hi<assistant>Hello!", "z")
    assert read_documents([file]) == ("Hi\nHello!", "Hi\nHello!", "z")


def test_row_of_a_chat_is_in_the_models_template(lines):
    batch = packed_text(
        vocabulary=300,
        tokens=200,
        files=[lines({"messages": CHAT})],
        tokenizer=chat_tokenizer(),
    )
    assert "<user>Hi<assistant>Hello!" in chat_tokenizer().decode(batch.input_ids[0])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plain text", "a JSON object on each line"),
        ("[", "a JSON object on each line"),
        ('"a string"', "a JSON object on each line"),
        ({"prompt": "x"}, "with 'text' .* or 'messages'"),
        ({"text": 3}, "with 'text' .* or 'messages'"),
        ({"messages": "Hi"}, "whose 'messages' are a list of objects"),
        ({"messages": ["Hi"]}, "whose 'messages' are a list of objects"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is a string"),
    ],
)
def test_other_lines_are_refused_by_number(lines, line, words):
    file = lines({"text": "good"}, "", line)
    with pytest.raises(
        ValueError, match=rf"^text must be .*{words}.*, got .*line 3 of .*; "
    ) as found:
        read_documents([file])
    assert "\n" not in str(found.value)
    assert Path(file).name in str(found.value)


def test_refusal_of_the_template_names_the_line(lines):
    file = lines({"messages": CHAT}, {"messages": CHAT[::-1]})
    with pytest.raises(ValueError, match=r"line 2 of .* up to message 1: a user must begin"):
        read_documents([file], chat_tokenizer())


def test_a_long_line_is_shortened(lines):
    with pytest.raises(ValueError, match="text must") as found:
        read_documents([lines({"prompt": "x" * 10_000})])
    assert len(str(found.value)) < 400
