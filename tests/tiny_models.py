"""Tiny Llama and Qwen models, the batches they get, and the same documents one by one, unpatched.

Shapes: B rows of S tokens, T = B·S = 256 in every batch, two blocks of 128 in a block mask.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.configuration_auto import model_type_to_module_name

from flexvarlen.bench.suites.contract.tiny_configs import draw_weights, tiny_config
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.reference.recurrences import plain_recurrences

VOCABULARY = 97
LENGTHS = (5, 70, 98, 1, 30, 52)  # the third crosses token 128, the boundary of two blocks
WINDOWS = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "qwen2_windows": (Qwen2Config, WINDOWS),
    "qwen3_windows": (Qwen3Config, WINDOWS),
}


def config_of(kind: str, head_dim: int = 16, **changes: Any):
    """The config of two layers, 6 query heads and 2 KV heads; of any verified family, too.

    Weights ten times as large as usual: else attention is almost uniform, and a leak moves little.
    """
    if kind not in KINDS:
        return tiny_config(kind, head_dim=head_dim, **changes)
    config_class, extra = KINDS[kind]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return config_class(**{**sizes, **extra, **changes})


def new_model(
    kind: str,
    *,
    head_dim: int = 16,
    implementation: str | None = None,
    task: str | None = None,
    **changes: Any,
):
    """A model of its own, always with the same weights, in fp32 and eval mode.

    Args:
        task: as transformers names the head's class; default: the family's.
    """
    torch.manual_seed(0)
    config = config_of(kind, head_dim, **changes)
    config._experts_implementation = "eager"  # the others have no fp64
    if implementation is None:  # some have no sdpa
        implementation = "sdpa" if kind in KINDS else "eager"
    auto_class = getattr(transformers, f"AutoModelFor{task or task_of(kind)}")
    model = auto_class.from_config(config, attn_implementation=implementation)
    return draw_weights(model).eval()


def task_of(kind: str) -> str:
    return "CausalLM" if kind in KINDS else BY_TYPE[kind].task


def balances_experts(model_type: str) -> bool:
    """Whether transformers adds the loss of a router to the head of this architecture.

    Some releases have the loss of one, but record no logits for it.
    """
    name = model_type_to_module_name(model_type)
    file = Path(transformers.__file__).parent / f"models/{name}/modeling_{name}.py"
    code = file.read_text()
    return "load_balancing_loss_func" in code and '"router_logits":' in code


@cache
def shared_model(kind: str, dtype=torch.float32, device: str = "cpu", head_dim: int = 16):
    """One model for many tests, which leave it unpatched, in eval mode and without gradients."""
    changes = {} if kind in KINDS else {"every_expert": dtype in (torch.bfloat16, torch.float16)}
    return new_model(kind, head_dim=head_dim, **changes).to(device=device, dtype=dtype)


def lora(model: nn.Module) -> nn.Module:
    """The model with adapters, which are not zero at first."""
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def tokenizer(padding_side: Literal["left", "right"] = "right") -> PreTrainedTokenizerFast:
    """The word "t7" for token 7; a chat is its messages' words."""
    words = {f"t{i}": i for i in range(VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="t1"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="t1",
        eos_token="t2",
        pad_token="t0",
        padding_side=padding_side,
        chat_template="{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}",
    )


@cache
def documents() -> tuple[Tensor, ...]:
    """Token ids of each document, `[L]`."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (sum(LENGTHS),), generator=generator).split(LENGTHS)


# ---- one by one ----


@dataclass(frozen=True)
class Outcome:
    """What a model gives for some documents: logits of all their tokens, loss, gradients."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def one_by_one(model: PreTrainedModel, order: tuple[tuple[int, int], ...]) -> Outcome:
    """Each document in a forward of its own, by index and first position; see `texts_alone`."""
    return texts_alone(model, [(documents()[index], first) for index, first in order])


def texts_alone(
    model: PreTrainedModel,
    texts: Sequence[tuple[Tensor, int]],
    *,
    labels: Sequence[Sequence[int]] | None = None,
    num_labels: int | None = None,
    smoothing: float = 0.0,
    autocast: bool = False,
) -> Outcome:
    """Each text in a forward of its own; the loss is the mean over all labels.

    Args:
        model: not patched.
        texts: token ids `[L]` and first position of each.
        labels: of each text, -100 is ignored; default: its tokens.
        num_labels: what the sum is divided by; default: all labels that are predicted.
        smoothing: of the labels.
        autocast: forwards run under bf16 autocast.
    """
    logits, losses, seen = [], [], 0
    for number, (given, first) in enumerate(texts):
        ids = given.to(model.device)
        own = ids if labels is None else torch.tensor(labels[number], device=model.device)
        positions = torch.arange(first, first + len(ids), device=model.device)[None]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
            out = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]
        wide = out if out.dtype == torch.float64 else out.float()
        losses.append(cross_entropy(wide[:-1], own[1:], reduction="sum", label_smoothing=smoothing))
        logits.append(out.detach())
        seen += int((own[1:] != -100).sum())
    loss = torch.stack(losses).sum() / (seen if num_labels is None else num_labels)
    loss.backward()
    # A vision tower has none.
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Outcome(torch.cat(logits), loss.detach(), gradients)


