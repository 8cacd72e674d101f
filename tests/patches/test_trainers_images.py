"""`patch_trainer` for models of text and images: losses and gradients are the padded run's.

TRL's collators call a processor: here Qwen2.5-VL's own, but for videos, which need torchvision, and
Gemma 3's.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Gemma3Processor,
    Qwen2_5_VLProcessor,
)

from tests.contract_training import settings
from tests.patches.padded_trainers import (
    BASES,
    CHOSEN,
    GROUPS,
    PLAIN,
    PROMPTS,
    REJECTED,
    SHORT,
    WHOLE,
    check_run,
    check_shared,
    datasets,
    trl,
)
from tests.tiny_models import config_of, new_model, tokenizer

Image = pytest.importorskip("PIL.Image", reason="needs Pillow, of which images are made")
image_processing = pytest.importorskip(
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    reason="needs a transformers that processes images without torchvision",
)

gemma3_images = pytest.importorskip(
    "transformers.models.gemma3.image_processing_pil_gemma3",
    reason="needs a transformers that processes images without torchvision",
)

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after"),
]

IMAGE, VIDEO, BEGIN, END = WORDS = ("t90", "t91", "t92", "t93")
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] + ' ' }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}AN_IMAGE "
    "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


class Processor(Qwen2_5_VLProcessor):
    """Of text and images."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def qwen(words):
    """An image is 4 to 16 tokens, of 8 × 8 pixels each."""
    words.image_token, words.video_token = IMAGE, VIDEO
    size = {"shortest_edge": 4 * 64, "longest_edge": 16 * 64}
    pixels = image_processing.Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, size=size
    )
    return Processor(pixels, words, TEMPLATE.replace("AN_IMAGE", f"{BEGIN}{IMAGE}{END}"))


def gemma(words):
    """An image is 4 tokens of 4 × 4 pixels each, after an empty line and before another."""
    words.image_token, words.boi_token, words.eoi_token = IMAGE, BEGIN, END
    words.image_token_id, words.boi_token_id = words.convert_tokens_to_ids([IMAGE, BEGIN])
    pixels = gemma3_images.Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
    template = TEMPLATE.replace("AN_IMAGE", BEGIN)
    return Gemma3Processor(pixels, words, template, image_seq_length=4)


def processor(kind):
    """Of tiny images."""
    words = tokenizer("left")
    words.add_special_tokens({"additional_special_tokens": list(WORDS)})
    return gemma(words) if kind == "gemma3" else qwen(words)


@cache
def pictures():
    """Of eight examples: one, two or none, of different sizes."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for number in range(8):
        shapes = [(16, 8 * (2 + number % 3), 3)] * (number + 1) if number % 3 < 2 else []
        draw = [torch.randint(256, shape, generator=generator) for shape in shapes[:2]]
        made.append([Image.fromarray(x.to(torch.uint8).numpy()) for x in draw])
    return made


def message(role, text):
    """Without the words that stand for images."""
    words = (word for word in text.split() if word not in WORDS)
    return [{"role": role, "content": " ".join(words)}]


def asked():
    return [message("user", x) for x in PROMPTS]


def answered(texts):
    return [message("assistant", x) for x in texts]


def chats():
    turns = zip(asked(), answered(CHOSEN), strict=True)
    return {"images": pictures(), "messages": [[*a, *b] for a, b in turns]}


def completions():
    return {"images": pictures(), "prompt": asked(), "completion": answered(CHOSEN)}


def preferences():
    chosen, rejected = answered(CHOSEN), answered(REJECTED)
    return {"images": pictures(), "prompt": asked(), "chosen": chosen, "rejected": rejected}


def unpaired():
    return completions() | {"label": [i % 2 == 0 for i in range(8)]}


def prompts():
    return {"images": pictures(), "prompt": asked()}


def prompts_with_images():
    """TRL's DistillationTrainer takes no batches in which some prompts have none."""
    pairs = [(images, x) for images, x in zip(pictures(), asked(), strict=True) if images]
    return {"images": [x for x, _ in pairs], "prompt": [x for _, x in pairs]}


