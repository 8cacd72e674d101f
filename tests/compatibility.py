"""What goes with what: for each kind of model and each thing asked of it, a test or a refusal.

`python docs/make_compatibility.py` makes docs/compatibility.md of it. What `patch_model` refuses is
asked of its own `why_not`, for a tiny model of each kind: such a cell needs no entry here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

import flexvarlen as fv
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.state import Settings
from flexvarlen.patches.why_not import why_not, why_not_class
from tests.patches.kinds import KINDS, row_of

MEANING = {
    "dense": "full attention in every layer, as in Llama and Qwen3",
    "windows": "layers with a sliding window, as in Gemma and Mistral",
    "MoE, router loss": "a mixture of experts with `output_router_logits=True`. TRL turns it on "
    "unless `router_aux_loss_coef=0.0`; Reward and Distillation have no such loss",
    "longrope": "rotary frequencies that depend on how long a document is, as in Phi-3 of 128K",
    "encoder": "attention in both directions, as in BERT and ModernBERT",
    "images": "text with images, as in Qwen2.5-VL",
    "hybrid": "recurrent layers beside attention, as in Qwen3.5",
}
"""What each kind of model is, by its name in `KINDS`."""


@dataclass(frozen=True)
class Column:
    """What a user asks for.

    Attributes:
        tests: by kind, "file::function[parameters]" below tests/; `*` stands for anything.
        settings: the arguments of `patch_model` with which it is asked for.
        raises: by kind, a call that raises why not, where others than `patch_model` say it.
    """

    tests: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    raises: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


def each(pattern: str, names: Mapping[str, str] | None = None) -> dict[str, str]:
    """A test of many kinds, whose name there replaces `{}`; default: of all, by their own names."""
    names = {kind: kind for kind in KINDS} if names is None else names
    return {kind: pattern.format(name) for kind, name in names.items()}


def families(*kinds: str) -> dict[str, str]:
    """Names of these kinds in the tests of families."""
    return {kind: KINDS[kind].family for kind in kinds}


TEXT = ("dense", "windows", "longrope", "hybrid")
EXPERTS = ("MoE, router loss",)
UNPAD: dict[str, Any] = {"unpad": True}
SHARED: dict[str, Any] = {"unpad": True, "share_prefixes": True}
RANKS: dict[str, Any] = {"sequence_parallel_group": object()}

ON_ROWS = "patches/forward/test_packed_models.py::test_packed_equals_one_by_one"
ON_FAMILIES = "patches/models/test_families.py::"
ON_ROUTER = "patches/forward/test_router_logits.py::"
ON_RANKS = "parallel/test_documents.py::test_a_model_trains_as_on_the_whole_row"
ON_TRAINERS_OF_IMAGES = (
    "patches/test_trainers_images.py::test_a_run_learns_what_the_padded_one_learns"
)


def classify_images() -> None:
    """Of packed rows."""
    from transformers import AutoModelForSequenceClassification

    from tests.tiny_models import config_of

    model = AutoModelForSequenceClassification.from_config(config_of("qwen3_5"))
    batch = {name: x for name, x in row_of("images").items() if name != "labels"}
    fv.patch_model(model, "sdpa")(**batch)


def replay_none(kind: str) -> None:
    """Experts of an engine for a model without any."""
    model = fv.patch_model(KINDS[kind].model(), "sdpa")
    ids = torch.arange(3, 9)[None]
    model(input_ids=ids, routed_experts=torch.zeros(1, 6, 2, 2).long())


FEATURES = {
    "packed": Column(
        {
            **each(ON_ROWS + "[{}-*]", families("dense", "windows")),
            "MoE, router loss": ON_ROUTER
            + "test_loss_and_gradients_are_those_of_the_documents[mixtral-cu_seq_lens]",
            **each(
                ON_FAMILIES + "test_packed_equals_one_by_one[all_at_once-{}]",
                families("longrope", "hybrid", "encoder"),
            ),
            "images": ON_FAMILIES + "test_packed_equals_one_by_one[*-qwen2_5_vl, images]",
        },
    ),
    "unpad": Column(
        {
            **each(
                "patches/forward/test_unpad.py::test_loss_of_a_language_model[{}-*]",
                {**families("dense", *EXPERTS, "encoder", "hybrid"), "windows": "gemma2"},
            ),
            "longrope": "patches/forward/test_unpad.py::test_longrope_frequencies_of_each_document",
            "images": "patches/forward/test_unpad_images.py::"
            "test_loss_and_hidden_states_of_a_language_model[qwen2_5_vl-*]",
        },
        UNPAD,
    ),
    "shared prefixes": Column(
        {
            **each(
                "patches/forward/test_share_prefixes.py::"
                "test_loss_and_gradients_are_the_padded_run_s[{}-*]",
                {**families("dense", *EXPERTS, "hybrid"), "windows": "gemma2"},
            ),
            "images": "patches/forward/test_unpad_images.py::"
            "test_a_prompt_with_images_is_shared[qwen2_5_vl]",
        },
        SHARED,
    ),
    "heads": Column(
        {
            **each(
                "patches/forward/test_pooling_heads.py::"
                "test_a_classifier_gives_a_row_per_document[{}-packed_layout]",
                families(*TEXT, "encoder"),
            ),
            "MoE, router loss": "patches/forward/test_pooling_heads.py::"
            "test_a_classifier_whose_router_has_a_loss",
        },
        raises={"images": classify_images},
    ),
    "checkpointing": Column(each("patches/test_kinds.py::test_gradient_checkpointing[{}]")),
    "compiled": Column(
        {
            "dense": "patches/forward/test_compiled_models.py::"
            "test_one_graph_for_any_documents_in_inductor[*]",
            "windows": "patches/forward/test_compiled_models.py::"
            "test_one_graph_for_any_documents[*]",
            "MoE, router loss": ON_ROUTER + "test_in_one_graph[mixtral-*]",
            **each(
                ON_FAMILIES + "test_one_graph_for_any_documents[{}]",
                families("longrope", "encoder"),
            ),
            "images": "patches/test_kinds.py::test_layers_compiled_one_by_one",
            "hybrid": "patches/forward/test_recurrent_layers.py::"
            "test_compiled_with_breaks_at_the_loop[qwen3_5_text]",
        },
    ),
    **{
        name: Column(
            {
                **each(
                    "patches/test_distributed.py::test_gradients_of_each_kind_of_model[{}-"
                    f"{name.lower()}]"
                ),
                "dense": "patches/test_distributed.py::test_gradients_are_those_of_one_process"
                f"[{name.lower()}]",
            },
        )
        for name in ("DDP", "FSDP2")
    },
    "context parallel": Column(
        {kind: f"{ON_RANKS}[{kind}]" for kind in ("dense", "windows", "encoder")}
        | {"MoE, router loss": f"{ON_RANKS}[experts]", "hybrid": f"{ON_RANKS}[qwen3_5_text]"},
        RANKS,
    ),
    "loss in chunks": Column(
        {
            **each(
                "patches/forward/test_chunked_loss.py::test_each_kind_of_model[{}]",
                {kind: kind for kind in KINDS if kind != "encoder"},
            ),
        },
        {"loss_chunk_tokens": 32},
    ),
    "MLP in chunks": Column(
        each(
            "patches/forward/test_chunked_mlp.py::test_each_kind_of_model[{}]",
            {kind: kind for kind in (*TEXT, "images") if kind not in (*EXPERTS, "encoder")},
        ),
        {"mlp_chunk_tokens": 7},
    ),
    "same bits": Column(
        {
            "dense": "patches/test_same_bits.py::"
            "test_a_micro_batch_of_one_has_the_bits_of_one_of_eight[packed]",
            **each(
                "patches/test_same_bits.py::test_each_kind_of_model[{}]",
                families("windows", "longrope", "hybrid"),
            ),
        },
        {"same_bits": 512},
    ),
    "router replay": Column(
        {
            "MoE, router loss": "patches/forward/test_replay.py::"
            "test_the_loss_of_routers_counts_the_experts_of_the_engine[packed-qwen3_moe]",
        },
        raises={kind: partial(replay_none, kind) for kind in KINDS if kind not in EXPERTS},
    ),
    "generation": Column(
        {
            **each(
                "patches/attention/test_generate.py::test_generates_the_same_tokens[{}-*]",
                {"dense": "qwen3", "windows": "qwen3_windows"},
            ),
            "MoE, router loss": ON_ROUTER + "test_generates_as_before[mixtral]",
            **each(
                ON_FAMILIES + "test_generates_as_the_unpatched_model[{}]",
                families("longrope", "hybrid"),
            ),
            "images": ON_FAMILIES + "test_generates_as_the_unpatched_model[qwen2_5_vl, images]",
        },
    ),
}


def padded_trainer(name: str) -> Column:
    """A column of TRL's trainers that pad."""
    test = "patches/test_trainers.py::test_each_kind_of_model"
    of_dense = {"reward": "reward_checkpointing", "dpo": "dpo_*", "grpo": "grpo_*"}
    kinds = ("windows", *EXPERTS, "longrope", "hybrid", *(("encoder",) * (name == "reward")))
    dense = "patches/test_trainers.py::test_a_run_learns_what_the_padded_one_learns"
    tests = {
        "dense": f"{dense}[{of_dense.get(name, name)}]",
        **each(f"{test}[{name}-{{}}]", families(*kinds)),
        "images": f"{ON_TRAINERS_OF_IMAGES}[{name}-qwen2_5_vl]",
    }
    if name == "reward":  # TRL's takes no images
        tests["images"] = "patches/test_trainers_images.py::test_rewards_of_text_alone"
    return Column(tests, UNPAD)


