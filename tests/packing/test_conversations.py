"""`conversation_samples`: what a policy saw at each turn, exact in one tree of all its rollouts.

`test_chat.py` holds the samples of random chats against each template of TRL.
"""

from __future__ import annotations

import json
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
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


words = st.sampled_from(["first", "reply", "two lines", "a question"])
steps = st.one_of(
    st.builds(lambda x: [user(x)], words),
    st.builds(lambda x, y, z: [answer(x, y, calls=1), tool(z)], words, st.none() | words, words),
)


@settings(max_examples=40)
@given(st.lists(steps, min_size=1, max_size=5), words, st.sampled_from(sorted(TEMPLATES)))
def test_any_conversation_in_its_tree(steps, last, template):
    messages = [user("first"), *(each for step in steps for each in step), answer(last, "thought")]
    tokenizer = tokenizer_with(TEMPLATES[template])
    samples = fv.conversation_samples(messages, tokenizer, tools=TOOLS)
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
@pytest.mark.parametrize(
    ("family", "template"), [("qwen3", "keeps"), ("qwen3_5_text", "strips")]
)  # test_deep_conversations.py has both families
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


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_of_the_answers_that_the_template_reproduces(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
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
    with pytest.raises(ValueError, match="the chat template must continue the prompt of message 2"):
        fv.conversation_samples(ROLLOUTS[2], tokenizer, opening="x")


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


def test_white_space_may_differ_and_the_prompt_may_open_the_reasoning():
    """Another name may hold the same reasoning."""
    opens = tokenizer_with(STRIPS.replace("{{ opening or '' }}", "<think>"))
    reply = answer(" reply\n", "a thought") | {"thinking": "a thought", "reasoning": ""}
    for last in (reply, answer("<think>x</think>y")):
        assert len(fv.conversation_samples([user("x"), last], opens)) == 1


def test_what_is_not_one_chat():
    tokenizer = tokenizer_with(STRIPS)
    for messages in ([ROLLOUTS[0], ROLLOUTS[1]], {"messages": ROLLOUTS[0]}, "a question"):
        with pytest.raises(ValueError, match="messages must be mappings"):
            fv.conversation_samples(messages, tokenizer)
    with pytest.raises(TypeError, match="add_generation_prompt"):  # it would end every answer
        fv.conversation_samples(ROLLOUTS[0], tokenizer, add_generation_prompt=True)


def test_tools_and_arguments_in_json_strings():
    """As answers of OpenAI's interface and data sets hold them; templates take them for texts."""
    tokenizer, found = tokenizer_with(STRIPS), []
    arguments = {"at": "1 o'clock", "on": ["x"]}
    for own, tools in ((arguments, TOOLS), (json.dumps(arguments), json.dumps(TOOLS))):
        message = answer("", calls=1)
        message["tool_calls"][0]["function"]["arguments"] = own
        messages = [user("a question"), message]
        found.append(fv.conversation_samples(messages, tokenizer, tools=tools))
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
