"""One random case of `tests.fuzz`: a batch, how a patched model runs on it, what it should give.

Shapes: B rows of S tokens; V is the vocabulary, or the hidden size of a base model.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import DynamicCache, StaticCache

from flexvarlen.patches.models.families import BY_TYPE
from tests import forms
from tests.patches.forward.test_packed_models import ready
from tests.tiny_models import KINDS, VOCABULARY, Batch, new_model

FAMILIES = (
    *("llama", "qwen2", "qwen2_windows", "qwen3", "qwen3_windows", "mistral", "mixtral", "gemma2"),
    *("gemma3_text", "phi3", "gpt_oss", "olmo3", "smollm3", "cohere2", "deepseek_v3"),
    *("llama4_text", "bert", "roberta", "modernbert"),
)
ENCODERS = tuple(name for name, family in BY_TYPE.items() if family.task == "MaskedLM")
NO_SDPA = ("gemma2", "gpt_oss")  # softcap and sinks
# flex has no gradients on the CPU, and compiles for each number of tokens, which takes seconds.
BACKENDS = [*["sdpa"] * 20, *["reference"] * 15, *["auto"] * 9, "flex"]
FLEX_TOKENS = 128
MOST_DOCUMENTS = 30  # of a row

Inputs = dict[str, Any]
Outcome = dict[str, Tensor]  # outputs [tokens, V], loss and gradients, by name


FORMS = {
    **forms.FORMS,
    "decoding": forms.Form("calls that share a cache", "one padded", lambda b: {}, ("ones",)),
}


@dataclass(frozen=True)
class Case:
    """A batch, and how the model runs on it.

    Attributes:
        rows: tokens of each document, row by row.
        left, right: padding tokens of each row.
        numbered: documents are numbered 1 to this, and from 1 again.
        padding_position: the value of position_ids at padding, or None: they go on.
        reentrant: gradient checkpointing of this kind, or None for none of it.
        base: the base model is called, without its head.
        calls: decoding: new tokens of each call; the first one or two are the prompt.
        positions: decoding: whether each call gets position_ids.
        cache: decoding: "own" (the model makes it), "dynamic" or "static".
    """

    seed: int
    family: str
    backend: str
    form: str
    rows: tuple[tuple[int, ...], ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    beside: tuple[str, ...]
    numbered: int
    padding_position: int | None
    train: bool = False
    gradients: bool = False
    labels: bool = False
    reentrant: bool | None = None
    autocast: bool = False
    use_cache: bool | None = None
    base: bool = False
    embeddings: bool = False
    calls: tuple[int, ...] = ()
    positions: tuple[bool, ...] = ()
    cache: str = "own"


# ---- draw ----


def draw(seed: int, families: tuple[str, ...] = FAMILIES) -> Case:
    """The case of a seed; it is another one for other `families`."""
    rng = random.Random(seed)
    family = rng.choice(families)
    decodes = family not in ENCODERS and rng.random() < 0.35
    form = "decoding" if decodes else rng.choice([name for name in FORMS if name != "decoding"])
    backend = rng.choice(BACKENDS[:-1] if decodes else BACKENDS)
    if backend == "sdpa" and family in NO_SDPA and rng.random() < 0.9:
        backend = "reference"
    beside = [name for name in FORMS[form].beside if rng.random() < 0.4]
    rows, left, right = _draw_rows(rng, family, backend, form)
    return Case(
        seed,
        family,
        backend,
        form,
        rows,
        left,
        right,
        tuple(beside),
        numbered=rng.choice([2, MOST_DOCUMENTS]),
        # RoBERTa's count from 0 if those of a row's first token do, padding or not.
        padding_position=rng.choice([0, None] if family == "roberta" else [0, 1, None]),
        **_draw_calls(rng, left, rows, right) if decodes else _draw_modes(rng, family, backend),
    )


def _draw_rows(rng: random.Random, family: str, backend: str, form: str) -> tuple[Any, Any, Any]:
    """Documents of each row, and the padding left and right of them."""
    tokens = rng.choice([rng.randint(1, 12), rng.randint(8, 60), rng.randint(60, 200)])
    batch = rng.choice([1, 1, 2, 3])
    if backend == "flex":
        tokens, batch = FLEX_TOKENS, 1
    elif form == "decoding":
        # Phi-3's longrope takes the frequencies of 64 tokens or fewer, or others for all rows.
        tokens = min(tokens, 50 if family == "phi3" else 90)
    drawn = [_draw_row(rng, FORMS[form].rows, tokens, row, batch) for row in range(batch)]
    packs = any(len(documents) > 1 for documents, _, _ in drawn)
    if family in ("llama4_text", "phi3") and not packs and form != "decoding":
        # Positions then count left padding, as in transformers, and by them Llama 4 scales its
        # queries, and Phi-3's longrope chooses its frequencies: no document alone has the same.
        drawn = [(documents, 0, left + right) for documents, left, right in drawn]
    return tuple(zip(*drawn, strict=True))  # type: ignore[return-value]


def _draw_row(
    rng: random.Random, kind: str, tokens: int, row: int, batch: int
) -> tuple[tuple[int, ...], int, int]:
    longest = tokens if kind.startswith("one") else rng.choice([1, 6, 40, tokens])
    lengths: list[int] = []
    while rest := tokens - sum(lengths):
        last = kind == "one" or len(lengths) + 1 == MOST_DOCUMENTS
        lengths.append(rest if last else rng.randint(1, min(longest, rest)))
    count = len(lengths)
    first, end = 0, count
    if kind == "one padded":
        first = rng.choice([0, count - 1, rng.randrange(count)])
        end = first + 1
    elif kind == "padded":
        first, end = sorted((rng.choice([0, rng.randint(0, count)]), rng.randint(0, count)))
        if row == 0 and first == end:  # other rows may be nothing but padding
            first, end = 0, count
    elif kind == "explicit" and row == batch - 1:
        end = rng.choice([count, rng.randint(1, count)])
    documents = lengths[first:end]
    if kind == "explicit" and rng.random() < 0.3:
        documents.insert(rng.randint(0, len(documents)), 0)
    return tuple(documents), sum(lengths[:first]), sum(lengths[end:])


def _draw_modes(rng: random.Random, family: str, backend: str) -> dict[str, Any]:
    rare = 0.1 if backend == "flex" else 1.0
    gradients = rng.random() < 0.6 * rare
    train = rng.random() < (0.8 if gradients else 0.2 * rare)
    base = rng.random() < 0.25
    return {
        "train": train,
        "gradients": gradients,
        "labels": not base and rng.random() < 0.7,
        "reentrant": rng.choice([None, False, True]) if train and gradients else None,
        "autocast": rng.random() < 0.1,
        "use_cache": None if family in ENCODERS else rng.choice([None, False]),
        "base": base,
        "embeddings": rng.random() < 0.2,
    }


def _draw_calls(rng: random.Random, left: Any, rows: Any, right: Any) -> dict[str, Any]:
    tokens = left[0] + sum(rows[0]) + right[0]
    cut = rng.choice([tokens, rng.randint(1, tokens)])
    prompt = [n for n in (cut, tokens - cut) if n]
    steps = [rng.choice([1, 1, 1, 3]) for _ in range(rng.randint(1, 3))]
    with_prompt, with_steps = rng.random() < 0.4, rng.random() < 0.4
    return {
        "calls": (*prompt, *steps),
        "positions": (*[with_prompt] * len(prompt), *[with_steps] * len(steps)),
        "cache": rng.choice(["own", "own", "dynamic", "static"]),
    }


def batch_of(case: Case) -> Batch:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (len(case.rows), case.left[0] + sum(case.rows[0]) + case.right[0])
    ids = torch.randint(3, VOCABULARY, shape, generator=generator)
    numbers = torch.zeros(shape, dtype=torch.long)
    positions = torch.arange(shape[1]).repeat(shape[0], 1)
    for row, lengths in enumerate(case.rows):
        at = case.left[row]
        for number, length in enumerate(filter(None, lengths)):
            numbers[row, at : at + length] = number % case.numbered + 1
            positions[row, at:] = torch.arange(shape[1] - at)
            at += length
    if case.padding_position is not None:
        positions[numbers == 0] = case.padding_position
    cu_seqlens = torch.tensor([0, *accumulate(n for row in case.rows for n in row)])
    return Batch(ids, positions, numbers, cu_seqlens.int(), order=())


# ---- run ----


@cache
def model_of(family: str):
    """Shared; a token goes to all experts, of which two that are almost equal could swap."""
    return new_model(family, **({} if family in KINDS else {"every_expert": True}))


def run(case: Case) -> tuple[Outcome, list[Outcome]]:
    """What the patched model gives; and what it should give, of which it must equal one.

    Cached calls give what the unpatched model gives in the same calls. Where these do not fit one
    another (a prompt without position_ids, whose padding counts, then steps with), a patched model
    may also give what the documents give one by one.
    """
    model, batch = model_of(case.family), batch_of(case)
    autocast = torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext()
    with torch.set_grad_enabled(case.gradients), autocast:
        together = _decode if case.calls else _forward
        expected = [(_decode_alone if case.calls else _one_by_one)(model, case, batch)]
        if case.calls:
            expected.insert(0, _decode(model, case, batch))
        with ready(model, case.backend, case):
            return together(model, case, batch), expected


def _forward(model, case: Case, batch: Batch) -> Outcome:
    """The whole batch at once."""
    inputs = _tokens(model, case, batch.ids) | forms.given(case.form, batch, *case.beside)
    if case.use_cache is not None:
        inputs["use_cache"] = case.use_cache
    if _has_loss(case, batch):
        inputs["labels"] = batch.ids.masked_fill(_unlabelled(batch), -100)
    out = _call(model, case, **inputs)
    loss = out.loss if "labels" in inputs else None
    found = _outcome(model, case, batch.of_documents(out[_output(case)]), loss)
    if case.gradients and case.embeddings:
        found["gradient of inputs_embeds"] = batch.of_documents(inputs["inputs_embeds"].grad)
    return found


def _one_by_one(model, case: Case, batch: Batch) -> Outcome:
    """A document in each forward; the loss is the mean over all labels."""
    lengths = [n for n in batch.cu_seqlens.diff().tolist() if n]
    caches = {} if case.family in ENCODERS else {"use_cache": False}
    tokens = [
        _tokens(model, case, ids[None]) for ids in batch.of_documents(batch.ids).split(lengths)
    ]
    outputs = torch.cat([_call(model, case, **x, **caches)[_output(case)][0] for x in tokens])
    loss = None
    if _has_loss(case, batch):
        labels = _counted_labels(case, batch)
        logits = outputs if case.family in ENCODERS else pad(outputs, (0, 0, 1, 0))[:-1]
        loss = cross_entropy(logits.float(), labels)
    found = _outcome(model, case, outputs, loss)
    if case.gradients and case.embeddings:
        found["gradient of inputs_embeds"] = torch.cat([x["inputs_embeds"].grad[0] for x in tokens])
    return found


def _call(model, case: Case, **inputs: Any) -> Any:
    if case.base:  # of a multimodal model's text tower base_model is that tower with its head
        model = model.model if model.base_model is model else model.base_model
    return model(**inputs)


def _output(case: Case) -> str:
    return "last_hidden_state" if case.base else "logits"


def _tokens(model, case: Case, ids: Tensor) -> Inputs:
    if not case.embeddings:
        return {"input_ids": ids}
    embedded = model.get_input_embeddings()(ids).detach()
    return {"inputs_embeds": embedded.requires_grad_(case.gradients)}


def _unlabelled(batch: Batch) -> Tensor:
    return (batch.ids % 4 == 0) | (batch.document_ids == 0)


def _counted_labels(case: Case, batch: Batch) -> Tensor:
    """`[tokens]`, those that count: of a causal model's not the first of a document."""
    ignored = _unlabelled(batch)
    if case.family not in ENCODERS:
        ignored = ignored | (batch.position_ids == 0)
    return batch.of_documents(batch.ids.masked_fill(ignored, -100))


