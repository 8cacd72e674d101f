"""Patching leaves no trace when undone, and works through wrappers, copies and saved folders."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from types import MethodType

import accelerate
import numpy as np
import peft
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import flexvarlen as fv
from flexvarlen.attention.backends.registry import get_backend
from tests import forms
from tests.oracle import assert_as_accurate
from tests.tiny_models import (
    batch_of,
    exact_and_baseline,
    new_model,
    one_by_one,
    one_row,
    padded_rows,
)

BATCH = one_row()
PACKED = {"input_ids": BATCH.ids, "position_ids": BATCH.position_ids, "labels": BATCH.ids}


def close(ours, expected):
    """Equal but for rounding: logits here reach 15, and a leak moves them by more than 1."""
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


def logits_of(model, **inputs):
    with torch.no_grad():
        return model(**(inputs or PACKED)).logits


@pytest.fixture(scope="module")
def expected():
    """Logits of the documents one by one."""
    return exact_and_baseline("llama", BATCH.order)[1].logits


@pytest.fixture
def called(monkeypatch):
    """The names of the backends that attended since it was last cleared."""
    names = []
    for name in ("sdpa", "reference"):
        backend = get_backend(name)

        def attend(*args, _name=name, _attend=backend.attend):
            names.append(_name)
            return _attend(*args)

        monkeypatch.setattr(backend, "attend", attend)
    return names


def _traces(model):
    """All that patching could leave on a model."""
    return (
        model.config.to_dict(),
        model.config._attn_implementation,
        [(name, sorted(vars(module))) for name, module in model.named_modules()],
        [(name, vars(module).get("forward")) for name, module in model.named_modules()],
    )


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flexvarlen_reference"])
def test_unpatching_restores_every_bit_and_attribute(implementation):
    model = new_model("qwen3_windows", implementation=implementation)
    batch = padded_rows(left=True)
    inputs = {"input_ids": batch.ids, "attention_mask": (batch.document_ids > 0).long()}
    traces, before = _traces(model), logits_of(model, **inputs)
    for backend in ("sdpa", "flex", "sdpa"):
        fv.patch_model(model, backend)
    assert not torch.equal(logits_of(model), before)
    assert fv.unpatch_model(model) is model
    assert _traces(model) == traces
    assert torch.equal(logits_of(model, **inputs), before)
    assert _traces(fv.unpatch_model(model)) == traces


def test_unpatching_restores_a_forward_of_the_instance():
    """accelerate wraps `forward` on the instance."""
    model = new_model("llama")
    of_instance = lambda *args, _forward=model.forward, **kwargs: _forward(*args, **kwargs)  # noqa: E731
    model.forward = of_instance
    expected = exact_and_baseline("llama", BATCH.order)[1].logits
    fv.patch_model(model, "sdpa")
    close(logits_of(model)[0], expected)
    with torch.no_grad():  # names of arguments are the class's
        close(model(BATCH.ids, None, BATCH.position_ids).logits[0], expected)
    fv.unpatch_model(model)
    assert model.forward is of_instance


def _halved(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


INSTANCE_FORWARDS = {
    # as accelerate does for mixed precision, and for its hooks
    "method": lambda model: MethodType(functools.partial(type(model).forward), model),
    "partial": lambda model: functools.partial(type(model).forward, model),
}


@pytest.mark.parametrize("how", INSTANCE_FORWARDS)
def test_a_deep_copy_with_a_forward_of_the_instance_uses_its_own_weights(how):
    model = new_model("llama")
    model.forward = INSTANCE_FORWARDS[how](model)
    fv.patch_model(model, "sdpa")
    twin = _halved(copy.deepcopy(model))
    expected = one_by_one(_halved(new_model("llama")), BATCH.order).logits
    close(logits_of(twin)[0], expected)
    fv.unpatch_model(twin)
    own = twin.forward.__self__ if how == "method" else twin.forward.args[0]
    assert own is twin
    assert torch.equal(logits_of(twin), logits_of(_halved(new_model("llama"))))
    close(logits_of(model)[0], exact_and_baseline("llama", BATCH.order)[1].logits)


def test_a_deep_copy_of_an_accelerated_model_uses_its_own_weights():
    model = new_model("llama")
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())
    fv.patch_model(model, "sdpa")
    twin = _halved(copy.deepcopy(model))
    expected = one_by_one(_halved(new_model("llama")), BATCH.order).logits
    close(logits_of(twin)[0], expected)


def test_a_wrapper_around_ours_survives_unpatching(expected):
    model, plain = new_model("llama"), new_model("llama")
    fv.patch_model(model, "sdpa")
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    fv.unpatch_model(model)
    assert torch.equal(logits_of(model), logits_of(plain))
    close(logits_of(fv.patch_model(model, "sdpa"))[0], expected)
    assert torch.equal(logits_of(fv.unpatch_model(model)), logits_of(plain))


def test_patching_again_wraps_nothing_twice_and_changes_the_backend(called, expected):
    model = new_model("llama")
    assert fv.patch_model(model, "sdpa") is model
    forward = model.forward
    close(logits_of(model)[0], expected)
    assert set(called) == {"sdpa"}
    called.clear()
    fv.patch_model(model, "reference")
    assert model.forward == forward
    close(logits_of(model)[0], expected)
    assert called == ["reference"] * 2  # once a layer


def test_patched_restores_what_was_there(called):
    model = new_model("llama")
    before = _traces(model)
    with fv.patched(model, "sdpa"):
        with pytest.raises(KeyError), fv.patched(model, "reference", capacity=8):  # noqa: PT012
            logits_of(model)
            raise KeyError
        logits_of(model)
    assert called == ["reference"] * 2 + ["sdpa"] * 2
    assert _traces(model) == before


def test_a_foreign_attn_implementation_on_a_patched_model_raises():
    """transformers' own attention would take our placeholder for a mask that hides nothing."""
    model = fv.patch_model(new_model("llama"), "sdpa")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="unpatch_model"):
        logits_of(model)
    logits_of(fv.patch_model(model, "sdpa"))
    logits_of(fv.unpatch_model(model))


