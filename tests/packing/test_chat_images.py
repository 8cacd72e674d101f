"""`tokenize_chat` with a processor: tokens and tensors are the processor's, answers are learned."""

from __future__ import annotations

import copy

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from flexvarlen.packing import PackedCollator, conversation_samples, tokenize_chat
from tests.packing.chat_processors import (
    KINDS,
    TEMPLATE,
    WITH_TORCHVISION,
    image,
    processor_of,
    published,
)
from tests.packing.chat_templates import SPECIAL

FIRST, SECOND = "first reply\n\nof two lines", "second reply"


def text(content):
    return {"type": "text", "text": content}


def picture(width=30, height=20, colour="red", **part):
    return {"type": "image", **(part or {"image": image(width, height, colour)})}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def answer(content, **also):
    return {"role": "assistant", "content": [text(content)], **also}


CHAT = [
    user(text("a question:\n"), picture(), picture(64, 32, "blue"), text("\nwhich colour?")),
    answer(FIRST),
    {"role": "tool", "content": [picture(16, 16, "green"), text("here")]},
    answer(SECOND),
    {"role": "assistant", "content": [text("a sketch"), picture(40, 40)], "weight": 0},
    user(text("and "), picture(8, 48)),
    answer(SECOND),
]
PLAIN = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": FIRST}]
NOT_COLUMNS = {"input_ids", "attention_mask", "assistant_masks", "labels"}


@pytest.fixture
def processor(request, tmp_path):
    return processor_of(getattr(request, "param", "qwen3_vl"), tmp_path)


def assert_same(found, expected):
    """Equal columns, of integers or of tensors."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(found[name], value), name


def assert_as_processed(document, chat, processor):
    """The tokens and tensors of a document are those of the processor for a whole chat."""
    expected = processor.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_tensors="pt"
    )
    ids, length = document["input_ids"], len(document["input_ids"])
    own = expected["input_ids"][0].tolist()
    assert own[:length] == ids
    assert not processor.tokenizer.decode(own[length:]).strip()
    assert document.keys() - NOT_COLUMNS == expected.keys() - NOT_COLUMNS
    for name in document.keys() - NOT_COLUMNS:
        if name.endswith("token_type_ids"):
            assert document[name] == expected[name][0, :length].tolist()
            assert max(document[name]) > 0
        else:
            assert torch.equal(document[name], expected[name]), name


def learned(document, processor):
    pairs = zip(document["input_ids"], document["assistant_masks"], strict=True)
    return processor.tokenizer.decode([token for token, mask in pairs if mask])


@pytest.mark.parametrize("processor", KINDS, indirect=True)
def test_a_chat_is_what_the_processor_returns_and_its_answers_are_learned(processor):
    before = copy.deepcopy(CHAT)
    (document,) = tokenize_chat(CHAT, processor)
    assert_as_processed(document, CHAT, processor)
    assert learned(document, processor) == "".join(
        f"{x}<|im_end|>" for x in (FIRST, SECOND, SECOND)
    )
    assert before == CHAT
    (last,) = tokenize_chat(CHAT, processor, train="last")
    assert learned(last, processor) == f"{SECOND}<|im_end|>"
    assert_same(last, document | {"assistant_masks": last["assistant_masks"]})


def processor_of_published(name, folder):
    """A processor with a template of TRL's, and the special tokens that it writes."""
    kind, template = published(name)
    processor = processor_of(kind, folder, template)
    processor.tokenizer.add_tokens(sorted(set(SPECIAL.findall(template))), special_tokens=True)
    return processor


