"""Compilation that users can afford: layer by layer, once a form, and never given up in silence."""

from __future__ import annotations

from functools import partial
from types import MethodType

import pytest
import torch
from accelerate.utils import compile_regions
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import flexvarlen as fv
from flexvarlen.attention.backends import sdpa
from tests import forms
from tests.oracle import assert_as_accurate
from tests.tiny_models import LENGTHS, exact_and_baseline, new_model, one_row

BATCH = one_row()
T = 256
DYNAMO_ALONE = "eager"  # what compiles the graphs, where it matters only how many there are
PARTS = 4  # what compile_regions compiles beside the layers: embedding, rotary, norm, head
MIXED = {"full_attention": "sdpa", "sliding_attention": "reference"}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def lengths_of(documents: int, longest: int) -> list[int]:
    """Documents that fill the row, one of them this long."""
    rest, others = T - longest, documents - 1
    return [longest, *(rest // others + (i < rest % others) for i in range(others))]


# default sizes: (4, 128), (4, 256), (16, 64), (32, 64), (64, 256), (4, 128), (32, 64)
SIZES = [(4, 100), (4, 200), (9, 60), (20, 60), (40, 130), (3, 90), (17, 33)]


GIVEN = {
    "layout": ("packed_layout",),
    "position_ids": ("position_ids",),
    "document_ids": ("document_ids",),
    "cu_seq_lens": ("cu_seq_lens", "cu_seq_lens_k"),
    # as DataCollatorWithFlattening gives them
    "collator": ("cu_seq_lens", "cu_seq_lens_k", "max_length", "positions"),
}


def inputs_of(form: str, lengths=LENGTHS) -> dict:
    """The documents as keyword arguments of a forward, with labels."""
    way, *beside = GIVEN[form]
    documents = forms.given(way, forms.row_of(lengths), *beside)
    return {"input_ids": BATCH.ids, "labels": BATCH.ids, **documents}


def compiled_model(how, model, compiler=DYNAMO_ALONE, *, backend="sdpa", **settings):
    """The patched model compiled, and the counter of its graphs."""
    counter = CompileCounterWithBackend(compiler)
    settings = {"fullgraph": True, "backend": counter, **settings}
    if how == "regions_then_patch":
        compiled = fv.patch_model(compile_regions(model, **settings), backend)
    else:
        fv.patch_model(model, backend)
        compiled = (torch.compile if how == "whole" else compile_regions)(model, **settings)
    return compiled, counter


def check_right(kind, model, out):
    """Logits and gradients as of the documents one by one."""
    out.loss.backward()
    exact, baseline = exact_and_baseline(kind, BATCH.order)
    assert_as_accurate(out.logits[0].detach(), exact.logits, baseline.logits, 2)
    seen = 0
    for name, parameter in model.named_parameters():
        name = name.replace("_orig_mod.", "")
        assert_as_accurate(parameter.grad, exact.gradients[name], baseline.gradients[name], 3, name)
        seen += 1
    assert seen == len(exact.gradients)
    model.zero_grad()


ORDERS = ("patch_then_regions", "regions_then_patch")


@pytest.mark.parametrize(
    ("kind", "backend", "how"),
    [
        ("llama", "sdpa", ORDERS[1]),
        ("qwen3_windows", MIXED, ORDERS[0]),
        pytest.param("llama", "sdpa", ORDERS[0], marks=pytest.mark.slow),
        pytest.param("qwen3_windows", "sdpa", ORDERS[0], marks=pytest.mark.slow),
        pytest.param("qwen3_windows", "sdpa", ORDERS[1], marks=pytest.mark.slow),
        pytest.param("qwen3_windows", MIXED, ORDERS[1], marks=pytest.mark.slow),
    ],
)
def test_regions_are_right_and_compiled_once_a_kind_of_layers(kind, backend, how):
    compiled, counter = compiled_model(how, new_model(kind), backend=backend)
    for form in ("position_ids", "layout", "document_ids", "cu_seq_lens"):
        check_right(kind, compiled, compiled(**inputs_of(form)))
    assert counter.frame_count == PARTS + (1 if kind == "llama" else 2)


@pytest.mark.parametrize("how", ORDERS)
@pytest.mark.slow
def test_regions_are_right_in_inductor(how):
    model = new_model("llama")
    compiled, counter = compiled_model(how, model, "inductor")
    check_right("llama", compiled, compiled(**inputs_of("position_ids")))
    assert counter.frame_count == PARTS + 1


@pytest.mark.parametrize("mode", ["train", "eval", "eval_no_grad"])
@pytest.mark.sampled(1)
def test_more_layers_make_no_more_graphs(mode):
    """A cache, which transformers makes in eval mode, would give each layer its own."""
    model = new_model("qwen3_windows", num_hidden_layers=6).train(mode == "train")
    compiled, counter = compiled_model("patch_then_regions", model)
    for form in ("position_ids", "layout"):
        with torch.set_grad_enabled(mode != "eval_no_grad"):
            assert compiled(**inputs_of(form)).logits.isfinite().all()
    assert counter.frame_count == PARTS + 2


def test_layers_compiled_in_place_make_no_more_graphs():
    """As accelerate does for FSDP2."""
    model = fv.patch_model(new_model("llama", num_hidden_layers=4), "sdpa")
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        model(**inputs_of("position_ids"))
    assert counter.frame_count == 1


@pytest.mark.parametrize("how", ORDERS)
def test_the_model_that_regions_were_made_of_is_left_as_it_was(how):
    model = new_model("llama")
    before = model(**inputs_of("position_ids")).logits
    compiled, _ = compiled_model(how, model)
    compiled(**inputs_of("position_ids"))
    for patched in (compiled, model):
        fv.unpatch_model(patched)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(**inputs_of("position_ids")).logits, before)


def test_regions_of_a_model_with_a_method_of_the_instance_are_compiled():
    """accelerate sets one for mixed precision; the regions' own layers must run under it."""
    model = new_model("llama")
    model.forward = MethodType(type(model).forward, model)
    compiled, counter = compiled_model("patch_then_regions", model)
    check_right("llama", compiled, compiled(**inputs_of("position_ids")))
    assert counter.frame_count == PARTS + 1


def test_unpatching_leaves_no_hook():
    model = new_model("llama")
    fv.unpatch_model(fv.patch_model(fv.patch_model(model, "sdpa"), "reference"))
    assert not any(part._forward_pre_hooks for part in model.modules())


# ---- once a form ----


@pytest.mark.parametrize("how", ["patch_then_regions", "whole"])
@pytest.mark.slow  # in one mode: test_regions_are_right_and_compiled_once_a_kind_of_layers
def test_returning_to_an_earlier_form_compiles_nothing(how):
    model = new_model("qwen3_windows")
    forms = ("layout", "position_ids", "document_ids", "cu_seq_lens")
    settings = [(True, True), (False, True), (False, False)]  # train, gradients
    if how == "whole":  # where each is seconds
        del settings[1]
    with torch._dynamo.config.patch(recompile_limit=32):
        compiled, counter = compiled_model(how, model, backend=MIXED)
        counts = []
        for train, grad in settings * 2:
            for form in forms:
                compiled.train(train)
                with torch.set_grad_enabled(grad):
                    compiled(**inputs_of(form))
                counts.append(counter.frame_count)
    new = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert new[len(new) // 2 :] == [0] * (len(new) // 2)
    if how == "whole":
        assert new[: len(new) // 2] == [1] * (len(new) // 2)
    else:  # layers see no form; each of the two kinds, and each part, at most once a mode
        assert [sum(new[i : i + 4]) for i in (0, 4)] == [PARTS + 2, 2]
        assert sum(new[8:12]) <= PARTS + 2


FORMS = ("layout", "cu_seq_lens", "collator")


@pytest.mark.parametrize("form", [*FORMS, "position_ids"])
@pytest.mark.parametrize("how", ["patch_then_regions", "whole"])
@pytest.mark.sampled(1)  # whole: test_compiled_lengths.py
def test_other_sizes_cost_at_most_one_compilation_more(how, form):
    """Dynamo leaves open what has changed once; nothing of ours may fix it again."""
    compiled, counter = compiled_model(how, new_model("llama", num_hidden_layers=1))
    counts = []
    for size in SIZES:
        with torch.no_grad():
            compiled(**inputs_of(form, lengths_of(*size)))
        counts.append(counter.frame_count)
    graphs = 1 if how == "whole" else PARTS + 1
    assert counts[0] == graphs
    assert counts[-1] <= graphs + 1
    assert counts[2:] == [counts[2]] * len(counts[2:])


@pytest.mark.slow  # Dynamo's own, which nothing of ours catches
def test_a_recompile_limit_raises_under_fullgraph():
    with torch._dynamo.config.patch(recompile_limit=2):
        model = new_model("llama", num_hidden_layers=1)
        compiled, _ = compiled_model("whole", model, dynamic=False)
        with torch.no_grad(), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):  # noqa: PT012
            for size in SIZES:
                compiled(**inputs_of("layout", lengths_of(*size)))


# ---- checkpointing ----


@pytest.fixture
def attentions(monkeypatch):
    """One entry for each time that a layer's attention really ran."""
    runs = []
    loop = sdpa._loop
    monkeypatch.setattr(sdpa, "_loop", lambda *args: (runs.append(1), loop(*args))[1])
    return runs


HOW = ("eager", "patch_then_regions", "whole")


def checkpointed(how, **settings):
    model = new_model("llama").train()
    model.gradient_checkpointing_enable(settings)
    if how == "eager":
        return fv.patch_model(model, "sdpa"), None
    return compiled_model(how, model, "aot_eager")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.sampled(2)
def test_checkpointing_runs_attention_again_and_is_right(how, reentrant, attentions):
    model, counter = checkpointed(how, use_reentrant=reentrant)
    for _ in range(2):
        attentions.clear()
        check_right("llama", model, model(**inputs_of("position_ids")))
        assert len(attentions) == 4  # two layers, forward and recomputation
    if counter is not None:
        assert counter.frame_count == (1 if how == "whole" else PARTS + 1)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.sampled(1)
def test_selective_checkpointing_keeps_what_attention_gave(how, attentions):
    ops = [torch.ops.flexvarlen.sdpa_forward.default]
    contexts = partial(create_selective_checkpoint_contexts, ops)
    model, _ = checkpointed(how, use_reentrant=False, context_fn=contexts)
    check_right("llama", model, model(**inputs_of("position_ids")))
    assert len(attentions) == 2  # two layers, forward alone