TRAINERS = {
    "Trainer": Column(each("patches/test_kinds.py::test_trainer[{}]")),
    "SFT": Column(
        {
            **each(
                "patches/test_kinds.py::test_sft_of_trl[{}]",
                {kind: kind for kind in (*TEXT, "MoE, router loss")},
            ),
            "images": f"{ON_TRAINERS_OF_IMAGES}[sft-qwen2_5_vl]",
        },
    ),
    "Reward": padded_trainer("reward"),
    "DPO": padded_trainer("dpo"),
    "KTO": padded_trainer("kto"),
    "GRPO": padded_trainer("grpo"),
    "RLOO": padded_trainer("rloo"),
    "Distillation": padded_trainer("distillation"),
}
COLUMNS = {**FEATURES, **TRAINERS}
ASKED = {
    "packed": "rows of many documents, forward and backward",
    "unpad": "`unpad=True`, a padded batch in and out, a packed row inside",
    "shared prefixes": "`unpad=True, share_prefixes=True`, a prompt once for all its answers",
    "heads": "classification and reward models, one output for each document",
    "checkpointing": "gradient checkpointing, not reentrant",
    "compiled": "`torch.compile`; images layer by layer, and hybrids with graph breaks on a CPU",
    "DDP, FSDP2": "torch's own, on two processes",
    "context parallel": "`sequence_parallel_group`, one row on two to eight processes",
    "loss in chunks": "`loss_chunk_tokens`, without the logits of all tokens",
    "MLP in chunks": "`mlp_chunk_tokens`, without the intermediates of all tokens",
    "same bits": "`same_bits`, whatever else is in the row",
    "router replay": "`routed_experts` of an inference engine",
    "generation": "`generate` of a patched model",
    "Trainer": "transformers' Trainer on packed rows",
    "SFT": "TRL's SFTTrainer with `padding_free=True`; images in padded batches after "
    "`fv.patch_trainer`",
    "Reward and others": "TRL's trainers after `fv.patch_trainer`, against their padded runs; "
    "Reward of text alone",
}
"""What the columns mean."""

