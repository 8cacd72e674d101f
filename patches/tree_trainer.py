"""One tree for each optimizer step of a trainer of TRL, in parts of a bounded number of tokens.

The trainers' losses are functions of log-probabilities. Those of all micro-batches of a step are
computed first, from one tree. Each micro-batch's loss runs backward to them; after the last one,
their gradients run through the parts.

Shapes: B rows of S tokens with padding; K scores of T tokens of a row of trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.layout.labels import IGNORE_INDEX
from flexvarlen.layout.routed_experts import ROUTED_EXPERTS
from flexvarlen.packing.prefixes import share_prefixes
from flexvarlen.patches.batch import shared_rows
from flexvarlen.patches.tree_logprobs import tree_scores


class PaddedRows(NamedTuple):
    """A micro-batch: int64 `[B, S]` each, of which labels are -100 where none counts.

    With the experts that routers replay, `[B, S, M, K]`, or None.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    routed_experts: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        """The columns that are not None."""
        return {name: x for name, x in self._asdict().items() if x is not None}

    def samples(self) -> list[dict[str, Tensor]]:
        """The real tokens of each row with what there is of them, on the host."""
        columns = {name: x.cpu() for name, x in self.columns().items()}
        masks = columns.pop("attention_mask").bool()
        return [
            {name: x[row][real] for name, x in columns.items()} for row, real in enumerate(masks)
        ]

    def equals(self, other: PaddedRows) -> bool:
        """Whether it is the same micro-batch."""
        own, others = self.columns(), other.columns()
        return own.keys() == others.keys() and all(
            torch.equal(x, others[k]) for k, x in own.items()
        )

    def scores_of(self, scores_KT: Tensor, paths: Sequence[Tensor]) -> Tensor:
        """Scores of its labels, `[K, B, S - 1]`, from those of a tree; 0 where no label counts.

        Args:
            scores_KT: of the tree.
            paths: of its rows in the tree.
        """
        (rows, columns), device = self.labels.shape, scores_KT.device
        real, has_label = self.attention_mask.cpu().bool(), (self.labels != IGNORE_INDEX).cpu()
        slots, index = [], []
        for row, path in enumerate(paths):
            predicted = real[row].nonzero()[1:, 0]  # no token predicts the first
            counts = has_label[row, predicted]
            slots.append(row * columns + predicted[counts])
            index.append(path[:-1][counts])
        found = scores_KT.index_select(1, torch.cat(index).to(device))
        padded = found.new_zeros(len(found), rows * columns)
        padded = padded.index_copy(1, torch.cat(slots).to(device), found)
        return padded.view(-1, rows, columns)[:, :, 1:]


class _StepScores:
    """Scores of some micro-batches, whose gradients run through the model after the last one's.

    Args:
        batches: all of them, in their order.
        scores: of their tree, each `[T]`, log-probabilities first.
        paths: of all their rows.
    """

    def __init__(
        self, batches: Sequence[PaddedRows], scores: Sequence[Tensor], paths: Sequence[Tensor]
    ) -> None:
        self._batches, self._paths, self._scores = iter(batches), iter(paths), scores
        self._leaf = torch.stack([x.detach() for x in scores]).requires_grad_()
        self.left = len(batches)

    def next(self, given: PaddedRows) -> Tensor:
        """Scores `[K, B, S - 1]` of the next micro-batch.

        Raises:
            RuntimeError: another one is given.
        """
        batch = next(self._batches, None)
        if batch is None or not batch.equals(given):
            raise RuntimeError(
                "the micro-batches of a step must run in their order, each once with gradients, "
                f"got another one of {len(given.input_ids)} rows; leave tokens_per_part out."
            )
        self.left -= 1
        if not self.left:
            self._leaf.register_post_accumulate_grad_hook(self._backward)
        return batch.scores_of(self._leaf, [next(self._paths) for _ in batch.input_ids])

    def _backward(self, leaf: Tensor) -> None:
        """Run the model's backward, without scores that no loss reads."""
        assert leaf.grad is not None
        pairs = list(zip(self._scores, leaf.grad, strict=True))
        self._scores = ()
        used = pairs[:1] + [pair for pair in pairs[1:] if pair[1].any()]
        torch.autograd.backward([x for x, _ in used], [x for _, x in used])


