"""A packed batch gives what its documents give one by one: logits, loss, every gradient.

The oracle is the unpatched model in fp64, a document at a time; the peer is the same in the packed
model's dtype, with transformers' eager attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import flexvarlen as fv
from tests.backends import ON_GPU
from tests.oracle import assert_as_accurate
from tests.tiny_models import (
    KINDS,
    LENGTHS,
    Batch,
    exact_and_peer,
    one_row,
    padded_rows,
    shared_model,
    two_rows,
)

Inputs = dict[str, Any]


def _embeddings(model, batch: Batch) -> Inputs:
    embeddings = model.get_input_embeddings()(batch.ids)
    return {"inputs_embeds": embeddings, "position_ids": batch.position_ids}


def _positions(model, batch: Batch) -> Inputs:
    return {"position_ids": batch.position_ids}


def _with_mask(model, batch: Batch, positions: bool, use_cache: bool | None = None) -> Inputs:
    inputs = {"attention_mask": (batch.document_ids > 0).long(), "use_cache": use_cache}
    return {**inputs, "position_ids": batch.position_ids} if positions else inputs


def _cu_seq_lens(model, batch: Batch) -> Inputs:
    return {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens.clone()}


def _layout(model, batch: Batch) -> Inputs:
    return {"packed_layout": fv.PackedLayout.from_lengths(LENGTHS, device=batch.ids.device)}


@dataclass(frozen=True)
class Form:
    """A way to hand a packed batch to a model.

    Attributes:
        inputs: the forward's keyword arguments beside input_ids.
        batch: the documents in rows, on a device.
        reentrant: gradient checkpointing of this kind, or None for none of it.
    """

    inputs: Callable[..., Inputs]
    batch: Callable[..., Batch] = one_row
    train: bool = False
    reentrant: bool | None = None


FORMS = {
    "restarting_position_ids": Form(lambda m, b: {**_positions(m, b), "use_cache": False}),
    "default_use_cache": Form(_positions),
    "train_mode": Form(_positions, train=True),
    "mask_of_ones": Form(
        lambda m, b: {**_positions(m, b), "attention_mask": torch.ones_like(b.ids)}
    ),
    "empty_cache": Form(lambda m, b: {**_positions(m, b), "past_key_values": DynamicCache()}),
    "cu_seq_lens_alone": Form(_cu_seq_lens),
    "cu_seq_lens_and_max_length": Form(
        lambda m, b: {**_cu_seq_lens(m, b), "max_length_q": 98, "max_length_k": 98}
    ),
    "document_id_mask": Form(lambda m, b: {"attention_mask": b.document_ids}),
    "two_packed_rows": Form(_positions, two_rows),
    "two_rows_cu_seq_lens": Form(_cu_seq_lens, two_rows),
    "two_rows_document_id_mask": Form(lambda m, b: {"attention_mask": b.document_ids}, two_rows),
    "right_padding": Form(partial(_with_mask, positions=False), partial(padded_rows, left=False)),
    "left_padding": Form(
        partial(_with_mask, positions=False, use_cache=False), partial(padded_rows, left=True)
    ),
    "right_padding_packed": Form(
        partial(_with_mask, positions=True), partial(padded_rows, left=False, packed=True)
    ),
    "left_padding_packed": Form(
        partial(_with_mask, positions=True), partial(padded_rows, left=True, packed=True)
    ),
    "first_document_at_position_100": Form(_positions, partial(one_row, firsts={0: 100})),
    "later_document_at_position_2": Form(_positions, partial(one_row, firsts={2: 2, 3: 2})),
    "checkpointing": Form(_positions, train=True, reentrant=False),
    "checkpointing_reentrant": Form(_positions, train=True, reentrant=True),
    "packed_layout": Form(_layout),
    "inputs_embeds": Form(_embeddings),
}


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
    batch = form.batch(device=model.device.type)
    exact, peer = exact_and_peer(kind, batch.order, **where)
    with ready(model, backend, form), torch.set_grad_enabled(grad):
        inputs = form.inputs(model, batch)
        if "inputs_embeds" not in inputs:
            inputs["input_ids"] = batch.ids
        out = model(**inputs, labels=batch.ids)
        if grad:
            out.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    logits = batch.of_documents(out.logits.detach())
    assert_as_accurate(logits, exact.logits, peer.logits, 2, "logits")
    # A token's loss moves at most twice as far as its logits.
    moved = 2 * (logits.double() - exact.logits).abs().max().item()
    assert abs(out.loss.item() - exact.loss.item()) <= moved + 1e-6 * exact.loss.item()
    if grad:
        assert gradients.keys() == exact.gradients.keys()
        for name, gradient in gradients.items():
            assert_as_accurate(gradient, exact.gradients[name], peer.gradients[name], 3, name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_one_by_one(kind, backend, form):
    check(kind, backend, FORMS[form], grad=True)


# On the CPU flex has no backward, and compiles anew for each T: all forms have one T.
@pytest.mark.parametrize("form", [name for name in FORMS if not FORMS[name].train])
@pytest.mark.parametrize("kind", ["llama", "qwen3_windows"])
def test_packed_equals_one_by_one_in_flex_on_the_cpu(kind, form):
    check(kind, "flex", FORMS[form], grad=False)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_one_by_one_in_bf16(kind, backend, form):
    where = {"dtype": torch.bfloat16, "device": "cuda", "head_dim": 64}
    window = 9 if kind.endswith("windows") else None
    call = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "window": window}
    reason = fv.why_not(backend, device="cuda", dtype=torch.bfloat16, **call)
    if reason is not None:
        pytest.skip(reason)
    check(kind, backend, FORMS[form], grad=True, **where)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_positional_arguments_are_not_looked_at(backend):
    model, batch = shared_model("llama"), one_row()
    exact, peer = exact_and_peer("llama", batch.order)
    ones = torch.ones_like(batch.ids)
    with fv.patched(model, backend), torch.no_grad():
        logits = model(batch.ids, ones, batch.position_ids).logits[0]
        hidden = model.model(batch.ids, ones, batch.position_ids).last_hidden_state
        head = model.lm_head(hidden)[0]
    assert_as_accurate(logits, exact.logits, peer.logits, 2)
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


def test_a_border_in_the_mask_alone_or_in_the_positions_alone():
    model, batch = shared_model("qwen3"), one_row()
    halves = (torch.arange(256)[None] < sum(LENGTHS[:3])).long() + 1
    position_ids = batch.position_ids.clone()
    position_ids[0, sum(LENGTHS[:3])] = LENGTHS[
        2
    ]  # one token goes on: here only the mask has a border
    exact, peer = exact_and_peer("qwen3", batch.order)
    with fv.patched(model, "sdpa"), torch.no_grad():
        out = model(batch.ids, position_ids=batch.position_ids, attention_mask=halves)
    assert_as_accurate(out.logits[0], exact.logits, peer.logits, 2)
