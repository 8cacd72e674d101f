"""What a case is, which there are, and how they are drawn: for `tests.fuzz`, `tests.same_answers`.

A case is a family of models, a head, a form of a batch (tests/forms.py), a mode and a backend, and
the documents of its rows. `draw` makes the case of a seed, `sample` combinations that hold most
pairs of values; `possible` is the one place that says what does not go together.

Shapes: B rows of S tokens.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import transformers

from flexvarlen.patches.models.families import BY_TYPE
from tests import forms
from tests.patches.models import images
from tests.tiny_models import VOCABULARY, Batch, config_of, task_of

# ---- what there is ----

FAMILIES = (
    *("llama", "qwen2", "qwen2_windows", "qwen3", "qwen3_windows", "mistral", "mixtral", "gemma2"),
    *("gemma3_text", "phi3", "gpt_oss", "olmo3", "smollm3", "cohere2", "deepseek_v3"),
    *("llama4_text", "mamba2", "bert", "roberta", "modernbert"),
)
"""Of random cases."""
KINDS_OF_LAYERS = (
    *("llama", "mistral", "gemma2", "gpt_oss", "llama4_text", "qwen3_moe", "gemma4_text"),
    *("deepseek_v3", "phi3", "qwen2_vl", "qwen3_5", "roberta", "modernbert"),
    *("qwen3_next", "granitemoehybrid", "mamba2", "lfm2"),
)
"""Each stands for one: windows, softcap, sinks, chunks, experts, shared keys and values, latent
attention, longrope, M-RoPE, encoders, the delta rule, Mamba-2, short convolutions."""
ENCODERS = tuple(name for name, family in BY_TYPE.items() if family.task == "MaskedLM")
NO_SDPA = ("gemma2", "gpt_oss")  # softcap and sinks
COMPILED = ("llama", "gpt_oss", "roberta")  # each takes seconds

HEADS = {
    "own": "",
    "none": "",
    "SequenceClassification": "SequenceClassification",
    "TokenClassification": "TokenClassification",
    "QuestionAnswering": "QuestionAnswering",
    "classifier that pools by the mask": "SequenceClassification",
    "questions by a forward of its own": "QuestionAnswering",
}
"""Of each the task, by which transformers names the class: of "own" the family's."""
REPLACED = tuple(HEADS)[5:]
"""Their forward is not transformers': what they do with padding is their own affair."""
HEAD_FAMILIES = ("llama", "qwen3", "mamba2", *ENCODERS)
LABELS = 3
LABELS_OF_DOCUMENTS = ("classes", "several", "regression", "wrong", None)
"""Of a classifier; "wrong" is one label for all documents."""

FORMS = {
    **forms.FORMS,
    "collator": forms.Form("what PackedCollator makes of the documents", "whole", lambda b: {}),
}

GENERATED = ("padding_mask", "plain", "shared prompt, left padding")


@dataclass(frozen=True)
class Mode:
    """How a model runs.

    Attributes:
        reentrant: gradient checkpointing of this kind, or None for none of it.
        call: "forward", "compiled", "generate", or "cached": calls that share a cache.
        patch: of the "model", its "base" alone, or "undone" again; or the plugin's "name" alone.
        options: further arguments of `patch_model`.
    """

    train: bool = True
    gradients: bool = True
    reentrant: bool | None = None
    autocast: bool = False
    call: str = "forward"
    patch: str = "model"
    options: Mapping[str, Any] = field(default_factory=dict)


EVAL = {"train": False, "gradients": False}
MODES = {
    "train": Mode(),
    "eval": Mode(**EVAL),
    "train() without gradients": Mode(gradients=False),
    "eval() with gradients": Mode(train=False),
    "checkpointing": Mode(reentrant=False),
    "reentrant checkpointing": Mode(reentrant=True),
    "autocast": Mode(autocast=True),
    "unpad": Mode(options={"unpad": True}),
    "unpad and share prefixes": Mode(options={"unpad": True, "share_prefixes": True}),
    "deterministic": Mode(options={"deterministic": True}),
    "batch invariant": Mode(options={"batch_invariant": True}),
    "base alone": Mode(**EVAL, patch="base"),
    "cached calls": Mode(**EVAL, call="cached"),
    "generate": Mode(**EVAL, call="generate"),
    "compiled": Mode(call="compiled"),
    "by name": Mode(patch="name"),
    "unpatched": Mode(patch="undone"),
}


class Combination(NamedTuple):
    """One value of each."""

    family: str
    head: str
    form: str
    mode: str
    backend: str