@pytest.mark.parametrize("name", ["gemma3", "llava_next", "qwen2_5_vl", "qwen3_vl"])
def test_published_templates_and_their_marks(name, tmp_path):
    """transformers' masks also have the white space behind an answer."""
    processor = processor_of_published(name, tmp_path)
    chat = [CHAT[0], answer(FIRST), CHAT[5], answer(SECOND)]
    (document,) = tokenize_chat(chat, processor)
    assert_as_processed(document, chat, processor)
    marked = processor.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = list(zip(marked["input_ids"][0], marked["assistant_masks"][0], strict=True))
    marks = processor.decode([token for token, mask in pairs if mask])
    found = learned(document, processor)
    if marks:  # transformers 5.17 marks nothing in a chat with images
        assert "".join(found.split()) == "".join(marks.split())
    for content in (FIRST, SECOND):
        assert found.count(content) == 1


def test_the_template_of_qwen3_6(tmp_path):
    """It removes earlier reasoning; an empty one shares a token with the end of the prompt."""
    processor = processor_of_published("qwen3_6", tmp_path)
    chat = [CHAT[0], answer(FIRST), CHAT[5], answer(SECOND)]
    documents = tokenize_chat(chat, processor)
    assert [learned(document, processor) for document in documents] == [
        f"\n</think>\n\n{content}<|im_end|>" for content in (FIRST, SECOND)
    ]
    assert [len(document["image_grid_thw"]) for document in documents] == [2, 3]
    chat = [CHAT[0], answer(FIRST, reasoning_content="first")]
    (document,) = tokenize_chat(chat, processor)
    assert_as_processed(document, chat, processor)
    assert learned(document, processor) == f"first\n</think>\n\n{FIRST}<|im_end|>"


@pytest.mark.parametrize("processor", KINDS, indirect=True)
def test_a_chat_of_text_is_that_of_the_tokenizer(processor):
    processor.tokenizer.chat_template = processor.chat_template
    assert tokenize_chat(PLAIN, processor) == tokenize_chat(PLAIN, processor.tokenizer)
    assert conversation_samples(PLAIN, processor) == conversation_samples(
        PLAIN, processor.tokenizer
    )


def test_images_are_processed_once(processor, monkeypatch):
    call, seen = type(processor.image_processor).__call__, []
    monkeypatch.setattr(
        type(processor.image_processor),
        "__call__",
        lambda self, images, **k: seen.append(len(images[0])) or call(self, images, **k),
    )
    tokenize_chat(CHAT, processor)
    assert seen == [5]


def test_the_template_writes_all_special_tokens(processor):
    (expected,) = tokenize_chat(CHAT, processor)
    start = ("<|im_end|>", processor.tokenizer.eos_token_id)
    adds = TemplateProcessing(single=f"{start[0]} $A", special_tokens=[start])
    processor.tokenizer.backend_tokenizer.post_processor = adds
    assert processor.tokenizer("a")["input_ids"][0] == start[1]
    (document,) = tokenize_chat(CHAT, processor)
    assert_same(document, expected)


@pytest.mark.parametrize("processor", KINDS, indirect=True)
def test_a_separate_document_has_its_own_images(processor):
    """The template removes the reasoning of earlier answers, so each turn is a document."""
    chat = [*CHAT[:1], answer(FIRST, reasoning_content="first"), *CHAT[2:]]
    first, second = tokenize_chat(chat, processor)
    assert_as_processed(first, chat[:2], processor)
    assert_as_processed(second, chat, processor)
    assert learned(first, processor) == f"<think>first</think>{FIRST}<|im_end|>"
    assert learned(second, processor) == f"{SECOND}<|im_end|>" * 2
    samples = conversation_samples(chat, processor)
    assert len(samples) == 3
    for sample, end in zip(samples, (2, 4, 7), strict=True):
        assert_as_processed(sample, chat[:end], processor)
        ids = [x for x in sample["labels"] if x != -100]
        assert sample["input_ids"][-len(ids) :] == ids


def test_only_documents_with_images_have_columns(processor):
    chat = [PLAIN[0], answer(FIRST, reasoning_content="first"), user(picture()), answer(SECOND)]
    first, second = tokenize_chat(chat, processor)
    assert first.keys() == {"input_ids", "assistant_masks"}
    assert_as_processed(second, chat, processor)


