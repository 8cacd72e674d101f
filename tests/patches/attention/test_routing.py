"""Layers of one model on different backends: each gets its own, and a refusal names the layers."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flexvarlen as fv
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.env import _flag
from flexvarlen.patches.attention import backend_choice, packed_forward
from flexvarlen.patches.models.layers import LayerKind
from flexvarlen.patches.state import ATTRIBUTE
from tests.patches.forward.test_compile_regions import check_right
from tests.tiny_models import new_model, one_row

BATCH = one_row()
PACKED = {"input_ids": BATCH.ids, "position_ids": BATCH.position_ids, "labels": BATCH.ids}
FULL = LayerKind("full_attention", True, None, None, 6, 2, 16, 0.25)
MIXED = {"full_attention": "sdpa", "sliding_attention": "reference"}


@pytest.fixture
def attended(monkeypatch):
    """Of each call of a backend: its name, the window's left side, the call."""
    calls = []
    for name in ("sdpa", "reference"):
        backend = get_backend(name)

        def attend(q, k, v, sinks, call, mask, plan, _name=name, _attend=backend.attend):
            calls.append((_name, mask.spec.left, call))
            return _attend(q, k, v, sinks, call, mask, plan)

        monkeypatch.setattr(backend, "attend", attend)
    return calls


@pytest.mark.parametrize(
    ("kind", "full", "sliding"),
    [
        ("qwen3_windows", "sdpa", "reference"),
        ("qwen2_windows", "reference", "sdpa"),
        ("qwen3_windows", "reference", "auto"),
    ],
)
def test_each_type_of_layers_gets_its_backend(kind, full, sliding, attended):
    choice = {"full_attention": full, "sliding_attention": sliding}
    model = fv.patch_model(new_model(kind), choice)
    check_right(kind, model, model(**PACKED))
    # the first layer sees all of its document, the second 9 tokens; on the CPU auto is sdpa
    sliding = "sdpa" if sliding == "auto" else sliding
    assert [call[:2] for call in attended] == [(full, -1), (sliding, 8)]


@pytest.mark.slow  # layer by layer: forward/test_compile_regions.py
def test_mixed_backends_make_one_graph():
    torch._dynamo.reset()
    model = fv.patch_model(new_model("qwen3_windows"), MIXED)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):
        check_right("qwen3_windows", model, compiled(**PACKED))
    assert counter.frame_count == 1


def test_auto_is_resolved_by_kind_of_layer(attended, monkeypatch):
    asked = asked_of_auto(monkeypatch)
    model = fv.patch_model(new_model("qwen3_windows", num_hidden_layers=4), "auto")
    with torch.no_grad():
        model(**PACKED)
    # once a kind, not once a layer
    heads = [(call.spec.left, call.num_heads, call.num_kv_heads) for call in asked]
    assert heads == [(-1, 6, 2), (8, 6, 2)]
    assert [name for name, *_ in attended] == ["sdpa", "reference", "reference", "reference"]


def asked_of_auto(monkeypatch):
    """What "auto" is resolved for, call by call: sdpa for full layers, reference for sliding."""
    asked = []

    def choose(backend, call, mask, *, training):
        assert backend == "auto"
        asked.append(call._replace(needs_grad=call.needs_grad or training))
        return "sdpa" if call.spec.left == -1 else "reference"

    monkeypatch.setattr(packed_forward, "choose", choose)
    return asked


# dtype of the model, autocast's, mode, gradients: dtype and needs_grad that auto is asked for
CALLS = {
    "plain": (torch.float32, None, "eval", True, torch.float32, True),
    "no_grad": (torch.float32, None, "eval", False, torch.float32, False),
    # a reentrant checkpoint runs a training forward without gradients first
    "training_no_grad": (torch.float32, None, "train", False, torch.float32, True),
    "bf16": (torch.bfloat16, None, "eval", False, torch.bfloat16, False),
    "autocast": (torch.float32, torch.bfloat16, "eval", True, torch.bfloat16, True),
}


@pytest.mark.parametrize(
    ("call", "promises"),
    [
        *((call, (None, None)) for call in CALLS),
        ("no_grad", (True, False)),
        ("plain", (False, True)),
    ],
)
def test_auto_is_asked_for_what_the_layers_call(call, promises, monkeypatch):
    dtype, autocast, mode, grad, expected_dtype, expected_grad = CALLS[call]
    asked = asked_of_auto(monkeypatch)
    model = new_model("llama").to(dtype).train(mode == "train")
    fv.patch_model(model, "auto", deterministic=promises[0], batch_invariant=promises[1])
    with (
        torch.set_grad_enabled(grad),
        torch.autocast("cpu", autocast, enabled=autocast is not None),
    ):
        model(**PACKED)
    [only] = asked  # what was found before the layers serves them
    assert only.dtype == expected_dtype
    assert only.needs_grad is expected_grad
    assert (only.deterministic, only.batch_invariant) == tuple(map(bool, promises))


