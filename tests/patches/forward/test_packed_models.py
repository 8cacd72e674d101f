"""A packed batch gives what its documents give one by one: logits, loss, every gradient.

The oracle is the unpatched model in fp64, a document at a time; the baseline is the same in the
packed model's dtype, with transformers' eager attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flexvarlen as fv
from tests import forms
from tests.backends import ON_GPU
from tests.contract_oracle import gradients_of
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.tiny_models import (
    KINDS,
    LENGTHS,
    Batch,
    exact_and_baseline,
    one_row,
    shared_model,
)


@dataclass(frozen=True)
class Form:
    """How a model gets a packed batch: a form of tests/forms.py and what is beside it, and a mode.

    Attributes:
        rows: a key of `forms.ROWS`.
        others: makes further keyword arguments of the forward.
        embedded: the tokens come as embeddings.
        reentrant: gradient checkpointing of this kind, or None for none of it.
    """

    given: tuple[str, ...]
    rows: str = "one_row"
    others: Callable[[Batch], dict[str, Any]] = lambda b: {}
    embedded: bool = False
    train: bool = False
    reentrant: bool | None = None


POSITIONS, CU_SEQ_LENS = ("position_ids",), ("cu_seq_lens", "cu_seq_lens_k")
MASK, PACKED_MASK = ("padding_mask",), ("padding_mask_and_position_ids",)
FORMS = {
    "restarting_position_ids": Form(POSITIONS, others=lambda b: {"use_cache": False}),
    "default_use_cache": Form(POSITIONS),
    "train_mode": Form(POSITIONS, train=True),
    "mask_of_ones": Form((*POSITIONS, "ones")),
    "cu_seq_lens_alone": Form(CU_SEQ_LENS),
    "cu_seq_lens_and_max_length": Form((*CU_SEQ_LENS, "max_length")),
    "document_id_mask": Form(("document_ids",)),
    "two_packed_rows": Form(POSITIONS, "two_rows"),
    "two_rows_cu_seq_lens": Form(CU_SEQ_LENS, "two_rows"),
    "two_rows_document_id_mask": Form(("document_ids",), "two_rows"),
    "right_padding": Form(MASK, "right_padding"),
    "left_padding": Form(MASK, "left_padding", others=lambda b: {"use_cache": False}),
    "right_padding_packed": Form(PACKED_MASK, "right_padding_packed"),
    "left_padding_packed": Form(PACKED_MASK, "left_padding_packed"),
    "first_document_at_position_100": Form(POSITIONS, "first_document_at_position_100"),
    "later_document_at_position_2": Form(POSITIONS, "later_document_at_position_2"),
    "checkpointing": Form(CU_SEQ_LENS, train=True, reentrant=False),
    "checkpointing_reentrant": Form(POSITIONS, train=True, reentrant=True),
    "packed_layout": Form(("packed_layout",)),
    "inputs_embeds": Form(POSITIONS, embedded=True),
}


SAYS_ONE, BOTH_SIDES = ("plain",), "both_sides_packed"
COMBINED = {
    "padding_at_both_ends": Form(PACKED_MASK, BOTH_SIDES),
    "padding_at_both_ends_numbered": Form(("document_ids",), BOTH_SIDES),
    "padding_at_both_ends_bool": Form((*PACKED_MASK, "bool"), BOTH_SIDES),
    "padding_at_both_ends_embedded": Form(("document_ids",), BOTH_SIDES, embedded=True),
    "embedded_cu_seq_lens": Form(("cu_seq_lens",), embedded=True),
    "embedded_layout": Form(("packed_layout",), embedded=True),
    "embedded_two_rows": Form(("document_ids",), "two_rows", embedded=True),
    "two_rows_layout": Form(("packed_layout",), "two_rows"),
    "two_rows_layout_and_ones": Form(("packed_layout", "ones"), "two_rows"),
    "two_rows_ones": Form((*POSITIONS, "ones"), "two_rows"),
    "int32": Form(
        SAYS_ONE,
        others=lambda b: {
            "position_ids": b.position_ids.int(),
            "attention_mask": torch.ones_like(b.ids).int(),
        },
    ),
    "boundaries_in_the_positions_alone": Form(
        POSITIONS,
        others=lambda b: {"attention_mask": (torch.arange(256)[None] < sum(LENGTHS[:3])) + 1},
    ),
    "mask_of_float_ones": Form(
        POSITIONS, others=lambda b: {"attention_mask": torch.ones(b.ids.shape)}
    ),
    "max_length_too_large": Form(
        ("cu_seq_lens",), others=lambda b: {"max_length_q": 256, "max_length_k": 256}
    ),
    "max_length_as_tensors": Form(
        CU_SEQ_LENS,
        others=lambda b: {
            f"max_length_{x}": torch.tensor(98, dtype=torch.int32) for x in ("q", "k")
        },
    ),
    "cu_seq_lens_that_repeat": Form(
        SAYS_ONE,
        others=lambda b: {"cu_seq_lens_q": torch.cat([b.cu_seqlens, b.cu_seqlens[-1:].repeat(3)])},
    ),
    "cu_seq_lens_and_ones": Form(("cu_seq_lens", "ones")),
    "cu_seq_lens_seq_idx": Form(("cu_seq_lens", "seq_idx")),
    "continued": Form(POSITIONS, "several_continued"),
    "continued_cu_seq_lens": Form(("cu_seq_lens", "positions"), "several_continued"),
    "continued_layout": Form(("packed_layout", "positions"), "several_continued"),
    "continued_numbered": Form(("document_ids", "positions"), "several_continued"),
    "spare_slots": Form(
        SAYS_ONE,
        others=lambda b: {"packed_layout": forms.layout_of(b, capacity=32, max_seqlen_bound=256)},
    ),
    "hidden_states": Form(POSITIONS, others=lambda b: {"output_hidden_states": True}),
    "no_dict": Form(POSITIONS, others=lambda b: {"return_dict": False}),
    "cache_position": Form(POSITIONS, others=lambda b: {"cache_position": torch.arange(256)}),
}
"""Forms that meet each other, or other arguments."""


@contextmanager
def ready(model, backend: str, form: Form):
    """The model patched and in the form's mode; then as before."""
    model.train(form.train)
    if form.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": form.reentrant})
    try:
        with fv.patched(model, backend):
            yield
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
        model.zero_grad()