class StepTrees:
    """The trees of a trainer's steps.

    Args:
        trainer: of TRL.
        tokens_per_part: tokens of a part at most.
        names: scores that the trainer reads.

    Attributes:
        upcoming: takes how many micro-batches of the step have run, and returns the next ones, as
            far as they are known.
    """

    upcoming: Callable[[int], list[PaddedRows]]

    def __init__(self, trainer: Any, tokens_per_part: int, names: Sequence[str]) -> None:
        self._names, self._autocast = names, trainer.accelerator.autocast
        self._scores_of = partial(
            tree_scores,
            names=names,
            max_tokens=tokens_per_part,
            temperature=getattr(trainer, "temperature", 1.0),
        )
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step."""
        self._ran, self._step = 0, _StepScores([], [torch.zeros(0)], [])

    def scores(self, model: nn.Module, given: PaddedRows) -> Tensor:
        """Scores `[K, B, S - 1]` of a batch; with gradients, it must be the step's next one."""
        if not torch.is_grad_enabled():
            scores, paths = self._run(model, [given])
            return given.scores_of(torch.stack(list(scores)), paths)
        if not self._step.left and (batches := self.upcoming(self._ran)):
            self._step = _StepScores(batches, *self._run(model, batches))
        self._ran += 1
        return self._step.next(given)

    def _run(
        self, model: nn.Module, batches: Sequence[PaddedRows]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        samples = [sample for batch in batches for sample in batch.samples()]
        shared = share_prefixes(
            samples,
            device=batches[0].input_ids.device,
            min_tokens=shared_rows.MIN_SHARED_TOKENS,
        )
        with self._autocast():
            return self._scores_of(model, shared), shared.paths

    def of(self, model: nn.Module) -> Callable[..., Any]:
        """What TRL calls in place of a model: with `fused_lm_head=True` it returns scores."""
        return partial(self._call, model)

    def _call(self, model: nn.Module, *, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if not fused_lm_head:
            return model(**inputs)
        given = PaddedRows(**{name: inputs.pop(name, None) for name in PaddedRows._fields})
        others = [name for name, x in inputs.items() if name != "use_cache" and x is not None]
        if others:
            raise ValueError(
                "tokens_per_part must be used with batches of text alone, got a batch with "
                f"{', '.join(others)}; leave tokens_per_part out."
            )
        found = dict(zip(self._names, self.scores(model, given), strict=True))
        if "is_top1" in found:
            found["is_top1"] = found["is_top1"].bool()
        return SimpleNamespace(**found)


# ---- trainers ----


def _of_generation(trainer: Any, trees: StepTrees) -> None:
    """GRPO and RLOO: one method makes all log-probabilities, of the reference too."""
    own = trainer._get_per_token_logps_and_entropies

    def logps(
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **others: Any,
    ) -> Any:
        return own(trees.of(model), input_ids, attention_mask, logits_to_keep, **others)

    def upcoming(ran: int) -> list[PaddedRows]:
        """Until the step ends, or the next generation begins."""
        buffered, done = trainer._buffered_inputs, trainer._step
        of_generation = len(buffered) * trainer.num_iterations
        left = (
            trainer.current_gradient_accumulation_steps - ran,
            of_generation - done % of_generation,
        )
        return [_completions(buffered[i % len(buffered)]) for i in range(done, done + min(left))]

    trees.upcoming = upcoming
    trainer._get_per_token_logps_and_entropies = logps
    _at_each_step(trainer, lambda batches: trees.begin_step())


def _completions(batch: dict[str, Any]) -> PaddedRows:
    prompt, answer = batch["prompt_mask"], batch["completion_mask"]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    counts = torch.cat([torch.zeros_like(prompt), answer], dim=1)
    labels, mask = ids.masked_fill(counts == 0, IGNORE_INDEX), torch.cat([prompt, answer], dim=1)
    routes = batch.get(ROUTED_EXPERTS)
    return PaddedRows(ids, mask, labels, None if routes is None else routes.to(ids.device))


def _of_loader(trainer: Any, trees: StepTrees) -> None:
    """DPO and KTO: the loss calls the policy, and the reference without gradients as before."""
    own = trainer.compute_loss
    batches: list[dict[str, Any]] = []

    def compute_loss(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(trees.of(model), *args, **kwargs)

    def begin_step(samples: list[dict[str, Any]]) -> None:
        batches[:] = samples
        trees.begin_step()

    def upcoming(ran: int) -> list[PaddedRows]:
        return [_preferences(batch, trainer.accelerator.device) for batch in batches[ran:]]

    trees.upcoming = upcoming
    trainer.compute_loss = compute_loss
    _at_each_step(trainer, begin_step)


def _preferences(batch: dict[str, Any], device: torch.device) -> PaddedRows:
    names = "input_ids", "attention_mask", "completion_mask"
    ids, mask, counts = (batch[name].to(device) for name in names)
    return PaddedRows(ids, mask, ids.masked_fill(counts == 0, IGNORE_INDEX))


def _at_each_step(trainer: Any, begin: Callable[[list[dict[str, Any]]], None]) -> None:
    """Call `begin` with what the loader gives for each optimizer step."""
    own = trainer.get_batch_samples

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        begin(found[0])
        return found

    trainer.get_batch_samples = get_batch_samples


_OF_COMPLETIONS = ("log_probs", "entropy")
_OF_PREFERENCES = (*_OF_COMPLETIONS, "mean_logits", "is_top1", "log_sum_sq_probs")
_SERVED: dict[str, tuple[Callable[[Any, StepTrees], None], tuple[str, ...]]] = {
    "GRPOTrainer": (_of_generation, _OF_COMPLETIONS),
    "RLOOTrainer": (_of_generation, _OF_COMPLETIONS),
    "DPOTrainer": (_of_loader, _OF_PREFERENCES),
    "KTOTrainer": (_of_loader, _OF_PREFERENCES),
}
"""TRL's trainers, also as bases of others: where their log-probabilities are made, and the scores
that they read."""


def step_trees(trainer: Any, tokens_per_part: int) -> Callable[[], None]:
    """A function that makes a trainer's steps one tree each; nothing is changed before its call.

    Raises:
        ValueError: `tokens_per_part` is below 1; another trainer.
        NotImplementedError: a setting of the trainer that its trees cannot serve.
    """
    require_int_at_least("tokens_per_part", tokens_per_part, 1)
    bases = [x.__name__ for x in type(trainer).__mro__ if x.__module__.startswith("trl.trainer.")]
    name = next((name for name in bases if name in _SERVED), None)
    if name is None:
        raise ValueError(
            f"tokens_per_part serves {', '.join(_SERVED)} of TRL, got {type(trainer).__name__}; "
            "leave tokens_per_part out."
        )
    if refused := next(_refused(trainer), None):
        raise NotImplementedError(
            f"tokens_per_part cannot be combined with {refused}; leave tokens_per_part out."
        )
    serve, names = _SERVED[name]
    return lambda: serve(trainer, StepTrees(trainer, tokens_per_part, names))


def _refused(trainer: Any) -> Iterator[str]:
    is_fsdp1 = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    if is_fsdp1 or trainer.is_deepspeed_enabled:
        yield "DeepSpeed or FSDP1: use DDP or FSDP2"
    if trainer.args.torch_compile:
        yield "torch_compile"
    if trainer.aux_loss_enabled:
        yield "a router's loss: set router_aux_loss_coef=0"
    if getattr(trainer.args, "cast_lm_head_to_fp32", False):
        yield "cast_lm_head_to_fp32"
