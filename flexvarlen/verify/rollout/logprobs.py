"""Log-probabilities of responses under one model, packed or each alone.

Shapes: N tokens of all completions; n of some; V = vocabulary; H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexvarlen.packing.pack import pack
from flexvarlen.patches.lm_head import lm_head
from flexvarlen.patches.parts import base_of
from flexvarlen.reference.model import share
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.variant import Sizes, make_variant
from flexvarlen.verify.rollout.responses import Response

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time, as in a trainer's loss."""

Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits `[n, V]`, ids `[n]`, temperatures `[n]`) -> `[n, …]`."""


def rows_of(
    responses: Sequence[Response], tokens: int
) -> Iterator[tuple[PackedBatch, Sequence[Response]]]:
    """Responses one after another in rows of at most `tokens`, at least one in a row; 0: alone."""
    size = max(tokens, 1)  # in which a longer response fills a row
    lengths = [len(x.prompt) + len(x.completion) for x in responses]
    for row in pack([min(n, size) for n in lengths], size, strategy="in_order"):
        group = [responses[i] for i in row]
        ids = [token for x in group for token in (*x.prompt, *x.completion)]
        yield PackedBatch(torch.tensor([ids], device="cpu"), tuple(lengths[i] for i in row)), group


def chosen_logprobs(logits_nV: Tensor, ids_n: Tensor, temperature_n: Tensor) -> Tensor:
    """`[n]` in at least fp32: what sampling at these temperatures gives the ids."""
    logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    logp_nV = (logits_nV / temperature_n[:, None]).log_softmax(-1)
    return logp_nV.gather(1, ids_n[:, None])[:, 0]


@torch.no_grad()
def trainer_logprobs(
    name: str,
    base: PreTrainedModel,
    responses: Sequence[Response],
    tokens: int,
    *,
    fp32_head: bool = False,
    score: Score = chosen_logprobs,
) -> Tensor:
    """`[N, …]` on the CPU, in fp64: the score of each token of the completions.

    Args:
        name: a variant's name, as in `make_variant`.
        base: the model, which is not patched.
        tokens: of a packed row; 0: each response in a forward of its own.
        fp32_head: whether the head multiplies in fp32.

    Raises:
        Unsupported: the variant cannot run here.
    """
    rows = list(rows_of(responses, tokens))
    sizes = Sizes.of(*(row for row, _ in rows))
    variant = make_variant(name, base, sizes, train=False)
    head = _fp32_head(base) if fp32_head else lm_head(base)
    model, found = base_of(variant.model), []
    for cpu_row, group in rows:
        row = cpu_row.to(base.device)
        inputs = variant.forward(row, input_ids=row.input_ids).inputs
        hidden_TH = model(**inputs).last_hidden_state[0]
        at = torch.cat(
            [
                torch.arange(start + len(x.prompt), end)
                for (start, end), x in zip(row.spans(), group, strict=True)
            ]
        ).to(base.device)
        temperatures = torch.tensor([x.temperature for x in group for _ in x.completion])
        parts = (x.split(CHUNK_TOKENS) for x in (at, temperatures.to(base.device)))
        for tokens_n, temperature_n in zip(*parts, strict=True):
            logits = head(hidden_TH[tokens_n - 1])
            found.append(score(logits, row.input_ids[0, tokens_n], temperature_n).double().cpu())
    return torch.cat(found)


def _fp32_head(base: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The head on fp32 states with its weights in fp32; the model keeps its own."""
    model = share(base)
    output: Any = model.get_output_embeddings()
    for name, parameter in list(output.named_parameters(recurse=False)):
        setattr(output, name, torch.nn.Parameter(parameter.detach().float(), requires_grad=False))
    head = lm_head(model)
    return lambda hidden: head(hidden.float())


def require_vocabulary(base: PreTrainedModel, responses: Sequence[Response]) -> None:
    """Raise a ValueError at the first id that the model has no embedding of."""
    size = int(base.config.get_text_config().vocab_size)
    for each in responses:
        for name, ids in (("prompt", each.prompt), ("completion", each.completion)):
            at = next((at for at, token in enumerate(ids) if token >= size), None)
            if at is not None:
                raise ValueError(
                    f"responses must have ids below the model's vocab_size {size}, got {ids[at]} "
                    f"at token {at} of the {name} in line {each.line}; name the model that "
                    "sampled, or its tokenizer's ids."
                )
