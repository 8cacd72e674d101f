"""A batch that a model cannot serve is refused in one sentence, before any kernel runs."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

import flexvarlen as fv
from flexvarlen.patches.batch import given_documents
from flexvarlen.patches.forward import make_row
from tests import forms
from tests.sentences import (  # noqa: F401
    failed_refusals,
    int32,
    no_kernel_runs,
    refused,
    rows_without_a_case,
)
from tests.tiny_models import new_model, one_row, shared_model, two_rows

ROW = one_row()  # of 256 tokens
IN_TWO_ROWS = {"input_ids": two_rows().ids}


def layout_of(*lengths):
    return {"packed_layout": fv.PackedLayout.from_lengths(lengths)}


def cu_seq_lens(*boundaries, **others):
    return {"cu_seq_lens_q": int32(*boundaries), **others}


def filled_cache():
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.ones(1, 2, 4, 16), torch.ones(1, 2, 4, 16), layer)
    return {"past_key_values": cache}


def by_name():
    """A model that finds the documents in the arguments of its attention function."""
    return new_model("llama", implementation="flexvarlen_doc")


@pytest.fixture
def model():
    with fv.patched(shared_model("llama"), "sdpa") as model:
        yield model


def refuses(model, cases, error=ValueError):
    """Twice: nothing is kept of a refused call."""

    def call(inputs):
        model(**{"input_ids": ROW.ids, **inputs})

    for _ in range(2):
        assert failed_refusals(cases, call, error) == []


CU_SEQ_LENS = "cu_seq_lens_q must be an int32 tensor [documents + 1], got "
LONGEST = "max_length_q and max_length_k must be at least the longest document, 156 tokens, got "
DOCUMENTS = [
    ("cu_seq_lens_q must start at 0, got 1", cu_seq_lens(1, 100, 256)),
    ("cu_seq_lens_q must never decrease, got 100 then 99", cu_seq_lens(0, 100, 99, 256)),
    ("cu_seq_lens_q must end at or before total_tokens=256, got 257", cu_seq_lens(0, 100, 257)),
    (f"{CU_SEQ_LENS}torch.int64", {"cu_seq_lens_q": torch.tensor([0, 100, 256])}),
    (f"{CU_SEQ_LENS}torch.float32", {"cu_seq_lens_q": torch.tensor([0.0, 100.0, 256.0])}),
    (f"{CU_SEQ_LENS}torch.int32 of shape (1, 3)", {"cu_seq_lens_q": int32(0, 100, 256)[None]}),
    (f"{CU_SEQ_LENS}list", {"cu_seq_lens_q": [0, 100, 256]}),
    (
        "cu_seq_lens_k must be an int32 tensor [documents + 1], got list",
        cu_seq_lens(0, 100, 256, cu_seq_lens_k=[0, 100, 256]),
    ),
    *(
        ("cu_seq_lens_k must equal cu_seq_lens_q", cu_seq_lens(0, 100, 256, cu_seq_lens_k=keys))
        for keys in (int32(0, 99, 256), int32(0, 99, 100, 256))
    ),
    (f"{LONGEST}155", cu_seq_lens(0, 100, 256, max_length_q=155)),
    (f"{LONGEST}100", cu_seq_lens(0, 100, 256, max_length_q=156, max_length_k=100)),
    (LONGEST, cu_seq_lens(0, 100, 256, max_length_q="156")),
    ("packed_layout must be a PackedLayout, got list", {"packed_layout": [100, 156]}),
    ("packed_layout must cover the batch's 256 tokens on cpu, got 255", layout_of(100, 155)),
    ("packed_layout must cover the batch's 256 tokens on cpu, got 257", layout_of(100, 157)),
    *(
        ("a document must not cross the boundary of two rows of 128", IN_TWO_ROWS | documents)
        for documents in (layout_of(100, 156), cu_seq_lens(0, 100, 200, 256))
    ),
    ("seq_idx must be an integer tensor [B, S], got list", {"seq_idx": [[0, 1]]}),
    ("seq_idx must be integers of shape (1, 256) on cpu", {"seq_idx": int32(0, 1)[None]}),
    ("cu_seq_lens_q must have one entry more than there are documents, got 1", cu_seq_lens(256)),
    (
        "cu_seq_lens_q must be on the tokens' device cpu, got meta",
        {"cu_seq_lens_q": int32(0, 256).to("meta")},
    ),
    *(
        (f"{name} must be passed together with cu_seq_lens_q", {name: given})
        for name, given in (("cu_seq_lens_k", int32(0, 256)), ("max_length_q", 256))
    ),
    ("max_length_k must be passed together with cu_seq_lens_q", {"max_length_k": 256}),
    *(
        ("a packed batch must not have a", forms.given(form, ROW) | others)
        for form in ("position_ids", "cu_seq_lens", "packed_layout")
        for others in (
            filled_cache(),
            {"attention_mask": torch.ones(1, 1, 256, 256, dtype=torch.bool)},
        )
    ),
]

POSITIONS = "position_ids must have shape (1, 256), as the tokens, got "
SHORT = ROW.position_ids[:, :-1]
SHAPES = [  # by name alone transformers reads them first
    ("attention_mask must have shape (1, 256)", {"attention_mask": torch.ones(1, 255)}),
    (f"{POSITIONS}(1, 255)", {"position_ids": SHORT}),
    (f"{POSITIONS}(1, 255)", {"position_ids": SHORT, **layout_of(100, 156)}),
    (f"{POSITIONS}(3, 256)", {"position_ids": ROW.position_ids.expand(3, -1)}),
]


def test_wrong_documents_reach_a_kernel(model):
    """Of a patched model, and of one by its attention's name alone."""
    with rows_without_a_case(given_documents, "ARGUMENTS") as without:
        refuses(model, DOCUMENTS + SHAPES)
    assert without == set()
    refuses(by_name(), DOCUMENTS)


