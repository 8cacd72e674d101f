"""TRL's GRPOTrainer, whose rollout returns an engine's experts: each forward replays them.

TRL passes the extra fields of `rollout_func` to the reward functions, and drops them before the
batches of a generation are made.

Shapes: B completions; P tokens of the longest prompt, padded on the left, C of the longest
completion, padded on the right; M layers with experts, K experts of a token in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.routed_experts import OWN_CHOICE, ROUTED_EXPERTS, routes_of_samples
from flexvarlen.upstream import why_absent

_EXTRA_FIELDS = 5  # their index in what GRPOTrainer._generate returns


def replays_rollout(trainer: Any) -> bool:
    """Whether it is a GRPOTrainer of TRL that may get an engine's experts of its rollouts."""
    bases = [x.__name__ for x in type(trainer).__mro__ if x.__module__.startswith("trl.trainer.")]
    return "GRPOTrainer" in bases and getattr(trainer, "rollout_func", None) is not None


def replay_rollouts(trainer: Any) -> None:
    """Make a GRPOTrainer replay `routed_experts` of its `rollout_func`, if that returns them.

    Log-probabilities of the policy, before and during the steps, and of the reference are then
    computed with the experts of the engine.
    """
    _RolloutReplay(trainer)


class _RolloutReplay:
    """The experts of the rollout that a trainer scores, or of the batch that it learns from."""

    def __init__(self, trainer: Any) -> None:
        self._class = next(x for x in type(trainer).__mro__ if "_generate" in vars(x))
        self._generate = trainer._generate
        self._generate_and_score = trainer._generate_and_score_completions
        self._compute_loss = trainer.compute_loss
        self._logps = trainer._get_per_token_logps_and_entropies
        self._rollout: _Rollout | None = None
        self._of_batch: Tensor | None = None
        trainer._generate = self.generate
        trainer._generate_and_score_completions = self.generate_and_score
        trainer.compute_loss = self.compute_loss
        trainer._get_per_token_logps_and_entropies = self.logps

    def generate(self, prompts: list[Any]) -> Any:
        """TRL's, of which the routes are kept: rewards have no use for them.

        Raises:
            NotImplementedError: this TRL returns no dict of extra fields at the known index.
        """
        found = self._generate(prompts)
        extra_fields = found[_EXTRA_FIELDS] if len(found) > _EXTRA_FIELDS else None
        if not isinstance(extra_fields, dict):
            name = f"_generate()[{_EXTRA_FIELDS}]"
            raise NotImplementedError(why_absent(self._class, name, "routed_experts"))
        routes = extra_fields.pop(ROUTED_EXPERTS, None)
        self._rollout = None if routes is None else _Rollout(found[0], found[1], routes)
        return found

    def generate_and_score(self, inputs: Any) -> dict[str, Any]:
        """TRL's; its output has `routed_experts`, int16 `[B, P + C, M, K]`."""
        try:
            output: dict[str, Any] = self._generate_and_score(inputs)
            if self._rollout is not None:
                sizes = output["prompt_ids"].shape[1], output["completion_ids"].shape[1]
                output[ROUTED_EXPERTS] = self._rollout.padded(*sizes)
            return output
        finally:
            self._rollout = None

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's, whose forwards replay the batch's experts."""
        self._of_batch = inputs.get(ROUTED_EXPERTS)
        try:
            return self._compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._of_batch = None

    def logps(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """TRL's, which calls the model on some rows after others."""
        routes = self._of_batch
        if routes is None and self._rollout is not None:
            routes = self._rollout.padded(input_ids.shape[1] - logits_to_keep, logits_to_keep)
        if routes is not None:
            model = _with_routes(model, routes.to(input_ids.device))
        return self._logps(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)


class _Rollout:
    """The experts of each completion of a generation, with its prompt.

    Raises:
        ValueError: they are not a list with a row for each token of each completion.
    """

    def __init__(
        self, prompts: Sequence[list[int]], completions: Sequence[list[int]], routes: Any
    ) -> None:
        if not isinstance(routes, Sequence) or len(routes) != len(completions):
            got = f"{len(routes)}" if isinstance(routes, Sequence) else type(routes).__name__
            raise ValueError(
                f"{ROUTED_EXPERTS} of rollout_func must be a list with what fv.engine_routes "
                f"returns for each of {len(completions)} completions with its prompt, got {got}; "
                "return one for each."
            )
        self._lengths = [(len(a), len(b)) for a, b in zip(prompts, completions, strict=True)]
        samples = [{ROUTED_EXPERTS: x} for x in routes]
        self._routes = routes_of_samples(samples, [a + b for a, b in self._lengths])

    def padded(self, prompt_tokens: int, completion_tokens: int) -> Tensor:
        """int16 `[B, P + C, M, K]`."""
        assert self._routes is not None
        shape = len(self._routes), prompt_tokens + completion_tokens, *self._routes[0].shape[1:]
        found = torch.full(shape, OWN_CHOICE, dtype=torch.int16)
        for row, (prompt, completion) in enumerate(self._lengths):
            at = slice(prompt_tokens - prompt, prompt_tokens + completion)
            found[row, at] = torch.from_numpy(self._routes[row])
        return found


def _with_routes(model: Any, routes: Tensor) -> Callable[..., Any]:
    """What TRL calls in place of a model, on some rows after others, each with its experts."""
    rows = iter(routes)

    def call(**inputs: Any) -> Any:
        own = torch.stack([next(rows) for _ in inputs["input_ids"]])
        return model(**inputs, **{ROUTED_EXPERTS: own})

    return call