@cache
def has_head(family: str, head: str) -> bool:
    if head in ("own", "none"):
        return True
    auto = getattr(transformers, f"AutoModelFor{HEADS[head]}")
    return type(config_of(family)) in auto._model_mapping


def possible(given: Combination) -> Combination:
    """The combination, with what does not exist, says nothing or takes too long replaced."""
    family, head, form, mode, backend = given
    task, sees_images = task_of(family), family in images.KINDS
    packed = form not in forms.FORMS or not forms.FORMS[form].rows.startswith("one")
    if form == "images" and not sees_images:
        form = "cu_seq_lens"
    if head in REPLACED and not packed:
        form = "packed_layout"
    if mode == "generate" and (task != "CausalLM" or form not in GENERATED):
        mode = "eval"
    if mode == "cached calls":
        mode, form = ("eval", form) if task == "MaskedLM" else (mode, "padding_mask")
    if mode == "by name" and not BY_TYPE[family].by_name_alone:
        mode = "train"
    if mode.startswith("unpad") and (sees_images or form == "plain"):
        mode = "train"
    if mode == "compiled" and family not in COMPILED:
        mode = "checkpointing"
    if mode == "reentrant checkpointing" and family == "gemma4_text":
        mode = "checkpointing"
    if mode == "base alone" and head in ("none", *REPLACED):
        mode = "eval"
    if backend == "sdpa" and family in NO_SDPA:
        backend = "reference"
    if mode == "batch invariant" and (
        backend == "reference" or (backend == "auto" and family in NO_SDPA)
    ):
        mode = "deterministic"
    if form == "tree" and head == "SequenceClassification":
        head = "TokenClassification"
    whole = mode in ("generate", "cached calls") or form == "samples with a common prefix"
    if whole or not has_head(family, head):
        head = "own"
    return Combination(family, head, form, mode, backend)


# ---- documents in rows ----

MOST_DOCUMENTS = 30  # of a row


