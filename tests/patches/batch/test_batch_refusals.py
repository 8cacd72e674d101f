"""What cannot be honoured raises a sentence, before any kernel runs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import compile_regions
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    AutoModelForCausalLM,
    BitNetConfig,
    DynamicCache,
    HeliumConfig,
    LlamaForCausalLM,
    LlamaModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

import flexvarlen as fv
from flexvarlen.attention.backends.registry import get_backend
from tests import forms
from tests.tiny_models import config_of, new_model, one_row, shared_model, two_rows

ROW, ROWS = one_row(), two_rows()
SIZES = config_of("llama").to_dict()
OTHER_TYPES = {"bitnet": BitNetConfig, "helium": HeliumConfig}


def other_model(model_type, implementation="eager"):
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    heads = ("num_attention_heads", "num_key_value_heads", "pad_token_id")
    config = OTHER_TYPES[model_type](**{name: SIZES[name] for name in (*names, *heads)})
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


@pytest.fixture(autouse=True)
def no_kernel_runs(monkeypatch):
    """A refusal comes first."""

    def attend(*args):
        raise AssertionError("a kernel ran before the refusal")

    for name in ("sdpa", "reference", "flex", "fa2", "varlen"):
        monkeypatch.setattr(get_backend(name), "attend", attend)


def refused(error, words, model, **inputs):
    """The model raises a sentence of more than a few words that has these in it."""
    with pytest.raises(error, match=words) as caught:
        model(**inputs)
    assert len(str(caught.value).split()) > 6


@pytest.fixture
def model():
    """A patched model."""
    model = shared_model("llama")
    with fv.patched(model, "sdpa"):
        yield model


def _filled_cache() -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.ones(1, 2, 4, 16), torch.ones(1, 2, 4, 16), layer)
    return cache


def _cu(*boundaries: int, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(boundaries, dtype=dtype)


PACKED_FORMS = {
    name: forms.given(name, ROW) for name in ("position_ids", "cu_seq_lens", "packed_layout")
}


@pytest.mark.parametrize("form", PACKED_FORMS)
@pytest.mark.parametrize("what", ["filled_cache", "4d_mask"])
def test_packed_with_other_keys_or_a_4d_mask(model, form, what):
    extra = {
        "filled_cache": lambda: {"past_key_values": _filled_cache()},
        "4d_mask": lambda: {"attention_mask": torch.ones(1, 1, 256, 256, dtype=torch.bool)},
    }[what]()
    refused(ValueError, "packed batch", model, input_ids=ROW.ids, **PACKED_FORMS[form], **extra)


BAD_INPUTS = {
    "crosses_rows": ({"cu_seq_lens_q": _cu(0, 100, 200, 256)}, ROWS, "boundary of two rows"),
    "layout_crosses_rows": (
        {"packed_layout": fv.PackedLayout.from_lengths([100, 156])},
        ROWS,
        "boundary of two rows",
    ),
    "cu_seq_lens_k_differs": (
        {"cu_seq_lens_q": _cu(0, 100, 256), "cu_seq_lens_k": _cu(0, 99, 256)},
        ROW,
        "cu_seq_lens_k must equal",
    ),
    "cu_seq_lens_k_longer": (
        {"cu_seq_lens_q": _cu(0, 100, 256), "cu_seq_lens_k": _cu(0, 99, 100, 256)},
        ROW,
        "cu_seq_lens_k must equal",
    ),
    "max_length_q": (
        {"cu_seq_lens_q": _cu(0, 100, 256), "max_length_q": 155},
        ROW,
        "156",
    ),
    "max_length_k": (
        {"cu_seq_lens_q": _cu(0, 100, 256), "max_length_q": 156, "max_length_k": 100},
        ROW,
        "156",
    ),
    "int64": ({"cu_seq_lens_q": _cu(0, 100, 256, dtype=torch.int64)}, ROW, "cu_seq_lens_q .*int32"),
    "float": (
        {"cu_seq_lens_q": _cu(0, 100, 256, dtype=torch.float32)},
        ROW,
        "cu_seq_lens_q .*int32",
    ),
    "not_from_0": ({"cu_seq_lens_q": _cu(1, 100, 256)}, ROW, "cu_seq_lens_q must start at 0"),
    "decreasing": (
        {"cu_seq_lens_q": _cu(0, 100, 99, 256)},
        ROW,
        "cu_seq_lens_q must never decrease",
    ),
    "past_the_end": ({"cu_seq_lens_q": _cu(0, 100, 257)}, ROW, "cu_seq_lens_q .*total_tokens=256"),
    "layout_too_short": (
        {"packed_layout": fv.PackedLayout.from_lengths([100, 155])},
        ROW,
        "256 tokens",
    ),
    "mask_of_another_shape": ({"attention_mask": torch.ones(1, 255).long()}, ROW, "shape"),
    "list": ({"cu_seq_lens_q": [0, 100, 256]}, ROW, "cu_seq_lens_q must be .* got list; pass"),
    "list_of_keys": (
        {"cu_seq_lens_q": _cu(0, 100, 256), "cu_seq_lens_k": [0, 100, 256]},
        ROW,
        "cu_seq_lens_k must be .* got list; pass",
    ),
    "two_axes": ({"cu_seq_lens_q": _cu(0, 100, 256)[None]}, ROW, r"cu_seq_lens_q .* \(1, 3\); "),
    "layout_that_is_a_list": ({"packed_layout": [100, 156]}, ROW, "packed_layout .* got list; "),
    "positions_that_are_a_list": (
        {"position_ids": [[0, 1, 2]]},
        ROW,
        "position_ids must be .* got list; ",
    ),
    "too_few_positions": (
        {"position_ids": ROW.position_ids[:, :-1]},
        ROW,
        r"position_ids must have shape \(1, 256\), .* got \(1, 255\); ",
    ),
    "too_few_positions_beside_a_layout": (
        {
            "position_ids": ROW.position_ids[:, :-1],
            "packed_layout": fv.PackedLayout.from_lengths([100, 156]),
        },
        ROW,
        r"position_ids must have shape \(1, 256\), .* got \(1, 255\); ",
    ),
    "positions_of_more_rows": (
        {"position_ids": ROW.position_ids.expand(3, -1)},
        ROW,
        r"position_ids must have shape \(1, 256\), .* got \(3, 256\); ",
    ),
    "seq_idx_that_is_a_list": ({"seq_idx": [[0, 1]]}, ROW, "seq_idx must be .* got list; "),
    "positions_of_three_axes": ({"position_ids": torch.zeros(3, 1, 256).long()}, ROW, "shape"),
    "output_attentions": (
        {"position_ids": ROW.position_ids, "output_attentions": True},
        ROW,
        "output_attentions",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input(model, case):
    inputs, batch, words = BAD_INPUTS[case]
    error = NotImplementedError if case == "output_attentions" else ValueError
    refused(error, words, model, input_ids=batch.ids, **inputs)


LONGER = fv.PackedLayout.from_lengths([100, 157])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"input_ids": ROW.ids.tolist()}, "input_ids must be a tensor, got list; "),
        ({"input_ids": None, "inputs_embeds": [[0.5]]}, "inputs_embeds must be a tensor"),
        ({"input_ids": ROW.ids[0]}, "input_ids must have shape \\[B, S\\]"),
        ({"labels": [[1, 2]]}, "labels must be a tensor, got list"),
        ({"labels": torch.ones(2).long()}, "labels must have one label for each of 256 tokens"),
        ({"cu_seq_lens_q": _cu(0, 100, 256), "max_length_q": "156"}, "longest document, 156"),
        ({"packed_layout": LONGER}, "got 257 on cpu; make it of the documents of this batch"),
    ],
)
def test_malformed_inputs(model, inputs, words):
    for _ in range(2):
        refused(ValueError, words, model, **{"input_ids": ROW.ids, **inputs})


IGNORING = {
    "packed": {**PACKED_FORMS["packed_layout"], "labels": ROW.ids},
    "padded": {"attention_mask": torch.ones_like(ROW.ids).index_fill(1, torch.arange(9), 0)},
    "decoding": {"past_key_values": _filled_cache()},
    "trees": fv.share_prefixes([[5, 6, 7], [5, 6, 8]]).batch(),
}


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("given", [-1, 0, "-100", torch.tensor(-1)])
@pytest.mark.parametrize("form", IGNORING)
def test_another_label_that_the_loss_ignores(form, given, unpad):
    """A patched model sets labels to -100, in which torch would find no class."""
    inputs = {"input_ids": ROW.ids, **IGNORING[form], "ignore_index": given}
    words = "ignore_index must be -100, .* got .*; set the labels"
    with fv.patched(shared_model("llama"), "sdpa", unpad=unpad) as model:
        refused(ValueError, words, model, **inputs)


def test_more_documents_or_longer_ones_than_asked_for():
    model = shared_model("llama")
    for sizes, words in (({"capacity": 4}, "capacity"), ({"max_seqlen_bound": 64}, "bound")):
        with fv.patched(model, "sdpa", **sizes):
            refused(ValueError, words, model, input_ids=ROW.ids, position_ids=ROW.position_ids)


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("cached", [0, 2])
def test_restarts_behind_the_end_of_a_mask(patched, cached):
    """transformers fills the mask up with zeros; what lies there is no padding for that."""
    if patched:
        model = fv.patch_model(new_model("llama"), "sdpa")
    else:
        model = new_model("llama", implementation="flexvarlen_doc")
    tokens = ROW.ids.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=2 * tokens)
    for layer in range(2 if cached else 0):  # a mask of the new tokens alone, beside cached ones
        cache.update(*(torch.zeros(1, 2, cached, 16) for _ in "kv"), layer)
    refused(
        ValueError,
        "position_ids that do not increase by 1" if patched else "a column for each of the",
        model,
        input_ids=ROW.ids,
        position_ids=ROW.position_ids + cached,
        attention_mask=torch.ones(1, tokens if cached else 5, dtype=torch.int64),
        past_key_values=cache,
    )


def test_attention_dropout_in_training():
    model = fv.patch_model(new_model("llama", attention_dropout=0.1), "sdpa").train()
    inputs = {"input_ids": ROW.ids, "position_ids": ROW.position_ids}
    refused(NotImplementedError, "attention dropout must be 0", model, **inputs)
    with pytest.raises(AssertionError, match="a kernel ran"):  # in eval nothing drops
        model.eval()(**inputs)


@pytest.mark.parametrize("model_type", OTHER_TYPES)
def test_an_unverified_model_type(model_type):
    words = f"of a verified family, got '{model_type}', in which"
    with pytest.raises(NotImplementedError, match=words):
        fv.patch_model(other_model(model_type), "sdpa")
    model = other_model(model_type, "flexvarlen_doc")
    refused(NotImplementedError, words, model, input_ids=ROW.ids, position_ids=ROW.position_ids)


def test_an_encoder_with_a_decoder():
    """The advice must not be verify=True, which refuses it too."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=99, **sizes))
    for verify in (False, True):
        with pytest.raises(NotImplementedError, match=r"one stack of layers, got T5For.* its own"):
            fv.patch_model(model, "sdpa", verify=verify)


