"""Calls on shards of a row that must be refused, on each rank of test_documents.py.

Each function returns the calls that are not: [] if all are, on every rank, so that none hangs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import BertForSequenceClassification, BertModel, LlamaForTokenClassification

import flexvarlen as fv
from flexvarlen.parallel.documents import documents_attention
from flexvarlen.parallel.plan import plan_row
from flexvarlen.parallel.sharded_layout import sharded_layout
from flexvarlen.patches.forward import sequence_parallel
from tests.parallel.documents_rows import ROWS, TOKENS, TREES, batch_of, tree_samples
from tests.sentences import failed_refusals, rows_without_a_case
from tests.tiny_models import new_model

ROW = batch_of(ROWS["long"])
WHOLE, IDS = ROW["packed_layout"], ROW["input_ids"]


def refused_rows(group: Any) -> list[str]:
    """Of `shard_row`: what one rank alone gets wrong; test_shard.py has what all do."""
    rank = dist.get_rank(group)
    other_documents = fv.PackedLayout.from_lengths([60 + rank, 60 - rank])
    same = f"batch must be the same row on every rank of the group, got another on rank {1 - rank}"
    cases = [
        (
            "batch must be a mapping with packed_layout on every rank, got NoneType",
            {"batch": ROW if rank else None},
        ),
        (
            "batch must have its documents as packed_layout, a PackedLayout, got NoneType",
            {"batch": ROW if rank else {"input_ids": IDS}},
        ),
        (same, {"batch": ROW | {"input_ids": IDS + rank}}),
        (same, {"batch": ROW | {"packed_layout": other_documents}}),
        (same, {"batch": ROW | {"weights": torch.full((1, TOKENS), rank).bfloat16()}}),
        (same, {"batch": ROW | {"num_items_in_batch": rank}}),
        (
            "the options must be the same on every rank of the group, {'method': 'documents', ",
            {"batch": ROW, "causal": rank > 0},
        ),
        (
            "group must be one that this process is in",
            {"batch": ROW, "group": dist.GroupMember.NON_GROUP_MEMBER},
        ),
    ]
    return failed_refusals(cases, lambda given: fv.shard_row(**{"group": group} | given))


def refused_attention(group: Any) -> list[str]:
    """Of `documents_attention`, and of a shard elsewhere."""
    causal, both_ways = (fv.shard_row(ROW, group, causal=x)["packed_layout"] for x in (True, False))
    x = torch.randn(TOKENS // 2, 2, 16)
    alone = fv.patch_model(new_model("llama"))

    def attend(given: dict[str, Any]) -> None:
        options = {"q": x, "k": x, "v": x, "layout": causal, "group": group} | given
        documents_attention(**options)

    unsupported = "documents_attention does not support "
    failed = failed_refusals(
        [
            (f"{unsupported}prefix; remove it", {"prefix": torch.tensor([1, 0, 0])}),
            (f"{unsupported}batch_invariant; remove it", {"batch_invariant": True}),
            (
                f"{unsupported}chunk; remove it",
                {"layout": both_ways, "chunk": 5, "causal": False},
            ),
            (
                f"{unsupported}window (left, right); remove it",
                {"layout": both_ways, "window": (3, 2), "causal": False},
            ),
        ],
        attend,
        NotImplementedError,
    )
    failed += failed_refusals(
        [
            ("layout must be the shard of rank", {"layout": WHOLE}),
            ("k must have the layout's total_tokens=60 rows, got 59", {"k": x[1:]}),
            (
                "the layout of a shard must be made for attention with causal=False, got",
                {"causal": False},
            ),
        ],
        attend,
    )
    whole = " must describe whole documents, got one rank's shard"
    elsewhere = [
        (f"layout{whole}", lambda: fv.packed_attention(x, x, x, causal)),
        (f"packed_layout{whole}", lambda: alone(IDS[:, : len(x)], packed_layout=causal)),
    ]
    return failed + failed_refusals(
        elsewhere, lambda call: call(), (ValueError, NotImplementedError)
    )


def refused_forwards(group: Any) -> list[str]:
    """Of models, which each row of the table of shards must refuse some call of."""

    def patched(model: Any) -> Any:
        return fv.patch_model(model, sequence_parallel_group=group)

    model, mixing, experts = (patched(new_model(kind)) for kind in ("llama", "lfm2", "mixtral"))
    dropping = patched(new_model("llama", attention_dropout=0.1).train())
    losing = patched(new_model("llama"))
    losing.loss_function = lambda logits, labels, vocab_size, **more: logits.sum() / labels.numel()
    tagger = patched(LlamaForTokenClassification(losing.config))
    bert, windows = new_model("bert"), patched(new_model("modernbert"))
    pooler, classifier = BertModel(bert.config), BertForSequenceClassification(bert.config)
    encoder, pooler, classifier = map(patched, (bert, pooler, classifier))

    reordered = dict(reversed(ROW.items()))  # which is the same row
    shard = fv.shard_row(reordered if dist.get_rank(group) else ROW, group)
    ids, own = shard["input_ids"], shard["packed_layout"]
    plain = {"input_ids": ids, "packed_layout": own}
    of_encoder = fv.shard_row(ROW, group, causal=False)
    both_ways = {"packed_layout": of_encoder["packed_layout"]}
    others = sharded_layout(
        plan_row(ROWS["long"], 2, total_tokens=TOKENS), 1 - dist.get_rank(group)
    )
    tree = fv.PackedLayout.from_tree([60, 30, 30], parents=[-1, 0, 0])
    uncounted = fv.shard_row(TREES(tree_samples(0)), group)
    del uncounted["num_items_in_batch"]

    of_shard = "packed_layout must be that of this rank's shard under sequence_parallel_group, got "
    size = "packed_layout must cover the shard's tokens [1, S], got 60 tokens"
    made_for = "the layout of a shard must be made for attention with causal="
    consecutive = "a model with recurrent layers must get consecutive tokens of the row"
    out = "cannot be combined with sequence_parallel_group"
    wrong = [
        (f"{of_shard}NoneType", model, {"input_ids": ids}),
        (f"{of_shard}list", model, plain | {"packed_layout": [60]}),
        (
            f"{of_shard}PackedLayout(3 documents of 100, 1, 19 tokens, total_tokens=120",
            model,
            plain | {"packed_layout": WHOLE},
        ),
        (
            f"{of_shard}PackedLayout(1 documents of 60 tokens",
            model,
            plain | {"packed_layout": fv.PackedLayout.from_lengths([60])},
        ),
        (
            f"{of_shard}PackedLayout(1 tree of 3 segments",
            model,
            plain | {"packed_layout": tree},
        ),
        ("packed_layout must be the shard of rank", model, plain | {"packed_layout": others}),
        (size, model, plain | {"input_ids": ids[:, 1:]}),
        (size, model, plain | {"input_ids": ids.view(2, -1)}),
        (f"attention_mask {out}", model, plain | {"attention_mask": torch.ones_like(ids)}),
        (
            f"attention_mask {out}",
            model,
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        ),
        (f"cu_seq_lens_q {out}", model, {"input_ids": ids, "cu_seq_lens_q": own.cu_seqlens}),
        (f"seq_idx {out}", model, plain | {"seq_idx": torch.zeros_like(ids)}),
        (f"use_cache {out}", model, plain | {"use_cache": True}),
        (f"logits_to_keep {out}", model, plain | {"logits_to_keep": 1}),
        (
            (f"cache {out}", f"past_key_values {out}"),
            model.generate,
            {"inputs": ids, "max_new_tokens": 2},
        ),
        (
            "position_ids must be those of the shard",
            model,
            plain | {"position_ids": torch.arange(TOKENS)[None]},
        ),
        (
            "labels of a shard must come with shift_labels",
            model,
            plain | {"labels": ids, "num_items_in_batch": 9},
        ),
        (
            "labels of a shard must come with shift_labels",
            model,
            plain | {"labels": ids, "shift_labels": ids},
        ),
        ("label_counts of a shard must come with num_items_in_batch", model, uncounted),
        (
            "model.loss_function must have parameters shift_labels and num_items_in_batch",
            losing,
            shard,
        ),
        (f"{made_for}True, got", model, plain | both_ways),
        (f"{made_for}False, got", encoder, shard),
        (f"{made_for}False, window=", windows, plain | both_ways),
        ("labels of a shard must come with num_items_in_batch", encoder, shard | both_ways),
        (
            "return_dict must stay True with labels of a shard",
            encoder,
            of_encoder | {"return_dict": False},
        ),
        (consecutive, mixing, shard),
        (consecutive, mixing, fv.shard_row(batch_of((60, 60)), group)),
    ]
    unsupported = [
        ("BertModel pools documents", pooler, plain | both_ways),
        ("BertForSequenceClassification pools documents", classifier, plain | both_ways),
        ("labels must be next tokens under sequence_parallel_group", tagger, shard),
        ("output_router_logits must be False", experts, plain | {"output_router_logits": True}),
        ("attention dropout must be 0", dropping, plain),
    ]
    failed = []
    with rows_without_a_case(sequence_parallel, "SHARDS") as without:
        for error, cases in ((ValueError, wrong), (NotImplementedError, unsupported)):
            calls = [(words, (call, given)) for words, call, given in cases]
            failed += failed_refusals(calls, lambda each: each[0](**each[1]), error)
    return [*failed, *without]