@cache
def exact_and_baseline(
    kind: str, order: tuple[tuple[int, int], ...], dtype=torch.float32, device="cpu", head_dim=16
) -> tuple[Outcome, Outcome]:
    """One by one in fp64, and in the dtype of the packed model, both with transformers' eager."""
    model = copy.deepcopy(shared_model(kind, dtype, device, head_dim))
    model.set_attn_implementation("eager")
    with plain_recurrences(model):
        baseline = one_by_one(model, order)
        return one_by_one(model.double(), order), baseline


# ---- batches ----


@dataclass(frozen=True)
class Batch:
    """Documents in rows.

    Attributes:
        ids, position_ids: `[B, S]`; padding has tokens too, and position 0.
        document_ids: `[B, S]`, 0 at padding, else the document's number in its row, from 1.
        cu_seqlens: int32, over all T tokens (rows without padding only).
        order: index and first position of each document, row by row.
    """

    ids: Tensor
    position_ids: Tensor
    document_ids: Tensor
    cu_seqlens: Tensor
    order: tuple[tuple[int, int], ...]

    def of_documents(self, x: Tensor) -> Tensor:
        """What `x`, `[B, S, …]`, holds at tokens of documents, in their order."""
        return x[self.document_ids.to(x.device) > 0]


def batch_of(
    rows: tuple[tuple[int, ...], ...],
    *,
    row_tokens: int,
    left: bool = False,
    firsts: dict[int, int] | None = None,
    device: str = "cpu",
) -> Batch:
    """A batch of the documents with these indices, padded to `row_tokens` a row.

    Args:
        left: padding comes first.
        firsts: the first position of a document that does not start at 0.
    """
    firsts = firsts or {}
    generator = torch.Generator().manual_seed(2)
    shape = (len(rows), row_tokens)
    ids = torch.randint(3, VOCABULARY, shape, generator=generator)
    position_ids, document_ids = torch.zeros(shape, dtype=torch.long), torch.zeros(shape).long()
    lengths, order = [0], []
    for row, indices in enumerate(rows):
        at = row_tokens - sum(LENGTHS[i] for i in indices) if left else 0
        for number, index in enumerate(indices):
            tokens = slice(at, at + LENGTHS[index])
            first = firsts.get(index, 0)
            ids[row, tokens] = documents()[index]
            position_ids[row, tokens] = torch.arange(first, first + LENGTHS[index])
            document_ids[row, tokens] = number + 1
            lengths.append(LENGTHS[index])
            order.append((index, first))
            at += LENGTHS[index]
    cu_seqlens = torch.tensor(lengths).cumsum(0).to(device, torch.int32)
    tensors = (x.to(device) for x in (ids, position_ids, document_ids))
    return Batch(*tensors, cu_seqlens, tuple(order))


ALL = tuple(range(len(LENGTHS)))


def one_row(device: str = "cpu", firsts: dict[int, int] | None = None) -> Batch:
    """All documents in one row of 256 tokens."""
    return batch_of((ALL,), row_tokens=256, firsts=firsts, device=device)


def two_rows(device: str = "cpu") -> Batch:
    """All documents in two rows of 128 tokens."""
    return batch_of(((0, 1, 3, 5), (2, 4)), row_tokens=128, device=device)


def padded_rows(device: str = "cpu", *, left: bool, packed: bool = False) -> Batch:
    """Two rows of 128 tokens, padding among them; one document per row, or (`packed`) several."""
    rows = ((0, 1, 3), (4, 5)) if packed else ((1,), (2,))
    return batch_of(rows, row_tokens=128, left=left, device=device)
