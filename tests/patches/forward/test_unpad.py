"""`patch_model(unpad=True)`: a padded batch in and out, one packed row inside."""

from __future__ import annotations

import copy
from itertools import cycle

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import DynamicCache, Trainer, TrainingArguments

import flexvarlen as fv
from flexvarlen.patches.attention import packed_forward
from flexvarlen.patches.models.families import FAMILIES
from tests import forms
from tests.backends import ON_GPU, gpu_param
from tests.oracle import assert_as_accurate
from tests.sentences import refused
from tests.tiny_models import (
    VOCABULARY,
    balances_experts,
    config_of,
    documents,
    new_model,
    one_row,
)

LENGTHS = (5, 70, 1, 30)
ROW = 75
TEXT = [each.model_type for each in FAMILIES if each.task in ("CausalLM", "MaskedLM")]
TEXT.remove("phi3")  # transformers gives all rows the longrope frequencies of the longest
SCANS = [each.model_type for each in FAMILIES if "start anew" in each.needs]
BALANCED = [kind for kind in TEXT if balances_experts(kind)]
ENCODERS = [each.model_type for each in FAMILIES if each.task == "MaskedLM"]


def unpadding(model):
    """A patched copy; some families have softcaps or sinks, which sdpa has not."""
    return fv.patch_model(copy.deepcopy(model), "auto", unpad=True)


def padded(side, pad=0):
    """Ids and mask `[4, 75]`; no token is the padding's."""
    ids = torch.full((len(LENGTHS), ROW), pad)
    mask = torch.zeros_like(ids)
    for row, (length, document) in enumerate(zip(LENGTHS, (0, 1, 3, 4), strict=True)):
        at = slice(0, length) if side == "right" else slice(ROW - length, ROW)
        ids[row, at] = documents()[document]
        mask[row, at] = 1
    return {"input_ids": ids, "attention_mask": mask}


