"""What is deselected, each with its reason, and what must pass.

A deselected test runs all the same: it must fail, with the error given here. One that passes, or
fails otherwise, fails the suite.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

MODELS = ("llama", "qwen3", "qwen3_windows")


def class_name(model: str, way: str) -> str:
    """The test class of a model and a way: `Qwen3WindowsPatched`."""
    return "".join(part.title() for part in (*model.split("_"), way))


@dataclass(frozen=True)
class Deselected:
    """A test that fails for a reason that is no bug of ours.

    Attributes:
        test: a pattern of test names.
        error: what the failure says.
        ways: those in which it fails.
        models: those whose test fails; elsewhere it must pass, or skip itself.
        backend: None: any.
        may_pass: it covers whatever fails with this error, and says nothing of what passes.
    """

    test: str
    error: str
    reason: str
    ways: tuple[str, ...] = ("name", "patched")
    models: tuple[str, ...] = MODELS
    backend: str | None = None
    may_pass: bool = False

    def covers(self, name: str, backend: str) -> bool:
        """Whether it is about `class::test` run with this backend."""
        if self.backend not in (None, backend):
            return False
        of_class, _, test = name.partition("::")
        classes = [class_name(model, way) for model in self.models for way in self.ways]
        return of_class in classes and fnmatch(test, self.test)


NO_WEIGHTS = "output_attentions=True is not supported, no kernel here keeps the weights"

DESELECTED: tuple[Deselected, ...] = (
    Deselected(
        "test_capture_outputs_decorator",
        NO_WEIGHTS,
        "asks every model for its attention weights, which no kernel of ours makes; eager does",
    ),
    Deselected(
        "test_eager_matches_sdpa_inference_*_output_attentions",
        NO_WEIGHTS,
        "asks for attention weights, for which transformers' sdpa is eager; ours refuses. The 24 "
        "other cases pass",
    ),
    Deselected(
        "test_sdpa_can_dispatch_non_composite_models",
        '_attn_implementation == "sdpa"',
        "asserts the name 'sdpa', in whose place the suite puts ours; test_ours_is_what_runs "
        "asserts ours",
    ),
    Deselected(
        "test_can_set_attention_dynamically",
        'check_attn_implementation("sdpa")',
        "asserts the name 'sdpa', in whose place the suite puts ours; "
        "test_ours_set_attention_dynamically does the same with our name, and looks at outputs too",
    ),
    Deselected(
        "test_model_rope_scaling_from_config_*_dynamic",
        "rope_type must be one whose frequencies are the same for all documents",
        "ours refuses dynamic RoPE on purpose: its frequencies come from the longest position in "
        "the batch, so that documents would change one another",
    ),
    Deselected(
        "test_ours_*",
        "assert",
        "some of these cases ask for what only ours does",
        ways=("stock",),
        may_pass=True,
    ),
    Deselected(
        "*",
        "flex has no backward on the CPU",
        "torch's FlexAttention has no backward on the CPU, and ours says so: what trains, or runs "
        "a forward with gradients on, needs a GPU",
        backend="flex",
        may_pass=True,
    ),
)

WITHOUT_ATTENTIONS: dict[str, str] = {
    "test_model_outputs_equivalence": "its third part asks for attention weights; the parts about "
    "outputs, losses and hidden states run",
}
"""Tests that run as for a model that has no attention weights, and why."""

MUST_PASS: tuple[str, ...] = (
    # equivalence
    "test_batching_equivalence",
    "test_determinism",
    "test_eager_matches_sdpa_inference_*",  # padding too: left, right, none, in three dtypes
    "test_hidden_states_output",
    "test_inputs_embeds_matches_input_ids",
    "test_model_outputs_equivalence",
    "test_ours_*",
    "test_save_load",
    # training
    "test_causal_lm_loss_honors_shift_labels",
    "test_problem_types",
    "test_training",
    "test_training_overfit",
    # gradient checkpointing
    "test_enable_input_require_grads_with_gradient_checkpointing",
    "test_gradient_checkpointing_enable_disable",
    "test_training_gradient_checkpointing*",
    # generation
    "test_generate*",
)
"""Patterns of tests that may not skip themselves; each names a test in every class."""
