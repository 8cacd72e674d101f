"""Suite "preference": the padded batches of TRL's trainers, and the same batches as packed rows.

    dpo, dpo-4096, dpo-compiled   DPOTrainer with a reference model of the policy's weights
    grpo, grpo-16, grpo-4096, …   GRPOTrainer's policy update, without the generation, at other
                                  sizes of the groups and lengths of the prompts
    grpo-step                     a step of 8 prompts with 16 answers, in micro-batches of 4 rows
    grpo-hybrid-4096              the same of a model with recurrent layers, its layers checkpointed
    grpo-experts-4096             of a mixture of experts, with the router's auxiliary loss
    reward                        RewardTrainer
    classification                transformers' Trainer
    images                        the same, of documents with 0 to 4 images, layers checkpointed
    grpo-images                   GRPOTrainer's update, 8 answers to a prompt with 3 images

A step is the trainer's own `compute_loss` on a batch of its own collator, the backward, and AdamW
with a learning rate of 0, so that all variants meet the same weights:

    padded-fa3, padded-fa2, padded-sdpa   the trainer as it is, with transformers' attention
    auto, fa3, …                          `patch_trainer(trainer, backend)`
    auto@128, …                           the same with `unpad_to_multiple_of=128`
    auto+shared, …                        the same with `share_prefixes=True`
    auto+tree                             and `tokens_per_part=65536`: one tree for a step
    auto+packed                           the same on rows of `PackedCollator`

Loss and gradients of the first batch are held against the same padded run in fp32, by the
acceptance rule, for every parameter. Its baseline is `padded-sdpa`. A variant that is wrong is not
timed. The compiled case takes another batch each step. Recurrent layers of the reference and of
the baseline run in plain torch.

DPO weights a pair by σ(−β · margin). Between models of different weights the margin is a sum of
rounded log-probabilities over a whole answer, and its rounding decides how far the gradients are
off. Between equal weights, as at the start of a training, it is 0, as both models attend by one
kernel. The loss, log 2, shows that the models agree, and the gradients show what they compute.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.bench.suites.model.attends import taken_by_auto
from flexvarlen.bench.suites.training import preference_tables
from flexvarlen.bench.suites.training.preference_cases import CASES, PreferenceCase, quick_cases
from flexvarlen.bench.suites.training.preference_images import layers_of, syncs_in_layers, tower_ms
from flexvarlen.bench.suites.training.preference_trainers import (
    TASKS,
    Batch,
    Draws,
    Task,
    mask_of,
)
from flexvarlen.bench.suites.training.trainer import fresh_accelerate
from flexvarlen.measure import watch_compilation
from flexvarlen.patches.state import CONTEXT
from flexvarlen.recurrent.fla_kernels import let_fla_run
from flexvarlen.reference.model import own_parameters, share
from flexvarlen.reference.recurrences import plain_recurrences
from flexvarlen.runner.suite import Findings, Options, Suite, require_known
from flexvarlen.verify.experiment.alone import Errors, both_relative, over_allowed, why_one_is_wrong
from flexvarlen.verify.experiment.measure import CheckedVariant, Measures, measure_variants
from flexvarlen.verify.experiment.step import checkpoint_layers, free
from flexvarlen.verify.experiment.variant import own_backend, set_transformers

PADDED = {
    "padded-fa3": "flash_attention_3",
    "padded-fa2": "flash_attention_2",
    "padded-sdpa": "sdpa",
}
EAGER = (*PADDED, "auto", "fa3")
COMPILED = ("auto@1", "auto@128", "auto@1024")
SHARED = (*EAGER, "auto+shared", "fa3+shared", "flex+shared")
KNOWN = (*PADDED, "auto", *fv.BACKENDS)
REPEATS = 11

HYBRID = ("padded-fa3", "auto", "auto+shared")
TOKENS_PER_PART = 65_536
IMAGES = ("padded-fa3", "padded-sdpa", "auto", "auto+packed")


class Preference(Suite[PreferenceCase]):
    name: ClassVar[str] = "preference"

    def cases(self, options: Options) -> Sequence[PreferenceCase]:
        return quick_cases() if options.quick else CASES

    def variants(self, case: PreferenceCase, options: Options) -> Sequence[str]:
        if case.mode == "compiled":
            return COMPILED if options.on_gpu else COMPILED[-1:]
        if case.images:
            return IMAGES if case.task == "images" else (*IMAGES[:3], "auto+shared")
        if case.checkpointing:
            return (*HYBRID, "auto+tree") if case.micro_batches > 1 else HYBRID
        return SHARED if case.task in ("dpo", "grpo") else EAGER

    def measure(self, case: PreferenceCase, variants: Sequence[str], options: Options) -> Findings:
        require_known([_split(variant)[0] for variant in variants], KNOWN)
        with fresh_accelerate(), tempfile.TemporaryDirectory() as folder:
            run = _Run(case, options, folder)
            return measure_variants(variants, run.check, options, most_repeats=REPEATS, lead_in=0)

    section = staticmethod(preference_tables.section)
    page_tables = staticmethod(preference_tables.page_tables)
    figures = staticmethod(preference_tables.figures)


class _Outcome(NamedTuple):
    """A loss, and the gradient of every parameter that has one."""

    loss: float
    gradients: Mapping[str, Tensor]


class _Run:
    """A case's models, batches and optimizer, and what the first batch must give."""

    def __init__(self, case: PreferenceCase, options: Options, folder: str) -> None:
        self.case, self.options, self.device = case, options, options.device
        self.folder = folder
        self.task: Task = TASKS[case.task]
        self.dtype = case.torch_dtype
        self.models = [
            self.task.new_model(case, self.device) for _ in range(1 + self.task.has_reference)
        ]
        for reference in self.models[1:]:
            reference.requires_grad_(False)
        plain = self.trainer(share)
        self.batches = self.batches_of(plain, self.task.batch)
        self.masks = [mask_of(batch) for batch in self.batches]
        let_fla_run()  # transformers' layers too, where fla refuses its own backward
        self.reference = self._reference()
        baseline = self.in_plain_torch(plain)
        self.baseline = self.errors_of(baseline)
        self.optimizer = torch.optim.AdamW(
            self.models[0].parameters(), lr=0.0, weight_decay=0.0, fused=options.on_gpu
        )
        self.optimizer.step()  # makes its state now, so that all peaks hold it
        free(self.device, self.models[0])

    def batches_of(self, trainer: Any, make: Callable[[Any, Draws], Batch]) -> list[Batch]:
        draws = Draws(self.case)
        hosts = [make(trainer, draws) for _ in range(self.case.batches)]
        return [
            {k: x.to(self.device) if hasattr(x, "to") else x for k, x in batch.items()}
            for batch in hosts
        ]

    def trainer(self, copy: Callable[..., Any], **options: Any) -> Any:
        """A trainer on copies of the models."""
        copies = [copy(model, **options) for model in self.models]
        settings = {
            "output_dir": self.folder,
            "per_device_train_batch_size": self.case.samples,
            "bf16": False,  # no autocast: the weights are
            "gradient_checkpointing": False,  # TRL's default is True
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": not self.options.on_gpu,
            "seed": self.case.seed,
            **({"num_generations": self.case.group} if self.case.task == "grpo" else {}),
        }
        return self.task.trainer(copies[0], copies[1] if len(copies) > 1 else None, settings)

    def outcome(self, trainer: Any, call: Callable[..., Any], *batches: Batch) -> _Outcome:
        """Forward and backward of each batch; the gradients are the parameters' own."""
        trainer.model.zero_grad(set_to_none=True)
        sum_of_losses = 0.0
        for micro_batch in itertools.chain(*(self.micro_batches(trainer, x) for x in batches)):
            loss: Tensor = trainer.compute_loss(call, micro_batch)
            loss.backward()  # type: ignore[no-untyped-call]
            sum_of_losses += float(loss.detach())
        parameters = trainer.model.named_parameters()
        return _Outcome(sum_of_losses, {n: p.grad for n, p in parameters if p.grad is not None})

    def micro_batches(self, trainer: Any, batch: Batch) -> list[Batch]:
        """The micro-batches of a batch: rows of one prompt each, as `patch_trainer` shuffles."""
        count = self.case.micro_batches
        if count == 1 or len(batch["prompt_ids"]) < self.case.samples:
            return [dict(batch)]
        rows = self.case.samples // count
        found = [
            {name: x[i : i + rows] if x.ndim else x for name, x in batch.items()}
            for i in range(0, self.case.samples, rows)
        ]
        trainer._buffered_inputs, trainer._step = found, 0
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = count
        trainer.get_batch_samples(iter(()), 0, self.device)  # begins a step
        return found

    def in_plain_torch(self, trainer: Any) -> _Outcome:
        """What the first batch gives, layers checkpointed; of a large batch group after group."""
        checkpoint_layers(trainer.model)
        parts = [self.batches[0]]
        if self.case.checkpointing and not self.case.images:
            # GRPO divides by num_items_in_batch, so that the groups' losses add up
            size, batch = self.case.group, parts[0]
            parts = [
                {name: x[first : first + size] if x.ndim else x for name, x in batch.items()}
                for first in range(0, self.case.samples, size)
            ]
        with plain_recurrences(trainer.model):
            return self.outcome(trainer, trainer.model, *parts)

    def _reference(self) -> _Outcome:
        """The padded run in fp32, its gradients on the host."""
        trainer = self.trainer(own_parameters, dtype=torch.float32)
        found = self.in_plain_torch(trainer)
        on_host = {name: x.cpu() for name, x in found.gradients.items()}
        free(self.device, trainer.model)
        return _Outcome(found.loss, on_host)

    def check(self, variant: str) -> CheckedVariant:
        """Make a variant, compare its first batch, and run the others once."""
        trainer, batches = self.make(variant), self.batches
        if variant.endswith("+packed") and self.task.packed is not None:
            batches = self.batches_of(trainer, self.task.packed)
        found, tokens_run, layout = self.eagerly(trainer, batches[0])
        attends = self.attends(variant, trainer, layout)  # in a graph auto measures nothing
        call: Callable[..., Any] = trainer.model
        with watch_compilation() as stats:
            if self.case.mode == "compiled":
                call = self.compiled(trainer)
                found = self.outcome(trainer, call, batches[0])
            errors, wrong = self.verdict(found)
            del found
            for batch in batches[1:]:
                self.outcome(trainer, call, batch)
        measures = errors | {
            "attends": attends,
            "tokens_real": sum(int(mask.sum()) for mask in self.masks) / len(self.masks),
            "tokens_padded": sum(mask.numel() for mask in self.masks) / len(self.masks),
            "tokens_run": tokens_run,
            "compilations": stats.compilations,
            "recompilations": stats.recompilations,
            "graph_breaks": stats.graph_breaks,
            "compile_s": stats.compile_s,
        }
        step = partial(self.step, trainer, call, itertools.cycle(batches))
        if self.case.images:
            first = partial(self.outcome, trainer, trainer.model, batches[0])
            measures["ms_tower"] = tower_ms(trainer.model, first, self.device)
            if self.options.on_gpu:
                measures["syncs_in_layers"] = syncs_in_layers(trainer.model, first)
        return CheckedVariant(step, measures, wrong, partial(self.conclude, measures))

    def conclude(self, measures: Measures, ms: float) -> Measures:
        """Samples per second; of a model with a tower, those of the rest of the step too."""
        times = {"samples_per_s": ms}
        if self.case.images:
            times["text_samples_per_s"] = ms - measures["ms_tower"]
        return {name: self.case.samples / (own / 1e3) for name, own in times.items()}

    def eagerly(self, trainer: Any, batch: Batch) -> tuple[_Outcome, int, fv.PackedLayout | None]:
        """What a batch gives, and the tokens and first documents of the policy's first layer."""
        inputs: list[tuple[int, fv.PackedLayout | None]] = []

        def note(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            packed = kwargs.get(CONTEXT)
            if torch._C._current_graph_task_id() == -1:  # not a checkpoint's, in the backward
                tokens = args[0].shape[:2].numel()
                inputs.append((tokens, None if packed is None else packed.layout))

        layer = layers_of(trainer.model)[0]
        hook = layer.register_forward_pre_hook(note, with_kwargs=True)
        try:
            found = self.outcome(trainer, trainer.model, batch)
            return found, sum(tokens for tokens, _ in inputs), inputs[0][1]
        finally:
            hook.remove()

    def make(self, variant: str) -> Any:
        """A variant's trainer, eager.

        Raises:
            Unsupported: transformers has not that attention here.
            NotImplementedError, ImportError: ours has not.
        """
        attention, multiple, more = _split(variant)

        def copy(model: Any) -> Any:
            own = share(model)
            if attention in PADDED:
                set_transformers(own, PADDED[attention])
            return own

        trainer = self.trainer(copy)
        if self.case.checkpointing:
            checkpoint_layers(trainer.model)
        if attention not in PADDED:
            fv.patch_trainer(
                trainer,
                attention,
                unpad_to_multiple_of=multiple,
                share_prefixes=more in ("shared", "tree"),
                tokens_per_part=TOKENS_PER_PART if more == "tree" else None,
            )
        return trainer

    def compiled(self, trainer: Any) -> Callable[..., Any]:
        """The policy under torch.compile; the trainer's reference model is compiled too."""
        backend = own_backend("inductor" if self.options.on_gpu else "eager")
        if trainer.ref_model is not None:
            trainer.ref_model = torch.compile(trainer.ref_model, backend=backend)
        policy: Callable[..., Any] = torch.compile(trainer.model, backend=backend)
        return policy

    def errors_of(self, found: _Outcome) -> Errors:
        """Against the reference; of a loss whose terms cancel, relative to their size."""
        size = float(self.task.cancels)
        loss, gradients = found
        return Errors.of_step(
            loss + size, gradients, self.reference.loss + size, self.reference.gradients
        )

    def verdict(self, found: _Outcome) -> tuple[Measures, str | None]:
        """The errors, and the sentence about the first that the rule does not allow, or None."""
        errors = self.errors_of(found)
        compared = list(errors.beside(self.baseline))
        measures: Measures = {
            "loss": found.loss,
            "reference_loss": self.reference.loss,
            **both_relative("loss_error", errors.loss, self.baseline.loss),
            "gradients": len(errors.gradients),
            "gradient_error": errors.worst_gradient,
            "baseline_gradient_error": self.baseline.worst_gradient,
            "error_over_allowed": over_allowed(compared, self.dtype),
        }
        return measures, why_one_is_wrong(compared, self.dtype)

    def attends(self, variant: str, trainer: Any, layout: fv.PackedLayout | None) -> str | None:
        """The kernel that "auto" took for these documents."""
        if _split(variant)[0] != "auto" or layout is None:
            return None
        compiled = self.case.mode == "compiled"
        return taken_by_auto(trainer.model, layout, self.dtype, compiled=compiled)

    def step(self, trainer: Any, call: Callable[..., Any], batches: Any) -> None:
        trainer.model.zero_grad(set_to_none=True)
        for micro_batch in self.micro_batches(trainer, next(batches)):
            trainer.compute_loss(call, micro_batch).backward()
        self.optimizer.step()


def _split(variant: str) -> tuple[str, int | None, str]:
    """The attention of a variant, `unpad_to_multiple_of`, and what else it has.

    >>> _split("auto+shared")
    ('auto', None, 'shared')
    >>> _split("auto@128")
    ('auto', 128, '')
    """
    rest, _, more = variant.partition("+")
    attention, _, multiple = rest.partition("@")
    return attention, int(multiple) if multiple else None, more


SUITE = Preference()
