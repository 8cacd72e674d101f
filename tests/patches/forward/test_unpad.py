"""`patch_model(unpad=True)`: a padded batch in and out, one packed row inside."""

from __future__ import annotations

import copy
from itertools import cycle

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters
from transformers import DynamicCache

import flexvarlen as fv
from flexvarlen.patches.attention import packed_forward
from tests import forms
from tests.backends import ON_GPU, gpu_param
from tests.patches.forward.padded_runs import (
    ENCODERS,
    LENGTHS,
    ROW,
    TEXT,
    assert_as_accurate_as_padded,
    assert_same,
    model_with,
    next_tokens,
    padded,
    pair,
    seen_tokens,
    unpadding,
)
from tests.tiny_models import (
    VOCABULARY,
    config_of,
    new_model,
    one_row,
    padded_rows,
)

# ---- the same loss and gradients ----


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("kind", "side"), [*zip(TEXT, cycle(["left", "right"]), strict=False)])
def test_loss_of_a_language_model(kind, side):
    head = "MaskedLM" if kind in ENCODERS else "CausalLM"
    plain, ours, shapes = pair(head, kind)
    inputs = padded(side, plain.config.get_text_config().pad_token_id)
    inputs["labels"] = next_tokens(inputs)
    out, _ = assert_same(plain, ours, inputs)
    assert shapes == [(1, sum(LENGTHS))]
    assert out.logits.shape == (len(LENGTHS), ROW, VOCABULARY)


def test_longrope_frequencies_of_each_document():
    model, inputs = new_model("phi3"), padded("right")
    with torch.no_grad():
        expected = fv.patch_model(model, "sdpa")(**inputs).logits
        logits = fv.patch_model(model, "sdpa", unpad=True)(**inputs).logits
    real = inputs["attention_mask"] == 1
    torch.testing.assert_close(logits[real], expected[real], atol=1e-4, rtol=1e-4)


CLASSES = torch.tensor([0, 1, 1, 0])
HEADS = (
    ("llama", "SequenceClassification", CLASSES),
    ("gemma3_text", "SequenceClassification", CLASSES),
    ("qwen3", "SequenceClassification", torch.tensor([[0.3], [-1.0], [2.0], [0.0]])),
    ("qwen2", "TokenClassification", None),
    ("bert", "TokenClassification", None),
)


@pytest.mark.parametrize(
    ("kind", "head", "labels", "side"),
    [
        *((*each, side) for side in ("left", "right") for each in HEADS),
        *((kind, "SequenceClassification", CLASSES, "right") for kind in ENCODERS),
    ],
)
def test_loss_of_a_head(kind, head, labels, side):
    regression = labels is not None and labels.is_floating_point()
    plain, ours, shapes = pair(head, kind, num_labels=1 if regression else 2)
    inputs = padded(side, plain.config.pad_token_id)
    if labels is None:
        labels = (inputs["input_ids"] % 2).masked_fill(inputs["attention_mask"] == 0, -100)
    assert_same(plain, ours, inputs | {"labels": labels})
    assert shapes == [(1, sum(LENGTHS))]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["mistral", "modernbert"])
