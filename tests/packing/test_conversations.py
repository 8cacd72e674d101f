"""`conversation_samples`: what a policy saw at each turn, exact in one tree of all its rollouts."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

import flexvarlen as fv
from tests.packing.test_chat import tokenizer_with
from tests.tiny_models import new_model

# As Qwen3's, an answer has its reasoning until another message follows.
STRIPS = (
    "{% for t in tools or [] %}[tool] {{ t.function.name }}<e> {% endfor %}"
    "{% for m in messages %}[{{ m.role }}]\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}"
    "<e> {% endfor %}{% if add_generation_prompt %}[assistant]\n{{ opening or '' }}{% endif %}"
)
KEEPS = STRIPS.replace(" and loop.last", "")
TEMPLATES = {"strips": STRIPS, "keeps": KEEPS}
OF_TRL = (
    "qwen3",
    "qwen3_training",
    "qwen3_5_think",
    "qwen3_8",
    "lfm2_2_5",
    "qwen3_instruct_2507",
    "gemma4_v5",
)
THOUGHTS = {"lfm2_2_5": "thinking", "qwen3_instruct_2507": "not written"}
"""Under which name a template reads reasoning, if it is another."""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def answer(content, thought=None, calls=0):
    call = {"type": "function", "id": "x", "function": {"name": "look", "arguments": {"at": 1}}}
    also = {"tool_calls": [call] * calls} if calls else {}
    also |= {} if thought is None else {"reasoning_content": thought}
    return {"role": "assistant", "content": content} | also


def user(content):
    return {"role": "user", "content": content}


def tool(content):
    return {"role": "tool", "name": "look", "tool_call_id": "x", "content": content}


START = [{"role": "system", "content": "reply in two lines"}, user("a question")]
ROLLOUTS = [
    [
        *START,
        answer("", "a thought", calls=1),
        tool("what is there"),
        answer("first reply", "another thought"),
        user("of two lines?"),
        answer("second reply"),
    ],
    [*START, answer("", "a thought of two lines", calls=1), tool("nothing"), answer("no reply")],
    [*START, answer("first reply", "a thought")],
]


@cache
def samples_of(template):
    tokenizer = tokenizer_with(TEMPLATES[template])
    samples = [fv.conversation_samples(x, tokenizer, tools=TOOLS) for x in ROLLOUTS]
    return [sample for each in samples for sample in each]


def template_of_trl(name):
    trl = pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def assert_seen(messages, tokenizer, samples):
    """Each sample is the prompt of its turn, and the answer, which alone is learned."""
    render = partial(tokenizer.apply_chat_template, tools=TOOLS, tokenize=False)
    turns = [i for i, each in enumerate(messages) if each["role"] == "assistant" and i]
    for turn, sample in zip(turns, samples, strict=True):
        ids, labels = torch.tensor([sample["input_ids"], sample["labels"]])
        learned = labels != -100
        prompt = render(messages[:turn], add_generation_prompt=True)
        assert labels[learned].equal(ids[learned])
        assert not learned[: -int(learned.sum())].any()  # at the end, and nowhere else
        assert tokenizer.decode(ids[~learned]) == prompt
        assert prompt + tokenizer.decode(labels[learned]) == render(messages[: turn + 1]).rstrip()


@pytest.mark.parametrize("name", [*TEMPLATES, *OF_TRL])
def test_a_sample_is_what_the_policy_saw_and_wrote(name):
    tokenizer = tokenizer_with(TEMPLATES.get(name) or template_of_trl(name))
    for messages in ROLLOUTS:
        thought = THOUGHTS.get(name, "reasoning_content")
        messages = [
            {thought if key == "reasoning_content" else key: x for key, x in message.items()}
            for message in messages
        ]
        assert_seen(messages, tokenizer, fv.conversation_samples(messages, tokenizer, tools=TOOLS))


words = st.sampled_from(["first", "reply", "two lines", "a question"])
steps = st.one_of(
    st.builds(lambda x: [user(x)], words),
    st.builds(lambda x, y, z: [answer(x, y, calls=1), tool(z)], words, st.none() | words, words),
)


@given(st.lists(steps, min_size=1, max_size=5), words, st.sampled_from(sorted(TEMPLATES)))
def test_any_conversation_in_its_tree(steps, last, template):
    messages = [user("first"), *(each for step in steps for each in step), answer(last, "thought")]
    tokenizer = tokenizer_with(TEMPLATES[template])
    samples = fv.conversation_samples(messages, tokenizer, tools=TOOLS)
    assert_seen(messages, tokenizer, samples)
    shared = fv.share_prefixes(samples)
    for sample, ids in zip(samples, shared.unfold(shared.input_ids), strict=True):
        assert ids.tolist() == sample["input_ids"]
    assert int(shared.label_counts.max()) == 1  # each answer is learned at its own turn alone
    assert int(shared.label_counts.sum()) == sum(x >= 0 for y in samples for x in y["labels"])
    if template == "keeps":
        assert shared.layout.lengths == (len(samples[-1]["input_ids"]),)


def test_a_tree_holds_the_turns_of_all_rollouts():
    """Kept whole, three rollouts are three paths, which part where they learn different tokens."""
    samples = samples_of("keeps")
    shared = fv.share_prefixes(samples)
    rollouts = [samples[last]["input_ids"] for last in (2, 4, 5)]
    beginnings = {tuple(ids[: i + 1]) for ids in rollouts for i in range(len(ids))}
    assert len(shared.layout.segments.lengths) == 5  # a path, which two others leave
    assert shared.layout.total_tokens == len(beginnings) + 2  # where both learn what follows
    stripped = samples_of("strips")
    tokens = sum(len(sample["input_ids"]) for sample in stripped)
    assert fv.share_prefixes(stripped).layout.total_tokens < 0.5 * tokens


def test_a_collator_takes_the_turns_of_several_rollouts():
    samples, shared = samples_of("strips"), fv.share_prefixes(samples_of("strips"))
    batch = fv.TreeCollator(pad_token_id=0)([samples[:3], [samples[3:5], samples[5:]]])
    assert batch["input_ids"].equal(shared.input_ids)
    assert batch["label_counts"].equal(shared.label_counts)


def test_another_template_than_the_tokenizer_s():
    plain = tokenizer_with("{% for m in messages %}{{ m.content }}<e>{% endfor %}")
    found = fv.conversation_samples(ROLLOUTS[0], plain, tools=TOOLS, chat_template=STRIPS)
    assert found == samples_of("strips")[:3]


@cache
def alone(family, template):
    """Logits, loss and gradients of each sample, in a forward of its own."""
    model = model_of(family)
    found = []
    for sample in samples_of(template):
        ids, labels = torch.tensor([sample["input_ids"], sample["labels"]])
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        loss = cross_entropy(logits[:-1], labels[1:])
        found.append((logits.detach(), loss.item(), gradients_of(model, loss)))
    return found


def model_of(family):
    return new_model(family, vocab_size=len(tokenizer_with(KEEPS)))


def gradients_of(model, loss):
    loss.backward(retain_graph=True)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-5, atol=1e-5 * float(x.abs().max()))


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_each_sample_in_the_tree_is_the_sample_alone(family, template):
    samples, expected = samples_of(template), alone(family, template)
    shared = fv.share_prefixes(samples)
    model = fv.patch_model(model_of(family), "sdpa")
    out = model(**shared.batch())
    counts = []
    for sample, logits, (own, loss, gradients) in zip(
        samples, shared.unfold(out.logits), expected, strict=True
    ):
        torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)
        labels = torch.tensor(sample["labels"])[1:]
        counts.append(int((labels != -100).sum()))
        found = cross_entropy(logits[:-1], labels)
        torch.testing.assert_close(found.item(), loss, rtol=1e-5, atol=1e-5)
        assert_close(gradients_of(model, found), gradients)
    # The model's own loss, of all turns together.
    total = sum(counts)
    mean = sum(n * loss for n, (_, loss, _) in zip(counts, expected, strict=True)) / total
    torch.testing.assert_close(out.loss.item(), mean, rtol=1e-5, atol=1e-5)
    sums = {
        name: sum(n / total * x[2][name] for n, x in zip(counts, expected, strict=True))
        for name in expected[0][2]
    }
    assert_close(gradients_of(model, out.loss), sums)


# ---- tokens of the engine ----


def recorded(messages, samples, *, prompts=True):
    """The messages with the tokens of an engine that saw these samples."""
    own = iter(samples)
    found = []
    for each in messages:
        if each["role"] == "assistant":
            sample = next(own)
            first = sum(x < 0 for x in sample["labels"])
            each = each | {"token_ids": sample["input_ids"][first:]}
            each |= {"prompt_token_ids": sample["input_ids"][:first]} if prompts else {}
        found.append(each)
    return found


def test_tokens_of_the_engine_are_taken_as_they_are():
    """Also those that no template writes; nothing is rendered."""
    prompt, own = torch.tensor([5, 6, 7]), [9, 9]
    samples = [{"input_ids": [5, 6, 7, 9, 9], "labels": [-100] * 3 + own}]
    messages = [*START, answer("x") | {"prompt_token_ids": prompt, "token_ids": own}]
    assert fv.conversation_samples(messages, None) == samples


@pytest.mark.parametrize("name", ["strips", "keeps", "qwen3"])
def test_tokens_of_the_answers_that_the_template_reproduces(name):
    tokenizer = tokenizer_with(TEMPLATES.get(name) or template_of_trl(name))
    samples_of = partial(fv.conversation_samples, tokenizer=tokenizer, tools=TOOLS)
    samples = samples_of(ROLLOUTS[0])
    for prompts in (True, False):
        assert samples_of(recorded(ROLLOUTS[0], samples, prompts=prompts)) == samples


def test_recorded_tokens_of_a_call_that_is_no_json():
    """As a policy writes it that is to unlearn it."""
    message = answer("", calls=1) | {"prompt_token_ids": [5], "token_ids": [7]}
    message["tool_calls"][0]["function"]["arguments"] = '{"at": no'
    (sample,) = fv.conversation_samples([*START, message], None)
    assert sample == {"input_ids": [5, 7], "labels": [-100, 7]}


def test_tokens_of_an_answer_that_the_template_does_not_reproduce():
    """The first difference is named: the same text in other tokens, an end, another text."""
    tokenizer = tokenizer_with(STRIPS)
    messages = recorded(ROLLOUTS[0], samples_of("strips"), prompts=False)
    ids, prompt = messages[4]["token_ids"], samples_of("strips")[1]["labels"].count(-100)
    at = next(i for i, x in enumerate(ids) if len(tokenizer.decode([x])) > 1)
    letters = tokenizer.convert_tokens_to_ids([*tokenizer.convert_ids_to_tokens(ids[at])])
    ended, end = prompt + len(ids), "'<e>' [(]351[)]"
    changed = {
        f"{prompt + at} of the sample '.' .* writes": [*ids[:at], *letters, *ids[at + 1 :]],
        f"{ended - 1} of the sample the end .* writes {end}": ids[:-1],
        f"{ended} of the sample {end} .* writes the end": [*ids, ids[-1]],
    }
    for words, own in changed.items():
        other = [*messages[:4], messages[4] | {"token_ids": own}, *messages[5:]]
        with pytest.raises(ValueError, match=f"token_ids of message 4: at position {words}"):
            fv.conversation_samples(other, tokenizer, tools=TOOLS)


def test_an_answer_whose_first_token_later_prompts_write_in_another_way():
    """The space before it is the prompt's last token, and then part of the answer's first."""
    tokenizer = tokenizer_with(STRIPS.replace("]\n", "] "))
    messages = [user("x"), answer("reply")]
    (sample,) = fv.conversation_samples(messages, tokenizer)
    assert [tokenizer.decode(x) for x in sample["input_ids"][-4:]] == [" ", "rep", "ly", "<e>"]
    with pytest.raises(ValueError, match=r"' ' .* was recorded, and the template writes ' reply'"):
        fv.conversation_samples(recorded(messages, [sample], prompts=False), tokenizer)


def test_what_is_refused():
    tokenizer = tokenizer_with(STRIPS)
    messages = recorded(ROLLOUTS[0], samples_of("strips"))
    for name, also in (("token_ids", "prompt_token_ids"), ("prompt_token_ids", "")):
        without = {key: x for key, x in messages[2].items() if key not in (name, also)}
        with pytest.raises(ValueError, match=f"must have {name}, or none, got message 2"):
            fv.conversation_samples([*messages[:2], without, *messages[3:]], tokenizer)
    only = [*START, answer("x") | {"prompt_token_ids": [1]}]
    with pytest.raises(ValueError, match="prompt_token_ids must come with token_ids"):
        fv.conversation_samples(only, tokenizer)
    with pytest.raises(ValueError, match=r"token_ids of message 2 must be integers.*pass the ids"):
        fv.conversation_samples([*START, answer("x") | {"token_ids": ["x"]}], tokenizer)
    with pytest.raises(ValueError, match="messages must contain an answer"):
        fv.conversation_samples([answer("a greeting"), user("x")], tokenizer)
    with pytest.raises(ValueError, match="continue the prompt of message 2"):
        fv.conversation_samples(ROLLOUTS[2], tokenizer, opening="x")
    unended = tokenizer_with(STRIPS.replace("<e>", ""))
    for last in (answer("x"), answer("", calls=1)):
        with pytest.raises(ValueError, match="must end message 2"):
            fv.conversation_samples([*START, last], unended)


def test_answers_without_recorded_tokens_that_are_not_to_be_learned():
    """Few-shot answers, by their weight or by a rule."""
    shot, last = answer("an example"), answer("x") | {"prompt_token_ids": [5, 6], "token_ids": [7]}
    for chat, train in (
        ([*START, shot | {"weight": 0}, user("y"), last], "all"),
        ([*START, shot, user("y"), last], "last"),
        ([*START, shot, user("y"), last], lambda message: "token_ids" in message),
    ):
        (sample,) = fv.conversation_samples(chat, None, train=train)
        assert sample == {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}


def test_templates_that_leave_out_a_part_of_an_answer():
    """Gemma 4's first ones wrote reasoning beside tool calls alone, Idefics 3's reads no string."""
    reasoning = tokenizer_with(
        STRIPS.replace("{% if m.reasoning", "{% if m.tool_calls and m.reasoning")
    )
    content = tokenizer_with(STRIPS.replace("{{ m.content }}", "{{ m.content.text }}"))
    messages = [*START, answer("reply"), user("thought"), answer("reply", "a thought")]
    with pytest.raises(ValueError, match="must write reasoning_content of message 4"):
        fv.conversation_samples(messages, reasoning)
    with pytest.raises(ValueError, match="text of message 1; pass its content as a list of parts"):
        fv.conversation_samples(messages, content)
    # White space may differ, another name may hold the same, and the prompt may open the reasoning.
    opens = tokenizer_with(STRIPS.replace("{{ opening or '' }}", "<think>"))
    also = {"thinking": "a thought", "reasoning": ""}
    messages[-1] = answer(" reply\n", "a thought") | also
    assert len(fv.conversation_samples(messages[-2:], opens)) == 1
    assert len(fv.conversation_samples([user("x"), answer("<think>x</think>y")], opens)) == 1


def test_content_that_the_template_would_write_as_python_does():
    """Lists are of templates for images; others would write them with their brackets."""
    parts = [{"type": "text", "text": "a question"}]
    asked, replied = [user(parts), answer("reply")], [user("x"), answer(parts)]
    for turn, messages in enumerate((asked, replied)):
        with pytest.raises(
            ValueError, match=rf"text of message {turn}; pass its content as a string"
        ):
            fv.conversation_samples(messages, tokenizer_with(template_of_trl("llama3_1")))
    for name in ("qwen2_5_vl", "llava_next"):
        tokenizer = tokenizer_with(template_of_trl(name))
        (sample,) = fv.conversation_samples([asked[0], replied[1]], tokenizer)
        assert tokenizer.decode(sample["input_ids"]).count("a question") == 2


def test_what_is_not_one_chat():
    tokenizer = tokenizer_with(STRIPS)
    for messages in ([ROLLOUTS[0], ROLLOUTS[1]], {"messages": ROLLOUTS[0]}, "a question"):
        with pytest.raises(ValueError, match="messages must be mappings"):
            fv.conversation_samples(messages, tokenizer)
    with pytest.raises(TypeError, match="add_generation_prompt"):  # it would end every answer
        fv.conversation_samples(ROLLOUTS[0], tokenizer, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gptoss", "gemma4", "qwen3_5_think"])
def test_arguments_that_the_template_would_write_in_quotes(name):
    """They are strings in answers of OpenAI's interface, which templates take for texts."""
    tool = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
    options = {"tools": [{"type": "function", "function": tool}]}
    tokenizer, found = tokenizer_with(template_of_trl(name)), []
    for arguments in ({"at": "1 o'clock", "on": ["x"]}, '{"at": "1 o\'clock", "on": ["x"]}'):
        message = answer("", calls=1)
        message["tool_calls"][0]["function"] = {"name": "look", "arguments": arguments}
        found.append(fv.conversation_samples([user("a question"), message], tokenizer, **options))
        options["tools"] = json.dumps(options["tools"])  # as data sets hold them
    assert found[0] == found[1]


def test_a_tokenizer_that_puts_a_space_before_each_text():
    """As SentencePiece's: an answer that is tokenized alone would begin with a space."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trained = trainers.BpeTrainer(vocab_size=100, special_tokens=["<e>"], show_progress=False)
    words.train_from_iterator(["[assistant]\nfirst reply", "[user]\n a first question"], trained)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>")
    tokenizer.chat_template = STRIPS
    messages = [user("a"), answer("first"), user("a question"), answer("reply")]
    samples = fv.conversation_samples(messages, tokenizer)
    learned = [[x for x in sample["labels"] if x >= 0] for sample in samples]
    texts = ["".join(tokenizer.convert_ids_to_tokens(own)) for own in learned]
    assert texts == ["first<e>", "reply<e>"]
