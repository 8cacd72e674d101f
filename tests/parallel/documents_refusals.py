"""Calls on shards of a row that must be refused, on each rank of test_documents.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import BertForSequenceClassification, BertModel

import flexvarlen as fv
from flexvarlen.parallel.documents import documents_attention
from flexvarlen.parallel.plan import plan_row
from flexvarlen.parallel.sharded_layout import sharded_layout
from tests.parallel.documents_rows import ROWS, TOKENS, TREES, batch_of, tree_samples
from tests.parallel.failed_refusals import failed_refusals
from tests.tiny_models import new_model


def refusals(group: Any) -> dict[str, str]:
    """Of `shard_row`, `documents_attention` and models: on every rank, so that none hangs."""
    rank, batch = dist.get_rank(group), batch_of(ROWS["long"])
    reordered = dict(reversed(batch.items()))  # which is the same row
    whole, shard = batch["packed_layout"], fv.shard_row(reordered if rank else batch, group)
    own, x = shard["packed_layout"], torch.randn(TOKENS // 2, 2, 16)
    model, alone = new_model("llama"), fv.patch_model(new_model("llama"))
    fv.patch_model(model, sequence_parallel_group=group)
    mixing = fv.patch_model(new_model("lfm2"), sequence_parallel_group=group)
    invariant = fv.patch_model(
        new_model("llama"), batch_invariant=True, sequence_parallel_group=group
    )
    by_heads = fv.shard_row(batch, group, method="ulysses")
    plan = plan_row(ROWS["long"], 2, total_tokens=TOKENS)
    ids, others = shard["input_ids"], sharded_layout(plan, 1 - rank)
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

    calls = {
        "whole row": ("layout must be the shard of rank", lambda: attend(whole)),
        "prefix": (
            "documents_attention has no prefix; leave it out",
            lambda: attend(own, prefix=3),
        ),
        "prefixes": (
            "documents_attention has no prefix; leave it out",
            lambda: attend(own, prefix=torch.tensor([1, 0, 0])),
        ),
        "chunks to both sides": (
            "documents_attention has no chunk; leave it out",
            lambda: attend(both_ways, chunk=5, causal=False),
        ),
        "invariant attention": (
            "documents_attention has no batch_invariant; leave it out",
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
            "documents_attention has no window (left, right); leave it out",
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
            "layout must be of whole documents, got one rank's shard",
            lambda: fv.packed_attention(x, x, x, own),
        ),
        "no group": (
            "packed_layout must be of whole documents, got one rank's shard",
            lambda: alone(**shard),
        ),
        "another's shard": (
            "packed_layout must be the shard of rank",
            lambda: model(ids, packed_layout=others),
        ),
        "cache": (
            "use_cache must be left out under sequence_parallel_group",
            lambda: model(ids, packed_layout=own, use_cache=True),
        ),
        "labels not shifted": (
            "labels of a shard must come with shift_labels",
            lambda: model(ids, packed_layout=own, labels=ids),
        ),
        "row of trees": (
            "a packed_layout of trees is not supported with sequence_parallel_group",
            lambda: model(ids, packed_layout=tree),
        ),
        "label_counts without num_items_in_batch": (
            "label_counts of a shard must come with num_items_in_batch",
            lambda: model(**uncounted),
        ),
        "hybrid by documents": (
            "a model with recurrent layers must get the next tokens of the row",
            lambda: mixing(**shard),
        ),
        "hybrid by heads": (
            "a model with recurrent layers must get the next tokens of the row",
            lambda: mixing(**by_heads),
        ),
        "hybrid, nothing cut": (
            "a model with recurrent layers must get the next tokens of the row",
            lambda: mixing(**fv.shard_row(batch_of((60, 60)), group)),
        ),
        "batch_invariant": (
            "batch_invariant does not hold where documents are cut",
            lambda: invariant(**shard),
        ),
    }
    return failed_refusals(calls)