@pytest.mark.parametrize("base_first", [False, True])
def test_a_model_whose_base_was_patched_too_is_restored(base_first):
    model = new_model("llama", implementation="eager")
    traces = _traces(model)
    for part in (model.model, model) if base_first else (model, model.model):
        fv.patch_model(part, "sdpa")
    if not base_first:
        fv.unpatch_model(model.model)
    fv.unpatch_model(model)
    assert _traces(model) == traces


def test_two_patched_models_keep_their_backends(called, expected):
    models = [fv.patch_model(new_model("llama"), backend) for backend in ("sdpa", "reference")]
    for model in models:
        close(logits_of(model)[0], expected)
    assert called == ["sdpa"] * 2 + ["reference"] * 2


def test_a_deep_copy_uses_its_own_weights(expected):
    model = fv.patch_model(new_model("llama"), "sdpa")
    twin = _halved(copy.deepcopy(model))
    close(logits_of(model)[0], expected)
    plain = fv.unpatch_model(copy.deepcopy(twin))
    close(logits_of(twin)[0], one_by_one(plain, BATCH.order).logits)
    close(logits_of(model)[0], expected)


@pytest.mark.parametrize("of_instance", [False, True])
def test_a_pickled_model_says_so_until_it_is_patched_again(of_instance, expected):
    """Pickle leaves out what is bound to the instance, our wrapper or another."""
    model = new_model("llama")
    if of_instance:
        model.forward = lambda *args, _forward=model.forward, **kwargs: _forward(*args, **kwargs)
    fv.patch_model(model, "sdpa")
    loaded = pickle.loads(pickle.dumps(model))
    # copies and pickles of it are as patched, or as lost, as it is
    for lost in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        with pytest.raises(ValueError, match="call patch_model again after a pickle"):
            logits_of(lost)
    close(logits_of(model)[0], expected)
    for unpatched_between in (False, True):
        fv.patch_model(loaded, "sdpa")
        out = logits_of(loaded, input_ids=BATCH.ids, attention_mask=BATCH.document_ids)
        close(out[0], expected)
        fv.unpatch_model(loaded)
        assert loaded.config._attn_implementation == "sdpa", unpatched_between
        logits_of(loaded)


PICKLED_CALLS = {
    "labels": PACKED,  # they would not be masked
    "document_ids": {"input_ids": BATCH.ids, "attention_mask": BATCH.document_ids},  # would leak
    "embeddings": {"inputs_embeds": torch.zeros(1, 8, 48)},
    "decoding": {"input_ids": BATCH.ids[:, :3], "attention_mask": torch.ones(1, 1, 3, 3).bool()},
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("part", "call"),
    [
        (part, call)
        for part in ("model", "base", "peft")
        for call in PICKLED_CALLS
        if (part, call) != ("base", "labels")  # a base model takes none
    ],
)
def test_a_pickled_model_refuses_every_forward(part, call, compiled):
    torch._dynamo.reset()
    model = new_model("llama")
    patched = fv.patch_model(model.model if part == "base" else model, deterministic=True)
    loaded = pickle.loads(pickle.dumps(_lora(patched) if part == "peft" else patched))
    run = torch.compile(loaded, backend="eager", fullgraph=True) if compiled else loaded
    error = Exception if compiled else ValueError  # Dynamo's own, with the sentence in it
    with pytest.raises(error, match="patch_model again"), torch.no_grad():
        run(**PICKLED_CALLS[call])


