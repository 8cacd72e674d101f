"""The trainers of the suite "preference", and batches as their own collators make them.

TRL and datasets are imported when a trainer is made: they may be missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from flexvarlen.bench.suites.model.geometries import GEOMETRIES
from flexvarlen.bench.suites.training import preference_images, texts
from flexvarlen.bench.suites.training.preference_cases import PreferenceCase

Batch = dict[str, Any]
Settings = dict[str, Any]

SPECIAL = {"<pad>": 0, "</s>": 1, "<unk>": 2}
KINDS = 3
"""Labels of a text in classification."""


class Draws:
    """Random prompts and answers of a case."""

    def __init__(self, case: PreferenceCase) -> None:
        self.case, self.rng = case, random.Random(case.seed)
        config = GEOMETRIES[case.geometry](case.layers)
        names = ("image_token_id", "vision_start_token_id")
        self.vocab_size = min(getattr(config, name, case.vocab_size) for name in names)

    def prompt(self) -> list[int]:
        return self.tokens(self.case.prompt)

    def answer(self) -> list[int]:
        return self.tokens(self.rng.randint(self.case.shortest, self.case.longest))

    def topics(self) -> list[list[int]]:
        every = texts.topic_ids(self.vocab_size, self.case.longest)
        return self.rng.sample(every, self.case.samples)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(len(SPECIAL), self.vocab_size) for _ in range(count)]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        labels: outputs of the head that classifies; None: a language model.
        has_reference: whether a reference model takes part.
        trainer: policy, reference model, settings -> the trainer.
        batch: the trainer's batch on the host.
        packed: the same batch as packed rows on the host.
        cancels: whether the loss is a sum of terms of size 1 that may cancel, as advantages do
            over answers of equal length: its rounding is then theirs.
    """

    labels: int | None
    has_reference: bool
    trainer: Callable[[PreTrainedModel, PreTrainedModel | None, Settings], Any]
    batch: Callable[[Any, Draws], Batch]
    cancels: bool = False
    packed: Callable[[Any, Draws], Batch] | None = None

    def new_model(self, case: PreferenceCase, device: torch.device) -> PreTrainedModel:
        """In train mode, with random weights, always the same."""
        changes: dict[str, Any] = {"pad_token_id": SPECIAL["<pad>"], "use_cache": False}
        if self.labels is None:
            maker = AutoModelForImageTextToText if case.images else AutoModelForCausalLM
            return case.new_model(maker, device, **changes)
        changes["num_labels"] = self.labels
        return case.new_model(AutoModelForSequenceClassification, device, **changes)


def mask_of(batch: Batch) -> torch.Tensor:
    """`[B, S]`, 0 at padding; GRPO has a prompt's and a completion's."""
    if "attention_mask" in batch:
        mask: torch.Tensor = batch["attention_mask"]
        return mask
    return torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def tokenizer() -> PreTrainedTokenizerFast:
    """Knows the special tokens only: batches are made of ids."""
    inner = Tokenizer(WordLevel(SPECIAL, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def _trl(
    kind: str, model: PreTrainedModel, settings: Settings, columns: Sequence[str], **options: Any
) -> Any:
    """TRL's trainer of that kind, on one line of text, as its constructor wants one."""
    import trl
    from datasets import Dataset

    return getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(**settings),
        train_dataset=Dataset.from_dict({name: ["text"] for name in columns}),
        processing_class=tokenizer(),
        **options,
    )


# ---- DPO ----


def _dpo(model: PreTrainedModel, reference: PreTrainedModel | None, settings: Settings) -> Any:
    columns = ("prompt", "chosen", "rejected")
    return _trl("DPO", model, settings | {"max_length": None}, columns, ref_model=reference)


def _pairs(draws: Draws) -> Iterator[tuple[list[int], list[int], list[int]]]:
    for _ in range(draws.case.samples):
        yield draws.prompt(), draws.answer(), draws.answer()


def _dpo_batch(trainer: Any, draws: Draws) -> Batch:
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    examples = [dict(zip(names, pair, strict=True)) for pair in _pairs(draws)]
    return dict(trainer.data_collator(examples))


# ---- reward model ----


def _reward(model: PreTrainedModel, _: PreTrainedModel | None, settings: Settings) -> Any:
    return _trl("Reward", model, settings | {"max_length": None}, ("chosen", "rejected"))


def _reward_batch(trainer: Any, draws: Draws) -> Batch:
    examples = [
        {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
        for prompt, chosen, rejected in _pairs(draws)
    ]
    return dict(trainer.data_collator(examples))


# ---- GRPO ----


def _grpo(model: PreTrainedModel, _: PreTrainedModel | None, settings: Settings) -> Any:
    rewards = {"reward_funcs": lambda completions, **_: [0.0 for _ in completions]}
    trainer = _trl("GRPO", model, settings, ("prompt",), **rewards)
    trainer.current_gradient_accumulation_steps = 1  # train() would set it
    return trainer


def _grpo_batch(trainer: Any, draws: Draws) -> Batch:
    """A batch as `_generate_and_score_completions` returns it: prompts padded left, others right.

    The rewards are random, and compared within each group.
    """
    count, group = draws.case.samples, draws.case.group
    prompts = [draws.prompt() for _ in range(count // group)]
    answers = [torch.tensor(draws.answer()) for _ in range(count)]
    lengths = torch.tensor([len(ids) for ids in answers])
    prompt_ids = torch.tensor(prompts).repeat_interleave(group, dim=0)
    rewards = torch.tensor([draws.rng.random() for _ in range(count)]).view(-1, group)
    spread = rewards.std(dim=1, keepdim=True)
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": torch.nn.utils.rnn.pad_sequence(answers, batch_first=True),
        "completion_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
        "advantages": ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).flatten(),
        "num_items_in_batch": lengths.sum(),
    }
    return preference_images.prompts(draws, batch) if draws.case.images else batch


# ---- transformers' Trainer: classification, documents with images ----


def _trainer(model: PreTrainedModel, _: PreTrainedModel | None, settings: Settings) -> Any:
    return Trainer(
        model=model,
        args=TrainingArguments(**settings),
        data_collator=DataCollatorWithPadding(tokenizer()),
    )


def _classification_batch(trainer: Any, draws: Draws) -> Batch:
    examples = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": draws.rng.randrange(KINDS)}
        for ids in draws.topics()
    ]
    return dict(trainer.data_collator(examples))


TASKS = {
    "dpo": Task(None, True, _dpo, _dpo_batch),
    "grpo": Task(None, False, _grpo, _grpo_batch, cancels=True),
    "reward": Task(1, False, _reward, _reward_batch),
    "classification": Task(KINDS, False, _trainer, _classification_batch),
    "images": Task(
        None, False, _trainer, preference_images.padded, packed=preference_images.packed
    ),
}