def next_tokens(inputs):
    """Labels that no padding predicts: transformers' padded run would learn from that, too."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return ids.masked_fill((mask == 0) | (mask.cumsum(-1) == 1), -100)


def model_with(head, kind, **changes):
    """In train mode; where experts are to be balanced, the loss says so."""
    torch.manual_seed(0)
    config = config_of(kind, **changes)
    config._experts_implementation = "eager"
    model = getattr(transformers, f"AutoModelFor{head}").from_config(
        config, attn_implementation="eager"
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if kind in BALANCED:
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    return model.train()


def losses_and_gradients(model, inputs):
    out = model(**inputs)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out, gradients


def assert_same(plain, ours, inputs, atol=1e-6):
    """Loss and every gradient, within 1e-5 of the gradient's norm.

    Scans go by chunks of 64 tokens, which begin elsewhere in a padded row: three times as much.
    """
    close = 3e-5 if plain.config.model_type in SCANS else 1e-5
    (expected, gradients), (out, found) = (
        losses_and_gradients(model, inputs) for model in (plain, ours)
    )
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=atol)
    if expected.get("aux_loss") is not None:
        torch.testing.assert_close(out.aux_loss, expected.aux_loss, rtol=1e-5, atol=0)
        for found_of_layer, of_layer in zip(out.router_logits, expected.router_logits, strict=True):
            assert found_of_layer.shape == of_layer.shape
    assert found.keys() == gradients.keys()
    whole = torch.cat([g.flatten() for g in gradients.values()]).norm()
    for name, gradient in gradients.items():
        off = (found[name] - gradient).norm()
        assert off <= close * gradient.norm() + 1e-6 * whole, f"{name} is off by {off}"
    return out, expected


def seen_tokens(model):
    """The shapes of what the first layer gets, one a forward."""
    shapes = []
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[:2])))
    return shapes


# ---- the same loss and gradients ----


@pytest.mark.parametrize(("kind", "side"), [*zip(TEXT, cycle(["left", "right"]), strict=False)])
def test_loss_of_a_language_model(kind, side):
    head = "MaskedLM" if kind in ENCODERS else "CausalLM"
    plain = model_with(head, kind)
    if kind == "gemma4_text":  # its scores are not scaled: too large for fp32 and this tolerance
        plain.double().set_attn_implementation("sdpa")
    ours = unpadding(plain)
    shapes = seen_tokens(ours)
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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("kind", "head", "labels"),
    [
        ("llama", "SequenceClassification", torch.tensor([0, 1, 1, 0])),
        ("gemma3_text", "SequenceClassification", torch.tensor([0, 1, 1, 0])),
        ("qwen3", "SequenceClassification", torch.tensor([[0.3], [-1.0], [2.0], [0.0]])),
        ("qwen2", "TokenClassification", None),
        ("mistral", "QuestionAnswering", torch.tensor([70, 74, 74, 60])),
        ("bert", "TokenClassification", None),
        ("modernbert", "QuestionAnswering", torch.tensor([0, 3, 0, 20])),
    ],
)
def test_loss_of_a_head(kind, head, labels, side):
    regression = labels is not None and labels.is_floating_point()
    plain = model_with(head, kind, num_labels=1 if regression else 2)
    ours = unpadding(plain)
    shapes = seen_tokens(ours)
    inputs = padded(side, plain.config.pad_token_id)
    if head == "QuestionAnswering":
        labels = {"start_positions": labels, "end_positions": labels}
    elif labels is None:
        own = (inputs["input_ids"] % 2).masked_fill(inputs["attention_mask"] == 0, -100)
        labels = {"labels": own}
    else:
        labels = {"labels": labels}
    if head == "QuestionAnswering":  # its loss sees the logits of padding
        real = inputs["attention_mask"] == 1
        with torch.no_grad():
            logits = [model(**inputs, **labels).start_logits[real] for model in (plain, ours)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
        assert shapes == [(1, sum(LENGTHS))]
        return
    assert_same(plain, ours, inputs | labels)
    assert shapes == [(1, sum(LENGTHS))]


@pytest.mark.parametrize("kind", ENCODERS)
def test_loss_of_an_encoder_that_pools(kind):
    plain = model_with("SequenceClassification", kind)
    ours = unpadding(plain)
    shapes = seen_tokens(ours)
    inputs = padded("right", plain.config.pad_token_id)
    assert_same(plain, ours, inputs | {"labels": torch.tensor([0, 1, 1, 0])})
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


def test_multiple_choice():
    plain = model_with("MultipleChoice", "bert")
    ours = unpadding(plain)
    shapes = seen_tokens(ours)
    inputs = {name: x.view(2, 2, ROW) for name, x in padded("right").items()}
    assert_same(plain, ours, inputs | {"labels": torch.tensor([0, 1])})
    assert shapes == [(1, sum(LENGTHS))]


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(reentrant):
    plain = model_with("CausalLM", "qwen3")
    ours = unpadding(plain)
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    shapes, inputs = seen_tokens(ours), padded("left")
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


def hidden_states(model, **inputs):
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_hidden_states_of_the_caller_s_shape(side):
    plain = new_model("llama").model
    ours = unpadding(plain)
    inputs = padded(side)
    real = inputs["attention_mask"] == 1
    expected, out = hidden_states(plain, **inputs), hidden_states(ours, **inputs)
    assert len(out.hidden_states) == len(expected.hidden_states) == 3
    for found, wanted in zip(out.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(found[real], wanted[real], atol=1e-4, rtol=1e-4)
        assert (found[~real] == 0).all()
    assert torch.equal(out.last_hidden_state, out.hidden_states[-1])


@pytest.mark.parametrize("form", ["counted", "embeds", "bool"])
def test_other_forms_of_a_padded_batch(form):
    plain = new_model("qwen3").model
    ours = unpadding(plain)
    shapes, inputs = seen_tokens(ours), padded("left")
    mask = inputs["attention_mask"]
    if form == "counted":  # as many RLHF scripts count, with 1 at padding
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        inputs["position_ids"] = positions
    elif form == "embeds":
        inputs["inputs_embeds"] = plain.embed_tokens(inputs.pop("input_ids")).detach()
    else:
        inputs["attention_mask"] = mask.bool()
    real = inputs["attention_mask"] == 1
    expected, out = hidden_states(plain, **inputs), hidden_states(ours, **inputs)
    torch.testing.assert_close(
        out.last_hidden_state[real], expected.last_hidden_state[real], atol=1e-4, rtol=1e-4
    )
    if form != "embeds":
        assert shapes[0] == (1, int(mask.sum()))


def test_padding_between_real_tokens():
    """It separates two documents, as without unpad: labels and windows count columns there."""
    model, inputs = new_model("mistral"), padded("right")
    inputs["attention_mask"][1, 40:50] = 0
    with torch.no_grad():
        expected = fv.patch_model(model, "sdpa")(**inputs).logits
        logits = fv.patch_model(model, "sdpa", unpad=True)(**inputs).logits
    assert torch.equal(logits, expected)


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


def test_embeddings_whose_padding_a_head_looks_for():
    model = fv.patch_model(model_with("SequenceClassification", "qwen3"), "sdpa", unpad=True)
    inputs = padded("right")
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    with pytest.raises(NotImplementedError, match="needs input_ids for a padded batch"):
        model(**inputs, inputs_embeds=embeds)


def test_a_row_of_padding_that_is_classified():
    model = fv.patch_model(model_with("SequenceClassification", "qwen3"), "sdpa", unpad=True)
    inputs = padded("right")
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


@pytest.mark.parametrize("form", ["packed_layout", "position_ids", "document_ids", "seq_idx"])
def test_a_packed_batch_stays_packed(form):
    batch, model = one_row(), new_model("llama")
    inputs = forms.given(form, batch) | {"labels": batch.ids}
    with torch.no_grad():
        expected = fv.patch_model(model, "sdpa")(batch.ids, **inputs)
        out = fv.patch_model(model, "sdpa", unpad=True)(batch.ids, **inputs)
    assert torch.equal(out.logits, expected.logits)
    assert torch.equal(out.loss, expected.loss)


def test_documents_beside_padding_are_not_one():
    """Restarts of positions under a mask of ones and zeros: a packed row with padding."""
    model = fv.patch_model(new_model("llama"), "sdpa", unpad=True)
    ids = torch.randint(3, VOCABULARY, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0]])
    mask = torch.tensor([[1] * 9 + [0] * 3])
    with torch.no_grad():
        out = model(ids, position_ids=positions, attention_mask=mask).logits
        alone = model(ids[:, 5:9]).logits
    torch.testing.assert_close(out[:, 5:9], alone, atol=1e-4, rtol=1e-4)


# ---- caches, compilation, refusals ----


def test_generation():
    plain = new_model("llama")
    inputs = padded("left")
    expected = plain.generate(**inputs, max_new_tokens=5, do_sample=False)
    ours = fv.patch_model(plain, "sdpa", unpad=True)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=5, do_sample=False), expected)


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


def test_recompilations():
    """Batches whose tokens round to one number share a graph, whatever their documents are."""
    plain = model_with("CausalLM", "llama", num_hidden_layers=1)
    ours = copy.deepcopy(plain)
    fv.patch_model(
        ours, "sdpa", unpad=True, unpad_to_multiple_of=64, capacity=4, max_seqlen_bound=80
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(ours, backend="eager")
    graphs = []
    for changed in (0, 7, 19, 25):
        inputs = padded("right")
        inputs["attention_mask"][1, 70 - changed :] = 0
        labels = next_tokens(inputs)
        out, expected = compiled(**inputs, labels=labels), plain(**inputs, labels=labels)
        torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-6)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == graphs[:1] * 4
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert len(breaks) == 1
    assert "find_padding" in next(iter(breaks))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"unpad_to_multiple_of": 8}, "unpad_to_multiple_of must be a positive number"),
        ({"unpad": True, "unpad_to_multiple_of": 0}, "unpad_to_multiple_of must be a positive"),
        ({"unpad": True, "unpad_to_multiple_of": 1.5}, "unpad_to_multiple_of must be a positive"),
    ],
)
def test_a_multiple_that_is_none(arguments, words):
    model = new_model("llama")
    with pytest.raises(ValueError, match=words):
        fv.patch_model(model, **arguments)
    assert not fv.is_patched(model)


def test_images(tmp_path):
    """In words of both interfaces, as a caller of patch_trainer has passed no unpad."""
    model = new_model("qwen2_vl")
    trainer = Trainer(model, TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
    for call in (lambda: fv.patch_model(model, unpad=True), lambda: fv.patch_trainer(trainer)):
        words = "which patch_trainer sets, .* a vision-language model, .*got Qwen2VL"
        refused(NotImplementedError, words, r"PackedCollator, .* fv\.patch_model\(model\)", call)


def test_auto_chooses_for_training_without_gradients_too(monkeypatch):
    """So that a trainer's reference model rounds as its policy does."""
    asked, choose = [], packed_forward.choose

    def noting(name, call, mask):
        asked.append(call.needs_grad)
        return choose(name, call, mask)

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