def test_an_unpatched_pickle_attends_without_us():
    model = fv.patch_model(new_model("llama"), "sdpa")
    loaded = fv.unpatch_model(pickle.loads(pickle.dumps(model)))
    assert torch.equal(logits_of(loaded), logits_of(new_model("llama")))
    pickled = pickle.loads(pickle.dumps(fv.unpatch_model(model)))
    assert torch.equal(logits_of(pickled), logits_of(loaded))


@pytest.mark.parametrize("how", ["model", "deep_copy"])
def test_a_model_that_was_not_pickled_decodes(how):
    model = fv.patch_model(new_model("llama"), "sdpa")
    if how == "deep_copy":
        pickle.dumps(model)
        model = copy.deepcopy(model)
    model.generate(BATCH.ids[:, :5], max_new_tokens=3, do_sample=False)


def test_a_layer_called_by_hand():
    """By the name alone it would take the row for one document."""
    model = fv.patch_model(new_model("llama"), "sdpa")
    hidden = torch.randn(1, 8, 48)
    tables = model.model.rotary_emb(hidden, torch.arange(8)[None])
    with pytest.raises(ValueError, match="must get its documents from the model's own forward"):
        model.model.layers[0](hidden, position_embeddings=tables)
    fv.unpatch_model(model)
    assert model.model.layers[0](hidden, position_embeddings=tables)[0].isfinite().all()


# ---- wrappers ----


def _lora(model):
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