@dataclass(frozen=True)
class Rows:
    """Documents in rows of one length.

    Attributes:
        documents: tokens of each, row by row.
        left, right: padding tokens of each row.
        numbered: documents are numbered 1 to this, and from 1 again.
        padding_position: the value of position_ids at padding, or None: they go on.
        first: the position of the first document's first token.
    """

    documents: tuple[tuple[int, ...], ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    numbered: int = MOST_DOCUMENTS
    padding_position: int | None = 0
    first: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of all documents that are not empty."""
        return [n for row in self.documents for n in row if n]

    def batch(self, seed: int, padding: int | None = None) -> Batch:
        """With random tokens; at padding too, unless it is given."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(self.documents), self.left[0] + sum(self.documents[0]) + self.right[0])
        ids = torch.randint(3, VOCABULARY, shape, generator=generator)
        numbers = torch.zeros(shape, dtype=torch.long)
        positions = torch.arange(shape[1]).repeat(shape[0], 1)
        for row, lengths in enumerate(self.documents):
            at = self.left[row]
            for number, length in enumerate(filter(None, lengths)):
                numbers[row, at : at + length] = number % self.numbered + 1
                positions[row, at:] = torch.arange(shape[1] - at)
                at += length
        if self.first:
            positions[0, : self.lengths[0]] += self.first
        if self.padding_position is not None:
            positions[numbers == 0] = self.padding_position
        if padding is not None:
            ids[numbers == 0] = padding
        cu_seqlens = torch.tensor([0, *accumulate(itertools.chain(*self.documents))])
        return Batch(ids, positions, numbers, cu_seqlens.int(), order=())


def draw_rows(rng: random.Random, given: Combination) -> Rows:
    """Documents that the form can say, in a number and of lengths that the family can take."""
    family, head, form, mode, backend = given
    kind = "whole" if head in REPLACED else FORMS[form].rows
    tokens = rng.choice([rng.randint(1, 12), rng.randint(8, 60), rng.randint(60, 200)])
    batch = 1 if form == "collator" else rng.choice([1, 1, 2, 3])
    most = 5 if family in SCANS else MOST_DOCUMENTS
    if HEADS[head] == "QuestionAnswering":  # it is refused for several
        most = rng.choice([1, most])
    if backend == "flex":
        tokens, batch = FLEX_TOKENS, 1
    elif mode == "cached calls":
        # Phi-3's longrope takes the frequencies of 64 tokens or fewer, or others for all rows.
        tokens = min(tokens, 50 if family == "phi3" else 90)
    plain = head in ("own", "none")
    drawn = [
        # A head gives an output for a row of nothing but padding, too.
        _draw_row(rng, kind, tokens, most, is_last=row == batch - 1, may_be_empty=plain and row > 0)
        for row in range(batch)
    ]
    packs = any(len(documents) > 1 for documents, _, _ in drawn)
    only_right = family in ("llama4_text", "phi3") and not packs and mode != "cached calls"
    # Under `unpad` BERT's positions count padding on the left, as transformers' do.
    only_right |= family == "bert" and mode.startswith("unpad")
    if only_right:
        # Positions then count left padding, as in transformers, and by them Llama 4 scales its
        # queries, and Phi-3's longrope chooses its frequencies: no document alone has the same.
        drawn = [(documents, 0, left + right) for documents, left, right in drawn]
    if mode == "generate":
        drawn = [(documents, left + right, 0) for documents, left, right in drawn]
    documents, left, right = zip(*drawn, strict=True)
    if not plain:  # an empty one has no output
        documents = tuple(tuple(filter(None, row)) for row in documents)
    numbered = rng.choice([2, MOST_DOCUMENTS])
    padding_position = rng.choice([0, 1, None])
    # Others than these add a number of their own, or take frequencies and scales by position.
    moves = form == "position_ids" and family not in ("roberta", "phi3", "llama4_text")
    first = rng.choice([0, 0, 2, 100]) if moves else 0
    return Rows(documents, left, right, numbered, padding_position, first)


FLEX_TOKENS = 128  # it compiles for each number of them, which takes seconds
SCANS = ("mamba2", "qwen3_next", "qwen3_5", "granitemoehybrid")  # on a CPU, document by document


def _draw_row(
    rng: random.Random, kind: str, tokens: int, most: int, *, is_last: bool, may_be_empty: bool
) -> tuple[tuple[int, ...], int, int]:
    """Documents of a row, and the padding left and right of them."""
    longest = tokens if kind.startswith("one") else rng.choice([1, 6, 40, tokens])
    lengths: list[int] = []
    while rest := tokens - sum(lengths):
        last = kind == "one" or len(lengths) + 1 == most
        lengths.append(rest if last else rng.randint(1, min(longest, rest)))
    count = len(lengths)
    first, end = 0, count
    if kind == "one padded":
        first = rng.choice([0, count - 1, rng.randrange(count)])
        end = first + 1
    elif kind == "padded":
        first, end = sorted((rng.choice([0, rng.randint(0, count)]), rng.randint(0, count)))
        if first == end and not may_be_empty:
            first, end = 0, count
    elif kind == "explicit" and is_last:
        end = rng.choice([count, rng.randint(1, count)])
    documents = lengths[first:end]
    if kind == "explicit" and rng.random() < 0.3:
        documents.insert(rng.randint(0, len(documents)), 0)
    return tuple(documents), sum(lengths[:first]), sum(lengths[end:])


# ---- a random case ----

INTEGERS = (torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A combination, the documents of its batch, and what else a caller may do.

    Attributes:
        beside: names of `forms.BESIDE`.
        labels: "tokens", one of `LABELS_OF_DOCUMENTS`, or None: no labels.
        dtype: of positions, masks and document numbers, where their values fit.
        pads: documents hold the padding token; under a head that pools, some nothing else.
        embeddings: inputs_embeds in place of ids.
        by_position: arguments are given by position, labels among them.
        calls: cached: new tokens of each call; the first one or two are the prompt.
        positions: cached: whether each call gets position_ids.
        cache: cached: "own" (the model makes it), "dynamic" or "static".
    """

    seed: int
    of: Combination
    rows: Rows
    beside: tuple[str, ...] = ()
    labels: str | None = None
    dtype: torch.dtype | None = None
    pads: bool = False
    embeddings: bool = False
    by_position: bool = False
    use_cache: bool | None = None
    calls: tuple[int, ...] = ()
    positions: tuple[bool, ...] = ()
    cache: str = "own"

    @property
    def mode(self) -> Mode:
        return MODES[self.of.mode]

    @property
    def is_encoder(self) -> bool:
        return self.of.family in ENCODERS

    @property
    def task(self) -> str:
        return HEADS[self.of.head]

    @property
    def pools(self) -> bool:
        """Whether the head gives one output for each document."""
        return self.task == "SequenceClassification"

    @property
    def predicts(self) -> bool:
        """Whether labels are those of the next token."""
        return self.of.head == "own" and not self.is_encoder


BACKENDS = {"sdpa": 20, "reference": 15, "auto": 9, "flex": 1}
"""How often random cases run on each."""
RANDOM_MODES = {name: 1 for name in tuple(MODES)[:12]} | {"cached calls": 6}


def draw(seed: int, families: Sequence[str] = FAMILIES, *, heads: bool = False) -> Case:
    """The case of a seed; it is another one for other `families`, and for other `heads` alone."""
    rng = random.Random(seed)
    others = tuple(HEADS)[2:]
    wanted = heads or rng.random() < 0.33
    among = [x for x in families if x in HEAD_FAMILIES] if wanted else []
    head = rng.choice(others) if among else rng.choice(["own", "own", "own", "none"])
    family, form = rng.choice(among or families), rng.choice(list(FORMS))
    backend, mode = (rng.choices(list(x), list(x.values()))[0] for x in (BACKENDS, RANDOM_MODES))
    combination = _held_alone(Combination(family, head, form, mode, backend))
    rows = draw_rows(rng, combination)
    beside = tuple(name for name in FORMS[combination.form].beside if rng.random() < 0.4)
    return Case(seed, combination, rows, beside, **_draw_details(rng, combination, rows))


def _held_alone(given: Combination) -> Combination:
    """The combination, with what cannot be compared with documents alone on a CPU replaced."""
    found = possible(given)
    if found.mode == "cached calls" and (found.backend == "flex" or found.family == "mamba2"):
        found = found._replace(mode="eval")
    if found.mode == "unpad and share prefixes" and found.family in ENCODERS:
        found = found._replace(mode="unpad")  # it is refused
    if found.backend == "flex" and MODES[found.mode].gradients:
        found = found._replace(mode="eval")  # FlexAttention has no backward there
    return found


def _draw_details(rng: random.Random, of: Combination, rows: Rows) -> dict[str, Any]:
    if of.mode == "cached calls":
        return _draw_calls(rng, rows)
    plain = of.head in ("own", "none")
    labels: Sequence[str | None] = [None] if of.head == "none" else ["tokens", "tokens", None]
    if HEADS[of.head] == "SequenceClassification":
        labels = LABELS_OF_DOCUMENTS
    # Encoders know the padding of a padded batch by its ids.
    has_ids = of.form == "collator" or (of.family in ENCODERS and of.mode == "unpad")
    embeddings = plain and not has_ids and rng.random() < 0.2
    by_position = of.head == "own" and of.family in ("llama", "qwen3") and not embeddings
    # Left of them transformers' head reads padding, and RoBERTa's positions skip that token.
    pads = not (plain or any(rows.left) or of.family == "roberta")
    return {
        "labels": rng.choice(labels),
        "dtype": None if plain or rng.random() < 0.6 else rng.choice(INTEGERS + FLOATS),
        "pads": pads and rng.random() < 0.3,
        "embeddings": embeddings,
        "by_position": by_position and rng.random() < 0.3,
        "use_cache": rng.choice([None, False]) if plain and of.family not in ENCODERS else None,
    }


def _draw_calls(rng: random.Random, rows: Rows) -> dict[str, Any]:
    tokens = rows.left[0] + sum(rows.documents[0]) + rows.right[0]
    cut = rng.choice([tokens, rng.randint(1, tokens)])
    prompt = [n for n in (cut, tokens - cut) if n]
    steps = [rng.choice([1, 1, 1, 3]) for _ in range(rng.randint(1, 3))]
    with_prompt, with_steps = rng.random() < 0.4, rng.random() < 0.4
    return {
        "calls": (*prompt, *steps),
        "positions": (*[with_prompt] * len(prompt), *[with_steps] * len(steps)),
        "cache": rng.choice(["own", "own", "dynamic", "static"]),
    }


# ---- a sample of combinations ----


def sample(
    families: Sequence[str],
    heads: Sequence[str],
    forms: Sequence[str],
    modes: Sequence[str],
    backends: Sequence[str],
    seed: int = 0,
) -> list[Combination]:
    """Every family in every form.

    Head, mode and backend of each are those of a few drawn ones with the most new pairs of values.
    """
    rng = random.Random(seed)
    every = list(itertools.product(families, forms))
    rng.shuffle(every)
    seen: Counter[frozenset[tuple[int, str]]] = Counter()
    found: list[Combination] = []
    for family, form in every:
        drawn = []
        for _ in range(30):
            head, mode, backend = (rng.choice(x) for x in (heads, modes, backends))
            drawn.append(possible(Combination(family, head, form, mode, backend)))
        chosen = max(drawn, key=lambda x: sum(2.0 ** -seen[pair] for pair in _pairs(x)))
        seen.update(_pairs(chosen))
        found.append(chosen)
    return list(dict.fromkeys(found))


def _pairs(combination: Combination) -> list[frozenset[tuple[int, str]]]:
    """Each two of its values."""
    return [frozenset(x) for x in itertools.combinations(enumerate(combination), 2)]
