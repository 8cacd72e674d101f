"""Models of test_ulysses.py, trained by each rank on its shard."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForTokenClassification

import flexvarlen as fv
from tests.parallel.failed_refusals import failed_refusals
from tests.tiny_models import VOCABULARY, new_model

TOKENS = 128
ROWS = ((37, 1, 50, 22), (37, 27, 46))  # 64: inside a document, and its boundary; padding behind


def batch_of(row: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(row)
    ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=generator)
    layout = fv.PackedLayout.from_lengths(ROWS[row], total_tokens=TOKENS)
    return {"input_ids": ids, "labels": ids.clone(), "packed_layout": layout}


@dataclass(frozen=True)
class Model:
    """A model of `kind` on this number of ranks.

    Attributes:
        groups: of equal sizes, each with a row of its own.
        prompt: tokens at the beginning that have no label.
    """

    name: str
    kind: str
    ranks: int
    changes: dict[str, Any] = field(default_factory=dict)
    groups: int = 1
    wrapper: Literal["ddp", "fsdp"] | None = None
    checkpointing: bool = False
    compiled: bool = False
    prompt: int = 0
    backend: str = "sdpa"

    def new(self):
        model = new_model(self.kind, **self.changes).train()
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def batches(self) -> list[dict[str, Any]]:
        batches = [batch_of(row) for row in range(self.groups)]
        for batch in batches:
            batch["labels"][:, : self.prompt] = -100
        return batches

    def expected(self):
        """Logits, loss and gradients of one process, on whole rows."""
        model = fv.patch_model(self.new(), self.backend)
        batches = self.batches()
        count = sum(
            (document[1:] != -100).sum()
            for batch, lengths in zip(batches, ROWS, strict=False)
            for document in batch["labels"][0, : sum(lengths)].split(lengths)
        )
        logits, losses = [], []
        for batch in batches:
            out = model(**batch, num_items_in_batch=count)
            logits.append(out.logits.detach())
            losses.append(out.loss)
        sum(losses).backward()
        gradients = {name: x.grad for name, x in model.named_parameters()}
        return torch.cat(logits), sum(losses).detach(), gradients

    def share(self) -> dict[str, Any]:
        """The same of this rank's shard."""
        group, row = dist.group.WORLD, 0
        if self.groups > 1:
            mesh = init_device_mesh("cpu", (self.groups, self.ranks // self.groups))
            group, row = mesh.get_group(1), mesh.get_local_rank(0)
        inner = fv.patch_model(self.new(), self.backend, sequence_parallel_group=group)
        model = inner
        if self.compiled:
            torch._dynamo.reset()
            model = torch.compile(inner, backend="eager", fullgraph=True)
        if self.wrapper == "ddp":
            model = DistributedDataParallel(model)
        elif self.wrapper == "fsdp":
            for layer in (*inner.model.layers, inner):
                fully_shard(layer)
        shard = fv.shard_row(self.batches()[row], group, method="ulysses")
        if self.groups > 1:
            count = shard["num_items_in_batch"].clone()
            dist.all_reduce(count, group=mesh.get_group(0))
            shard["num_items_in_batch"] = count
        out = model(**shard)
        (out.loss * (self.ranks if self.wrapper else 1)).backward()
        gradients = {name: x.grad for name, x in inner.named_parameters()}
        if self.wrapper == "fsdp":
            assert all(isinstance(x, DTensor) for x in gradients.values())
            gradients = {name: x.full_tensor() for name, x in gradients.items()}
        return {
            "logits": out.logits.detach()[0],
            "loss": out.loss.detach(),
            "gradients": gradients,
        }


FEW_KV_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
MODELS = (
    Model("ddp", "llama", 2, wrapper="ddp", checkpointing=True),
    Model("fsdp", "qwen3", 2, wrapper="fsdp", backend="auto"),
    Model("compiled", "qwen3", 2, {"num_hidden_layers": 1}, compiled=True),
    Model("softcap_and_windows", "gemma2", 2, backend="reference"),
    Model("sinks_and_experts", "gpt_oss", 2, backend="reference"),
    Model("fewer_kv_heads_than_ranks", "qwen3_windows", 4, FEW_KV_HEADS),
    Model("ranks_without_labels", "llama", 4, FEW_KV_HEADS, prompt=70),
    Model("chunks_and_temperature", "llama4_text", 4, FEW_KV_HEADS),
    Model("two_groups_of_two", "llama", 4, groups=2, wrapper="ddp"),
)


def copies() -> dict[str, str]:
    """Of a patched model."""
    group = dist.group.WORLD
    model = fv.patch_model(new_model("llama"), "sdpa", sequence_parallel_group=group)
    shard = fv.shard_row(batch_of(0), group, method="ulysses")
    logits = model(**shard).logits
    same = copy.deepcopy(model)(**shard).logits.equal(logits)
    with fv.patched(model):
        assert fv.verify_isolation(model, batch_of(0)).gradients == "bits"
        assert model.generate(shard["input_ids"], max_new_tokens=2).shape[1] == TOKENS // 2 + 2
    assert model(**shard).logits.equal(logits)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=False)(**shard)
    except ValueError as error:
        said = str(error)
    return {"copy": "same logits" if same else "other logits", "pickle": said}


WHOLE = "packed_layout must cover the"
OUT = "must be left out under sequence_parallel_group"


def refusals() -> dict[str, str]:
    """Of `patch_model` and of patched models, before any rank waits for another."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    model = fv.patch_model(new_model("mixtral", **FEW_KV_HEADS), sequence_parallel_group=group)
    row = batch_of(0)
    layout, whole = row["packed_layout"], fv.shard_row(row, group, method="ulysses")
    own = fv.PackedLayout.from_lengths([TOKENS // ranks])
    shard = {name: whole[name] for name in ("input_ids", "packed_layout")}
    tokens = shard["input_ids"]
    dropping = new_model("llama", attention_dropout=0.1, **FEW_KV_HEADS).train()
    fv.patch_model(dropping, sequence_parallel_group=group)

    losing = fv.patch_model(new_model("llama", **FEW_KV_HEADS), sequence_parallel_group=group)
    losing.loss_function = lambda logits, labels, vocab_size, **more: logits.sum() / labels.numel()
    classifier = LlamaForTokenClassification(losing.config)
    fv.patch_model(classifier, sequence_parallel_group=group)
    three_heads = new_model("llama", num_attention_heads=3, num_key_value_heads=3)
    fv.patch_model(three_heads, sequence_parallel_group=group)

    def patch(kind: str, group: Any = group, **changes: Any) -> None:
        fv.patch_model(new_model(kind, **changes), sequence_parallel_group=group)

    calls = {
        "no layout": ("packed_layout must come with each rank's shard", lambda: model(tokens)),
        "lengths for a layout": (
            "packed_layout must come with each rank's shard",
            lambda: model(tokens, packed_layout=[TOKENS]),
        ),
        "layout of the shard": (WHOLE, lambda: model(tokens, packed_layout=own)),
        "one token too few": (WHOLE, lambda: model(tokens[:, 1:], packed_layout=layout)),
        "two rows": (WHOLE, lambda: model(tokens.view(2, -1), packed_layout=layout)),
        "attention_mask": (
            f"attention_mask {OUT}",
            lambda: model(**shard, attention_mask=torch.ones_like(tokens)),
        ),
        "attention_mask without a layout": (
            f"attention_mask {OUT}",
            lambda: model(tokens, attention_mask=torch.ones_like(tokens)),
        ),
        "cu_seq_lens": (
            f"cu_seq_lens_q {OUT}",
            lambda: model(tokens, cu_seq_lens_q=own.cu_seqlens),
        ),
        "seq_idx": (f"seq_idx {OUT}", lambda: model(**shard, seq_idx=torch.zeros_like(tokens))),
        "cache": (f"use_cache {OUT}", lambda: model(**shard, use_cache=True)),
        "logits_to_keep": (f"logits_to_keep {OUT}", lambda: model(**shard, logits_to_keep=1)),
        "generate": (
            (f"cache {OUT}", f"past_key_values {OUT}"),
            lambda: model.generate(tokens, max_new_tokens=2),
        ),
        "positions of the row": (
            "position_ids must be those of the shard",
            lambda: model(**shard, position_ids=torch.arange(TOKENS)[None]),
        ),
        "labels not shifted": (
            "labels of a shard must come with shift_labels",
            lambda: model(**shard, labels=tokens, num_items_in_batch=9),
        ),
        "mean of the shard": (
            "labels of a shard must come with shift_labels",
            lambda: model(**shard, labels=tokens, shift_labels=tokens),
        ),
        "loss_function without shift_labels": (
            "model.loss_function must have parameters shift_labels and num_items_in_batch",
            lambda: losing(**whole),
        ),
        "token classification": (
            "labels must be next tokens under sequence_parallel_group",
            lambda: classifier(**whole),
        ),
        "auxiliary loss": (
            "output_router_logits must be False",
            lambda: model(**shard, output_router_logits=True),
        ),
        "dropout": ("attention dropout must be 0", lambda: dropping(**shard)),
        "images": (
            "a model with sequence_parallel_group must be over text",
            lambda: patch("qwen2_vl"),
        ),
        "longrope": (
            "a model with sequence_parallel_group must be over text",
            lambda: patch("phi3"),
        ),
        "auxiliary loss in the config": (
            "output_router_logits must be False",
            lambda: patch("mixtral", output_router_logits=True),
        ),
        "heads": ("num_heads must be a multiple of the", lambda: three_heads(**shard)),
        "group": (
            "sequence_parallel_group must be a torch.distributed ProcessGroup",
            lambda: patch("llama", "sp"),
        ),
    }
    return failed_refusals(calls)
