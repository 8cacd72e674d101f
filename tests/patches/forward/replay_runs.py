"""Rollouts of mixtures with noise on their routers, recorded, and the same samples alone, forced.

Nothing of ours forces a router here: `forced` has hooks of its own, and weights by `RULES`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flexvarlen as fv
from tests.contract_oracle import gradients_of
from tests.tiny_models import VOCABULARY, new_model

PROMPT, ANSWER, NOISE = 36, 9, 3.0
Choose = Callable[[int, Tensor], Tensor]
"""Index of a router, its logits `[T, E]` -> the experts `[T, K]`."""


def softmax_of_all(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    found = logits.softmax(-1).gather(1, experts)
    return found / found.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else found


def softmax_of_chosen(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return logits.gather(1, experts).softmax(-1)


def sigmoid(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    found = logits.sigmoid().gather(1, experts)
    found = found / found.sum(-1, keepdim=True) if router.norm_topk_prob else found
    return found * router.routed_scaling_factor


RULES = {
    "qwen3_moe": softmax_of_all,
    "gpt_oss": softmax_of_chosen,
    "deepseek_v3": sigmoid,
    "qwen3_5_moe_text": softmax_of_all,
    "mixtral": softmax_of_all,
    "olmoe": softmax_of_all,
    "glm4_moe": sigmoid,
}


def routers(model: nn.Module) -> list[Any]:
    return [x for x in model.modules() if type(x).__name__.lower().endswith("router")]


@contextmanager
def forced(model: nn.Module, kind: str, choose: Choose) -> Iterator[None]:
    """Inside, routers weigh the experts that `choose` says."""

    def hook(index: int) -> Callable[..., Any]:
        def replace(router: nn.Module, _: Any, output: Any) -> Any:
            experts = choose(index, output[0])
            return output[0], RULES[kind](router, output[0], experts), experts

        return replace

    handles = [x.register_forward_hook(hook(i)) for i, x in enumerate(routers(model))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Rollout:
    """A sample as an engine returns it.

    Attributes:
        ids: of prompt and answer, int64 `[L]`.
        logprobs: of the answer's tokens.
        record: uint8 `[L - 1 - start, M, K]`.
        start: the token that the record begins with.
    """

    ids: Tensor
    logprobs: Tensor
    record: Any
    start: int

    def sample(self, model: Any) -> dict[str, Any]:
        """Of a collator or a tree: labels at the answer alone, and its routes."""
        experts = {"num_experts": routers(model)[0].num_experts}
        experts |= {"num_layers": self.record.shape[1], "top_k": self.record.shape[2]}
        routes = fv.engine_routes(self.record, len(self.ids), start=self.start, **experts)
        labels = self.ids.clone()
        labels[:PROMPT] = -100
        return {"input_ids": self.ids, "labels": labels, "routed_experts": routes}


def rollout(model: Any, kind: str, prompt: int, prompt_noise: int, seed: int) -> Rollout:
    """Generate an answer with noise on the routers; without noise at the prompt if it is 0.

    A prompt without noise is not recorded, as if the engine did not return its routes.
    """
    ids = torch.randint(3, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(prompt))
    rng_of = {True: prompt_noise, False: seed + 100}
    rng_of = {key: torch.Generator().manual_seed(x) for key, x in rng_of.items()}
    seen: list[list[Tensor]] = [[] for _ in routers(model)]

    def choose(index: int, logits: Tensor) -> Tensor:
        is_prompt = len(logits) > 1
        noise = torch.randn(logits.shape, generator=rng_of[is_prompt]) * NOISE
        own = routers(model)[index].top_k
        noisy = logits + noise * bool(prompt_noise or not is_prompt)
        if hasattr(routers(model)[index], "e_score_correction_bias"):
            noisy = noisy.sigmoid()  # not in groups, where the prompt's choice is its own
        seen[index].append(noisy.topk(own).indices)
        return seen[index][-1]

    torch.manual_seed(seed)
    with torch.no_grad(), forced(model, kind, choose):
        out = model.generate(
            ids,
            max_new_tokens=ANSWER,
            min_new_tokens=ANSWER,
            do_sample=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = out.sequences[0]
    logprobs = torch.cat(out.logits).log_softmax(-1).gather(1, tokens[PROMPT:, None])[:, 0]
    start = 0 if prompt_noise else PROMPT
    record = torch.stack([torch.cat(x) for x in seen], 1)[start:]
    return Rollout(tokens, logprobs, record.to(torch.uint8).numpy(), start)


@cache
def model_of(kind: str) -> Any:
    """In eval mode, as nothing here has dropout; not to be changed."""
    return new_model(kind)


@cache
def rollouts(kind: str) -> tuple[Rollout, ...]:
    """Two answers to one prompt; another with other experts in the same prompt; one of another.

    The fourth has no routes at its prompt.
    """
    cases = ((1, 1, 1), (1, 1, 2), (1, 2, 3), (2, 0, 4))
    return tuple(rollout(model_of(kind), kind, *case) for case in cases)


def samples(kind: str) -> list[dict[str, Any]]:
    return [x.sample(model_of(kind)) for x in rollouts(kind)]


def loss_of(logprobs: list[Tensor]) -> Tensor:
    """Of the answers' log-probabilities; no two tokens count alike."""
    flat = torch.cat(logprobs)
    return (flat * torch.linspace(-1, 1, len(flat))).sum()


