"""The models, what is deselected, each with its reason, and what must pass.

A deselected test runs all the same: it must fail, with the error given here. One that passes, or
fails otherwise, fails the suite.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3_windows": (
        "Qwen3",
        {"head_dim": 8, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4},
    ),
    "mistral": ("Mistral", {"sliding_window": 4}),
    # A softcap that the small scores of a tiny model feel; the published one is 50.
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 4,
            "attn_logit_softcapping": 1.0,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "phi3": ("Phi3", {"sliding_window": 4}),
    # All documents are short: where one is long, transformers gives its frequencies to all others.
    "phi3_longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [4.0, 5.0, 6.0, 7.0],
            },
        },
    ),
}
"""A model, the prefix of its classes in transformers, and what its config adds to the sizes.

The name begins with the family's, which `--model` takes.
"""


def class_name(model: str, way: str) -> str:
    """The test class of a model and a way: `Qwen3WindowsPatched`."""
    return "".join(part.title() for part in (*model.split("_"), way))


@dataclass(frozen=True)
class Deselected:
    """A test that fails for a reason that is no bug of ours.

    Attributes:
        test: a pattern of test names.
        error: what the failure says; empty: anything.
        ways: those in which it fails.
        models: those whose test fails; elsewhere it must pass, or skip itself.
        backend: None: any.
        may_pass: it covers whatever fails with this error, and says nothing of what passes.
    """

    test: str
    error: str
    reason: str
    ways: tuple[str, ...] = ("name", "patched")
    models: tuple[str, ...] = tuple(MODELS)
    backend: str | None = None
    may_pass: bool = False

    def covers(self, name: str, backend: str) -> bool:
        """Whether it is about `class::test` run with this backend."""
        if self.backend not in (None, backend):
            return False
        of_class, _, test = name.partition("::")
        return of_class in self.classes() and fnmatch(test, self.test)

    def classes(self) -> list[str]:
        """The names of the classes that it is about."""
        return [class_name(model, way) for model in self.models for way in self.ways]


NO_WEIGHTS = "output_attentions=True is not supported, as no kernel returns the weights"

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
        "*",
        "rope_type 'longrope' takes its frequencies from the longest position in the batch",
        "by the name alone ours refuses longrope: the rotary tables are made before any layer is "
        "asked; patch_model serves it",
        ways=("name",),
        models=("phi3_longrope",),
        may_pass=True,
    ),
    Deselected(
        "test_ours_inference_equivalence",
        "The size of tensor a (4) must match the size of tensor b (8)",
        "transformers' comparison changes the head_dim, for which the config's factors are too few",
        models=("phi3_longrope",),
    ),
    Deselected(
        "test_ours_*",
        "",
        "some of these cases ask for what only ours does",
        ways=("stock",),
        may_pass=True,
    ),
    Deselected(
        "*",
        "sdpa has no softcap, no sinks",
        "torch's SDPA has no softcap (Gemma 2) and no sinks (gpt-oss), and ours says so; 'auto' "
        "takes another backend for them",
        models=("gemma2", "gpt_oss"),
        backend="sdpa",
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
"""Patterns of tests that must not skip themselves with ours; each names a test in every class."""