def assert_as_accurate_as_padded(kind, head, backend, inputs, **options):
    """Logits and every gradient against the padded run in fp64, beside the padded one in bf16.

    Returns what `seen_tokens` does.
    """
    baseline = model_with(head, kind, head_dim=64).to("cuda", torch.bfloat16)
    baseline.set_attn_implementation("sdpa")  # eager gives NaN for rows that begin with padding
    exact = copy.deepcopy(baseline).double()
    inputs = {name: x.cuda() for name, x in inputs.items()}
    ours = fv.patch_model(copy.deepcopy(baseline), backend, unpad=True, **options)
    shapes = seen_tokens(ours)
    out, gradients = losses_and_gradients(ours, inputs)
    (wanted, exact_gradients), (low, low_gradients) = (
        losses_and_gradients(model, inputs) for model in (exact, baseline)
    )
    real = inputs["attention_mask"] == 1
    own = [x.logits if head != "CausalLM" else x.logits[real] for x in (out, wanted, low)]
    assert_as_accurate(*own, 2)
    assert gradients.keys() == exact_gradients.keys()
    for name, gradient in gradients.items():
        assert_as_accurate(gradient, exact_gradients[name], low_gradients[name], 3, name)
    return shapes


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", gpu_param("flex"), gpu_param("varlen")])
def test_compiled_on_a_gpu(backend):
    """Batches of other documents share a graph; the loss is the eager one's."""
    plain = model_with("CausalLM", "qwen3", head_dim=64).to("cuda", torch.bfloat16)
    ours = fv.patch_model(
        plain, backend, unpad=True, unpad_to_multiple_of=128, capacity=4, max_seqlen_bound=128
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, graphs = torch.compile(ours), []
    for changed in (0, 7, 19):
        inputs = padded("left")
        inputs["attention_mask"][1, : 5 + changed] = 0
        inputs["labels"] = next_tokens(inputs)
        inputs = {name: x.cuda() for name, x in inputs.items()}
        loss = compiled(**inputs).loss
        loss.backward()
        torch.testing.assert_close(loss, ours(**inputs).loss, rtol=2e-2, atol=2e-2)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[2]
