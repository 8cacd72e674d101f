"""Calls on shards of a row that must be refused, on each rank of test_documents.py.

Each function returns the calls that are not: [] if all are, on every rank, so that none hangs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    BertForSequenceClassification,
    BertModel,
    JetMoeConfig,
    JetMoeForCausalLM,
    LlamaForTokenClassification,
)

import flexvarlen as fv
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
        ("batch must be a mapping with packed_layout", {"batch": ROW if rank else None}),
        ("batch must have its documents as", {"batch": ROW if rank else {"input_ids": IDS}}),
        (same, {"batch": ROW | {"input_ids": IDS + rank}}),
        (same, {"batch": ROW | {"packed_layout": other_documents}}),
        (same, {"batch": ROW | {"weights": torch.full((1, TOKENS), rank).bfloat16()}}),
        (same, {"batch": ROW | {"num_items_in_batch": rank}}),
        ("the options must be the same on every rank", {"causal": rank > 0}),
        ("group must be one that this process", {"group": dist.GroupMember.NON_GROUP_MEMBER}),
    ]
    row = {"batch": ROW, "group": group}
    return failed_refusals(cases, lambda given: fv.shard_row(**row | given))


def refused_shards(group: Any) -> list[str]:
    """Where whole documents are needed."""
    layout = fv.shard_row(ROW, group)["packed_layout"]
    x, alone = torch.randn(TOKENS // 2, 2, 16), fv.patch_model(new_model("llama"))
    whole = "must describe whole documents, got one rank's shard"
    cases = [
        (f"layout {whole}", lambda: fv.packed_attention(x, x, x, layout)),
        (f"packed_layout {whole}", lambda: alone(IDS[:, : len(x)], packed_layout=layout)),
    ]
    return failed_refusals(cases, lambda call: call(), (ValueError, NotImplementedError))


def refused_forwards(group: Any) -> list[str]:
    """Of models, which each row of the table of shards must refuse some call of."""

    def patched(model: Any) -> Any:
        return fv.patch_model(model, sequence_parallel_group=group)

    model, mixing = (patched(new_model(kind)) for kind in ("llama", "lfm2"))
    dropping = patched(new_model("llama", attention_dropout=0.1).train())
    losing = patched(new_model("llama"))
    losing.loss_function = lambda logits, labels, vocab_size, **more: logits.sum() / labels.numel()
    tagger = patched(LlamaForTokenClassification(losing.config))
    bert, windows = new_model("bert"), patched(new_model("modernbert"))
    pooler, classifier = BertModel(bert.config), BertForSequenceClassification(bert.config)
    encoder, pooler, classifier = map(patched, (bert, pooler, classifier))

    sizes = {"hidden_size": 64, "intermediate_size": 64, "kv_channels": 16, "num_hidden_layers": 2}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    unlisted = JetMoeForCausalLM(JetMoeConfig(vocab_size=100, **sizes, **experts))
    for each in (None, group):
        fv.patch_model(unlisted, "sdpa", verify=True, sequence_parallel_group=each)

    reordered = dict(reversed(ROW.items()))  # which is the same row
    shard = fv.shard_row(reordered if dist.get_rank(group) else ROW, group)
    ids, own = shard["input_ids"], shard["packed_layout"]
    of_encoder = fv.shard_row(ROW, group, causal=False)
    both_ways = {"packed_layout": of_encoder["packed_layout"]}
    plan = plan_row(ROWS["long"], 2, total_tokens=TOKENS)
    others = sharded_layout(plan, 1 - dist.get_rank(group))
    tree = fv.PackedLayout.from_tree([60, 30, 30], parents=[-1, 0, 0])
    uncounted = fv.shard_row(TREES(tree_samples(0)), group)
    del uncounted["num_items_in_batch"]

    def own_shard(**changes: Any) -> dict[str, Any]:
        return {"input_ids": ids, "packed_layout": own} | changes

    no_layout = {"input_ids": ids}
    of_shard = "packed_layout must be that of this rank's shard under sequence_parallel_group, got "
    size = "packed_layout must cover the shard's tokens [1, S], got 60 tokens"
    shifted = "labels of a shard must come with shift_labels"
    made_for = "the layout of a shard must be made for attention with causal="
    consecutive = "a model with recurrent layers must get consecutive tokens of the row"
    out = "cannot be combined with sequence_parallel_group"
    same_size, ones = fv.PackedLayout.from_lengths([60]), torch.ones_like(ids)
    wrong = [
        (f"{of_shard}NoneType", model, no_layout),
        (f"{of_shard}list", model, own_shard(packed_layout=[60])),
        (
            f"{of_shard}PackedLayout(3 documents of 100, 1, 19",
            model,
            own_shard(packed_layout=WHOLE),
        ),
        (f"{of_shard}PackedLayout(1 documents of 60", model, own_shard(packed_layout=same_size)),
        (f"{of_shard}PackedLayout(1 tree of 3 segments", model, own_shard(packed_layout=tree)),
        ("packed_layout must be the shard of rank", model, own_shard(packed_layout=others)),
        (size, model, own_shard(input_ids=ids[:, 1:])),
        (size, model, own_shard(input_ids=ids.view(2, -1))),
        (f"attention_mask {out}", model, own_shard(attention_mask=ones)),
        (f"attention_mask {out}", model, {**no_layout, "attention_mask": ones}),
        (f"cu_seq_lens_q {out}", model, {**no_layout, "cu_seq_lens_q": own.cu_seqlens}),
        (f"seq_idx {out}", model, own_shard(seq_idx=ones)),
        (f"use_cache {out}", model, own_shard(use_cache=True)),
        (f"logits_to_keep {out}", model, own_shard(logits_to_keep=1)),
        ((f"cache {out}", f"past_key_values {out}"), model.generate, {"inputs": ids}),
        ("position_ids must be those of the shard", model, own_shard(position_ids=IDS)),
        (shifted, model, own_shard(labels=ids, num_items_in_batch=9)),
        (shifted, model, own_shard(labels=ids, shift_labels=ids)),
        ("label_counts of a shard must come with num_items_in_batch", model, uncounted),
        ("model.loss_function must have parameters shift_labels and", losing, shard),
        (f"{made_for}True, got", model, own_shard(**both_ways)),
        (f"{made_for}False, got", encoder, shard),
        (f"{made_for}False, window=", windows, own_shard(**both_ways)),
        ("labels of a shard must come with num_items_in_batch", encoder, shard | both_ways),
        ("return_dict must stay True with labels", encoder, {**of_encoder, "return_dict": False}),
        (consecutive, mixing, shard),
        (consecutive, mixing, fv.shard_row(batch_of((60, 60)), group)),
    ]
    unsupported = [
        ("BertModel pools documents", pooler, own_shard(**both_ways)),
        ("BertForSequenceClassification pools documents", classifier, own_shard(**both_ways)),
        ("labels must be next tokens under sequence_parallel_group", tagger, shard),
        ("attention dropout must be 0", dropping, own_shard()),
        ("output_router_logits must be False for trees, for a row", unlisted, shard),
    ]
    failed = []
    with rows_without_a_case(sequence_parallel, "SHARDS") as without:
        for error, cases in ((ValueError, wrong), (NotImplementedError, unsupported)):
            calls = [(words, (call, given)) for words, call, given in cases]
            failed += failed_refusals(calls, lambda each: each[0](**each[1]), error)
    return [*failed, *without]
