"""`patch_trainer` for models of text and images: losses and weights are the padded run's.

TRL's collators call a processor: here Qwen2.5-VL's own, but for videos, which need torchvision.
"""

from __future__ import annotations

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
    of_length,
    trl,
)
from tests.tiny_models import config_of, new_model, tokenizer

Image = pytest.importorskip("PIL.Image", reason="needs Pillow, of which images are made")
image_processing = pytest.importorskip(
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    reason="needs a transformers that processes images without torchvision",
)

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after"),
]

IMAGE, VIDEO, BEGIN, END = "t90", "t91", "t92", "t93"
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] + ' ' }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    f"{BEGIN}{IMAGE}{END} "
    "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


class Processor(Qwen2_5_VLProcessor):
    """Of text and images."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def processor():
    """An image is 4 to 16 tokens, of 8 × 8 pixels each."""
    words = tokenizer("left")
    words.add_special_tokens({"additional_special_tokens": [IMAGE, VIDEO, BEGIN, END]})
    words.image_token, words.video_token = IMAGE, VIDEO
    size = {"shortest_edge": 4 * 64, "longest_edge": 16 * 64}
    pixels = image_processing.Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, size=size
    )
    return Processor(pixels, words, TEMPLATE)


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
    words = (word for word in text.split() if word not in (IMAGE, VIDEO, BEGIN, END))
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


@cache
def saved(kind):
    """A folder, from which some trainers load a second model."""
    folder = tempfile.mkdtemp()
    new_model(kind).save_pretrained(folder)
    return folder


def model(kind, scale=1.0):
    """Another scale of the embeddings, and margins of two models are not 0."""
    found = AutoModelForImageTextToText.from_pretrained(saved(kind), attn_implementation="eager")
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
            arguments[self.second] = model(kind, 0.5)
        if self.rewards:
            arguments["reward_funcs"] = [self.rewards]
        config = getattr(trl, f"{self.trainer}Config")
        return getattr(trl, f"{self.trainer}Trainer")(
            model=model(kind),
            args=config(**settings(folder, **given)),
            train_dataset=datasets.Dataset.from_dict(self.dataset()),
            processing_class=processor(),
            **arguments,
        )


CASES = {
    "sft": Case("SFT", chats, WHOLE),
    "sft_completions": Case("SFT", completions, WHOLE),
    "dpo": Case("DPO", preferences, WHOLE, "ref_model"),
    "kto": Case("KTO", unpaired, WHOLE, "ref_model"),
    "grpo": Case("GRPO", prompts, {**GROUPS, "beta": 0.1}, rewards=of_length, generates=True),
    "rloo": Case("RLOO", prompts, {**GROUPS, "beta": 0.1}, rewards=of_length, generates=True),
    "distillation": Case(
        "Distillation", prompts_with_images, SHORT, "teacher_model", generates=True
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "qwen2_5_vl") for name in CASES), ("sft", "qwen3_vl"), ("dpo", "qwen3_5")],
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


@pytest.mark.parametrize(("name", "kind"), [("dpo", "qwen2_5_vl"), ("grpo", "qwen3_vl")])
def test_a_shared_prompt_with_images(name, kind, tmp_path, monkeypatch):
    check_shared(CASES[name], tmp_path, monkeypatch, kind=kind)
