"""What a rank of test_documents.py does.

A SHARE is what it found: `tokens`, its indices in the row; `by_token`, what it has of these;
`summed`, its part of what is summed over the ranks.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3TextModel

import flexvarlen as fv
from flexvarlen.parallel.gather_keys import gather_keys
from flexvarlen.parallel.key_exchange import KeyExchange
from flexvarlen.parallel.pieces import Piece
from flexvarlen.parallel.plan import RowPlan, plan_row
from flexvarlen.parallel.sharded_layout import sharded_layout
from tests.parallel.documents_rows import ROWS, TOKENS, TREES, batch_of, tree_samples
from tests.tiny_models import config_of, new_model

WORLD = 8
GROUPS = {2: (6, 7), 3: (1, 2, 3), 4: (0, 2, 4, 6), 8: tuple(range(8))}
"""The processes of the world that share a row, by their number."""


def attention_of_shard(q, k, v, layout, *, group, sinks=None, **options):
    """`packed_attention` of one rank's tokens, as a layer of a patched model computes it."""
    keys = layout.shard.keys(options.get("window"), options.get("chunk"), group)
    layout_q, layout_k = keys.layouts(layout)

    def attend(q, k, v, sinks):
        return fv.packed_attention(q, k, v, layout_q, layout_k=layout_k, sinks=sinks, **options)

    return keys.attend(attend, q, k, v, sinks)