def _has_loss(case: Case, batch: Batch) -> bool:
    """The mean over no labels has no value."""
    return case.labels and bool((_counted_labels(case, batch) >= 0).any())


def _outcome(model, case: Case, outputs: Tensor, loss: Tensor | None) -> Outcome:
    """With the gradients of the loss, or of some function of the outputs; resets them."""
    found = {"outputs": outputs.detach()}
    if loss is not None:
        found["loss"] = loss.detach()
    if case.gradients:
        if loss is None:
            weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs)
            loss = (outputs.float() * weights).sum() / len(outputs)
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
        model.zero_grad()
    return found


def _decoded_tokens(case: Case, batch: Batch) -> tuple[Tensor, Tensor]:
    """Ids of prompt and new tokens, and which are no padding, `[B, tokens of all calls]`."""
    new = sum(case.calls) - batch.ids.shape[1]
    ids = torch.cat([batch.ids, batch.ids.flip(1).repeat(1, new)[:, :new]], dim=1)
    return ids, pad(batch.document_ids > 0, (0, new), value=True)


def _decode(model, case: Case, batch: Batch) -> Outcome:
    """Calls that share a cache."""
    ids, real = _decoded_tokens(case, batch)
    positions = real.cumsum(1) - 1
    if case.padding_position is not None:
        positions[~real] = case.padding_position
    kept = {
        "own": lambda: None,
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=ids.shape[1]),
    }[case.cache]()
    logits = []
    bounds = pairwise([0, *accumulate(case.calls)])
    for with_positions, (start, end) in zip(case.positions, bounds, strict=True):
        inputs: Inputs = {"position_ids": positions[:, start:end]} if with_positions else {}
        if case.beside or not real.all():
            inputs["attention_mask"] = real[:, :end].long()
        out = model(ids[:, start:end], past_key_values=kept, use_cache=True, **inputs)
        kept = out.past_key_values
        logits.append(out.logits)
    return {"outputs": torch.cat(logits, dim=1)[real]}


def _decode_alone(model, case: Case, batch: Batch) -> Outcome:
    """The same documents, each in one forward."""
    rows = zip(*_decoded_tokens(case, batch), strict=True)
    logits = [model(ids[real][None], use_cache=False).logits[0] for ids, real in rows]
    return {"outputs": torch.cat(logits)}
