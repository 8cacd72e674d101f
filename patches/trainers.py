"""`patch_trainer`: run the padded batches of a Trainer, or of a trainer of TRL, as packed rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.patches.api import current_patch, patch_model, restore
from flexvarlen.patches.context_parallel_trainer import (
    enable_context_parallel,
    settings_that_read_logits,
)
from flexvarlen.patches.inner_model import transformers_model
from flexvarlen.patches.parts import ModelParts
from flexvarlen.patches.replay_trainer import replay_rollouts, replays_rollout
from flexvarlen.patches.state import BackendChoice
from flexvarlen.patches.tree_trainer import step_trees
from flexvarlen.patches.why_not import why_no_mlp_chunks, why_no_trees

T = TypeVar("T", bound=Trainer)


def patch_trainer(
    trainer: T,
    backend: BackendChoice = "auto",
    *,
    unpad_to_multiple_of: int | None = None,
    share_prefixes: bool = False,
    tokens_per_part: int | None = None,
    same_bits: int | bool | None = None,
    loss_chunk_tokens: int | None = None,
    mlp_chunk_tokens: int | None = None,
    verify: bool = False,
    context_parallel: int | None = None,
) -> T:
    """Make a trainer's models drop the padding of their batches: one line before `train()`.

    With `context_parallel`, each packed row is instead sharded over that many processes.

    Calls `patch_model(model, unpad=True)` on each transformers model in the trainer's attributes,
    or in lists among them: the policy, its reference, a teacher, reward models. With LoRA, the
    policy without its adapter is the reference, and is patched with it. Collators, losses and
    metrics are unchanged, so their values and the gradients equal those of the padded run, except
    for metrics that read padding (see docs/preference.md). `generate` runs as before.

    With `share_prefixes`, models compute a prefix that rows of a batch share only once: the prompt
    of DPO's chosen and rejected answers, and of GRPO's completions. GRPOTrainer and RLOOTrainer,
    which shuffle completions before they split them into batches, then shuffle blocks of
    completions of one prompt, even after their models are unpatched. It does not apply to encoders
    among the reward models, in which rows share nothing. Images of other models than Qwen-VL raise
    an error.

    With `tokens_per_part` too, the rows of all micro-batches of an optimizer step form one tree,
    which runs in parts of at most that many tokens: of TRL's GRPO, RLOO, DPO and KTO trainers, with
    text, in one process or a tree for each under DDP or FSDP2. Losses stay the trainer's own.

    GRPOTrainer replays the experts of an inference engine if its `rollout_func` returns them as
    `routed_experts`: a list with what `engine_routes` returns for each completion with its prompt.

    With `same_bits`, log-probabilities of a sample have the same bits in a micro-batch of 1 as of
    8: every row, and every tile of TRL's fused head, has one size. Positions are then counted from
    each sample's first token, also if it is padded on the left.

    Works with transformers' Trainer in any padded task, and with the trainers of TRL 1.16 in the
    table of docs/preference.md. AsyncGRPOTrainer has its own prefix trees, which raise an error in
    the first forward of a patched model. `fv.unpatch_model(trainer.model)` restores a model.

    With `context_parallel=P` batches are packed rows: of transformers' Trainer with
    `PackedCollator` or `DataCollatorWithFlattening`, or of TRL's SFTTrainer with `packing=True` or
    `padding_free=True`. Of W processes P share a row, so that W / P rows are computed at a time.
    Losses, logged values and gradients are those of W / P processes. See docs/several-gpus.md.

    Args:
        trainer: a trainer whose `train()` has not been called.
        backend, unpad_to_multiple_of, share_prefixes, verify: as in `patch_model`.
        same_bits: the number of tokens of every row, as in `patch_model`. True: `total_tokens` of a
            `PackedCollator`, or the larger batch size times `max_length` of the arguments (GRPO and
            RLOO: `vllm_max_model_length`), twice that for the pairs of DPO. Reward
            models, which score documents, keep rows of their own size.
        tokens_per_part: tokens of a part at most, at least 1; None: a tree for each micro-batch.
        loss_chunk_tokens: as in `patch_model`, for transformers' Trainer; SFTTrainer's default
            loss computes no logits of the whole row.
        mlp_chunk_tokens: as in `patch_model`, for any trainer. Reference, teacher and reward models
            that do not support it run their MLPs whole.
        context_parallel: number of processes that share a row, a divisor of their total number.

    Returns:
        The same trainer.

    Raises:
        ValueError: the trainer is not a Trainer, or has `model_init`; with `share_prefixes`,
            batches of shuffled completions cannot contain two of each prompt; with
            `loss_chunk_tokens`, a trainer of TRL, or a setting that reads logits; with
            `tokens_per_part`, another trainer, or `share_prefixes=False`; with `context_parallel`,
            the trainer makes padded batches, or a setting needs whole rows; with `same_bits`, no
            size is known, or `tokens_per_part` or `context_parallel` is given too.
        SameBitsError: with `same_bits`, a model's outputs for a document have other bits in another
            row. All models are then unchanged.
        NotImplementedError: a model cannot be patched (see `patch_model`), or a setting cannot be
            combined with `tokens_per_part`. All models are then unchanged.

    >>> import flexvarlen as fv  # doctest: +SKIP
    >>> trainer = DPOTrainer(model, args=config, train_dataset=data)  # doctest: +SKIP
    >>> fv.patch_trainer(trainer).train()  # doctest: +SKIP
    """
    if not isinstance(trainer, Trainer):
        raise ValueError(
            "trainer must be a transformers Trainer or one of TRL's, got "
            f"{type(trainer).__name__}; without a Trainer, call patch_model(model, unpad=True)."
        )
    if trainer.model_init is not None:
        raise ValueError(
            "trainer must be made with model=, got model_init=, which makes a new model when "
            "training starts; call patch_model(model, unpad=True) inside model_init."
        )
    if tokens_per_part is not None and not share_prefixes:
        raise ValueError(
            "tokens_per_part must be used with share_prefixes=True, got share_prefixes=False; pass "
            "both."
        )
    if same_bits and (tokens_per_part is not None or context_parallel is not None):
        raise ValueError(
            "same_bits, which is for whole rows, cannot be combined with tokens_per_part or "
            "context_parallel; remove it."
        )
    if loss_chunk_tokens is not None:
        _check_own_loss(trainer)
    in_chunks = {"loss_chunk_tokens": loss_chunk_tokens, "mlp_chunk_tokens": mlp_chunk_tokens}
    if context_parallel is None:
        one_tree = None if tokens_per_part is None else step_trees(trainer, tokens_per_part)
        block_size = _completions_of_block(trainer, one_tree is not None) if share_prefixes else 1
        size = row_size_of(trainer) if same_bits is True else same_bits
        options = {
            "unpad_to_multiple_of": unpad_to_multiple_of,
            "same_bits": size,
            "share_prefixes": share_prefixes,
            "verify": verify,
        }
        _unpad_models(trainer, backend, options | in_chunks)
        if replays_rollout(trainer):
            replay_rollouts(trainer)
        if block_size > 1:
            _shuffle_blocks(trainer, block_size)
        if one_tree is not None:
            one_tree()
        return trainer
    ranks = require_int_at_least("context_parallel", context_parallel, 2)
    if unpad_to_multiple_of is not None or share_prefixes or verify:
        raise ValueError(
            "context_parallel, which shards packed rows, cannot be combined with "
            "unpad_to_multiple_of, share_prefixes or verify; remove them."
        )
    enable_context_parallel(trainer, backend, ranks, in_chunks)
    return trainer


def _unpad_models(trainer: Any, backend: BackendChoice, options: dict[str, Any]) -> None:
    """Patch all models of a trainer with `unpad`, or none.

    Args:
        options: other arguments of `patch_model`.
    """
    with ExitStack() as undo:
        if options["same_bits"]:
            undo.enter_context(trainer.accelerator.autocast())
        for model in _models(trainer):
            undo.callback(restore, model, current_patch(model))
            others = {} if model is trainer.model else _options_of_others(model)
            patch_model(model, backend, unpad=True, **options | others)
        undo.pop_all()


def _options_of_others(model: nn.Module) -> dict[str, Any]:
    """The options that a model beside the policy does not get, with their defaults."""
    parts = ModelParts.of(transformers_model(model))
    options: dict[str, Any] = {"loss_chunk_tokens": None}  # its logits are read
    if parts.head.pools:  # scores of documents
        options["same_bits"] = None
    if why_no_trees(parts) is not None:
        options["share_prefixes"] = False
    if why_no_mlp_chunks(parts) is not None:
        options["mlp_chunk_tokens"] = None
    return options


def _check_own_loss(trainer: Any) -> None:
    """Refuse a trainer that reads logits, which `loss_chunk_tokens` does not compute.

    Raises:
        ValueError: it is one of TRL's, or a setting needs logits.
    """
    if any(each.__module__.startswith("trl.") for each in type(trainer).__mro__):
        raise ValueError(
            "loss_chunk_tokens is for transformers' Trainer, got TRL's "
            f"{type(trainer).__name__}, which scores tokens itself; remove it "
            "(SFTTrainer's default loss computes no logits of the whole row)."
        )
    given = [name for name, is_set in settings_that_read_logits(trainer).items() if is_set]
    if given:
        raise ValueError(
            f"loss_chunk_tokens computes no logits, which {' and '.join(given)} needs; remove it."
        )


_PAIRS = ("DPOTrainer",)
"""Trainers of which an example is two rows."""


def row_size_of(trainer: Any) -> int:
    """The tokens of the largest row of a trainer's batches, by its collator or its arguments.

    Raises:
        ValueError: neither limits the tokens.
    """
    collator, args = trainer.data_collator, trainer.args
    total: int | None = getattr(collator, "total_tokens", None)
    if total is not None:
        return total
    names = ("max_length", "vllm_max_model_length")
    longest = next((x for name in names if (x := getattr(args, name, None)) is not None), None)
    if longest is None:
        raise ValueError(
            "same_bits=True needs a trainer that limits the tokens of a row by max_length (GRPO, "
            "RLOO: vllm_max_model_length) or by a PackedCollator's total_tokens, got "
            f"{type(trainer).__name__} without; pass the number of tokens, the batch size of a "
            "device times the longest prompt and completion, such as same_bits=16_384."
        )
    rows = max(args.per_device_train_batch_size, args.per_device_eval_batch_size)
    pairs = any(each.__name__ in _PAIRS for each in type(trainer).__mro__)
    return int(longest * rows * (2 if pairs else 1))


def _models(trainer: Any) -> list[nn.Module]:
    """The transformers models in a trainer's attributes and their lists, the policy first.

    Each is listed once, in its first wrapper; models that are part of another are not listed.
    """
    values = list(vars(trainer).values())
    for value in tuple(values):
        values += value if isinstance(value, list | tuple) else ()
    modules = [value for value in values if isinstance(value, nn.Module)]
    found = {transformers_model(trainer.model): trainer.model}
    for holder in (each for module in modules for each in _holders(module)):
        found.setdefault(transformers_model(holder), holder)
    parts = {part for inner in found for part in inner.modules() if part is not inner}
    return [model for inner, model in found.items() if inner not in parts]


def _holders(module: nn.Module) -> list[nn.Module]:
    """The outermost modules in this one, or itself, that hold one transformers model each."""
    models = {part for part in module.modules() if isinstance(part, PreTrainedModel)}
    inside = {part for model in models for part in model.modules() if part is not model}
    if len(models - inside) > 1:
        return [holder for child in module.children() for holder in _holders(child)]
    return [module] if models else []


_SHUFFLE = "shuffle_sequence_dict"
"""TRL's function that shuffles the completions of a generation, of the modules of some trainers."""


