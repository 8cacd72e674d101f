"""`tokenize_chat`: the answers are learned, whole, and nothing else, with or without marks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from tokenizers.processors import ByteLevel
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from flexvarlen.packing import tokenize_chat
from flexvarlen.verify.corpus import train_tokenizer

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


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize(
    "answers", [("yes ", "no"), (" yes", "  no"), ("yes \U0001f600", "no \u00e9")]
)
def test_marked_answers_may_begin_or_end_with_any_character(trim, answers):
    """The masks of transformers reach into the next question, or leave answers out."""
    tokenizer = tokenizer_with(MARKED.replace("<e>{% endgeneration %}", "{% endgeneration %}<e>"))
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim)
    first, second = ({"role": "assistant", "content": answer} for answer in answers)
    chat = [CHAT[0], first, CHAT[2], second]
    (found,) = tokenize_chat(chat, tokenizer)
    pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
    answer = tokenizer.decode([token for token, mask in pairs if mask])
    assert answer.replace(" ", "") == "".join(answers).replace(" ", "")


def test_a_greeting_before_the_first_question_is_not_learned_without_marks():
    greeting = {"role": "assistant", "content": "hello"}
    ((answers, text),) = learned(PLAIN, [greeting, *CHAT])
    assert answers == f"{FIRST}<e>{SECOND}<e>"
    assert text.startswith("[assistant] hello<e>")


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(ValueError, match=r"tokenizer must be a fast one.*ByT5Tokenizer"):
        tokenize_chat(CHAT, ByT5Tokenizer())


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


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_tool_calls_that_the_template_leaves_out_are_refused(template):
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}, *CHAT]
    with pytest.raises(ValueError, match="the chat template must write tool_calls"):
        learned(template, chat)
    written = template.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
    ((answers, _),) = learned(written, chat)
    assert "look" in answers


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_chat_without_an_answer_is_refused(template):
    with pytest.raises(ValueError, match="messages must hold an answer"):
        learned(template, CHAT[:1])