def test_sizes_of_a_patch_are_integers():
    for sizes in ({"capacity": "8"}, {"max_seqlen_bound": 2.5}):
        with pytest.raises(ValueError, match="must be an integer"):
            fv.patch_model(shared_model("llama"), "sdpa", **sizes)
    assert not fv.is_patched(shared_model("llama"))


def test_no_transformers_model():
    with pytest.raises(ValueError, match=r"PreTrainedModel.*got Linear"):
        fv.patch_model(nn.Linear(2, 2))


class Distilled(nn.Module):
    """A teacher and its student, of one kind or of two."""

    def __init__(self, teacher, student):
        super().__init__()
        self.teacher, self.student = teacher, student


@pytest.mark.parametrize("how", [fv.patch_model, fv.unpatch_model])
@pytest.mark.parametrize("student", ["llama", "qwen3"])
def test_a_second_model(student, how):
    """The first alone would be patched, and the other leak."""
    pair = Distilled(new_model("llama"), nn.ModuleDict({"inner": new_model(student)}))
    with pytest.raises(
        ValueError, match=r"'teacher' .*'student\.inner', .* patch each one separately"
    ):
        how(pair)
    assert pair.teacher.config._attn_implementation == "sdpa"
    for model in (pair.teacher, pair.student):
        fv.unpatch_model(fv.patch_model(model, "sdpa"))