def bf16_but_for_the_embedding():
    """As bitsandbytes and some trainers leave it; the outputs are cast by a hook."""
    model = new_model("qwen3_windows").to(torch.bfloat16)
    model.model.embed_tokens.float()
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out.bfloat16())
    return model


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_auto_is_resolved_for_the_dtype_of_the_queries_not_of_the_embedding(how, monkeypatch):
    torch._dynamo.reset()
    asked = asked_of_auto(monkeypatch)
    model = fv.patch_model(bf16_but_for_the_embedding(), "auto")
    if how == "compiled":
        model = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        model(**PACKED)
    assert {(call.spec.left, call.dtype) for call in asked} == {
        (-1, torch.bfloat16),
        (8, torch.bfloat16),
    }


def test_auto_is_resolved_anew_for_queries_of_another_dtype(attended, monkeypatch):
    """Weights in fp32 that are cast on the way: no parameter tells."""
    asked = asked_of_auto(monkeypatch)
    model = new_model("qwen3_windows", num_hidden_layers=4)
    for layer in model.model.layers:
        # v too: q and k leave the rotation in bf16, as its tables are cast to them
        for name in ("q_norm", "k_norm", "v_proj"):
            getattr(layer.self_attn, name).register_forward_hook(
                lambda module, args, out: out.bfloat16()
            )
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: args[0].float())
    model.model.rotary_emb.register_forward_hook(
        lambda module, args, out: tuple(x.bfloat16() for x in out)
    )
    fv.patch_model(model, "auto")
    with torch.no_grad():
        model(**PACKED)
    kinds = [(-1, torch.float32), (8, torch.float32), (-1, torch.bfloat16), (8, torch.bfloat16)]
    assert [(call.spec.left, call.dtype) for call in asked] == kinds
    assert [name for name, *_ in attended] == ["sdpa"] + ["reference"] * 3


def test_a_route_is_taken_for_its_own_calls_alone():
    layout = fv.PackedLayout.from_lengths([5, 7])
    packed = packed_forward.PackedForward(
        layout, "sdpa", deterministic=False, batch_invariant=False
    )
    found = packed.route(FULL, torch.float32, False)
    assert packed.route(FULL, torch.float32, False) is found
    for dtype, needs_grad in ((torch.float32, True), (torch.bfloat16, False)):
        other = packed.route(FULL, dtype, needs_grad)
        assert (other.call.dtype, other.call.needs_grad) == (dtype, needs_grad)
        assert other.plan is found.plan


def test_a_layer_type_that_the_mapping_misses_is_a_sentence():
    """It was "auto" in silence."""
    with pytest.raises(ValueError, match=r"layer of type 'chunked_attention'; call patch_model"):
        backend_choice.chosen_for(MIXED, "chunked_attention")
    model = fv.patch_model(new_model("qwen3_windows"), MIXED)
    model.model.layers[1].self_attn.layer_type = "chunked_attention"
    with pytest.raises(ValueError, match=r"layer of type 'chunked_attention'"), torch.no_grad():
        model(**PACKED)


def test_a_kind_is_asked_about_with_its_window(monkeypatch):
    windows = []

    def refusal(backend, call):
        windows.append((backend, call.spec.causal, call.spec.left))

    monkeypatch.setattr(backend_choice, "named_refusal", refusal)
    fv.patch_model(new_model("qwen3_windows"), MIXED)
    assert windows == [("sdpa", True, -1), ("reference", True, 8)]


def test_layers_of_one_kind_share_one_plan_by_the_name_alone(monkeypatch):
    """In a patched model: batch/test_found_once.py."""
    plans, backend = [], get_backend("sdpa")
    plan = backend.plan
    monkeypatch.setattr(
        backend, "plan", lambda mask, **kwargs: (plans.append(mask.spec), plan(mask))[1]
    )
    model = new_model("qwen3_windows", num_hidden_layers=5, implementation="flexvarlen_auto")
    for _ in range(2):
        plans.clear()
        with torch.no_grad():
            model(**PACKED, use_cache=False)
        assert [spec.left for spec in plans] == [-1, 8]


def test_sliding_layers_without_a_window_are_what_the_config_calls_them(attended):
    """Both types have one mask then: the window alone would not tell them apart."""
    model = new_model(
        "qwen2", layer_types=["sliding_attention", "full_attention"], use_sliding_window=False
    )
    fv.patch_model(model, MIXED)
    with torch.no_grad():
        model(**PACKED, use_cache=False)  # transformers' cache wants a window
    assert [call[:2] for call in attended] == [("reference", -1), ("sdpa", -1)]