def test_wrong_arguments_reach_a_kernel(model):
    refuses(
        model,
        [
            ("input_ids must be a tensor, got list", {"input_ids": ROW.ids.tolist()}),
            ("inputs_embeds must be a tensor", {"input_ids": None, "inputs_embeds": [[0.5]]}),
            ("input_ids must have shape [B, S]", {"input_ids": ROW.ids[0]}),
            ("labels must be a tensor, got list", {"labels": [[1, 2]]}),
            ("labels must have one label for each of 256 tokens", {"labels": torch.ones(2).long()}),
            ("position_ids must be an integer tensor", {"position_ids": [[0, 1, 2]]}),
            (
                "position_ids must have shape [B, S], got (3, 1, 256)",
                {"position_ids": torch.zeros(3, 1, 256).long()},
            ),
        ],
    )
    output_attentions = {"position_ids": ROW.position_ids, "output_attentions": True}
    cases = [("output_attentions=True is not supported", output_attentions)]
    refuses(model, cases, NotImplementedError)


@pytest.mark.parametrize("unpad", [False, True])
def test_another_label_that_the_loss_ignores(unpad):
    """A patched model sets labels to -100, in which torch would find no class."""
    batches = [
        {**forms.given("packed_layout", ROW), "labels": ROW.ids},
        {"attention_mask": torch.ones_like(ROW.ids).index_fill(1, torch.arange(9), 0)},
        filled_cache(),
        fv.share_prefixes([[5, 6, 7], [5, 6, 8]]).batch(),
    ]
    cases = [
        ("ignore_index must be -100, ", {**batch, "ignore_index": value})
        for batch in batches
        for value in (-1, 0, "-100", torch.tensor(-1))
    ]
    with fv.patched(shared_model("llama"), "sdpa", unpad=unpad) as model:
        refuses(model, cases)