WRAPPERS = {
    "peft": _lora,
    "ddp": DistributedDataParallel,
    "ddp_of_peft": lambda model: DistributedDataParallel(_lora(model)),
    "compile": lambda model: torch.compile(model, backend="eager", fullgraph=True),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("when", ["patched_first", "wrapped_first", "called_first"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.sampled(4)
def test_works_through_a_wrapper(wrapper, when):
    torch._dynamo.reset()
    model, plain = new_model("qwen3"), new_model("qwen3")
    oracle = one_by_one(_lora(plain) if "peft" in wrapper else plain, BATCH.order)
    if when == "patched_first":
        fv.patch_model(model, "sdpa")
    wrapped = WRAPPERS[wrapper](model).train()
    if when == "called_first":  # a compiled graph of the unpatched model must not be used again
        wrapped(**PACKED)
    if when != "patched_first":
        assert fv.patch_model(wrapped, "sdpa") is wrapped
    out = wrapped(**PACKED)
    out.loss.backward()
    close(out.logits[0], oracle.logits)
    close(out.loss, oracle.loss)
    seen = 0
    for name, parameter in wrapped.named_parameters():
        if parameter.grad is not None:
            close(
                parameter.grad,
                oracle.gradients[name.removeprefix("module.").removeprefix("_orig_mod.")],
            )
            seen += 1
    assert seen == (8 if "peft" in wrapper else len(oracle.gradients))
    fv.unpatch_model(wrapped)
    plain = _lora(new_model("qwen3")) if "peft" in wrapper else new_model("qwen3")
    close(logits_of(wrapped), logits_of(plain.train()))


@pytest.mark.parametrize("when", ["patched_first", "wrapped_first"])
@pytest.mark.parametrize("wrapper", ["checkpoint", "peft"])
def test_works_with_a_base_model_in_a_wrapper(wrapper, when, expected):
    """Which passes attributes on: its base_model is another."""
    model = new_model("llama")
    if when == "patched_first":
        fv.patch_model(model, "sdpa")
    if wrapper == "checkpoint":
        model.model = checkpoint_wrapper(model.model)
    else:
        config = peft.LoraConfig(target_modules=["q_proj"])  # adds nothing yet
        model.model = peft.get_peft_model(model.model, config)
    if when == "wrapped_first":
        fv.patch_model(model, "sdpa")
    close(logits_of(model)[0], expected)


# ---- folders and names, without patch_model ----


def test_a_saved_patched_model_loads_anywhere(tmp_path):
    model = fv.patch_model(new_model("qwen2_windows"), "sdpa")
    model.save_pretrained(tmp_path)
    assert "flexvarlen" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"
    assert torch.equal(logits_of(loaded), logits_of(fv.unpatch_model(model)))


def _by_name(how, kind, tmp_path):
    if how == "from_config":
        return new_model(kind, implementation="flexvarlen_flex")
    model = new_model(kind)
    if how == "set_attn_implementation":
        model.set_attn_implementation("flexvarlen_doc")
        return model
    model.save_pretrained(tmp_path)
    return AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flexvarlen_doc")


NAMED_FORMS = {
    "position_ids": ("one_row", "position_ids"),
    "two_rows": ("two_rows", "position_ids"),
    "cu_seq_lens": ("one_row", "cu_seq_lens", "positions"),
    "right_padding": ("right_padding", "padding_mask"),
    "left_padding": ("left_padding", "padding_mask"),
}


@pytest.mark.parametrize("form", NAMED_FORMS)
@pytest.mark.parametrize("how", ["from_config", "from_pretrained", "set_attn_implementation"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_windows"])
def test_the_name_alone_is_right(kind, how, form, tmp_path):
    model = _by_name(how, kind, tmp_path)
    rows, way, *beside = NAMED_FORMS[form]
    batch = forms.ROWS[rows]()
    inputs = forms.given(way, batch, *beside)
    exact, baseline = exact_and_baseline(kind, batch.order)
    logits = batch.of_documents(logits_of(model, input_ids=batch.ids, **inputs))
    assert_as_accurate(logits, exact.logits, baseline.logits, 2)


def test_the_name_alone_finds_cu_seq_lens_without_position_ids():
    model = new_model("llama", implementation="flexvarlen_doc")
    out = logits_of(model, input_ids=BATCH.ids, cu_seq_lens_q=BATCH.cu_seqlens)
    # Positions run on through the row, and RoPE loses precision: 2e-4 (FACTS.md).
    torch.testing.assert_close(
        out[0], exact_and_baseline("llama", BATCH.order)[1].logits, rtol=1e-3, atol=1e-2
    )


WRITES = {
    "copy_": lambda positions, new: positions.copy_(new),
    # these two leave no trace in the tensor's version
    "data": lambda positions, new: positions.data.copy_(new),
    "numpy": lambda positions, new: np.copyto(positions.numpy(), new.numpy()),
}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
def test_the_name_alone_is_not_misled_by_the_layout_of_the_last_forward(write, mode, layers):
    """Layers share what the first one found; the next forward may bring the same tensors."""
    model = new_model("llama", implementation="flexvarlen_doc", num_hidden_layers=layers)
    batches = (BATCH, batch_of(((5, 4, 3, 2, 1, 0),), row_tokens=256), BATCH)
    positions = torch.zeros_like(BATCH.position_ids)
    with mode():
        expected = [model(b.ids, position_ids=b.position_ids).logits for b in batches]
        for batch, logits in zip(batches, expected, strict=True):
            WRITES[write](positions, batch.position_ids)
            assert torch.equal(model(batch.ids, position_ids=positions).logits, logits)
    if layers == 2:
        close(expected[1][0], exact_and_baseline("llama", batches[1].order)[1].logits)


def test_the_name_alone_is_not_misled_after_a_forward_that_failed():
    model = new_model("llama", implementation="flexvarlen_doc")
    positions = BATCH.position_ids.clone()
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits_of(model, input_ids=BATCH.ids, position_ids=positions)
    hook.remove()
    other = batch_of(((5, 4, 3, 2, 1, 0),), row_tokens=256)
    positions.data.copy_(other.position_ids)
    out = logits_of(model, input_ids=other.ids, position_ids=positions)
    close(out[0], exact_and_baseline("llama", other.order)[1].logits)


def test_the_name_alone_plans_each_mask_once_a_forward(monkeypatch):
    model = new_model("qwen3_windows", implementation="flexvarlen_flex", num_hidden_layers=6)
    backend, planned = get_backend("flex"), []
    plan = backend.plan
    monkeypatch.setattr(
        backend, "plan", lambda mask, **kwargs: planned.append(mask.spec) or plan(mask)
    )
    for _ in range(2):
        planned.clear()
        logits_of(model, input_ids=BATCH.ids, position_ids=BATCH.position_ids)
        assert len(planned) == len(set(planned)) == 2  # with and without a window