def _module_defining_shuffle(trainer: Any) -> dict[str, Any]:
    """The names of the module in which a trainer's `_prepare_inputs` finds the function, or {}."""
    owners = (each for each in type(trainer).__mro__ if "_prepare_inputs" in vars(each))
    modules = (vars(sys.modules[owner.__module__]) for owner in owners)
    return next((names for names in modules if _SHUFFLE in names), {})


def _completions_of_block(trainer: Any, one_tree: bool = False) -> int:
    """How many completions of a prompt a trainer that shuffles them can keep together, else 1.

    Args:
        trainer: any.
        one_tree: whether the batches of a step are one tree.
    """
    of_prompt = getattr(trainer, "num_generations", 1)
    if of_prompt == 1 or not _module_defining_shuffle(trainer):
        return 1
    rows, setting = trainer.args.per_device_train_batch_size, "per_device_train_batch_size"
    if one_tree:
        if trainer.args.steps_per_generation <= trainer.args.gradient_accumulation_steps:
            return 1  # a tree has all completions
        rows *= trainer.args.gradient_accumulation_steps
        setting += " * gradient_accumulation_steps"
    block_size = math.gcd(rows, of_prompt)
    if block_size == 1:
        raise ValueError(
            f"{setting} must have a divisor in common with num_generations, so "
            f"that a batch holds completions of one prompt, got {rows} and {of_prompt}; set it to "
            "a multiple of num_generations."
        )
    return block_size