def test_images_may_be_paths_and_arrow_may_fill_in_none(processor, tmp_path):
    image(30, 20, "red").save(tmp_path / "red.png")
    path = str(tmp_path / "red.png")
    (expected,) = tokenize_chat([user(picture(), text("which?")), answer(FIRST)], processor)
    forms = (
        picture(path=path),
        picture(image=path, text=None, url=None),
        {"type": "image_url", "image_url": {"url": path}},
        {"type": "image_url", "image_url": path},
    )
    for part in forms:
        chat = [user(part, text("which?") | {"image": None}), answer(FIRST)]
        (document,) = tokenize_chat(chat, processor)
        assert_same(document, expected)


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        (picture(index=0), ValueError, "the image of message 0 must be given under one of image, "),
        (picture(path="a", url="b"), ValueError, "the image of message 0 .* got 2 of them"),
        ({"type": "audio", "path": "a"}, NotImplementedError, "message 0 has audio"),
        (text("<|image_pad|>"), ValueError, r"the chat template must .* up to message 0, .* got "),
        (text("<|video_pad|>"), ValueError, r"the chat template must write one placeholder .* \["),
    ],
)
def test_a_part_that_cannot_be_processed_is_refused(processor, part, error, message):
    with pytest.raises(error, match=message):
        tokenize_chat([user(part, picture()), answer(FIRST)], processor)


def test_a_text_chat_with_a_placeholder_is_refused(processor):
    with pytest.raises(ValueError, match=r"which are \[\], got \['image'\]"):
        tokenize_chat([user(text("<|image_pad|>")), answer(FIRST)], processor)


def test_an_answer_with_a_placeholder_is_refused(processor):
    with pytest.raises(ValueError, match=r"message 1, .* got \['image', 'image'\]"):
        tokenize_chat([user(picture()), answer("<|image_pad|>")], processor)


def test_an_answer_with_an_image_is_not_trained_on(processor):
    drawn = {"role": "assistant", "content": [text("a sketch"), picture()]}
    with pytest.raises(ValueError, match="content must be a string, or parts of type text"):
        tokenize_chat([user(text("draw")), drawn], processor)


def test_a_chat_with_images_needs_a_processor(processor):
    processor.tokenizer.chat_template = processor.chat_template
    with pytest.raises(ValueError, match="a chat with images needs the model's processor, got "):
        tokenize_chat(CHAT, processor.tokenizer)


def test_recorded_prompts_have_no_images(processor):
    recorded = answer(FIRST, token_ids=[7], prompt_token_ids=[5])
    with pytest.raises(NotImplementedError, match="cannot have prompt_token_ids"):
        tokenize_chat([user(picture()), recorded], processor)


def test_recorded_answers_are_reproduced(processor):
    chat = [user(picture(), text("which?")), answer(FIRST)]
    (expected,) = conversation_samples(chat, processor)
    ids = [x for x in expected["labels"] if x != -100]
    (sample,) = conversation_samples([chat[0], answer(FIRST, token_ids=ids)], processor)
    assert_same(sample, expected)
    with pytest.raises(ValueError, match="does not reproduce the token_ids of message 1"):
        conversation_samples([chat[0], answer(FIRST, token_ids=ids[1:])], processor)


def test_a_template_without_the_image_is_refused(tmp_path):
    processor = processor_of("qwen3_vl", tmp_path, TEMPLATE.replace("IMAGE", ""))
    with pytest.raises(ValueError, match=r"\['image', 'image'\], got \[\]; use the processor's"):
        tokenize_chat(CHAT[:2], processor)