def test_more_documents_or_longer_ones_than_asked_for():
    inputs = {"position_ids": ROW.position_ids}
    for name, size in (("capacity", 4), ("max_seqlen_bound", 64)):
        with fv.patched(shared_model("llama"), "sdpa", **{name: size}) as model:
            refuses(model, [(f"{name} must be at least the ", inputs)])


def test_what_trees_do_not_go_with_reaches_a_kernel(model):
    """Also where samples happen to share nothing. Each row of the table refuses some call."""
    shared, apart = (
        fv.share_prefixes(texts).batch() for texts in ([[5, 6, 7], [5, 6, 8]], [[5, 6, 7], [8, 9]])
    )
    others = {
        "bidirectional attention": fv.patch_model(new_model("bert"), "sdpa"),
        "rope_type 'longrope'": fv.patch_model(new_model("phi3"), "sdpa"),
        "batch_invariant": fv.patch_model(new_model("mamba2"), "sdpa", batch_invariant=True),
    }
    with rows_without_a_case(make_row, "TREES") as without:
        for batch in (shared, apart):
            ids = batch["input_ids"]
            changes = [
                ("labels cannot be combined with a packed_layout", {"labels": ids}),
                ("position_ids cannot be combined with a packed_layout", {"position_ids": ids}),
                ("return_dict must be True with a packed_layout", {"return_dict": False}),
                ("logits_to_keep must be 0 with the shift_labels", {"logits_to_keep": 3}),
                ("a packed_layout of trees cannot fill a cache", {"use_cache": True}),
            ]
            refuses(model, [(words, batch | change) for words, change in changes])
            for reason, other in others.items():
                words = f"a packed_layout of trees is not supported with {reason}"
                refuses(other, [(words, batch)], NotImplementedError)
        of_trees = [
            ("shift_labels must come with label_counts", {"label_counts": None}),
            ("attention_mask cannot be combined with", {"attention_mask": shared["input_ids"]}),
        ]
        refuses(model, [(words, shared | change) for words, change in of_trees])
        with torch.no_grad():
            part = next(fv.share_prefixes([[5, 6, 7], [5, 6, 8]]).parts(model, 3))
        words = "a tree cannot run in parts with output_router_logits"
        refuses(model, [(words, part | {"output_router_logits": True})], NotImplementedError)
        grid = {"image_grid_thw": torch.tensor([[1, 2, 2]])}
        with_images = fv.patch_model(new_model("qwen2_vl"), "sdpa")
        refuses(with_images, [("position_ids of 4 rows must be given", shared | grid)])
        words = "a packed_layout of trees is not supported with images of models other"
        refuses(model, [(words, shared | grid)], NotImplementedError)
    assert without == set()


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("cached", [0, 2])
def test_restarts_behind_the_end_of_a_mask(patched, cached):
    """transformers fills the mask up with zeros; what lies there is no padding for that."""
    model = fv.patch_model(new_model("llama"), "sdpa") if patched else by_name()
    tokens = ROW.ids.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=2 * tokens)
    for layer in range(2 if cached else 0):  # a mask of the new tokens alone, beside cached ones
        cache.update(*(torch.zeros(1, 2, cached, 16) for _ in "kv"), layer)
    inputs = {
        "position_ids": ROW.position_ids + cached,
        "attention_mask": torch.ones(1, tokens if cached else 5, dtype=torch.int64),
        "past_key_values": cache,
    }
    words = "position_ids that do not increase by 1" if patched else "a column for each of the"
    refused(ValueError, words, "", lambda: model(input_ids=ROW.ids, **inputs))


def test_attention_dropout_in_training():
    model = fv.patch_model(new_model("llama", attention_dropout=0.1), "sdpa").train()
    inputs = {"position_ids": ROW.position_ids}
    refuses(model, [("attention dropout must be 0", inputs)], NotImplementedError)
    with pytest.raises(pytest.fail.Exception, match="a kernel was called"):  # in eval none drops
        model.eval()(input_ids=ROW.ids, **inputs)
