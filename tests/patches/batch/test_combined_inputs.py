"""Documents beside what else a forward takes: masks, checkpoints, adapters, other dtypes."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import flexvarlen as fv
from tests import forms
from tests.contract_oracle import Step, check_step, gradients_of, snapshot
from tests.oracle import assert_as_accurate
from tests.tiny_models import (
    documents,
    exact_and_baseline,
    lora,
    new_model,
    one_row,
    shared_model,
)

KIND = "qwen3_windows"


ONE, BOTH = one_row(), forms.both_sides()


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
    ("form", "compiled"),
    [
        ("packed_layout", False),
        ("seq_idx", False),
        pytest.param("seq_idx", True, marks=pytest.mark.slow),
    ],
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
