"""`seq_idx` and the other boundaries of DataCollatorWithFlattening: honoured, or refused."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening

import flexvarlen as fv
from flexvarlen.patches.batch.find_layout import find_layout
from flexvarlen.patches.batch.given_documents import GivenDocuments
from flexvarlen.patches.isolation.documents import documents_of, layout_of, units_of
from tests import forms
from tests.oracle import assert_as_accurate
from tests.patches.batch.models import HOW, NAME, PATCHED, model_of
from tests.tiny_models import LENGTHS, documents, exact_and_baseline, new_model, one_row, two_rows

ONE, TWO = one_row(), two_rows()
KIND = "qwen3_windows"


def numbers(batch):
    return (batch.document_ids - 1).int()


def through(batch):
    """Positions that run through the row, as of one document."""
    return torch.arange(batch.ids.shape[1])[None]


# What comes beside seq_idx, and would say one document per row.
BESIDE = {
    "alone": lambda batch: {},
    "mask_of_ones": lambda batch: forms.given("plain", batch, "ones"),
    "positions_that_run_through": lambda batch: {"position_ids": through(batch)},
    "both": lambda batch: {
        "attention_mask": torch.ones_like(batch.ids),
        "position_ids": through(batch),
    },
    "cu_seq_lens": lambda batch: forms.given("cu_seq_lens", batch),
    "layout": lambda batch: forms.given("packed_layout", batch),
}


def check(batch, logits, *, by_row=False):
    """As the documents one by one; `by_row`: at the positions that they have in their row."""
    firsts, before, row_tokens = [], 0, batch.ids.shape[1]
    for index, first in batch.order:
        firsts.append(before % row_tokens if by_row else first)
        before += LENGTHS[index]
    order = tuple((i, first) for (i, _), first in zip(batch.order, firsts, strict=True))
    exact, baseline = exact_and_baseline(KIND, order)
    assert_as_accurate(batch.of_documents(logits), exact.logits, baseline.logits, 2)


@pytest.mark.pairwise(how=HOW, form=BESIDE, rows=["one", "two"])
def test_a_change_begins_a_document(how, form, rows):
    batch = {"one": ONE, "two": TWO}[rows]
    model = model_of(how, KIND)
    given = {"seq_idx": numbers(batch), **BESIDE[form](batch)}
    with torch.no_grad():
        out = model(batch.ids, labels=batch.ids, use_cache=False, **given)
    # Nobody makes other positions for a plugin name alone.
    by_row = how == NAME or "position_ids" in given
    check(batch, out.logits, by_row=by_row)
    if how == PATCHED:  # labels, too
        exact, _ = exact_and_baseline(KIND, batch.order)
        assert out.loss.item() == pytest.approx(exact.loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_position_ids": False},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        {"return_flash_attn_kwargs": True},
    ],
    ids=str,
)
def test_batches_of_the_collator(options):
    made = DataCollatorWithFlattening(return_seq_idx=True, **options)(
        [{"input_ids": document.tolist()} for document in documents()]
    )
    with torch.no_grad():
        check(ONE, fv.patch_model(new_model(KIND), "sdpa")(**made).logits)


def test_padding_is_not_cut():
    """Its tokens may bear any number."""
    mask = (torch.arange(12) < 8).long()[None]
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 4]])
    layout = find_layout(GivenDocuments(1, 12, mask.device, seq_idx=seq_idx, attention_mask=mask))
    assert layout.lengths == (3, 5, 4)
    assert layout.real_tokens().tolist() == mask[0].bool().tolist()
    explicit = fv.PackedLayout.from_lengths([3, 5], total_tokens=12)
    found = find_layout(GivenDocuments(1, 12, mask.device, seq_idx=seq_idx, packed_layout=explicit))
    assert found is explicit


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_compare_and_verify_find_the_same_documents(dtype):
    """`compare` read no seq_idx, and `verify_isolation` added 1 to 255 in uint8: padding."""
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 255, 255]]).to(dtype)
    batch = {"input_ids": torch.ones(1, 7, dtype=torch.long), "seq_idx": seq_idx}
    for layout in (layout_of(batch), documents_of(batch, None)):
        assert [unit.end - unit.start for unit in units_of(layout)] == [3, 2, 2]


WRONG = {
    "more_than_cu_seq_lens": {"seq_idx": (through(ONE) // 2), "cu_seq_lens_q": ONE.cu_seqlens},
    "fewer_than_cu_seq_lens": {"seq_idx": through(ONE) * 0, "cu_seq_lens_q": ONE.cu_seqlens},
    "others_than_the_layout": {
        "seq_idx": numbers(ONE),
        "packed_layout": fv.PackedLayout.from_lengths([200, 56]),
    },
    "of_another_shape": {"seq_idx": numbers(ONE)[0]},
    "too_short": {"seq_idx": numbers(ONE)[:, :-1]},
    "of_floats": {"seq_idx": numbers(ONE).float()},
    "cu_seq_lens_k_alone": {"cu_seq_lens_k": ONE.cu_seqlens},
    "cu_seq_lens_k_and_its_length": {"cu_seq_lens_k": ONE.cu_seqlens, "max_length_k": 98},
    "max_length_q_alone": {"max_length_q": 98, "position_ids": ONE.position_ids},
    "max_length_k_alone": {"max_length_k": 98},
}


@pytest.mark.parametrize(
    ("how", "case"),
    [
        *((PATCHED, case) for case in WRONG),
        *((NAME, case) for case in ("of_floats", "cu_seq_lens_k_alone", "too_short")),
    ],
)
def test_what_cannot_be_honoured_raises(how, case):
    model = model_of(how, KIND)
    with pytest.raises(ValueError, match=r"seq_idx|cu_seq_lens_q") as caught:
        model(ONE.ids, **WRONG[case])
    assert len(str(caught.value).split()) > 6


IN_A_GRAPH = {
    "cu_seq_lens_k": (
        {"cu_seq_lens_k": ONE.cu_seqlens},
        "cu_seq_lens_k must be passed together with cu_seq_lens_q",
    ),
    "contradiction": (
        {"cu_seq_lens_q": ONE.cu_seqlens, "seq_idx": through(ONE) // 2},
        "seq_idx must change where",
    ),
}


@pytest.mark.parametrize("case", IN_A_GRAPH)
def test_what_cannot_be_honoured_raises_in_a_graph(case):
    torch._dynamo.reset()
    given, words = IN_A_GRAPH[case]
    model = model_of(PATCHED, KIND, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=words):
        compiled(ONE.ids, use_cache=False, **given)
    torch._dynamo.reset()