def test_one_model_in_two_places():
    model = new_model("llama")
    assert fv.patch_model(Distilled(model, model.model), "sdpa").teacher is model
    assert fv.patch_model(Distilled(model.model, model), "sdpa").student is model
    assert "forward" in vars(model.model)


class Named(LlamaForCausalLM):
    """A user's."""


class WithoutKeywords(LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, labels=None):
        return super().forward(input_ids=input_ids, position_ids=position_ids, labels=labels)


class BaseWithoutKeywords(LlamaModel):
    def forward(self, input_ids=None, position_ids=None):
        return super().forward(input_ids=input_ids, position_ids=position_ids)


class KeywordsForLossAlone(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        out = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids)
        logits = self.lm_head(out.last_hidden_state)
        loss = ForCausalLMLoss(logits, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(loss, logits)


def of_class(model_class, **changes):
    config = config_of("llama", **changes)
    config._attn_implementation = "sdpa"
    return model_class(config).eval()


def test_a_subclass_by_any_name(monkeypatch):
    """Its head is that of the class that it extends."""
    monkeypatch.undo()  # here kernels run
    plain, model = new_model("llama"), of_class(Named)
    model.load_state_dict(plain.state_dict())
    inputs = {"input_ids": ROW.ids, "position_ids": ROW.position_ids, "labels": ROW.ids}
    with torch.no_grad():
        outs = [fv.patch_model(each, "sdpa")(**inputs) for each in (plain, model)]
    assert torch.equal(outs[0].logits, outs[1].logits)
    assert torch.equal(outs[0].loss, outs[1].loss)


@pytest.mark.parametrize("model_class", [WithoutKeywords, BaseWithoutKeywords])
def test_a_subclass_without_keywords(model_class):
    """The documents could not come to the layers."""
    model = of_class(model_class)
    words = rf"{model_class.__name__}\.forward must take \*\*kwargs .* input_ids, position_ids"
    with pytest.raises(ValueError, match=words):
        fv.patch_model(model, "sdpa")
    assert "forward" not in vars(model)
    assert model.config._attn_implementation == "sdpa"


class DropsDocuments(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        hidden = self.hidden(input_ids, kwargs)
        logits = self.lm_head(hidden)
        given = {name: kwargs[name] for name in ("labels", "num_items_in_batch") if name in kwargs}
        loss = ForCausalLMLoss(logits, vocab_size=logits.shape[-1], **given) if given else None
        return CausalLMOutputWithPast(loss, logits)

    def hidden(self, input_ids, kwargs):
        return self.model(input_ids, use_cache=False).last_hidden_state


class DropsThemOnce(DropsDocuments):
    def hidden(self, input_ids, kwargs):
        given = {name: each for name, each in kwargs.items() if name != "labels"}
        return self.model(input_ids, **given).last_hidden_state + super().hidden(input_ids, kwargs)


class GivesThemToOneLayer(DropsDocuments):
    def hidden(self, input_ids, kwargs):
        hidden = super().hidden(input_ids, kwargs)
        tables = self.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        given = {name: each for name, each in kwargs.items() if name != "labels"}
        return self.model.layers[0](hidden, position_embeddings=tables, **given)


BOUNDARIES = {
    "packed_layout": fv.PackedLayout.from_cu_seqlens(ROW.cu_seqlens, total_tokens=256),
    "position_ids": ROW.position_ids,
    "attention_mask": ROW.document_ids,
}


class WithSecondModel(LlamaForCausalLM):
    """Whose rows are its own."""

    def forward(self, input_ids=None, **kwargs):
        shorter = self.model(input_ids[:, :100], use_cache=False).last_hidden_state
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden) + shorter.sum())