NO_NEXT_TOKEN = ("generation", "SFT", "DPO", "KTO", "GRPO", "RLOO", "Distillation")
"""What nobody asks of an encoder."""


def refusal(kind: str, column: str) -> str | None:
    """Why a kind of model cannot have what a column asks for, in the code's words; or None."""
    asked = COLUMNS[column]
    if kind not in asked.raises:
        model, settings = _model(kind), Settings(**{**_DEFAULTS, **asked.settings})
        why = why_not_class(type(model), model.config, settings)
        return why or why_not(ModelParts.of(model), settings)
    try:
        asked.raises[kind]()
    except (NotImplementedError, ValueError) as error:
        return str(error)
    raise AssertionError(f"{column} of {kind} does not raise any more: name its test instead.")


@cache
def _model(kind: str) -> Any:
    return KINDS[kind].model()


_ARGUMENTS = inspect.signature(fv.patch_model).parameters
_DEFAULTS = {name: argument.default for name, argument in _ARGUMENTS.items() if name != "model"}


def cell(kind: str, column: str) -> tuple[str | None, str | None]:
    """The test that holds a combination, or the sentence that refuses it.

    Raises:
        AssertionError: both, or neither though a user may ask.
    """
    test, why = COLUMNS[column].tests.get(kind), refusal(kind, column)
    asked = kind != "encoder" or column not in NO_NEXT_TOKEN
    assert (test is not None) + (why is not None) == asked, (
        f"{column} of {kind} must be tested or refused, got test {test} and refusal {why!r}; "
        "correct tests/compatibility.py, or write the test."
    )
    return test, why