def of_length(completions, **_):
    return [float(len(message["content"]) % 7) for (message,) in completions]


@cache
def saved(kind):
    """A model that knows its folder, from which some trainers load a second one."""
    folder = tempfile.mkdtemp()
    new_model(kind).save_pretrained(folder)
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")


def model(kind, scale=1.0):
    """Another scale of the embeddings, and margins of two models are not 0."""
    found = copy.deepcopy(saved(kind))
    found.get_input_embeddings().weight.data *= scale
    return found


@dataclass(frozen=True)
class Case:
    """A trainer of TRL, and what it is made with; see `tests.patches.padded_trainers.Case`."""

    trainer: str
    dataset: Callable[[], dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    second: str = ""
    rewards: Callable[..., Any] | None = None
    generates: bool = False
    reads_padding: tuple[str, ...] = ()

    def make(self, folder, *, kind="qwen2_5_vl", **changes):
        """The trainer."""
        given = {**PLAIN, "learning_rate": 0.01, **self.settings, **changes}
        arguments: dict[str, Any] = {}
        if self.second:
            arguments[self.second] = model(kind, -0.5)
        if self.rewards:
            arguments["reward_funcs"] = [self.rewards]
        config = getattr(trl, f"{self.trainer}Config")
        return getattr(trl, f"{self.trainer}Trainer")(
            model=model(kind),
            args=config(**settings(folder, **given)),
            train_dataset=datasets.Dataset.from_dict(self.dataset()),
            processing_class=processor(kind),
            **arguments,
        )


WITHOUT_IMAGES = {"generation_kwargs": {"suppress_tokens": [int(word[1:]) for word in WORDS]}}
OF_REWARDS = {**GROUPS, **WITHOUT_IMAGES, "beta": 0.1}
CASES = {
    "sft": Case("SFT", chats, WHOLE),
    "sft_completions": Case("SFT", completions, WHOLE),
    "dpo": Case("DPO", preferences, WHOLE, "ref_model"),
    "kto": Case("KTO", unpaired, WHOLE, "ref_model"),
    "grpo": Case("GRPO", prompts, OF_REWARDS, rewards=of_length, generates=True),
    # Its gradients are not divided by the number of tokens: a larger step doubles the rounding.
    "rloo": Case(
        "RLOO",
        prompts,
        {**OF_REWARDS, "learning_rate": 1e-4},
        rewards=of_length,
        generates=True,
    ),
    "distillation": Case(
        "Distillation",
        prompts_with_images,
        {**SHORT, **WITHOUT_IMAGES},
        "teacher_model",
        generates=True,
    ),
}


BREADTH = ("sft_completions", "rloo")  # as sft, and as grpo


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "qwen2_5_vl") for name in CASES if name not in BREADTH), ("dpo", "gemma3")]
    + [pytest.param(name, "qwen2_5_vl", marks=pytest.mark.slow) for name in BREADTH]
    + [
        pytest.param(name, kind, marks=pytest.mark.slow)
        for name, kind in (
            *(("sft", "qwen3_vl"), ("sft", "qwen3_5"), ("dpo", "qwen3_5"), ("grpo", "qwen3_5")),
            *(("sft", "gemma3"), ("grpo", "gemma3")),
        )
    ],
)
def test_a_run_learns_what_the_padded_one_learns(name, kind, tmp_path):
    check_run(CASES[name], tmp_path, kind=kind)


def reward_model(kind="qwen3_5"):
    torch.manual_seed(1)
    config = config_of(kind)
    config.num_labels = config.text_config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")


def test_rewards_of_text_alone(tmp_path):
    """TRL's RewardTrainer takes no images."""
    case = replace(BASES["reward"], model=reward_model)
    check_run(case, tmp_path, kind="qwen3_5", learning_rate=0.01)


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param("dpo", "qwen2_5_vl", marks=pytest.mark.slow), ("grpo", "qwen3_vl")],
)
def test_a_shared_prompt_with_images(name, kind, tmp_path, monkeypatch):
    check_shared(CASES[name], tmp_path, monkeypatch, kind=kind)