def test_questions(kind, side):
    """Their loss sees the logits of padding, which are others."""
    plain, ours, shapes = pair("QuestionAnswering", kind)
    inputs = padded(side, plain.config.pad_token_id)
    real, labels = inputs["attention_mask"] == 1, torch.tensor([0, 3, 0, 20])
    inputs |= {"start_positions": labels, "end_positions": labels}
    with torch.no_grad():
        logits = [model(**inputs).start_logits[real] for model in (plain, ours)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert shapes == [(1, sum(LENGTHS))]


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("kind", [*ENCODERS, "modernbert mean"])
def test_encoder_that_reads_the_first_token_of_left_padded_rows(kind, unpad):
    """It would read padding, the same in each row; the mean of a row's tokens is right."""
    kind, _, pooling = kind.partition(" ")
    changes = {"classifier_pooling": pooling} if pooling else {}
    model = model_with("SequenceClassification", kind, **changes).eval()
    labels = torch.tensor([0, 1, 1, 0])
    right, left = (padded(side, model.config.pad_token_id) for side in ("right", "left"))
    out = model(**right, labels=labels)
    fv.patch_model(model, "sdpa", unpad=unpad)
    for inputs in (left, right, left):
        if inputs is left and pooling != "mean":
            with pytest.raises(ValueError, match=r"must not hide the first token of a row"):
                model(**inputs, labels=labels)
            continue
        found = model(**inputs, labels=labels)
        torch.testing.assert_close(found.logits, out.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.loss, out.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_pooler_over_left_padded_rows(kind):
    model = model_with("SequenceClassification", kind).eval()
    base = type(new_model(kind).base_model)(model.config).eval()  # with a pooler
    right, left = (padded(side, model.config.pad_token_id) for side in ("right", "left"))
    with torch.no_grad():
        pooled = base(**right).pooler_output
        fv.patch_model(base, "sdpa")
        torch.testing.assert_close(base(**left).pooler_output, pooled, rtol=1e-4, atol=1e-5)
        left["attention_mask"][0] = 0
        rest = base(**left).pooler_output  # a row without a token keeps its index
        torch.testing.assert_close(rest[1:], pooled[1:], rtol=1e-4, atol=1e-5)
        fv.patch_model(base, "sdpa", unpad=True)
        left = padded("left", model.config.pad_token_id)
        with pytest.raises(ValueError, match="must not hide the first token of a row"):
            base(**left)


@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification", "QuestionAnswering"])
def test_mixed_precision_of_accelerate(head):
    """It wraps the head's forward, which must not look as if ours had been replaced."""
    plain = model_with(head, "qwen2")
    ours, inputs = unpadding(plain), padded("right")
    real = inputs["attention_mask"] == 1
    AcceleratorState._reset_state(reset_partial_state=True)  # of a Trainer of another test
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with torch.no_grad():
        outs = [accelerator.prepare(model)(**inputs, use_cache=False) for model in (plain, ours)]
    for expected, found in zip(*(out.to_tuple() for out in outs), strict=True):
        per_token = found.shape[:2] == real.shape
        off = (found - expected)[real] if per_token else found - expected
        assert off.norm() < 0.1 * expected.norm()  # bf16 keeps 8 bits; weights are large
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow  # apart: test_recompilations, and of packed rows models/test_encoders.py
def test_a_compiled_encoder():
    """A graph must not pool the layout's spare slots, too; no table has positions for 1,024."""
    torch._dynamo.reset()
    plain = model_with("SequenceClassification", "roberta", num_hidden_layers=1).eval()
    compiled = torch.compile(unpadding(plain), backend="eager")
    pad = plain.config.pad_token_id
    inputs = {name: x[:3] for name, x in padded("right", pad).items()}
    with torch.no_grad():
        logits = compiled(**inputs).logits
        torch.testing.assert_close(logits, plain(**inputs).logits, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(reentrant):
    plain, ours, shapes = pair("CausalLM", "qwen3")
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    inputs = padded("left")
    assert_same(plain, ours, inputs | {"labels": next_tokens(inputs)})
    assert shapes == [(1, sum(LENGTHS))]


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_that_padding_predicts(side):
    """Scripts may leave them in; a patched model never learns from them."""
    model = unpadding(model_with("CausalLM", "llama"))
    inputs = padded(side)
    with torch.no_grad():
        masked = model(**inputs, labels=next_tokens(inputs)).loss
        left_in = model(**inputs, labels=inputs["input_ids"]).loss
    torch.testing.assert_close(left_in, masked)


# ---- shapes, positions, masks ----


@pytest.mark.parametrize("form", ["right", "left", "counted", "embeds", "bool"])
def test_hidden_states_of_the_caller_s_shape(form):
    plain = new_model("qwen3").model
    ours = unpadding(plain)
    shapes, inputs = seen_tokens(ours), padded("right" if form == "right" else "left")
    mask = inputs["attention_mask"]
    real = mask == 1
    if form == "counted":  # as many RLHF scripts count, with 1 at padding
        inputs["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(~real, 1)
    elif form == "embeds":
        inputs["inputs_embeds"] = plain.embed_tokens(inputs.pop("input_ids")).detach()
    elif form == "bool":
        inputs["attention_mask"] = real
    with torch.no_grad():
        expected, out = (model(**inputs, output_hidden_states=True) for model in (plain, ours))
    assert len(out.hidden_states) == len(expected.hidden_states) == 3
    for found, wanted in zip(out.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(found[real], wanted[real], atol=1e-4, rtol=1e-4)
        assert (found[~real] == 0).all()
    assert torch.equal(out.last_hidden_state, out.hidden_states[-1])
    if form != "embeds":
        assert shapes[0] == (1, int(mask.sum()))


def unchanged():
    """Batches that `unpad` leaves as they are, by name."""
    one, packed, between = one_row(), padded_rows(left=False, packed=True), padded("right")
    between["attention_mask"][1, 40:50] = 0
    in_forms = ("packed_layout", "position_ids", "document_ids", "seq_idx")
    return {
        **{form: {"input_ids": one.ids, **forms.given(form, one)} for form in in_forms},
        # restarts of positions under a mask of ones and zeros
        "documents_and_padding": {
            "input_ids": packed.ids,
            **forms.given("padding_mask_and_position_ids", packed),
        },
        # it separates two documents: labels and windows count columns there
        "padding_between_tokens": between,
    }


@pytest.mark.parametrize("form", unchanged())
def test_a_packed_batch_stays_packed(form):
    model, inputs = new_model("mistral"), unchanged()[form]
    inputs["labels"] = inputs["input_ids"]
    with torch.no_grad():
        expected = fv.patch_model(model, "sdpa")(**inputs)
        out = fv.patch_model(model, "sdpa", unpad=True)(**inputs)
    assert torch.equal(out.logits, expected.logits)
    assert torch.equal(out.loss, expected.loss)


def test_a_head_that_keeps_the_batch():
    """Its base model would run other documents than the head masked its labels for."""

    class Forgets(transformers.LlamaForCausalLM):
        def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
            return super().forward(input_ids, attention_mask=attention_mask, labels=labels)

    config = config_of("llama")
    config._attn_implementation = "sdpa"
    model = fv.patch_model(Forgets(config).eval(), "sdpa", unpad=True)
    with pytest.raises(ValueError, match=r"must pass its \*\*kwargs on to its base model"):
        model(**padded("right"))


def test_classified_rows_whose_last_token_is_not_known():
    model = fv.patch_model(model_with("SequenceClassification", "qwen3"), "sdpa", unpad=True)
    inputs = padded("right")
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with pytest.raises(NotImplementedError, match="needs input_ids for a padded batch"):
        model(attention_mask=inputs["attention_mask"], inputs_embeds=embeds)
    inputs["attention_mask"][2] = 0
    with pytest.raises(ValueError, match="at least one token of each row"):
        model(**inputs)


def test_a_batch_without_padding_keeps_its_rows():
    model = fv.patch_model(new_model("llama"), "sdpa", unpad=True)
    shapes = seen_tokens(model)
    ids = torch.randint(3, VOCABULARY, (2, 8))
    model(ids, attention_mask=torch.ones_like(ids))
    model(ids)
    assert model(ids).past_key_values is None  # nor with padding: decode with use_cache=True
    assert shapes == [(2, 8)] * 3


def test_rows_of_padding_alone():
    model = fv.patch_model(new_model("llama"), "sdpa", unpad=True)
    ids = torch.full((2, 8), 3)
    for mask in (torch.tensor([[1], [0]]).expand(2, 8), torch.zeros(2, 8).long()):
        hidden = model.model(ids, attention_mask=mask).last_hidden_state
        assert hidden.isfinite().all()
        assert (hidden[mask == 0] == 0).all()


# ---- caches, compilation, refusals ----


def test_a_cache_that_the_caller_asks_for():
    plain, inputs = new_model("llama"), padded("left")
    with torch.no_grad():
        expected = plain(**inputs, use_cache=True)
        ours = fv.patch_model(plain, "sdpa", unpad=True)
        asked = ours(**inputs, use_cache=True)
        given = ours(**inputs, past_key_values=DynamicCache(config=ours.config))
    for out in (asked, given):
        assert out.past_key_values.get_seq_length() == ROW
        torch.testing.assert_close(out.logits[:, -1], expected.logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("backend", "device"),
    [("sdpa", "cpu"), *(gpu_param(backend, "cuda") for backend in ("auto", "flex", "varlen"))],
)
def test_recompilations(backend, device):
    """Batches whose tokens round to one number share a graph, whatever their documents are."""
    on_gpu = device == "cuda"
    sizes = {"head_dim": 64} if on_gpu else {"num_hidden_layers": 1}
    plain = model_with("CausalLM", "qwen3", **sizes)
    plain.to(device, torch.bfloat16 if on_gpu else torch.float32)
    shape = {"unpad_to_multiple_of": 128, "capacity": 4, "max_seqlen_bound": 128}
    ours = fv.patch_model(copy.deepcopy(plain), backend, unpad=True, **shape)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(ours, backend="inductor" if on_gpu else "eager")
    close, graphs = 2e-2 if on_gpu else 1e-5, []
    for changed in (0, 7, 19):
        inputs = padded("right")
        inputs["attention_mask"][1, 70 - changed :] = 0
        inputs["labels"] = next_tokens(inputs)
        inputs = {name: x.to(device) for name, x in inputs.items()}
        loss = compiled(**inputs).loss
        loss.backward()
        expected = (ours if on_gpu else plain)(**inputs).loss
        torch.testing.assert_close(loss, expected, rtol=close, atol=close)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[2]
    if not on_gpu:
        assert graphs[0] == graphs[1]
        (only_break,) = counters["graph_break"]
        assert "find_padding" in only_break


@pytest.mark.parametrize(
    "arguments",
    [
        {"unpad_to_multiple_of": 8},
        {"unpad": True, "unpad_to_multiple_of": 0},
        {"unpad": True, "unpad_to_multiple_of": 1.5},
    ],
)
def test_a_multiple_that_is_none(arguments):
    model = new_model("llama")
    with pytest.raises(ValueError, match="unpad_to_multiple_of must be a positive number"):
        fv.patch_model(model, **arguments)
    assert not fv.is_patched(model)


def test_auto_chooses_for_training_without_gradients_too(monkeypatch):
    """So that a trainer's reference model rounds as its policy does."""
    asked, choose = [], packed_forward.choose

    def noting(name, call, mask, *, training):
        asked.append(training)
        return choose(name, call, mask, training=training)

    monkeypatch.setattr(packed_forward, "choose", noting)
    model = unpadding(model_with("CausalLM", "llama")).eval()
    with torch.no_grad():
        model(**padded("right"))
    assert asked
    assert all(asked)


# ---- on a GPU's kernels ----


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("backend", ["auto", *(gpu_param(x) for x in ON_GPU if x != "cudnn")])
@pytest.mark.parametrize(
    ("kind", "head"), [("qwen3", "CausalLM"), ("llama", "SequenceClassification")]
)
def test_bf16_is_as_accurate_as_the_padded_run(kind, head, backend, side):
    inputs = padded(side)
    labels = torch.tensor([0, 1, 1, 0]) if head != "CausalLM" else next_tokens(inputs)
    assert_as_accurate_as_padded(kind, head, backend, inputs | {"labels": labels})
