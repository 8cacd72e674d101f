"""`tokenize_chat`: the answers are learned, whole, and nothing else, with or without marks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from flexvarlen.packing import tokenize_chat
from flexvarlen.verify.corpus import train_tokenizer
from tests.packing.chat_templates import KINDS, templates, tokenizer_of
from tests.packing.random_chats import assert_as_expected, random_chat

FIRST, SECOND = "first reply\nof two lines", "second reply"
CHAT = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": FIRST},
    {"role": "user", "content": "first reply? "},
    {"role": "assistant", "content": SECOND},
]
PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<e> {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
MARKED = PLAIN.replace(
    "{{ m.content }}<e>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<e>{% endgeneration %}"
    "{% else %}{{ m.content }}<e>{% endif %}",
)
# As Qwen3's: an answer has a thought, which is left out once another question follows.
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}] {% if loop.last and m.role == 'assistant' %}<think> "
    "{% endif %}{{ m.content }}<e> {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@cache
def words():
    texts = tuple(message["content"] for message in CHAT)
    return train_tokenizer((*texts, PLAIN, MARKED), 400)


def tokenizer_with(template):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(), bos_token="<b>", eos_token="<e>")
    tokenizer.chat_template = template
    return tokenizer


def learned(template, chat=CHAT, **options):
    """Of each document what is learned, and its whole text."""
    tokenizer = tokenizer_with(template)
    found = []
    for each in tokenize_chat(chat, tokenizer, **options):
        pairs = zip(each["input_ids"], each["assistant_masks"], strict=True)
        answer = tokenizer.decode([token for token, mask in pairs if mask])
        found.append((answer, tokenizer.decode(each["input_ids"])))
    return found


def test_answers_are_learned_with_marks_and_without():
    ((marked, text),) = learned(MARKED)
    assert marked == f"{FIRST}<e>{SECOND}<e>"
    ((plain, same),) = learned(PLAIN)
    assert (plain, same) == (marked, text)
    assert tokenize_chat(CHAT, tokenizer_with(PLAIN)) == tokenize_chat(CHAT, tokenizer_with(MARKED))


@pytest.mark.parametrize(
    "answers", [("yes ", "no"), (" yes", "  no"), ("yes \U0001f600", "no \u00e9"), ("y\0", "\0n")]
)
def test_answers_may_begin_or_end_with_any_character(answers):
    """The masks of transformers reach into the next question, or leave answers out."""
    first, second = ({"role": "assistant", "content": answer} for answer in answers)
    ((found, _),) = learned(MARKED.replace("] {", "]\n{"), [CHAT[0], first, CHAT[2], second])
    assert found == f"{answers[0]}<e>{answers[1]}<e>"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "a system"}]])
def test_a_greeting_before_the_first_question_is_context(template, before):
    greeting = {"role": "assistant", "content": "hello"}
    ((answers, text),) = learned(template, [*before, greeting, *CHAT])
    assert answers == f"{FIRST}<e>{SECOND}<e>"
    assert "[assistant] hello<e>" in text


def test_a_tokenizer_without_offsets():
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = PLAIN
    (found,) = tokenize_chat(CHAT, tokenizer)
    assert sum(found["assistant_masks"]) == len(f"{FIRST}<e>{SECOND}<e>".encode())


@pytest.mark.parametrize("template", [PLAIN, MARKED, FORGETFUL])
def test_answers_that_are_not_to_be_learned(template):
    whole = [answer for answer, _ in learned(template)]
    second = whole[-1].removeprefix(f"{FIRST}<e>")
    without = [CHAT[0], CHAT[1] | {"weight": 0}, *CHAT[2:]]
    for chat, train in (
        (without, "all"),
        (CHAT, "last"),
        (CHAT, lambda message: message["content"] == SECOND),
    ):
        ((answers, text),) = learned(template, chat, train=train)
        assert answers == second
        assert f"[assistant] {FIRST}<e>" in text
    assert [
        x for x, _ in learned(template, [*without[:2], *(x | {"weight": 1} for x in CHAT)])
    ] == whole
    for chat, train, words in (
        ([x | {"weight": 0} for x in CHAT], "all", "must hold an answer to train on"),
        (CHAT, lambda message: False, "must hold an answer to train on"),
        ([CHAT[0], CHAT[1] | {"weight": 0.5}], "all", "weight of message 1 must be 0.* got 0.5"),
        (CHAT, "first", "train must be 'all', 'last' or a function .* got 'first'"),
    ):
        with pytest.raises(ValueError, match=words):
            learned(template, chat, train=train)


def test_what_follows_the_last_answer_is_not_needed():
    assert learned(PLAIN, CHAT[:3]) == learned(PLAIN, CHAT[:2])


def test_answers_that_are_written_anew_end_documents_of_their_own():
    (first, _), (second, text) = learned(FORGETFUL)
    assert (first, second) == (f"<think> {FIRST}<e>", f"<think> {SECOND}<e>")
    assert f"[assistant] {FIRST}<e>" in text  # the thought is gone, and not learned again


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "llama3_2", "gemma3", "gemma4", "gptoss", "phi3", "lfm2"]
)
def test_templates_of_real_models_teach_whole_answers(name):
    trl = pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    found = [answer for answer, _ in learned(template)]
    assert all(text in "".join(found) for text in (FIRST, SECOND))
    assert "question" not in "".join(found)
    assert all(answer.endswith(">") for answer in found)  # the token that ends an answer


def test_a_template_whose_answers_do_not_begin_with_their_prompt_is_refused():
    template = PLAIN.replace("%}[assistant] {%", "%}[assistant] <think>{%")
    with pytest.raises(ValueError, match="must continue the prompt of message 1"):
        learned(template)


def test_a_template_whose_answers_have_no_end_is_refused():
    """As GLM's, whose answers end where the next question begins."""
    with pytest.raises(ValueError, match="the chat template must end message 1"):
        learned(PLAIN.replace("<e>", ""))


