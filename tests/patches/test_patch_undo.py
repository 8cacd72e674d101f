"""Patching leaves no trace when undone, and works through wrappers, copies and pickles."""

from __future__ import annotations

import copy
import functools
import pickle
from itertools import product
from types import MethodType

import accelerate
import peft
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import flexvarlen as fv
from flexvarlen.attention.backends.registry import get_backend
from tests.contract_oracle import gradients_of
from tests.tiny_models import (
    exact_and_baseline,
    lora,
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
        [(name, list(module._forward_pre_hooks)) for name, module in model.named_modules()],
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


def test_unpatching_restores_a_forward_of_the_instance(expected):
    """accelerate wraps `forward` on the instance."""
    model = new_model("llama")
    of_instance = lambda *args, _forward=model.forward, **kwargs: _forward(*args, **kwargs)  # noqa: E731
    model.forward = of_instance
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


def _method(model):
    """As accelerate sets one for mixed precision."""
    model.forward = MethodType(functools.partial(type(model).forward), model)


def _partial(model):
    model.forward = functools.partial(type(model).forward, model)


def _hook(model):
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())


@pytest.mark.parametrize("prepare", [lambda model: None, _method, _partial, _hook])
def test_a_deep_copy_uses_its_own_weights(prepare, expected):
    """Also with a forward of the instance, from before it was patched."""
    model, halved = new_model("llama"), _halved(new_model("llama"))
    prepare(model)
    fv.patch_model(model, "sdpa")
    twin = _halved(copy.deepcopy(model))
    close(logits_of(twin)[0], one_by_one(halved, BATCH.order).logits)
    assert torch.equal(logits_of(fv.unpatch_model(twin)), logits_of(halved))
    close(logits_of(model)[0], expected)


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


@pytest.mark.parametrize("base_first", [False, True])
def test_a_model_whose_base_was_patched_too_is_restored(base_first, expected):
    model = new_model("llama", implementation="eager")
    traces = _traces(model)
    for part in (model.model, model) if base_first else (model, model.model):
        fv.patch_model(part, "sdpa")
    if not base_first:
        fv.unpatch_model(model.model)
    close(logits_of(model)[0], expected)
    fv.unpatch_model(model)
    assert _traces(model) == traces


def test_two_patched_models_keep_their_backends(called, expected):
    models = [fv.patch_model(new_model("llama"), backend) for backend in ("sdpa", "reference")]
    for model in models:
        close(logits_of(model)[0], expected)
    assert called == ["sdpa"] * 2 + ["reference"] * 2


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


PICKLED = [
    (part, call)
    for part in ("model", "base", "peft")
    for call in PICKLED_CALLS
    if (part, call) != ("base", "labels")  # a base model takes none
]


@pytest.mark.parametrize(
    ("part", "call", "compiled"),
    [
        *((*case, False) for case in PICKLED),
        ("peft", "document_ids", True),
        *(
            pytest.param(*case, True, marks=pytest.mark.slow)
            for case in PICKLED
            if case != ("peft", "document_ids")
        ),
    ],
)
def test_a_pickled_model_refuses_every_forward(part, call, compiled):
    torch._dynamo.reset()
    model = new_model("llama")
    patched = fv.patch_model(model.model if part == "base" else model, deterministic=True)
    loaded = pickle.loads(pickle.dumps(lora(patched) if part == "peft" else patched))
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


WRAPPERS = {
    "peft": lora,
    "ddp": DistributedDataParallel,
    "ddp_of_peft": lambda model: DistributedDataParallel(lora(model)),
    "compile": lambda model: torch.compile(model, backend="eager", fullgraph=True),
}


WRAPPED = (
    ("peft", "wrapped_first"),
    ("ddp", "patched_first"),
    ("ddp_of_peft", "wrapped_first"),
    ("compile", "called_first"),  # a graph of the unpatched model must not be used again
)
WHEN = ("patched_first", "wrapped_first", "called_first")


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("wrapper", "when"),
    [
        *WRAPPED,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(WRAPPERS, WHEN)
            if case not in WRAPPED
        ),
    ],
)
def test_works_through_a_wrapper(wrapper, when):
    torch._dynamo.reset()
    model, plain = (new_model("qwen3", num_hidden_layers=1) for _ in range(2))
    oracle = one_by_one(lora(plain) if "peft" in wrapper else plain, BATCH.order)
    if when == "patched_first":
        fv.patch_model(model, "sdpa")
    wrapped = WRAPPERS[wrapper](model).train()
    if when == "called_first":
        wrapped(**PACKED)
    if when != "patched_first":
        assert fv.patch_model(wrapped, "sdpa") is wrapped
    out = wrapped(**PACKED)
    out.loss.backward()
    close(out.logits[0], oracle.logits)
    close(out.loss, oracle.loss)
    found = {
        name.removeprefix("module.").removeprefix("_orig_mod."): x
        for name, x in gradients_of(wrapped).items()
    }
    assert found.keys() == oracle.gradients.keys()
    for name, gradient in found.items():
        close(gradient, oracle.gradients[name])
    fv.unpatch_model(wrapped)
    plain = new_model("qwen3", num_hidden_layers=1)
    plain = lora(plain) if "peft" in wrapper else plain
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