@dataclass(frozen=True)
class Attention:
    """A call of `attention_of_shard`, and of `packed_attention` on the whole row.

    Attributes:
        heads: of queries, and of keys and values.
        of_shard: what is otherwise in its mask.
    """

    name: str
    ranks: int
    row: str
    heads: tuple[int, int] = (6, 2)
    options: dict[str, Any] = field(default_factory=dict)
    of_shard: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False

    def inputs(self):
        """By name q, k, v and, if there are any, sinks; and the cotangent of the whole row."""
        generator = torch.Generator().manual_seed(0)
        heads, kv_heads = self.heads
        q, k, v, cotangent = (
            torch.randn(TOKENS, n, 16, generator=generator, dtype=torch.float64)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        leaves = {"q": q, "k": k, "v": v}
        if self.options.get("sinks"):
            leaves["sinks"] = torch.randn(heads, generator=generator, dtype=torch.float64)
        return leaves, cotangent

    def attend(self, attention: Callable[..., Any], leaves: Any, layout: Any, **group: Any) -> Any:
        sinks = {name: x for name, x in leaves.items() if name == "sinks"}
        qkv = (leaves[name] for name in "qkv")
        return attention(*qkv, layout, **{"backend": "sdpa", **self.options, **sinks, **group})

    def alone(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`by_token` and `summed` of one process."""
        leaves, cotangent = self.inputs()
        layout = fv.PackedLayout.from_lengths(ROWS[self.row], total_tokens=TOKENS)
        for x in leaves.values():
            x.requires_grad_()
        out = self.attend(fv.packed_attention, leaves, layout)
        return of_attention(out, leaves, cotangent)

    def share(self, group: Any) -> dict[str, Any]:
        leaves, cotangent = self.inputs()
        of_mask = {name: x for name, x in self.options.items() if name in ("causal", "window")}
        here, layout = shard_of(ROWS[self.row], group, **of_mask | self.of_shard)
        leaves = {
            name: (x if name == "sinks" else x[here]).requires_grad_() for name, x in leaves.items()
        }

        def call(leaves):
            return self.attend(attention_of_shard, leaves, layout, group=group)

        if self.compiled:
            torch._dynamo.reset()
            call = torch.compile(call, fullgraph=True, backend="aot_eager")
        seen = Collectives()
        with nullcontext() if self.compiled else seen:
            by_token, summed = of_attention(call(leaves), leaves, cotangent[here])
        found = {"tokens": here, "by_token": by_token, "summed": summed}
        return found | {"collectives": seen.count}


def of_attention(out: Any, leaves: Any, cotangent: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The output and the gradients by token, and the gradients of what all ranks have."""
    gradients = torch.autograd.grad(out, [*leaves.values()], cotangent)
    by_name = dict(zip(leaves, gradients, strict=True))
    summed = {name: by_name.pop(name) for name in leaves if name == "sinks"}
    return {"out": out.detach(), **by_name}, summed


class Collectives(TorchDispatchMode):
    """Counts the operators that wait for other ranks."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(word in func.name() for word in ("c10d", "gather_keys"))
        return func(*args, **kwargs or {})


def shard_of(
    lengths: tuple[int, ...], group: Any, *, causal: bool = True, window: int | None = None
):
    """The tokens of the row that this rank has, and its layout."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    plan = plan_row(lengths, ranks, total_tokens=TOKENS, causal=causal)
    here = torch.from_numpy(plan.order()).view(ranks, -1)[rank]
    return here, sharded_layout(plan, rank, window=window)


REFERENCE = {"backend": "reference"}
CALLS = (
    Attention("two_ranks", 2, "mixed"),
    Attention("three_ranks", 3, "mixed", heads=(4, 1)),
    Attention("four_ranks", 4, "long"),
    Attention("eight_ranks", 8, "one", heads=(3, 3)),
    Attention("nothing_cut", 4, "short"),
    Attention("window", 3, "long", options={"window": 30}),
    Attention("chunk", 4, "one", options={"chunk": 25}),
    Attention("window_in_eight", 8, "mixed", options={"window": 9}),
    Attention("window_in_two", 2, "one", options={"window": 50}, of_shard={"window": 60}),
    Attention("window_without_its_shard", 3, "one", options={"window": 9}, of_shard={"window": 5}),
    Attention("window_and_chunk", 3, "one", options={"window": 9, "chunk": 25}),
    Attention("some_of_each_rank_sent", 2, "apart"),
    Attention("softcap", 2, "long", options=REFERENCE | {"softcap": 5.0}),
    Attention("sinks", 3, "one", options=REFERENCE | {"sinks": True}),
    Attention("bidirectional", 4, "mixed", options={"causal": False}),
    Attention("window_to_both_sides", 3, "mixed", options={"causal": False, "window": 9}),
    Attention("wide_window_to_both_sides", 4, "long", options={"causal": False, "window": 45}),
    Attention("compiled", 2, "one", compiled=True),
)


ENCODERS = ("modernbert", "bert", "roberta")


@dataclass(frozen=True)
class Model:
    """A model of `kind` trained for one step on this number of ranks.

    Attributes:
        wrapper: which adds up the gradients; DDP after its first step in another order.
        prompt: tokens at the beginning of the row that have no label.
        chunk_tokens: of the loss and of MLPs on the ranks; then they make no logits.
    """

    name: str
    kind: str
    ranks: int
    row: str
    changes: dict[str, Any] = field(default_factory=dict)
    backend: str = "sdpa"
    checkpointing: bool = False
    wrapper: Literal["ddp", "fsdp"] | None = None
    prompt: int = 0
    chunk_tokens: int | None = None

    def new(self, **arguments: Any):
        model = new_model(self.kind, **self.changes).train()
        for dropout in model.modules():
            if isinstance(dropout, torch.nn.Dropout):
                dropout.p = 0.0
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return fv.patch_model(model, self.backend, **arguments)

    def batch(self) -> dict[str, Any]:
        if self.row == "trees":
            return TREES(tree_samples(1))
        batch = batch_of(ROWS[self.row])
        if self.kind in ENCODERS:  # labels of some tokens, also the first of a document
            batch["labels"][:, 1::3] = -100
        batch["labels"][:, : self.prompt] = -100
        return batch

    def share(self, group: Any) -> dict[str, Any]:
        """A SHARE: logits, loss and gradients; found twice, to be bitwise equal."""
        chunks = {"loss_chunk_tokens": self.chunk_tokens, "mlp_chunk_tokens": self.chunk_tokens}
        model = called = self.new(sequence_parallel_group=group, deterministic=True, **chunks)
        if self.wrapper == "ddp":  # whose mean over the ranks is a part of the sum, as FSDP's
            called = DistributedDataParallel(model, process_group=group)
        elif self.wrapper == "fsdp":
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
        numbered = self.batch() | {"tokens": torch.arange(TOKENS)[None]}
        shard = fv.shard_row(numbered, group, **fv.shard_options(called))
        here = shard.pop("tokens")[0]
        found = []
        for _ in range(2):
            model.zero_grad()
            out = called(**shard)
            out.loss.backward()
            gradients = {name: x.grad for name, x in model.named_parameters()}
            if self.wrapper == "fsdp":
                gradients = {name: x.full_tensor() for name, x in gradients.items()}
            logits = {} if out.logits is None else {"logits": out.logits.detach()[0]}
            found.append({**logits, **losses_of(out), **gradients})
        first, second = found
        same = self.wrapper == "ddp" or all(first[name].equal(second[name]) for name in first)
        by_token = {name: first.pop(name) for name in logits}
        return {"tokens": here, "by_token": by_token, "summed": first, "same_bits": same}


def losses_of(out: Any) -> dict[str, torch.Tensor]:
    """The loss of a step, and that of routers if it has one."""
    losses = {name: out.get(name) for name in ("loss", "aux_loss")}
    return {name: x.detach() for name, x in losses.items() if x is not None}


ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
MODELS = (
    Model("dense", "llama", 3, "mixed", checkpointing=True),
    Model("windows", "qwen3_windows", 2, "long"),
    Model("softcap_and_windows", "gemma2", 4, "mixed", backend="reference"),
    Model("chunks_and_temperature", "llama4_text", 3, "one"),
    Model("sinks_and_experts", "gpt_oss", 2, "mixed", ROUTER_LOSS, backend="reference"),
    Model("experts", "mixtral", 4, "long", ROUTER_LOSS),
    Model("experts_and_padding", "qwen3_moe", 2, "mixed", ROUTER_LOSS, checkpointing=True),
    Model("routers_without_a_loss", "deepseek_v3", 2, "one", {"output_router_logits": True}),
    Model("in_eight_ranks", "qwen3", 8, "mixed"),
    Model("fsdp", "qwen3", 2, "mixed", backend="auto", wrapper="fsdp"),
    Model("in_chunks", "qwen3", 2, "one", checkpointing=True, wrapper="fsdp", chunk_tokens=7),
    Model("in_chunks_in_eight_ranks", "llama", 8, "mixed", checkpointing=True, chunk_tokens=4),
    Model("a_rank_without_labels", "llama", 3, "mixed", prompt=82),
    Model("encoder", "modernbert", 4, "mixed"),
    Model("encoder_with_a_table", "bert", 2, "one"),
    Model("encoder_without_position_0", "roberta", 3, "long"),
    Model("trees", "qwen3_windows", 4, "trees", checkpointing=True),
    Model("trees_of_a_hybrid", "qwen3_5_text", 3, "trees"),
    Model("trees_of_experts", "mixtral", 2, "trees", ROUTER_LOSS),
)


def embedding_model():
    """EmbeddingGemma: a base model alone, with windows to both sides in one of two layers."""
    torch.manual_seed(0)
    config = config_of("gemma3_text", use_bidirectional_attention=True)
    return Gemma3TextModel(config).eval()


@torch.no_grad()
def embedded(group: Any) -> dict[str, Any]:
    """The hidden states."""
    model = fv.patch_model(embedding_model(), "sdpa", sequence_parallel_group=group)
    numbered = batch_of(ROWS["long"]) | {"tokens": torch.arange(TOKENS)[None]}
    del numbered["labels"]
    shard = fv.shard_row(numbered, group, **fv.shard_options(model))
    here = shard.pop("tokens")[0]
    by_token = {"hidden states": model(**shard).last_hidden_state[0]}
    return {"tokens": here, "by_token": by_token, "summed": {}}


def hybrid(kind: str, ranks: int, row: str, **arguments: Any) -> Model:
    return Model(kind, kind, ranks, row, **arguments)


OF_QWEN = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],  # as its checkpoints have it, for images
    }
}
HYBRIDS = (
    hybrid("qwen3_5_text", 2, "edge", changes=OF_QWEN, checkpointing=True),
    hybrid("qwen3_5_moe_text", 2, "mixed", changes=ROUTER_LOSS),
    hybrid("qwen3_next", 3, "one"),
    hybrid("olmo_hybrid", 4, "padded", checkpointing=True),
    hybrid("kimi_linear", 4, "padded", wrapper="ddp"),
    hybrid("mamba2", 4, "long"),
    hybrid("bamba", 3, "edge", checkpointing=True, wrapper="ddp"),
    hybrid("granitemoehybrid", 2, "long"),
    hybrid("falcon_h1", 2, "one"),
    hybrid("nemotron_h", 4, "mixed"),
    hybrid("lfm2", 8, "mixed", checkpointing=True),
    hybrid("lfm2_moe", 3, "mixed"),
)