def check(kind: str, backend: str, form: Form, *, grad: bool, **where: Any) -> None:
    """Packed equals one by one, for a kind of model in a dtype, on a device, with a head_dim."""
    model = shared_model(kind, **where)
    batch = forms.ROWS[form.rows](device=model.device.type)
    exact, baseline = exact_and_baseline(kind, batch.order, **where)
    with ready(model, backend, form), torch.set_grad_enabled(grad):
        inputs = {**forms.given(form.given[0], batch, *form.given[1:]), **form.others(batch)}
        if form.embedded:
            inputs["inputs_embeds"] = model.get_input_embeddings()(batch.ids)
        else:
            inputs["input_ids"] = batch.ids
        out = model(**inputs, labels=batch.ids)
        if grad:
            out[0].backward()
        gradients = gradients_of(model)
    loss, logits = out[:2]
    logits = batch.of_documents(logits.detach())
    assert_as_accurate(logits, exact.logits, baseline.logits, 2, "logits")
    # A token's loss moves at most twice as far as its logits.
    moved = 2 * (logits.double() - exact.logits).abs().max().item()
    assert abs(loss.item() - exact.loss.item()) <= moved + 1e-6 * exact.loss.item()
    if grad:
        assert_gradients_as_accurate(gradients, exact.gradients, baseline.gradients)


@pytest.mark.pairwise(kind=KINDS, backend=["sdpa", "reference"], form=FORMS)
def test_packed_equals_one_by_one(kind, backend, form):
    check(kind, backend, FORMS[form], grad=True)


@pytest.mark.parametrize("form", COMBINED)
def test_forms_that_meet_each_other(form):
    check("qwen3_windows", "sdpa", COMBINED[form], grad=False)


# On the CPU flex has no backward, and compiles anew for each T: all forms have one T. A backend
# sees the layout alone: of one row, of several, and with padding.
@pytest.mark.parametrize("form", ["packed_layout", "two_packed_rows", "left_padding_packed"])
def test_packed_equals_one_by_one_in_flex_on_the_cpu(form):
    check("qwen3_windows", "flex", FORMS[form], grad=False)


@pytest.mark.gpu
@pytest.mark.pairwise(kind=KINDS, backend=ON_GPU, form=FORMS)
def test_packed_equals_one_by_one_in_bf16(kind, backend, form):
    where = {"dtype": torch.bfloat16, "device": "cuda", "head_dim": 64}
    window = 9 if kind.endswith("windows") else None
    call = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "window": window}
    reason = fv.why_not(backend, device="cuda", dtype=torch.bfloat16, **call)
    if reason is not None:
        pytest.skip(reason)
    check(kind, backend, FORMS[form], grad=True, **where)


def test_positional_arguments_are_not_looked_at():
    model, batch = shared_model("llama"), one_row()
    exact, baseline = exact_and_baseline("llama", batch.order)
    ones = torch.ones_like(batch.ids)
    with fv.patched(model, "sdpa"), torch.no_grad():
        logits = model(batch.ids, ones, batch.position_ids).logits[0]
        hidden = model.model(batch.ids, ones, batch.position_ids).last_hidden_state
        head = model.lm_head(hidden)[0]
    assert_as_accurate(logits, exact.logits, baseline.logits, 2)
    assert torch.equal(head, logits), "the base model alone differs from the whole"


@pytest.mark.parametrize("backend", ["sdpa", "reference", "flex"])
@pytest.mark.parametrize("kind", ["llama", "qwen2_windows"])
def test_no_bit_of_another_document_changes(kind, backend):
    model, batch = shared_model(kind), one_row()
    start = sum(LENGTHS[:2])
    changed = batch.ids.clone()
    changed[0, start : start + LENGTHS[2]] = batch.ids[0, start : start + LENGTHS[2]].flip(0)
    others = torch.ones(256, dtype=torch.bool)
    others[start : start + LENGTHS[2]] = False
    with fv.patched(model, backend), torch.no_grad():
        before, after = (
            model(ids, position_ids=batch.position_ids).logits[0] for ids in (batch.ids, changed)
        )
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])
