"""`tokenize_chat`: the answers are learned, whole, and nothing else, with or without marks."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from flexvarlen.packing import tokenize_chat
from flexvarlen.verify.corpus import train_tokenizer
from tests.packing.chat_templates import CHATML, KINDS, templates, tokenizer_of
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


def test_an_answer_to_a_system_message_alone():
    ((answers, _),) = learned(PLAIN, [{"role": "system", "content": "write"}, CHAT[1]])
    assert answers == f"{FIRST}<e>"


def test_each_answer_needs_an_end():
    for template in (
        PLAIN.replace("<e>", "{% if loop.index0 < 2 %}<e>{% endif %}"),
        PLAIN.replace("<e>", "{% if m.content %}<e>{% endif %}"),
    ):
        with pytest.raises(ValueError, match="the chat template must end message 3"):
            learned(template, [*CHAT[:3], {"role": "assistant", "content": ""}])


def test_a_long_chat_is_tokenized_once():
    """Each later prompt repeats it; its special tokens say where."""
    tokenizer, seen = tokenizer_of("bytes"), []
    words = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    words.chat_template = CHATML
    call = words.__class__.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(words),
            "__call__",
            lambda self, text, **k: seen.append(text) or call(self, text, **k),
        )
        (found,) = tokenize_chat(CHAT * 20, words)
    assert words.decode(found["input_ids"]).count(SECOND) == 20
    assert sum(map(len, seen)) < 2 * len(words.decode(found["input_ids"]))


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
        ([x | {"weight": 0} for x in CHAT], "all", "must contain an answer to train on"),
        (CHAT, lambda message: False, "must contain an answer to train on"),
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
        ("", r"tool_calls\[0\].function.arguments.at"),
        ("{{ (m.tool_calls or [])[:1] }}", r"tool_calls\[1\].function.arguments.at"),
        (
            "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}",
            "tool call look",
        ),
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
    with pytest.raises(ValueError, match=f"must write {missing} of message 1, but omits it"):
        learned(template, chat)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"reasoning_content": "a thought"}, "must write reasoning_content of message 1"),
        ({"refusal": "a refusal"}, "must write refusal of message 1"),
        (
            {"function_call": CALL["function"]},
            "function_call must be given as tool_calls, .* in message 1",
        ),
        ({"tool_calls": [7]}, r"tool_calls must be a list of mappings .* got \[7\], in message 1"),
        ({"tool_calls": "[]"}, "tool_calls must be a list of mappings .* in message 1"),
        ({"reasoning": "a", "thinking": "b"}, "reasoning must be one text, .* in message 1"),
        ({"content": [{"type": "image"}]}, "content must be a string, or parts of type text"),
        (
            {"content": [{"type": "text", "text": FIRST}]},
            "text of message 1; pass its content as a string",
        ),
    ],
)
def test_answers_with_parts_that_no_template_trains_are_refused(template, other, words):
    with pytest.raises(ValueError, match=words):
        learned(template, [CHAT[0], CHAT[1] | other])
    if "content" not in other:
        ((found, _),) = learned(template, [CHAT[0], CHAT[1] | other, *CHAT[2:]], train="last")
        assert found == f"{SECOND}<e>"


@pytest.mark.parametrize("content", ["a question", [{"type": "text", "text": "a question"}]])
def test_a_question_that_the_template_does_not_write(content):
    """Qwen3's leaves out a list, SmolVLM's a string."""
    wrong = "not string" if isinstance(content, str) else "string"
    template = PLAIN.replace("{{ m.content }}", f"{{{{ m.content if m.content is {wrong} }}}}")
    wanted = "a list of parts" if isinstance(content, str) else "a string"
    with pytest.raises(ValueError, match=f"text of message 0; pass its content as {wanted}"):
        learned(template, [{"role": "user", "content": content}, CHAT[1]])


def test_a_call_without_arguments_that_the_template_leaves_out():
    call = CALL | {"function": {"name": "look"}}
    template = PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ (m.tool_calls or [])[:1] }}")
    chat = [CHAT[0], CHAT[1] | {"tool_calls": [call, call]}]
    with pytest.raises(ValueError, match="must write tool call look of message 1"):
        learned(template, chat)
    assert len(learned(template.replace("[:1]", ""), chat)) == 1


def test_a_part_that_another_part_repeats_must_be_written_too():
    template = PLAIN.replace("{{ m.content }}", "{{ m.reasoning or m.content }}")
    with pytest.raises(ValueError, match="must write content of message 1"):
        learned(template, [CHAT[0], CHAT[1] | {"reasoning": f"why {FIRST}"}])


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_arguments_as_data_sets_hold_them(template):
    """Arrow fills a struct with None; OpenAI's interface returns JSON strings."""
    template = template.replace(
        "{{ m.content }}", "{{ m.content }}{{ m.tool_calls or '' | tojson }}"
    )
    template = template.replace("m.tool_calls or ''", "(m.tool_calls or '')")
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    expected = learned(template, chat)
    assert '"arguments": {"at": "noon", "n": 7, "x": 0}' in expected[0][0]
    whole = CALL["function"]["arguments"]
    for arguments in (whole | {"zone": None}, json.dumps(whole)):
        call = CALL | {"function": {"name": "look", "arguments": arguments}, "id": None}
        other = [CHAT[0] | {"tool_calls": None}, chat[1] | {"tool_calls": [call]}]
        assert learned(template, other) == expected
    null = CALL | {"function": {"name": "look", "arguments": '{"at": null}'}}
    ((answers, _),) = learned(template, [CHAT[0], chat[1] | {"tool_calls": [null]}])
    assert '{"at": null}' in answers  # the model wrote it
    given = np.array([copy.deepcopy(null)], dtype=object)  # as pandas holds a list
    assert learned(template, [CHAT[0], chat[1] | {"tool_calls": given}]) == [(answers, _)]
    assert given[0] == null
    for wrong in ("noon", "[1]", [1]):
        call = CALL | {"function": {"name": "look", "arguments": wrong}}
        broken = [CHAT[0], chat[1] | {"tool_calls": [call]}, *CHAT]
        with pytest.raises(ValueError, match=r"arguments must be a mapping .* in message 1"):
            learned(template, broken)
        learned(template, broken, train="last")


def test_an_error_of_the_template_names_the_message():
    template = (
        "{% if messages[1:] and 'bad' in messages[-1].content %}{{ 1 + 'x' }}{% endif %}" + PLAIN
    )
    with pytest.raises(ValueError, match="cannot write the chat up to message 2: unsupported"):
        learned(template, [*CHAT[:2], CHAT[2] | {"content": "bad"}, CHAT[3]])


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_chat_without_an_answer_is_refused(template):
    with pytest.raises(ValueError, match="messages must contain an answer"):
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