class ExplicitSecondBatch(LlamaForCausalLM):
    """Whose rows are as long."""

    def forward(self, input_ids=None, **kwargs):
        one = fv.PackedLayout.from_lengths([input_ids.shape[1]])
        whole = self.model(input_ids, packed_layout=one).last_hidden_state
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden) + whole.sum())


def test_a_head_that_tells_its_base_model_of_other_documents(monkeypatch):
    monkeypatch.undo()  # here kernels run
    model = fv.patch_model(of_class(ExplicitSecondBatch), "sdpa")
    with torch.no_grad():
        out = model(input_ids=ROW.ids, packed_layout=BOUNDARIES["packed_layout"])
    assert out.logits.isfinite().all()


class RunsLayers(DropsDocuments):
    def hidden(self, input_ids, kwargs):
        hidden = self.model.embed_tokens(input_ids)
        tables = self.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for layer in self.model.layers:
            hidden = layer(hidden, position_embeddings=tables)
        return self.model.norm(hidden)


class MakesAMask(DropsDocuments):
    def hidden(self, input_ids, kwargs):
        tokens = input_ids.shape[1]
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
        return self.model(input_ids, attention_mask=mask, use_cache=False).last_hidden_state


def _compiled_whole(model):
    return torch.compile(model, backend="eager", fullgraph=True)


def _base_compiled(model):
    model.model.compile(backend="eager")
    return model


def _base_checkpointed(model):
    model.model = checkpoint_wrapper(model.model)
    return model


def _base_hooked(model):
    add_hook_to_module(model.model, ModelHook())
    return model


# accelerate's regions are a second module of the same layers.
WRAPPERS = (
    *(_compiled_whole, _base_compiled, _base_checkpointed, _base_hooked),
    partial(compile_regions, backend="eager"),
)
LOSING = (
    *((head, None) for head in (DropsDocuments, DropsThemOnce, GivesThemToOneLayer)),
    *((head, None) for head in (KeywordsForLossAlone, WithSecondModel, RunsLayers, MakesAMask)),
    *((DropsDocuments, wrap) for wrap in WRAPPERS),
    *((head, _compiled_whole) for head in (RunsLayers, MakesAMask)),
)