EQUAL_BOUNDS = ((100, 1, 19), (98, 3, 19), (101, 2, 17))
LAST_SLOTS = ((100, 1, 19), (1, 100, 1, 18))  # which differ on the first rank
COMPILED: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "documents": ("llama", EQUAL_BOUNDS),
    "contiguous": ("lfm2", LAST_SLOTS),
    "trees": ("llama", ()),
    "encoder": ("modernbert", EQUAL_BOUNDS),
    "routers": ("mixtral", EQUAL_BOUNDS),
}
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "lfm2": {"num_hidden_layers": 1, "layer_types": ["conv"]},
    "modernbert": {},
    "mixtral": {"num_hidden_layers": 1, **ROUTER_LOSS},
}


def graphs(name: str, group: Any) -> dict[str, Any]:
    """How often a model is compiled for rows of equal bounds, and whether its losses are right."""
    kind, lengths = COMPILED[name]
    trees = [TREES(tree_samples(seed)[seed:]) for seed in range(3)]
    rows = [batch_of(row) for row in lengths] or trees
    torch._dynamo.reset()
    counters.clear()
    model = Model("compiled", kind, 2, "", LAYERS[kind])
    eager = model.new(sequence_parallel_group=group)
    eager.set_experts_implementation("batched_mm")  # eager loops over experts, on the host
    first = fv.shard_row(rows[0], group, **fv.shard_options(eager))
    eager(**first)  # installs transformers' hooks, by a lock
    called = torch.compile(eager, fullgraph=True, backend="eager")
    errors = []
    for row in rows:
        shard = fv.shard_row(row, group, **fv.shard_options(eager))
        loss = called(**shard).loss
        loss.backward()
        errors.append(float((loss - eager(**shard).loss).abs()))
    return {"count": counters["stats"]["unique_graphs"], "errors": errors}