def _shuffle_blocks(trainer: Any, size: int) -> None:
    """Make a trainer that shuffles completions move `size` of them at a time, not single ones."""
    names = _module_defining_shuffle(trainer)
    prepare, shuffle = trainer._prepare_inputs, partial(_shuffled, size=size)

    def prepare_inputs(batch: Any) -> Any:
        before, names[_SHUFFLE] = names[_SHUFFLE], shuffle
        try:
            return prepare(batch)
        finally:
            names[_SHUFFLE] = before

    trainer._prepare_inputs = prepare_inputs


def _shuffled(batch: dict[str, Any], size: int) -> dict[str, Any]:
    """The rows of a batch in another order, `size` of them at a time.

    Args:
        batch: columns: tensors `[B, ...]`, lists of B; None and 0-d tensors are kept.
    """
    rows = next(len(x) for x in batch.values() if _has_rows(x))
    order = torch.arange(rows).view(-1, size)[torch.randperm(rows // size)].flatten()
    return {name: _take(x, order) if _has_rows(x) else x for name, x in batch.items()}


def _has_rows(column: Any) -> bool:
    return column is not None and not (isinstance(column, Tensor) and column.ndim == 0)


def _take(column: Tensor | Sequence[Any], order: Tensor) -> Tensor | list[Any]:
    if isinstance(column, Tensor):
        return column[order.to(column.device)]
    return [column[i] for i in order]