@pytest.mark.parametrize(("head", "wrap"), LOSING)
def test_a_head_that_does_not_give_its_base_model_the_documents(monkeypatch, head, wrap):
    """Also one whose base model would find the same ones by itself; a graph cannot ask."""
    monkeypatch.undo()  # here kernels run
    torch._dynamo.reset()
    model = fv.patch_model(of_class(head, num_hidden_layers=1), "sdpa")
    call = model if wrap is None else wrap(model)
    given = BOUNDARIES if wrap is None and head is DropsDocuments else ("packed_layout",)
    words = r"must pass its \*\*kwargs|must get its documents"
    # What a call that failed leaves behind changes nothing.
    for name in given if wrap else (*given, *given):
        with torch.no_grad(), pytest.raises((ValueError, Unsupported), match=words):
            call(input_ids=ROW.ids, labels=ROW.ids, **{name: BOUNDARIES[name]})
    if head is DropsDocuments and wrap is None:
        model.model(input_ids=ROW.ids)  # on its own it may take the row for one document
        model(input_ids=ROW.ids)


def _drops_keywords(inner, with_mask):
    def forward(x, attention_mask=None, position_ids=None, position_embeddings=None, **kwargs):
        mask = None if with_mask else attention_mask
        return inner(x, attention_mask=mask, position_embeddings=position_embeddings)

    return forward


class KeywordsOfBaseDropped(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        kwargs.pop("use_cache", None)
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


class AllOfBaseDropped(LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        kwargs.pop("use_cache", None)
        return super().forward(input_ids=input_ids)


@pytest.mark.parametrize(
    ("where", "how"),
    [
        *((where, how) for where in ("layer", "base") for how in ("eager", "eager_without_mask")),
        ("layer", "compiled"),
        pytest.param("base", "compiled", marks=pytest.mark.slow),
    ],
)
def test_documents_that_do_not_come_to_attention(monkeypatch, where, how):
    """Neither a mask that stands in for them nor none would keep documents apart."""
    monkeypatch.undo()  # here kernels run
    with_mask = how == "eager_without_mask"
    dropping = AllOfBaseDropped if with_mask else KeywordsOfBaseDropped
    model = of_class(LlamaModel if where == "layer" else dropping, num_hidden_layers=1)
    if where == "layer":
        model.layers[0].forward = _drops_keywords(model.layers[0].forward, with_mask)
    fv.patch_model(model, "sdpa")
    call = torch.compile(model, backend="eager", fullgraph=True) if how == "compiled" else model
    words = r"must get its documents from the model's own forward.*pass \*\*kwargs on"
    for positions in (ROW.position_ids, torch.arange(256)[None]):  # packed, and one document
        with torch.no_grad(), pytest.raises((ValueError, Unsupported), match=words):
            call(input_ids=ROW.ids, position_ids=positions)


def test_an_unknown_backend():
    with pytest.raises(ValueError, match=r"sdpa.*got 'flash'"):
        fv.patch_model(shared_model("llama"), "flash")


@pytest.mark.skipif(torch.cuda.is_available(), reason="these need what a GPU machine has")
@pytest.mark.parametrize("backend", ["fa2", "varlen"])
def test_a_backend_that_this_machine_lacks(backend):
    model = shared_model("llama")
    with pytest.raises(NotImplementedError, match=backend):
        fv.patch_model(model, backend)
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model)


def test_training_with_flex_on_the_cpu():
    model = shared_model("llama")
    with fv.patched(model, "flex"):
        words = "no backward on the CPU"
        inputs = {"input_ids": ROW.ids, "position_ids": ROW.position_ids}
        refused(NotImplementedError, words, model, **inputs)


@pytest.mark.parametrize("form", ["cu_seq_lens", "packed_layout"])
def test_the_name_alone_with_a_filled_cache(form):
    model = new_model("llama", implementation="flexvarlen_doc")
    inputs = {**PACKED_FORMS[form], "past_key_values": _filled_cache()}
    refused(ValueError, "packed batch", model, input_ids=ROW.ids, **inputs)


def test_the_name_alone_with_bad_boundaries():
    model = new_model("llama", implementation="flexvarlen_doc")
    for boundaries, words in ((_cu(1, 256), "start at 0"), (_cu(0, 257), "total_tokens=256")):
        refused(ValueError, words, model, input_ids=ROW.ids, cu_seq_lens_q=boundaries)