def copies(group: Any) -> dict[str, Any]:
    """What copies of a patched model do with a shard, and the model itself with whole rows."""
    batch = batch_of(ROWS["long"])
    model = fv.patch_model(new_model("llama"), "sdpa", sequence_parallel_group=group)
    shard = fv.shard_row(batch, group)
    logits = model(**shard).logits
    same = copy.deepcopy(model)(**shard).logits.equal(logits)
    with fv.patched(model):
        whole = fv.verify_isolation(model, batch).gradients
        generated = model.generate(shard["input_ids"], max_new_tokens=2).shape[1]
    again = model(**shard).logits.equal(logits)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=False)(**shard)
    except ValueError as error:
        said = str(error)
    found = {"copy": same, "again": again, "whole": whole, "generated": generated - TOKENS // 2}
    return found | {"pickle": said}


def rounded_once(group: Any) -> torch.Tensor:
    """The gradient, in bf16, of keys that have three: 256 and 1 of one rank, 1 of the other."""
    pieces = (Piece(0, 0, 2), Piece(0, 6, 8)), (Piece(0, 2, 6),)
    exchange = KeyExchange.of(RowPlan((8,), 4, pieces), dist.get_rank(group), capacity=2)
    k = torch.ones(4, 1, 16, dtype=torch.bfloat16, requires_grad=True)
    keys, _ = gather_keys(k, k, exchange, group)
    gradient = torch.ones_like(keys)
    gradient[:2] = 256 if dist.get_rank(group) == 0 else 1
    (found,) = torch.autograd.grad(keys, k, gradient)
    return found[:2]


@cache
def groups() -> dict[int, Any]:
    """By their number of ranks: made by all processes, in one order."""
    return {ranks: dist.new_group(members) for ranks, members in GROUPS.items()}


def in_group(ranks: int, call: Callable[..., Any], *arguments: Any) -> Any:
    """What `call(*arguments, group)` returns on this rank of the group; None on others."""
    group = groups()[ranks]
    return call(*arguments, group) if dist.get_rank() in GROUPS[ranks] else None
