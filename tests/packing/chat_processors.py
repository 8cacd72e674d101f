"""Tiny processors of several families, saved and loaded again, and a template for their chats."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from PIL import Image

from flexvarlen.verify.corpus import train_tokenizer

WITH_TORCHVISION = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="needs torchvision: pip install torchvision"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% elif 'image' in p %}IMAGE"
    "{% elif 'video' in p %}VIDEO{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "first reply of two lines\n\n\nsecond reply\n\na question: which colour is it, and here is\n"


class Qwen3VLWithoutVideos(transformers.Qwen3VLProcessor):
    """Processors of videos need torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)


def _tokenizer(*special, **named):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer((TEXT,) * 4, 400),
        eos_token="<|im_end|>",
        pad_token="<pad>",
        extra_special_tokens=named,
    )
    tokenizer.add_tokens(["<|im_start|>", *special], special_tokens=True)
    return tokenizer


QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def _qwen(template):
    sizes = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    images = transformers.Qwen2VLImageProcessor(size=sizes)
    return Qwen3VLWithoutVideos(images, _tokenizer(*QWEN), template.replace("IMAGE", QWEN_IMAGE))


def _qwen_videos(template):
    images, videos = transformers.Qwen2VLImageProcessor(), transformers.Qwen3VLVideoProcessor()
    template = template.replace("IMAGE", QWEN_IMAGE).replace("VIDEO", "<|video_pad|>")
    return transformers.Qwen3VLProcessor(images, _tokenizer(*QWEN), videos, template)


def _gemma3(template):
    tokenizer = _tokenizer(boi_token="<boi>", eoi_token="<eoi>", image_token="<soft>")
    images = transformers.Gemma3ImageProcessor(size={"height": 8, "width": 8})
    template = template.replace("IMAGE", "<boi>")
    return transformers.Gemma3Processor(images, tokenizer, template, image_seq_length=4)


def _llava_next(template):
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 8},
        crop_size={"height": 8, "width": 8},
        image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]],
    )
    return transformers.LlavaNextProcessor(
        images,
        _tokenizer("<image>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template.replace("IMAGE", "<image>\n"),
    )


def _idefics3(template):
    images = transformers.Idefics3ImageProcessor(
        size={"longest_edge": 16}, max_image_size={"longest_edge": 8}
    )
    special = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    tokenizer, template = _tokenizer(*special), template.replace("IMAGE", "<image>")
    return transformers.Idefics3Processor(images, tokenizer, 4, template)


def _pixtral(template):
    images = transformers.PixtralImageProcessor(size={"longest_edge": 32}, patch_size=4)
    tokenizer = _tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    template = template.replace("IMAGE", "[IMG]")
    return transformers.PixtralProcessor(images, tokenizer, 4, chat_template=template)


_MAKE = {
    "qwen3_vl": _qwen,
    "gemma3": _gemma3,
    "llava_next": _llava_next,
    "idefics3": _idefics3,
    "pixtral": _pixtral,
    "qwen3_vl with videos": _qwen_videos,
}
KINDS = ["qwen3_vl", "gemma3", "llava_next"]
KINDS += [pytest.param(kind, marks=WITH_TORCHVISION) for kind in ("idefics3", "pixtral")]


def processor_of(kind, folder, template=TEMPLATE):
    """A processor, as it is loaded from a folder."""
    processor = _MAKE[kind](template)
    processor.save_pretrained(folder)
    return type(processor).from_pretrained(folder)


def published(name):
    """A kind of processor, and TRL's template for it, with marks around the answers."""
    trl = pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")
    folder = Path(trl.__file__).parent / "chat_templates"
    template = (folder / f"{name}_training.jinja").read_text(encoding="utf-8")
    kind = "qwen3_vl" if name.startswith("qwen") else name
    return kind, template.replace("<start_of_image>", "<boi>")


@cache
def image(width, height, colour):
    """A PIL image of one colour."""
    return Image.new("RGB", (width, height), colour)