BAD = {
    "unknown_type": ({**MIXED, "chunked_attention": "sdpa"}, "no layer is 'chunked_attention'"),
    "missing_type": ({"full_attention": "sdpa"}, "'sliding_attention' has none"),
    "unknown_backend": ({**MIXED, "full_attention": "flash"}, "backend must be one of .*'flash'"),
    "no_mapping": (["sdpa", "reference"], "or a mapping from layer types to names, got list"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_choice_is_a_sentence_and_patches_nothing(how):
    choice, sentence = BAD[how]
    model = new_model("qwen3_windows")
    with pytest.raises(ValueError, match=sentence):
        fv.patch_model(model, choice)
    assert ATTRIBUTE not in vars(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_without_sliding_layers_takes_no_backend_for_them():
    with pytest.raises(ValueError, match=r"\(full_attention\), got .*'sliding_attention'"):
        fv.patch_model(new_model("llama"), MIXED)


# ---- refusals ----


def test_a_refused_kind_of_layers_is_named_at_the_call():
    model = fv.patch_model(new_model("qwen3_windows"), {**MIXED, "sliding_attention": "flex"})
    with torch.no_grad():
        assert model(**PACKED).logits.isfinite().all()
    sentence = (
        "flex cannot serve the sliding_attention layers: flex has no backward on the CPU.* "
        "For these layers .*sdpa.* could"
    )
    with pytest.raises(NotImplementedError, match=sentence):
        model(**PACKED)


def test_a_refused_kind_of_layers_is_named_when_patched():
    with pytest.raises(NotImplementedError, match="reference cannot serve the sliding_attention"):
        fv.patch_model(new_model("qwen3_windows"), MIXED, batch_invariant=True)


def test_a_model_of_one_kind_of_layers_gets_the_refusal_as_it_is():
    with pytest.raises(NotImplementedError, match=r"^reference is not batch invariant"):
        fv.patch_model(new_model("llama"), "reference", batch_invariant=True)


def test_auto_without_a_candidate_names_the_layers(monkeypatch):
    def choose(backend, call, mask, *, training):
        if call.spec.left == 8:
            raise NotImplementedError("no backend can serve this call.")
        return "sdpa"

    monkeypatch.setattr(packed_forward, "choose", choose)
    model = fv.patch_model(new_model("qwen3_windows"), "auto")
    with pytest.raises(NotImplementedError, match="The sliding_attention layers: no backend"):
        model(**PACKED)


# ---- what is asked of all layers ----


def test_promises_reach_every_layer_and_its_plan(attended, monkeypatch):
    kept = []
    backend = get_backend("sdpa")
    plan = backend.plan
    monkeypatch.setattr(
        backend, "plan", lambda mask, **kwargs: (kept.append(kwargs), plan(mask))[1]
    )
    model = new_model("qwen3_windows")
    fv.patch_model(model, "sdpa", deterministic=True, batch_invariant=True)
    with torch.no_grad():
        model(**PACKED)
    assert [options.deterministic for *_, options in attended] == [True, True]
    assert kept == [{"batch_invariant": True}] * 2
    attended.clear(), kept.clear()
    with fv.patched(model, "sdpa"), torch.no_grad():
        model(**PACKED)
    assert [options.deterministic for *_, options in attended] == [False, False]
    assert kept == [{"batch_invariant": False}] * 2
    with torch.no_grad():
        model(**PACKED)  # as it was before
    assert attended[-1][2].deterministic


@pytest.fixture
def invariant_environment(monkeypatch):
    """FLEXVARLEN_BATCH_INVARIANT=1, which is read once a process."""
    monkeypatch.setenv("FLEXVARLEN_BATCH_INVARIANT", "1")
    _flag.cache_clear()
    yield
    monkeypatch.undo()
    _flag.cache_clear()


@pytest.mark.usefixtures("invariant_environment")
def test_the_environment_promises_where_the_argument_does_not_say():
    with pytest.raises(NotImplementedError, match="reference is not batch invariant"):
        fv.patch_model(new_model("llama"), "reference")
    fv.patch_model(new_model("llama"), "reference", batch_invariant=False)
    assert "not batch invariant" in fv.why_not("reference")
    assert "reference" not in fv.available_backends()
    assert fv.why_not("reference", batch_invariant=False) is None


def test_a_guessed_dtype_that_the_backend_refuses_is_no_refusal(monkeypatch):
    """FSDP2 casts parameters to bf16 after the forward has begun: the layers' queries decide."""
    backend = get_backend("sdpa")

    def only_half(call):
        return None if call.dtype == torch.bfloat16 else "sdpa needs bf16; use backend='reference'."

    monkeypatch.setattr(backend, "why_not", only_half)
    monkeypatch.setattr("flexvarlen.attention.choose._choices", {})
    layout = fv.PackedLayout.from_lengths([5])
    packed = packed_forward.PackedForward(
        layout, "sdpa", deterministic=False, batch_invariant=False, kinds=(FULL,)
    )
    packed.prepare(torch.float32, needs_grad=False)
    assert packed.route(FULL, torch.bfloat16, False).backend is backend
    with pytest.raises(NotImplementedError, match="needs bf16"):
        packed.route(FULL, torch.float32, False)


@pytest.mark.parametrize("backend", ["flex_attention", {"full_attention": "flex_attention"}])
def test_transformers_name_for_a_kernel(backend):
    """`flex_attention` is flex, wherever a backend is named."""
    model = fv.patch_model(new_model("llama"), backend)
    assert model.config._attn_implementation == "flexvarlen_flex"
