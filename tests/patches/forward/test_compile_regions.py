"""Compilation that users can afford: layer by layer, and once a kind of layers."""

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
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
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
    if how == "in_place":  # as accelerate does for FSDP2
        compiled = fv.patch_model(model, backend)
        for layer in model.model.layers:
            layer.compile(**settings)
    elif how == "regions_then_patch":
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
    gradients = {name.replace("_orig_mod.", ""): p.grad for name, p in model.named_parameters()}
    assert_gradients_as_accurate(gradients, exact.gradients, baseline.gradients)
    model.zero_grad()


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


ORDERS = ("patch_then_regions", "regions_then_patch")


@pytest.mark.parametrize(
    ("kind", "backend", "how"),
    [
        ("llama", "sdpa", ORDERS[1]),
        ("qwen3_windows", MIXED, ORDERS[0]),
        slow("llama", "sdpa", ORDERS[0]),
        slow("qwen3_windows", "sdpa", ORDERS[0]),
        slow("qwen3_windows", "sdpa", ORDERS[1]),
        slow("qwen3_windows", MIXED, ORDERS[1]),
    ],
)
def test_regions_are_right_and_compiled_once_a_kind_of_layers(kind, backend, how):
    compiled, counter = compiled_model(how, new_model(kind), backend=backend)
    for form in ("position_ids", "layout", "document_ids", "cu_seq_lens"):
        check_right(kind, compiled, compiled(**inputs_of(form)))
    assert counter.frame_count == PARTS + (1 if kind == "llama" else 2)


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("patch_then_regions", "train"),
        ("in_place", "eval_no_grad"),
        slow("patch_then_regions", "eval"),
        slow("patch_then_regions", "eval_no_grad"),
        slow("in_place", "train"),
    ],
)
def test_more_layers_make_no_more_graphs(how, mode):
    """A cache, which transformers makes in eval mode, would give each layer its own."""
    model = new_model("qwen3_windows", num_hidden_layers=4).train(mode == "train")
    compiled, counter = compiled_model(how, model)
    for form in ("position_ids", "layout"):
        with torch.set_grad_enabled(mode != "eval_no_grad"):
            assert compiled(**inputs_of(form)).logits.isfinite().all()
    assert counter.frame_count == 2 + (0 if how == "in_place" else PARTS)


@pytest.mark.parametrize("how", [ORDERS[1], slow(ORDERS[0])])
def test_the_model_that_regions_were_made_of_is_left_as_it_was(how):
    model = new_model("llama", num_hidden_layers=1)
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


# ---- other sizes ----


@pytest.mark.parametrize("form", ["layout", "cu_seq_lens", "collator", "position_ids"])
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


# ---- checkpointing ----


@pytest.fixture
def attentions(monkeypatch):
    """One entry for each time that a layer's attention really ran."""
    runs = []
    loop = sdpa._loop
    monkeypatch.setattr(sdpa, "_loop", lambda *args: (runs.append(1), loop(*args))[1])
    return runs


CHECKPOINTS = {  # and how often two layers attend
    "not_reentrant": ({"use_reentrant": False}, 4),  # in the forward and when it is repeated
    "reentrant": ({"use_reentrant": True}, 4),
    "selective": (
        {
            "use_reentrant": False,
            "context_fn": partial(
                create_selective_checkpoint_contexts, [torch.ops.flexvarlen.sdpa_forward.default]
            ),
        },
        2,
    ),
}


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("eager", "not_reentrant"),
        ("eager", "selective"),
        ("patch_then_regions", "reentrant"),
        slow("eager", "reentrant"),
        slow("patch_then_regions", "not_reentrant"),
        slow("patch_then_regions", "selective"),
        *(slow("whole", kind) for kind in CHECKPOINTS),
    ],
)
def test_checkpointing_attends_again_unless_attention_is_kept(how, kind, attentions):
    settings, expected = CHECKPOINTS[kind]
    model, counter = new_model("llama").train(), None
    model.gradient_checkpointing_enable(settings)
    if how == "eager":
        fv.patch_model(model, "sdpa")
    else:
        compiler = "aot_eager" if kind == "selective" else DYNAMO_ALONE
        model, counter = compiled_model(how, model, compiler)
    for _ in range(2):
        attentions.clear()
        check_right("llama", model, model(**inputs_of("position_ids")))
        assert len(attentions) == expected
    if counter is not None:
        assert counter.frame_count == (1 if how == "whole" else PARTS + 1)
