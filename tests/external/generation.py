"""Generation: a model that runs our attention writes what its eager twin writes.

transformers' own generation tests are not in its source package. Greedy, sampling, beams, static
cache, chunked prefill and no cache, of left-padded prompts, are in
`tests/patches/attention/test_generate.py`, with
more backends; here are the ways into `generate` that it leaves out, and short ones of its own for
the models of this suite.

Shapes: prompts `[3, 9]`, left-padded to 9, 5 and 2 tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from parameterized import parameterized
from transformers_tests.generation.test_utils import GenerationTesterMixin

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "beams_sampled": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "static_cache": {"cache_implementation": "static"},
    "no_cache": {"use_cache": False},
    "repetition_penalty": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}
# Logits of two kernels in fp32 whose outputs are of the order of 1; transformers' tests of
# generation use the same.
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


class GenerationCases(GenerationTesterMixin):
    """Cases for a test class that has `model_tester` and `all_generative_model_classes`."""

    def _twins(self) -> tuple[Any, Any]:
        """A model that runs our attention, and one with the same weights that is eager."""
        (model_class,) = self.all_generative_model_classes
        config = self.model_tester.get_config()
        # Weights large enough that the next token depends on the attention, and no early end.
        config.initializer_range, config.eos_token_id = 0.5, None
        torch.manual_seed(0)
        ours = model_class(config).eval()
        twin_config = copy.deepcopy(config)
        twin_config._attn_implementation = "eager"
        twin = model_class(twin_config).eval()
        twin.load_state_dict(ours.state_dict())
        assert twin.config._attn_implementation == "eager"
        return ours, twin

    def _prompts(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, self.model_tester.vocab_size, (3, 9), generator=generator)
        mask = (torch.arange(9) >= torch.tensor([[0], [4], [7]])).long()
        return {"input_ids": ids * mask, "attention_mask": mask}

    def _generate(self, model: Any, **arguments: Any) -> Any:
        torch.manual_seed(2)
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        return model.generate(**{**self._prompts(), **settings, **arguments})

    def _assert_same(self, **arguments: Any) -> None:
        ours, twin = self._twins()
        found, expected = (self._generate(model, **arguments) for model in (ours, twin))
        assert torch.equal(found, expected), f"{found}\n{expected}"

    @parameterized.expand([(name,) for name in CASES])
    def test_generate(self, name: str) -> None:
        self._assert_same(**CASES[name])

    def test_generate_with_scores(self) -> None:
        ours, twin = self._twins()
        wanted = {"return_dict_in_generate": True, "output_logits": True}
        found, expected = (self._generate(model, **wanted) for model in (ours, twin))
        assert torch.equal(found.sequences, expected.sequences)
        for ours_logits, eager_logits in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours_logits, eager_logits, **CLOSE)

    def test_generate_left_padding_is_not_seen(self) -> None:
        """A left-padded prompt gives what it gives alone, without padding."""
        ours, _ = self._twins()
        together, prompts = self._generate(ours), self._prompts()
        for row, mask in enumerate(prompts["attention_mask"].bool()):
            alone = prompts["input_ids"][row][mask][None]
            found = self._generate(ours, input_ids=alone, attention_mask=torch.ones_like(alone))
            assert torch.equal(found[0, -8:], together[row, -8:])

    def test_generate_from_embeddings(self) -> None:
        ours, twin = self._twins()
        embeds = ours.get_input_embeddings()(self._prompts()["input_ids"]).detach()
        found, expected = (
            self._generate(model, input_ids=None, inputs_embeds=embeds) for model in (ours, twin)
        )
        assert torch.equal(found, expected)

    def test_generate_goes_on_from_its_cache(self) -> None:
        """Eight tokens at once are four, and from their cache four more."""
        ours, _ = self._twins()
        at_once = self._generate(ours)
        first = self._generate(ours, max_new_tokens=4, return_dict_in_generate=True)
        mask = torch.nn.functional.pad(self._prompts()["attention_mask"], (0, 4), value=1)
        then = self._generate(
            ours,
            input_ids=first.sequences,
            attention_mask=mask,
            past_key_values=first.past_key_values,
            max_new_tokens=4,
        )
        assert torch.equal(then, at_once)

    @parameterized.expand([("assistant",), ("prompt_lookup",)])
    def test_generate_assisted(self, how: str) -> None:
        """Several candidate tokens at once come to a cache that is not empty."""
        ours, twin = self._twins()
        prompt = {name: x[:1] for name, x in self._prompts().items()}
        help_of = {"assistant": {"assistant_model": ours}, "prompt_lookup": {}}[how]
        if how == "prompt_lookup":
            prompt["input_ids"] = prompt["input_ids"][:, :3].repeat(1, 3)
            help_of = {"prompt_lookup_num_tokens": 3}
        found = self._generate(ours, **prompt, **help_of)
        assert torch.equal(found, self._generate(twin, **prompt))