CALL = {
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "noon", "n": 7, "x": 0}},
}


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ("", r"tool_calls\[0\].function.name"),
        ("{{ (m.tool_calls or [])[:1] }}", r"tool_calls\[1\].function.name"),
        ("{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}", r".*arguments.at"),
        (
            "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in "
            "c.function.arguments.items() if v %}{{ k }}{{ v }}{% endfor %}{% endfor %}",
            ".*arguments.x",
        ),
    ],
)
def test_tool_calls_that_the_template_leaves_out_are_refused(template, written, missing):
    """Two calls are one too many for gpt-oss's."""
    template = template.replace("{{ m.content }}", "{{ m.content }}" + written)
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, *CHAT]
    with pytest.raises(ValueError, match=f"must write {missing} of message 1, and leaves it out"):
        learned(template, chat)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("other", "missing"),
    [
        ({"reasoning_content": "a thought"}, "reasoning_content"),
        ({"refusal": "a refusal"}, "refusal"),
        ({"function_call": CALL["function"]}, "function_call.name"),
    ],
)
def test_parts_of_an_answer_that_the_template_leaves_out_are_refused(template, other, missing):
    with pytest.raises(ValueError, match=f"must write {missing} of message 1"):
        learned(template, [CHAT[0], CHAT[1] | other])


def test_a_part_that_another_part_repeats_must_be_written_too():
    template = PLAIN.replace("{{ m.content }}", "{{ m.reasoning or m.content }}")
    with pytest.raises(ValueError, match="must write content of message 1"):
        learned(template, [CHAT[0], CHAT[1] | {"reasoning": f"why {FIRST}"}])


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_arguments_as_data_sets_hold_them(template):
    """Arrow fills a struct with None; OpenAI's interface returns JSON strings."""
    template = template.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson }}")
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    expected = learned(template.replace("m.tool_calls", "(m.tool_calls or '')"), chat)
    assert '"arguments": {"at": "noon", "n": 7, "x": 0}' in expected[0][0]
    none = CALL["function"]["arguments"] | {"zone": None}
    for arguments in (none, json.dumps(none)):
        call = CALL | {"function": {"name": "look", "arguments": arguments}, "id": None}
        other = [CHAT[0] | {"tool_calls": None}, chat[1] | {"tool_calls": [call]}]
        assert learned(template.replace("m.tool_calls", "(m.tool_calls or '')"), other) == expected
    for wrong in ("noon", "[1]", [1]):
        call = CALL | {"function": {"name": "look", "arguments": wrong}}
        with pytest.raises(ValueError, match=r"arguments of message 1 must be a mapping or a JSON"):
            learned(template, [CHAT[0], chat[1] | {"tool_calls": [call]}])


def test_an_error_of_the_template_names_the_message():
    template = (
        "{% if messages[1:] and 'bad' in messages[-1].content %}{{ 1 + 'x' }}{% endif %}" + PLAIN
    )
    with pytest.raises(ValueError, match="cannot write the chat up to message 2: unsupported"):
        learned(template, [*CHAT[:2], CHAT[2] | {"content": "bad"}, CHAT[3]])


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_chat_without_an_answer_is_refused(template):
    with pytest.raises(ValueError, match="messages must hold an answer"):
        learned(template, CHAT[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_random_chats_under_every_template(kind, pytestconfig):
    """`--chat-cases N` sets their number; nothing is trained that generation does not see."""
    accepted = 0
    for seed in range(pytestconfig.getoption("--chat-cases")):
        name = list(templates())[seed % len(templates())]
        template, tokenizer, chat = templates()[name], tokenizer_of(kind), random_chat(seed)
        accepted += assert_as_expected(chat, tokenizer, template)
    assert accepted > seed / 4
