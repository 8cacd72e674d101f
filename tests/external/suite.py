"""The tests: transformers' `ModelTesterMixin` over tiny models, a class for each model and way.

Not collected by `make test`: `python -m tests.external` puts `transformers_tests` on the path.
"""

from __future__ import annotations

import sys
import unittest
from typing import Any

import torch
import transformers
from transformers import set_seed
from transformers_tests.test_modeling_common import ModelTesterMixin
from transformers_tests.test_training_mixin import TrainingTesterMixin

from tests.external.generation import GenerationCases
from tests.external.our_attention import WAYS, is_patched, name_of
from tests.external.tables import MODELS, WITHOUT_ATTENTIONS, class_name

HEADS = (
    "Model",
    "ForCausalLM",
    "ForSequenceClassification",
    "ForQuestionAnswering",
    "ForTokenClassification",
)


class TinyModel:
    """What the mixins ask a tester for: sizes, a config, a batch `[batch_size, seq_length]`.

    Its padding: the rows hold 1 to 7 tokens, padded right or left in turn; the first is whole.
    """

    batch_size, seq_length, vocab_size = 8, 7, 99
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    is_training = True

    def __init__(self, model: str, attn_implementation: str | None) -> None:
        prefix, self._extra = MODELS[model]
        if attn_implementation is not None:
            self._extra = {**self._extra, "attn_implementation": attn_implementation}
        self.config_class = getattr(transformers, f"{prefix}Config")
        names = [prefix + head for head in HEADS if hasattr(transformers, prefix + head)]
        self.classes = tuple(getattr(transformers, name) for name in names)
        self.causal_lm_class = self.classes[1]

    def get_config(self) -> Any:
        """A config of its own."""
        return self.config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=48,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            max_position_embeddings=128,
            # With 0.02 attention is almost uniform: what it sees would hardly matter.
            initializer_range=0.1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self._extra,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """A config and a batch."""
        rows, tokens = torch.arange(self.batch_size)[:, None], torch.arange(self.seq_length)
        padding = rows % self.seq_length
        mask = torch.where(rows % 2 == 0, tokens < self.seq_length - padding, tokens >= padding)
        ids = torch.randint(3, self.vocab_size, mask.shape)
        return self.get_config(), {"input_ids": ids, "attention_mask": mask.long()}


class Suite(ModelTesterMixin, TrainingTesterMixin, GenerationCases):
    """All tests; a class of each model and way is made of it below."""

    model_name, way = "", ""
    backend = "sdpa"
    model_tester: Any = None

    def setUp(self) -> None:
        set_seed(0)  # the mixin draws batches and weights, and seeds only some of them
        by_name = name_of(self.backend) if self.way == "name" else None
        self.model_tester = TinyModel(self.model_name, by_name)

    @property
    def has_attentions(self) -> bool:
        """False in tests of which only the part with output_attentions=True cannot run."""
        return self.way == "stock" or self._testMethodName not in WITHOUT_ATTENTIONS

    def _prepare_config_and_inputs_for_retain_grad_hidden_states_attentions(self) -> Any:
        """The mixin makes this test's models eager; a config that says so may ask for weights."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config._attn_implementation = "eager"
        return config, inputs

    # ---- ours ----

    def test_ours_is_what_runs(self) -> None:
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            model, before = model_class(config), self.hooks.calls
            assert model.config._attn_implementation == name_of(self.backend)
            assert is_patched(model) == (self.way == "patched")
            with torch.no_grad():
                model(**inputs)
            assert self.hooks.calls - before == self.model_tester.num_hidden_layers

    def test_ours_inference_equivalence(self) -> None:
        """transformers' comparison of FlashAttention with eager, in bf16, on ours."""
        for side in ("left", "right"):
            with torch.no_grad():
                self.flash_attn_inference_equivalence("sdpa", padding_side=side)

    def test_ours_set_attention_dynamically(self) -> None:
        """To eager and back, the outputs are those of the kernel in force."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        whole = {"input_ids": inputs["input_ids"]}
        for model_class in self.all_model_classes:
            model = model_class(config).eval()
            names, outputs, calls = [], [], []
            for name in ("sdpa", "eager", "sdpa"):
                model.set_attn_implementation(name)
                before = self.hooks.calls
                with torch.no_grad():
                    outputs.append(model(**whole)[0])
                names.append(model.config._attn_implementation)
                calls.append(self.hooks.calls - before)
            assert names == [name_of(self.backend), "eager", name_of(self.backend)]
            assert calls == [2, 0, 2]
            assert torch.equal(outputs[0], outputs[2])
            torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)

    def test_ours_padding_free_matches_padded(self) -> None:
        """The documents of a padded batch in one row, told apart by position_ids alone."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        real = inputs["attention_mask"].bool()
        positions = (inputs["attention_mask"].cumsum(-1) - 1)[real][None]
        for model_class in self.all_model_classes[:2]:
            model = model_class(config).eval()
            with torch.no_grad():
                padded = model(**inputs)[0][real]
                packed = model(inputs["input_ids"][real][None], position_ids=positions)[0][0]
            torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-5)


def _make_classes() -> None:
    module = sys.modules[__name__]
    for model in MODELS:
        for way in WAYS:
            attributes = {
                "model_name": model,
                "way": way,
                "all_model_classes": TinyModel(model, None).classes,
                "__module__": __name__,
            }
            name = class_name(model, way)
            setattr(module, name, type(name, (Suite, unittest.TestCase), attributes))


_make_classes()
