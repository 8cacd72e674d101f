"""Forms of a batch that meet each other: the documents stay what they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import peft
import pytest
import torch
from transformers import DynamicCache, StaticCache

import flexvarlen as fv
from tests import forms
from tests.contract_oracle import Step, check_step, gradients_of, snapshot
from tests.oracle import assert_as_accurate
from tests.tiny_models import (
    Batch,
    batch_of,
    documents,
    exact_and_baseline,
    new_model,
    one_row,
    padded_rows,
    shared_model,
    two_rows,
)

KIND = "qwen3_windows"


def embeddings(batch: Batch) -> torch.Tensor:
    return shared_model(KIND).get_input_embeddings()(batch.ids)


ONE, TWO, BOTH = one_row(), two_rows(), forms.both_sides()
LATER = forms.ROWS["several_continued"]()


@dataclass(frozen=True)
class Combined:
    """Rows, forms of tests/forms.py that are given at once, and what else the forward gets."""

    batch: Batch
    given: tuple[str, ...]
    others: dict[str, Any] = field(default_factory=dict)
    embedded: bool = False


PADDED = ("padding_mask_and_position_ids",)
POSITIONS = ("position_ids",)
FORMS = {
    "padding_at_both_ends": Combined(BOTH, PADDED),
    "padding_at_both_ends_numbered": Combined(BOTH, ("document_ids",)),
    "padding_at_both_ends_bool": Combined(BOTH, (*PADDED, "bool")),
    "padding_at_both_ends_embedded": Combined(BOTH, ("document_ids",), embedded=True),
    "embedded_cu_seq_lens": Combined(ONE, ("cu_seq_lens",), embedded=True),
    "embedded_layout": Combined(ONE, ("packed_layout",), embedded=True),
    "embedded_two_rows": Combined(TWO, ("document_ids",), embedded=True),
    "two_rows_layout": Combined(TWO, ("packed_layout",)),
    "two_rows_layout_and_ones": Combined(TWO, ("packed_layout", "ones")),
    "two_rows_ones": Combined(TWO, (*POSITIONS, "ones")),
    "int32": Combined(
        ONE,
        (),
        {
            "position_ids": ONE.position_ids.int(),
            "attention_mask": torch.ones_like(ONE.ids).int(),
        },
    ),
    "mask_of_float_ones": Combined(ONE, POSITIONS, {"attention_mask": torch.ones(ONE.ids.shape)}),
    "max_length_too_large": Combined(
        ONE, ("cu_seq_lens",), {"max_length_q": 256, "max_length_k": 256}
    ),
    "max_length_as_tensors": Combined(
        ONE,
        ("cu_seq_lens", "cu_seq_lens_k"),
        {
            "max_length_q": torch.tensor(98, dtype=torch.int32),
            "max_length_k": torch.tensor(98, dtype=torch.int32),
        },
    ),
    "cu_seq_lens_that_repeat": Combined(
        ONE, (), {"cu_seq_lens_q": torch.cat([ONE.cu_seqlens, ONE.cu_seqlens[-1:].repeat(3)])}
    ),
    "cu_seq_lens_and_ones": Combined(ONE, ("cu_seq_lens", "ones")),
    "cu_seq_lens_seq_idx": Combined(ONE, ("cu_seq_lens", "seq_idx")),
    "continued": Combined(LATER, POSITIONS),
    "continued_cu_seq_lens": Combined(LATER, ("cu_seq_lens", "positions")),
    "continued_layout": Combined(LATER, ("packed_layout", "positions")),
    "continued_numbered": Combined(LATER, ("document_ids", "positions")),
    "spare_slots": Combined(
        ONE, (), {"packed_layout": forms.layout_of(ONE, capacity=32, max_seqlen_bound=256)}
    ),
    "hidden_states": Combined(ONE, POSITIONS, {"output_hidden_states": True}),
    "no_dict": Combined(ONE, POSITIONS, {"return_dict": False}),
    "cache_position": Combined(ONE, POSITIONS, {"cache_position": torch.arange(256)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_documents_one_by_one(form):
    batch, given = FORMS[form].batch, FORMS[form].given
    inputs = forms.given(given[0], batch, *given[1:]) if given else {}
    inputs |= FORMS[form].others
    if FORMS[form].embedded:
        inputs["inputs_embeds"] = embeddings(batch)
    else:
        inputs["input_ids"] = batch.ids
    exact, baseline = exact_and_baseline(KIND, batch.order)
    with fv.patched(shared_model(KIND), "sdpa") as model, torch.no_grad():
        out = model(**inputs, labels=batch.ids)
    loss, logits = out[:2] if isinstance(out, tuple) else (out.loss, out.logits)
    assert_as_accurate(batch.of_documents(logits), exact.logits, baseline.logits, 2)
    assert loss.item() == pytest.approx(exact.loss.item(), rel=1e-5)


@pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens", "packed_layout", "document_ids"])
def test_the_last_tokens_alone(form):
    """`logits_to_keep` takes tokens of the row, whatever document they are of."""
    given = forms.given(form, ONE)
    exact, baseline = exact_and_baseline(KIND, ONE.order)
    ends = ONE.cu_seqlens[1:].long() - 1
    with fv.patched(shared_model(KIND), "sdpa"), torch.no_grad():
        last = shared_model(KIND)(ONE.ids, logits_to_keep=ends, **given).logits[0]
        tail = shared_model(KIND)(ONE.ids, logits_to_keep=60, **given).logits[0]
    assert_as_accurate(last, exact.logits[ends], baseline.logits[ends], 2)
    assert_as_accurate(tail, exact.logits[-60:], baseline.logits[-60:], 2)


def causal_4d(kind: str, tokens: int) -> torch.Tensor:
    """Causal, but for one key in the middle that nobody else sees."""
    sees = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    sees[11:, 10] = False
    if kind == "bool":
        return sees[None, None]
    return torch.zeros(1, 1, tokens, tokens).masked_fill(~sees, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_4d_mask_is_honoured(kind, train):
    """One document per row: as the unpatched model has it, outputs and gradients."""
    models = [new_model("llama").train(train) for _ in range(2)]
    fv.patch_model(models[0], "sdpa")
    ids = documents()[1][None, :40]
    outs = []
    for model in models:
        out = model(ids, attention_mask=causal_4d(kind, 40), labels=ids, use_cache=False)
        out.loss.backward()
        outs.append(out)
    torch.testing.assert_close(outs[0].logits, outs[1].logits, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        causal = models[1](ids).logits
    assert (outs[0].logits - causal).abs().max() > 1, "the mask hides nothing"


@pytest.mark.parametrize("padding", ["none", "left", "right", "both"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_an_explicit_cache_of_one_document_a_row_goes_on(cache, padding):
    """Prefill and two steps by hand, against the unpatched model."""
    batch = {
        "none": batch_of(((2,), (2,)), row_tokens=98),
        "left": padded_rows(left=True),
        "right": padded_rows(left=False),
        "both": forms.rolled(padded_rows(left=False), 15),
    }[padding]
    tokens = batch.ids.shape[1]

    def run(model):
        kept = (
            DynamicCache(config=model.config)
            if cache == "dynamic"
            else StaticCache(config=model.config, max_cache_len=tokens + 2)
        )
        seen = forms.real_tokens(batch)
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        given = {"past_key_values": kept, "use_cache": True}
        made = []
        with torch.no_grad():
            out = model(batch.ids, attention_mask=seen, position_ids=positions, **given)
            made.append(batch.of_documents(out.logits))
            for n in range(2):
                seen = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
                positions = seen.sum(-1, keepdim=True) - 1
                token = torch.full((2, 1), 7 + n)
                out = model(token, attention_mask=seen, position_ids=positions, **given)
                made.append(out.logits)
        return made

    model = new_model("llama")
    expected = run(model)
    for ours, theirs in zip(run(fv.patch_model(model, "sdpa")), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def lora(model):
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


WAYS = {
    "plain": {},
    "reentrant": {"reentrant": True},
    "not_reentrant": {"reentrant": False},
    "compiled": {"compiled": True},
    "compiled_not_reentrant": {"compiled": True, "reentrant": False},
}


@pytest.mark.parametrize(
    ("autocast", "way"),
    [*((True, way) for way in WAYS), *((False, way) for way in WAYS if "compiled" not in way)],
)
@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.sampled(3)
def test_gradients_of_what_is_combined(with_lora, autocast, way):
    """Autocast, LoRA, checkpointing and a compiled model, each with each."""
    torch._dynamo.reset()
    made = {name: WAYS[way].get(name) for name in ("reentrant", "compiled")}
    # With LoRA and checkpoints, Dynamo traces all layers again behind each of its breaks.
    layers = {"num_hidden_layers": 1} if made["compiled"] else {}
    model = fv.patch_model(new_model("qwen3", **layers), "sdpa")
    if made["reentrant"] is not None:
        model.gradient_checkpointing_enable({"use_reentrant": made["reentrant"]})
    if with_lora:
        model = lora(model)
    model.train()
    # A checkpointed PEFT model asks for gradients of its inputs, which breaks Dynamo's graph.
    whole = not with_lora or made["reentrant"] is None
    run = torch.compile(model, backend="eager", fullgraph=whole) if made["compiled"] else model
    weights = snapshot(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = run(ONE.ids, labels=ONE.ids, attention_mask=ONE.document_ids).loss
    loss.backward()
    step = Step(weights, loss.detach(), gradients_of(model))
    plain = new_model("qwen3", **layers)
    plain = lora(plain) if with_lora else plain
    check_step(step, plain, [x.tolist() for x in documents()], autocast=autocast)
    torch._dynamo.reset()


def test_gradients_reach_embeddings_of_their_own_document():
    model = fv.patch_model(new_model("qwen3"), "sdpa").train()
    embedded = model.get_input_embeddings()(BOTH.ids).detach().requires_grad_()
    out = model(inputs_embeds=embedded, attention_mask=BOTH.document_ids)
    third = (BOTH.document_ids == 2) & (torch.arange(2)[:, None] == 0)  # of the first row
    out.logits[third].square().sum().backward()
    reached = embedded.grad.abs().sum(-1) > 0
    assert torch.equal(reached, third)


# ---- what is refused ----

HOW = {
    "patched": lambda kind: fv.patch_model(new_model(kind), "sdpa"),
    "name_alone": lambda kind: new_model(kind, implementation="flexvarlen_doc"),
}


@pytest.mark.parametrize("how", [*HOW, "unpad"])
def test_positions_of_a_small_or_a_rounding_dtype(how):
    """uint8 would lose the document after position 255, and bfloat16 would cut one at 257."""
    model = HOW.get(how, lambda kind: fv.patch_model(new_model(kind), "sdpa", unpad=True))("llama")
    torch.manual_seed(0)
    ids = torch.randint(50, (2, 260))
    positions = torch.cat([torch.arange(256), torch.arange(4)])[None]
    mask = torch.ones_like(ids)
    if how == "unpad":
        mask[1, 200:] = 0
    given = {"attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        expected = model(ids, position_ids=positions, **given).logits
        small = given | {"attention_mask": mask.to(torch.uint8)}
        found = model(ids, position_ids=positions.to(torch.uint8), **small).logits
        assert torch.equal(found, expected)
        with pytest.raises(ValueError, match=r"position_ids must be integers, got torch\.bfloat16"):
            model(ids, position_ids=positions.bfloat16(), **given)
        if how == "patched":  # each row's cache keeps one document
            cache = DynamicCache(config=model.config)
            model(ids[:, :256], past_key_values=cache)
            with pytest.raises(ValueError, match=r"got torch\.float16"):
                model(ids[:, 256:], position_ids=positions[:, 256:].half(), past_key_values=cache)


@pytest.mark.parametrize(
    ("how", "in_a_dict"), [("patched", False), ("patched", True), ("name_alone", False)]
)
def test_a_block_mask(how, in_a_dict):
    mask = fv.document_block_mask(forms.layout_of(ONE))
    if in_a_dict:
        mask = {"full_attention": mask}
    with pytest.raises(ValueError, match="attention_mask must be a tensor, got BlockMask"):
        HOW[how]("llama")(ONE.ids, attention_mask=mask)


@pytest.mark.parametrize(
    ("form", "compiled"), [("packed_layout", False), ("seq_idx", False), ("seq_idx", True)]
)
def test_positions_that_go_on_under_longrope(form, compiled):
    """The rotary tables are made by the restarts, and would take two documents for one."""
    torch._dynamo.reset()
    model = fv.patch_model(new_model("phi3", num_hidden_layers=1), "sdpa")
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    through = torch.arange(256)[None]
    with torch.no_grad():
        run(ONE.ids, position_ids=ONE.position_ids, **forms.given(form, ONE))
        with pytest.raises(
            RuntimeError if compiled else ValueError, match="must not continue from one"
        ):
            run(ONE.ids, position_ids=through, **forms.given(form, ONE))
    torch._dynamo.reset()
