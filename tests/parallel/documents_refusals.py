"""Calls on shards of a row that must be refused, on each rank of test_documents.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import BertForSequenceClassification, BertModel, LlamaForTokenClassification

import flexvarlen as fv
from flexvarlen.parallel.documents import documents_attention
from flexvarlen.parallel.plan import plan_row
from flexvarlen.parallel.sharded_layout import sharded_layout
from tests.parallel.documents_rows import ROWS, TOKENS, TREES, batch_of, tree_samples
from tests.parallel.failed_refusals import failed_refusals
from tests.tiny_models import new_model

OF_SHARD = "packed_layout must be that of this rank's shard under sequence_parallel_group"
OUT = "cannot be combined with sequence_parallel_group"
OVER_TEXT = "a model with sequence_parallel_group must take text alone"


def refusals(group: Any) -> dict[str, str]:
    """Of `shard_row`, `documents_attention` and models: on every rank, so that none hangs."""
    rank, batch = dist.get_rank(group), batch_of(ROWS["long"])
    reordered = dict(reversed(batch.items()))  # which is the same row
    whole, shard = batch["packed_layout"], fv.shard_row(reordered if rank else batch, group)
    own, x = shard["packed_layout"], torch.randn(TOKENS // 2, 2, 16)
    model, alone = new_model("llama"), fv.patch_model(new_model("llama"))
    fv.patch_model(model, sequence_parallel_group=group)
    mixing = fv.patch_model(new_model("lfm2"), sequence_parallel_group=group)
    experts = fv.patch_model(new_model("mixtral"), sequence_parallel_group=group)
    dropping = new_model("llama", attention_dropout=0.1).train()
    fv.patch_model(dropping, sequence_parallel_group=group)
    losing = fv.patch_model(new_model("llama"), sequence_parallel_group=group)
    losing.loss_function = lambda logits, labels, vocab_size, **more: logits.sum() / labels.numel()
    tagger = LlamaForTokenClassification(losing.config)
    fv.patch_model(tagger, sequence_parallel_group=group)
    plan = plan_row(ROWS["long"], 2, total_tokens=TOKENS)
    ids, others = shard["input_ids"], sharded_layout(plan, 1 - rank)
    unlabeled = {"input_ids": ids, "packed_layout": own}
    same = f"batch must be the same row on every rank of the group, got another on rank {1 - rank}"
    other_documents = fv.PackedLayout.from_lengths([60 + rank, 60 - rank])
    of_encoder = fv.shard_row(batch, group, causal=False)
    both_ways = of_encoder["packed_layout"]
    bert, modernbert = new_model("bert"), new_model("modernbert")
    of_bert = BertModel(bert.config), BertForSequenceClassification(bert.config)
    encoder, windows, pooler, classifier = (
        fv.patch_model(each, sequence_parallel_group=group) for each in (bert, modernbert, *of_bert)
    )
    tree = fv.PackedLayout.from_tree([60, 30, 30], parents=[-1, 0, 0])
    trees = TREES(tree_samples(0))
    uncounted = fv.shard_row(trees, group)
    del uncounted["num_items_in_batch"]

    def attend(layout: Any, **options: Any) -> None:
        documents_attention(x, x, x, layout, group=group, **options)

    def patch(kind: str, group: Any = group, *, batch_invariant: bool = False, **changes: Any):
        made = new_model(kind, **changes)
        fv.patch_model(made, batch_invariant=batch_invariant, sequence_parallel_group=group)

    calls = {
        "no layout on a rank": (
            "batch must have its documents as packed_layout, a PackedLayout, got NoneType",
            lambda: fv.shard_row(batch if rank else {"input_ids": batch["input_ids"]}, group),
        ),
        "other tokens on a rank": (
            same,
            lambda: fv.shard_row(batch | {"input_ids": batch["input_ids"] + rank}, group),
        ),
        "other documents on a rank": (
            same,
            lambda: fv.shard_row(batch | {"packed_layout": other_documents}, group),
        ),
        "other weights on a rank": (
            same,
            lambda: fv.shard_row(
                batch | {"weights": torch.full((1, TOKENS), rank).bfloat16()}, group
            ),
        ),
        "another count on a rank": (
            same,
            lambda: fv.shard_row(batch | {"num_items_in_batch": rank}, group),
        ),
        "other options on a rank": (
            "the options must be the same on every rank of the group, {'method': 'documents', ",
            lambda: fv.shard_row(batch, group, causal=rank > 0),
        ),
        "a group of others": (
            "group must be one that this process is in",
            lambda: fv.shard_row(batch, dist.GroupMember.NON_GROUP_MEMBER),
        ),
        "whole row": ("layout must be the shard of rank", lambda: attend(whole)),
        "prefix": (
            "documents_attention does not support prefix; remove it",
            lambda: attend(own, prefix=3),
        ),
        "prefixes": (
            "documents_attention does not support prefix; remove it",
            lambda: attend(own, prefix=torch.tensor([1, 0, 0])),
        ),
        "chunks to both sides": (
            "documents_attention does not support chunk; remove it",
            lambda: attend(both_ways, chunk=5, causal=False),
        ),
        "invariant attention": (
            "documents_attention does not support batch_invariant; remove it",
            lambda: attend(own, batch_invariant=True),
        ),
        "fewer tokens on a rank": (
            "input_ids must be one row, [1, 120], got [1, 119]; remove it",
            lambda: fv.shard_row(batch | {"input_ids": batch["input_ids"][:, rank:]}, group),
        ),
        "another ignore_index": (
            "ignore_index must be -100, ",
            lambda: fv.shard_row(batch | ({} if rank else {"ignore_index": -1}), group),
        ),
        "another ignore_index in a forward": (
            "ignore_index must be -100, ",
            lambda: model(**shard, ignore_index=-1),
        ),
        "labels of -1 on a rank": (
            "labels must be at least 0, or -100 ",
            lambda: fv.shard_row(batch | {"labels": batch["labels"] * (-1) ** rank}, group),
        ),
        "no batch on a rank": (
            "batch must be a mapping with packed_layout on every rank, got NoneType",
            lambda: fv.shard_row(batch if rank else None, group),
        ),
        "queries that are no tensor": (
            "q must be a tensor, got list; make one with torch.tensor()",
            lambda: documents_attention(x.tolist(), x, x, own, group=group),
        ),
        "fewer keys than tokens": (
            "k must have the layout's total_tokens=60 rows, got 59",
            lambda: documents_attention(x, x[1:], x[1:], own, group=group),
        ),
        "fewer values than keys": (
            "v must have the layout's total_tokens=60 rows, got 59",
            lambda: documents_attention(x, x, x[1:], own, group=group),
        ),
        "values of another dtype": (
            "q, k and v must have one dtype, got torch.float32 and torch.float64 for v",
            lambda: documents_attention(x, x, x.double(), own, group=group),
        ),
        "window of two sides": (
            "documents_attention does not support window (left, right); remove it",
            lambda: attend(both_ways, window=(3, 2), causal=False),
        ),
        "encoder given a causal shard": (
            "the layout of a shard must be made for attention with causal=False, got",
            lambda: encoder(**shard),
        ),
        "encoder's windows": (
            "the layout of a shard must be made for attention with causal=False, window=",
            lambda: windows(ids, packed_layout=both_ways),
        ),
        "decoder given an encoder's shard": (
            "the layout of a shard must be made for attention with causal=True, got",
            lambda: model(ids, packed_layout=both_ways),
        ),
        "encoder's labels shifted": (
            "labels of a shard must come with num_items_in_batch",
            lambda: encoder(**shard | {"packed_layout": both_ways}),
        ),
        "encoder's tuple": (
            "return_dict must stay True with labels of a shard",
            lambda: encoder(**of_encoder, return_dict=False),
        ),
        "pooler": ("BertModel pools documents", lambda: pooler(ids, packed_layout=both_ways)),
        "classifier": (
            "BertForSequenceClassification pools documents",
            lambda: classifier(ids, packed_layout=both_ways),
        ),
        "causal=False on a causal shard": (
            "the layout of a shard must be made for attention with causal=False, got",
            lambda: attend(own, causal=False),
        ),
        "packed_attention on a shard": (
            "layout must describe whole documents, got one rank's shard",
            lambda: fv.packed_attention(x, x, x, own),
        ),
        "no group": (
            "packed_layout must describe whole documents, got one rank's shard",
            lambda: alone(**shard),
        ),
        "another's shard": (
            "packed_layout must be the shard of rank",
            lambda: model(ids, packed_layout=others),
        ),
        "no layout": (f"{OF_SHARD}, got NoneType", lambda: model(ids)),
        "lengths for a layout": (f"{OF_SHARD}, got list", lambda: model(ids, packed_layout=[60])),
        "layout of the row": (
            f"{OF_SHARD}, got PackedLayout(3 documents of 100, 1, 19 tokens, total_tokens=120",
            lambda: model(ids, packed_layout=whole),
        ),
        "plain layout of the shard's size": (
            f"{OF_SHARD}, got PackedLayout(1 documents of 60 tokens",
            lambda: model(ids, packed_layout=fv.PackedLayout.from_lengths([60])),
        ),
        "one token too few": (
            "packed_layout must cover the shard's tokens [1, S], got 60 tokens",
            lambda: model(ids[:, 1:], packed_layout=own),
        ),
        "two rows": (
            "packed_layout must cover the shard's tokens [1, S], got 60 tokens",
            lambda: model(ids.view(2, -1), packed_layout=own),
        ),
        "attention_mask": (
            f"attention_mask {OUT}",
            lambda: model(**unlabeled, attention_mask=torch.ones_like(ids)),
        ),
        "attention_mask without a layout": (
            f"attention_mask {OUT}",
            lambda: model(ids, attention_mask=torch.ones_like(ids)),
        ),
        "cu_seq_lens": (
            f"cu_seq_lens_q {OUT}",
            lambda: model(ids, cu_seq_lens_q=own.cu_seqlens),
        ),
        "seq_idx": (f"seq_idx {OUT}", lambda: model(**unlabeled, seq_idx=torch.zeros_like(ids))),
        "cache": (f"use_cache {OUT}", lambda: model(**unlabeled, use_cache=True)),
        "logits_to_keep": (f"logits_to_keep {OUT}", lambda: model(**unlabeled, logits_to_keep=1)),
        "generate": (
            (f"cache {OUT}", f"past_key_values {OUT}"),
            lambda: model.generate(ids, max_new_tokens=2),
        ),
        "positions of the row": (
            "position_ids must be those of the shard",
            lambda: model(**unlabeled, position_ids=torch.arange(TOKENS)[None]),
        ),
        "labels not shifted": (
            "labels of a shard must come with shift_labels",
            lambda: model(**unlabeled, labels=ids, num_items_in_batch=9),
        ),
        "mean of the shard": (
            "labels of a shard must come with shift_labels",
            lambda: model(**unlabeled, labels=ids, shift_labels=ids),
        ),
        "loss_function without shift_labels": (
            "model.loss_function must have parameters shift_labels and num_items_in_batch",
            lambda: losing(**shard),
        ),
        "token classification": (
            "labels must be next tokens under sequence_parallel_group",
            lambda: tagger(**shard),
        ),
        "auxiliary loss": (
            "output_router_logits must be False",
            lambda: experts(**unlabeled, output_router_logits=True),
        ),
        "auxiliary loss in the config": (
            "output_router_logits must be False",
            lambda: patch("mixtral", output_router_logits=True),
        ),
        "dropout": ("attention dropout must be 0", lambda: dropping(**unlabeled)),
        "images": (OVER_TEXT, lambda: patch("qwen2_vl")),
        "longrope": (OVER_TEXT, lambda: patch("phi3")),
        "group": (
            "sequence_parallel_group must be a torch.distributed ProcessGroup",
            lambda: patch("llama", "sp"),
        ),
        "row of trees": (
            f"{OF_SHARD}, got PackedLayout(1 tree of 3 segments",
            lambda: model(ids, packed_layout=tree),
        ),
        "label_counts without num_items_in_batch": (
            "label_counts of a shard must come with num_items_in_batch",
            lambda: model(**uncounted),
        ),
        "hybrid by documents": (
            "a model with recurrent layers must get consecutive tokens of the row",
            lambda: mixing(**shard),
        ),
        "hybrid, nothing cut": (
            "a model with recurrent layers must get consecutive tokens of the row",
            lambda: mixing(**fv.shard_row(batch_of((60, 60)), group)),
        ),
        "batch_invariant": (
            "batch_invariant must be False with a sequence_parallel_group, got True",
            lambda: patch("llama", batch_invariant=True),
        ),
    }
    return failed_refusals(calls)