def test_a_prompt_that_ends_inside_a_token(tmp_path):
    """An engine tokenizes it alone; Qwen3.5's ends with a line break, and another follows."""
    template = TEMPLATE.replace("<|im_start|>{{ m.role }}\n", "<|im_start|>{{ m.role }}\nfi")
    template = template.replace("<|im_start|>assistant\n", "<|im_start|>assistant\nfi")
    processor = processor_of("qwen3_vl", tmp_path, template)
    chat = [user(picture(), text("which?")), answer("rst reply")]
    (document,) = tokenize_chat(chat, processor)
    expected = processor.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_tensors="pt"
    )
    own, length = expected["input_ids"][0].tolist(), len(document["input_ids"])
    assert document["input_ids"] != own[:length]
    assert learned(document, processor) == "rst reply<|im_end|>"
    assert processor.tokenizer.decode(document["input_ids"]) + "\n" == processor.decode(own)
    image_token = processor.image_token_id
    assert document["mm_token_type_ids"] == [int(x == image_token) for x in document["input_ids"]]
    assert torch.equal(document["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("prompt", ["", "fi"])
def test_values_that_do_not_depend_on_the_token(tmp_path, monkeypatch, prompt):
    """They are the processor's where its tokens are, and otherwise unknown."""
    template = TEMPLATE.replace("assistant\n", f"assistant\n{prompt}")
    template = template.replace("m.role }}\n", f"m.role }}}}\n{prompt}")
    processor = processor_of("qwen3_vl", tmp_path, template)
    monkeypatch.setattr(
        processor, "create_mm_token_type_ids", lambda ids: [list(range(len(x))) for x in ids]
    )
    chat = [user(picture(), text("which?")), answer("rst reply")]
    if prompt:
        with pytest.raises(ValueError, match="mm_token_type_ids must depend on the token alone"):
            tokenize_chat(chat, processor)
    else:
        (document,) = tokenize_chat(chat, processor)
        assert document["mm_token_type_ids"] == list(range(len(document["input_ids"])))


def test_a_processor_that_changes_the_text_is_refused(processor, monkeypatch):
    call = type(processor).__call__
    monkeypatch.setattr(
        type(processor), "__call__", lambda self, text, **k: call(self, text=[text[0] + "a"], **k)
    )
    with pytest.raises(ValueError, match="must return the tokens of its tokenizer for the chat up"):
        tokenize_chat(CHAT, processor)


def test_a_processor_that_does_not_say_where_images_are(processor, monkeypatch):
    call = type(processor).__call__

    def without_offsets(self, *arguments, return_text_replacement_offsets, **options):
        return call(self, *arguments, **options)

    monkeypatch.setattr(type(processor), "__call__", without_offsets)
    with pytest.raises(NotImplementedError, match="does not tell where it expands images"):
        tokenize_chat(CHAT, processor)


@pytest.mark.parametrize("processor", KINDS, indirect=True)
def test_documents_are_collated_with_others(processor):
    (images,), (plain,) = tokenize_chat(CHAT, processor), tokenize_chat(PLAIN, processor)
    batch = PackedCollator(processor)([plain, images, plain])
    assert batch["input_ids"][0].tolist() == [
        token for document in (plain, images, plain) for token in document["input_ids"]
    ]
    labels = batch["labels"][0]
    found = processor.decode(labels[labels != -100].tolist())
    assert found == "".join(learned(document, processor) for document in (plain, images, plain))
    assert torch.equal(batch["pixel_values"], images["pixel_values"])


@WITH_TORCHVISION
def test_videos(tmp_path):
    processor = processor_of("qwen3_vl with videos", tmp_path)
    frames = torch.arange(4 * 3 * 64 * 64).reshape(4, 3, 64, 64).byte().numpy()
    video = {"type": "video", "video": frames}
    chat = [user(picture(64, 64), video, text("which?")), answer(FIRST), user(video), answer("b")]
    (document,) = tokenize_chat(chat, processor)
    assert len(document["video_grid_thw"]) == 2
    assert set(document["mm_token_type_ids"]) == {0, 1, 2}
    assert_as_processed(document, chat, processor)
    assert learned(document, processor) == f"{FIRST}<|im_end|>b<|im_end|>"