@cache
def alone(kind: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities of the answers, and gradients, of each sample alone with forced routing."""
    model = copy.deepcopy(model_of(kind))
    found = [of_answer(run_alone(model, kind, x).logits[0], x.ids) for x in rollouts(kind)]
    loss_of(found).backward()
    return [x.detach() for x in found], gradients_of(model)


def run_alone(model: Any, kind: str, sample: Rollout, **inputs: Any) -> Any:
    """Unpatched, with the experts of the record, and its own where there is none."""

    def choose(index: int, logits: Tensor) -> Tensor:
        own = logits
        if hasattr(routers(model)[index], "e_score_correction_bias"):
            own = logits.sigmoid()
        experts = own.topk(sample.record.shape[2]).indices
        recorded = torch.from_numpy(sample.record).long()[:, index]
        return torch.cat([experts[: sample.start], recorded, experts[-1:]])

    with forced(model, kind, choose):
        return model(sample.ids[None], use_cache=False, **inputs)


def logits_alone(kind: str) -> list[tuple[Tensor, ...]]:
    """Of each sample, its routers' logits `[L, E]` by layer."""
    outputs = (
        run_alone(model_of(kind), kind, x, output_router_logits=True) for x in rollouts(kind)
    )
    return [x.router_logits for x in outputs]


def of_answer(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of a sample's answer, from its logits `[L, V]`."""
    found = logits[PROMPT - 1 : -1].log_softmax(-1)
    return found.gather(1, ids[PROMPT:, None])[:, 0]


def patched(kind: str, backend: str = "reference", **settings: Any) -> Any:
    return fv.patch_model(copy.deepcopy(model_of(kind)), backend, **settings)


# ---- forms of a batch: (kind, its samples) -> log-probabilities of the answers, and the model ----

Form = Callable[..., tuple[list[Tensor], Any]]


def packed(
    kind: str, given: list[dict[str, Any]], model: Any = None, **settings: Any
) -> tuple[list[Tensor], Any]:
    model = prepared(patched(kind) if model is None else model, **settings)
    total = sum(len(x["input_ids"]) for x in given) + 5
    batch = fv.PackedCollator(total_tokens=total, next_token_labels=True)(given)
    logits = model(**{k: x for k, x in batch.items() if k != "labels"}).logits[0]
    lengths = [len(x["input_ids"]) for x in given]
    rows = logits[: sum(lengths)].split(lengths)
    return [of_answer(x, y["input_ids"]) for x, y in zip(rows, given, strict=True)], model


def padded(given: list[dict[str, Any]], side: str = "left") -> dict[str, Tensor]:
    columns = {"input_ids": 0, "routed_experts": -1, "attention_mask": 0}
    given = [x | {"attention_mask": torch.ones_like(x["input_ids"])} for x in given]
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [x[name] for x in given], batch_first=True, padding_value=value, padding_side=side
        )
        for name, value in columns.items()
        if name in given[0]
    }


def unpadded(
    kind: str, given: list[dict[str, Any]], share: bool = False, **settings: Any
) -> tuple[list[Tensor], Any]:
    model = prepared(patched(kind, unpad=True, share_prefixes=share), **settings)
    given = [cut(given[0], -2), *given[1:]]
    batch = padded(given, "right" if share else "left")
    logits = model(**batch, use_cache=False).logits
    rows = (x[mask.bool()] for x, mask in zip(logits, batch["attention_mask"], strict=True))
    return [of_answer(x, y["input_ids"]) for x, y in zip(rows, given, strict=True)], model


def cut(sample: dict[str, Any], tokens: int) -> dict[str, Any]:
    return {name: x[:tokens] for name, x in sample.items()}


def sharing(kind: str, given: list[dict[str, Any]], **settings: Any) -> tuple[list[Tensor], Any]:
    return unpadded(kind, given, share=True, **settings)


def tree(kind: str, given: list[dict[str, Any]], **settings: Any) -> tuple[list[Tensor], Any]:
    model = prepared(patched(kind), **settings)
    shared = fv.share_prefixes(given, total_tokens=180)
    rows = shared.unfold(fv.tree_logprobs(model, shared))
    return [x[PROMPT - 1 : -1] for x in rows], model


def parts(kind: str, given: list[dict[str, Any]], **settings: Any) -> tuple[list[Tensor], Any]:
    model = prepared(patched(kind), **settings)
    shared = fv.share_prefixes(given)
    rows = shared.unfold(fv.tree_logprobs(model, shared, max_tokens=50))
    return [x[PROMPT - 1 : -1] for x in rows], model


def prepared(model: Any, *, checkpoints: bool = False, experts: str | None = None) -> Any:
    if checkpoints:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    if experts is not None:
        model.set_experts_implementation(experts)
    return model


FORMS: dict[str, Form] = {
    "packed": packed,
    "unpadded": unpadded,
    "sharing": sharing,
    "tree": tree,
    "parts": parts,
}


# ---- on two ranks ----


def of_rank(kind: str, aux: bool = False) -> dict[str, Any]:
    """This rank's loss, log-probabilities and gradients of the packed row."""
    group = dist.group.WORLD
    model = patched(kind, sequence_parallel_group=group).train()
    batch, inputs = row_of(kind, total_tokens=184), {"output_router_logits": True} if aux else {}
    out = model(**fv.shard_row(batch, group, **fv.shard_options(model)), **inputs)
    out.loss.backward()
    return {"loss": out.loss.detach(), "gradients": gradients_of(model)}


def row_of(kind: str, total_tokens: int) -> dict[str, Any]:
    collator = fv.PackedCollator(total_tokens=total_tokens, next_token_labels=True)
    batch = collator(samples(kind))
    del batch["use_cache"]
    return batch
