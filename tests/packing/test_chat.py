"""`tokenize_chat`: the answers are learned, whole, and nothing else, with or without marks."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from flexvarlen.packing import conversation_samples, tokenize_chat
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


def test_an_answer_to_a_system_message_alone():
    ((answers, _),) = learned(PLAIN, [{"role": "system", "content": "write"}, CHAT[1]])
    assert answers == f"{FIRST}<e>"


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


def called_with(arguments):
    return {"type": "function", "function": {"name": "look", "arguments": arguments}}


CALL = called_with({"at": "noon", "n": 7, "x": 0})
CALLED = {"content": "", "tool_calls": [CALL, CALL]}
NO_ARGUMENTS = {"tool_calls": [CALL | {"function": {"name": "look"}}] * 2}
IN_PARTS = [{"type": "text", "text": "a question"}]


def plain(content):
    """A template that writes the content of a message so."""
    return PLAIN.replace("{{ m.content }}", content)


def calls(each, of="m.tool_calls or []"):
    return plain(f"{{{{ m.content }}}}{{% for c in {of} %}}{each}{{% endfor %}}")


FIRST_CALL = "(m.tool_calls or [])[:1]"  # two are one too many for gpt-oss's
NAME, TRUE_ARGUMENTS = "{{ c.function.name }}", "c.function.arguments.items() if v"
STRINGS, LISTS = (
    plain(f"{{{{ m.content if m.content is {x} }}}}") for x in ("string", "not string")
)
# Template, what the first answer has instead (or all messages), what the template does not write.
OMITTED = [
    (PLAIN, CALLED, r"tool_calls\[0\].function.arguments.at of message 1, "),
    (calls("{{ c }}", FIRST_CALL), CALLED, r"tool_calls\[1\].function.arguments.at of message 1, "),
    (calls("{{ c.function.arguments }}"), CALLED, "tool call look of message 1, "),
    (calls("{{ c }}", FIRST_CALL), NO_ARGUMENTS, "tool call look of message 1, "),
    (calls(NAME), CALLED, ".*arguments.at of message 1, "),
    (
        calls(f"{NAME}{{% for k, v in {TRUE_ARGUMENTS} %}}{{{{ k }}}}{{{{ v }}}}{{% endfor %}}"),
        CALLED,
        ".*arguments.x of message 1, ",
    ),
    (PLAIN, {"reasoning_content": "a thought"}, "reasoning_content of message 1, "),
    (PLAIN, {"refusal": "a refusal"}, "refusal of message 1, "),
    # Another part repeats it.
    (
        plain("{{ m.reasoning or m.content }}"),
        {"reasoning": f"why {FIRST}"},
        "content of message 1, ",
    ),
    # Qwen3's leaves out a list, SmolVLM's a string.
    (LISTS, {}, "the text of message 0; pass its content as a list of parts"),
    (
        STRINGS,
        [{"role": "user", "content": IN_PARTS}, CHAT[1]],
        "the text of message 0; .* a string",
    ),
    (PLAIN, {"content": IN_PARTS}, "the text of message 1; pass its content as a string"),
]
REFUSED = [
    *((x, y, f"the chat template must write {what}") for x, y, what in OMITTED),
    # The answer has a form that templates do not know.
    (PLAIN, {"function_call": CALL["function"]}, "function_call must be given as tool_calls, "),
    (
        PLAIN,
        {"tool_calls": [7]},
        r"tool_calls must be a list of mappings .* got \[7\], in message 1",
    ),
    (PLAIN, {"tool_calls": "[]"}, "tool_calls must be a list of mappings .* in message 1"),
    *(
        (PLAIN, {"tool_calls": [called_with(x)]}, ".*arguments must be a mapping .* in message 1")
        for x in ("noon", "[1]", [1])
    ),
    (PLAIN, {"reasoning": "a", "thinking": "b"}, "reasoning must be one text, .* in message 1"),
    (PLAIN, {"content": [{"type": "file"}]}, "content must be a string, or parts of type text"),
    (PLAIN, {"weight": 0.5}, "the weight of message 1 must be 0 .* got 0.5"),
    # It does not follow its prompt, or has no end, as GLM's, or cannot be written.
    (
        PLAIN.replace("%}[assistant] {%", "%}[assistant] <think>{%"),
        {},
        "the chat template must continue the prompt of message 1, ",
    ),
    (PLAIN.replace("<e>", ""), {}, "the chat template must end message 1, "),
    (
        plain("{{ m.content }}{{ 1 + 'x' if 'bad' in m.content }}"),
        {"content": "bad"},
        "the chat template cannot write the chat up to message 1: unsupported",
    ),
    # Nothing is trained.
    (PLAIN, CHAT[:1], "messages must contain an answer to train on"),
    (PLAIN, [x | {"weight": 0} for x in CHAT], "messages must contain an answer to train on"),
]


@pytest.mark.parametrize("call", [tokenize_chat, conversation_samples])
@pytest.mark.parametrize(("template", "chat", "message"), REFUSED)
def test_a_chat_that_cannot_be_trained_is_refused(call, template, chat, message):
    if isinstance(chat, dict):
        chat = [CHAT[0], CHAT[1] | chat, *CHAT[2:]]
    with pytest.raises(ValueError, match=message):
        call(chat, tokenizer_with(template))


@pytest.mark.parametrize(
    ("end", "answer"),
    [("{% if loop.index0 < 2 %}<e>{% endif %}", SECOND), ("{% if m.content %}<e>{% endif %}", "")],
)
def test_each_answer_needs_an_end(end, answer):
    with pytest.raises(ValueError, match="the chat template must end message 3"):
        learned(PLAIN.replace("<e>", end), [*CHAT[:3], {"role": "assistant", "content": answer}])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("first", "train must be 'all', "),
        (lambda message: False, "messages must contain an answer"),
    ],
)
def test_train_must_choose_an_answer(train, message):
    with pytest.raises(ValueError, match=message):
        learned(PLAIN, train=train)


@pytest.mark.parametrize("answer", [CALLED, {"tool_calls": [7]}, {"refusal": "a refusal"}])
def test_parts_of_answers_that_are_not_trained_are_no_matter(answer):
    chat = [CHAT[0], CHAT[1] | answer, *CHAT[2:]]
    assert [found for found, _ in learned(PLAIN, chat, train="last")] == [f"{SECOND}<e>"]


def test_calls_without_arguments_are_written():
    assert len(learned(calls("{{ c }}"), [CHAT[0], CHAT[1] | NO_ARGUMENTS])) == 1


def test_null_is_learned_where_the_model_wrote_it_and_what_is_given_stays():
    """In JSON strings of OpenAI's interface; Arrow fills structs with None: see random chats."""
    null = called_with('{"at": null}')
    given = np.array([copy.deepcopy(null)], dtype=object)  # as pandas holds a list
    for own in ([null], given):
        ((found, _),) = learned(calls("{{ c | tojson }}"), [CHAT[0], CHAT[1] | {"tool_calls": own}])
        assert '{"at": null}' in found
    assert given[0] == null


@pytest.mark.parametrize("kind", KINDS)
def test_random_chats_under_every_template(kind, pytestconfig):
    """`--chat-cases N` sets their number; nothing is trained that generation does not see."""
    accepted = 0
    for seed in range(pytestconfig.getoption("--chat-cases")):
        name = list(templates())[seed % len(templates())]
        template, tokenizer, chat = templates()[name], tokenizer_of(kind), random_chat(seed)
        accepted += assert_as_expected(chat, tokenizer, template)
    assert accepted > seed / 4
