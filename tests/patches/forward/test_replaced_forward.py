"""A `forward` that is set after `patch_model`: it raises until the model is patched again."""

from __future__ import annotations

import copy
import functools
from types import MethodType

import accelerate
import peft
import pytest
import torch

import flexvarlen as fv
from tests.oracle import assert_as_accurate
from tests.tiny_models import exact_and_baseline, new_model, one_row

BATCH = one_row()
NUMBERED = {"attention_mask": BATCH.document_ids, "labels": BATCH.ids}
SAYS = r"patch_model again"


def check(model):
    """Logits and loss of the documents one by one."""
    exact, baseline = exact_and_baseline("llama", BATCH.order)
    with torch.no_grad():
        out = model(BATCH.ids, **NUMBERED)
    assert_as_accurate(out.logits[0], exact.logits, baseline.logits, 2)
    assert out.loss.item() == pytest.approx(exact.loss.item(), rel=1e-5)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    yield
    torch._dynamo.reset()


def own_method(module):
    """As Liger does on an instance, in its own words."""

    def replaced(self, *args, **kwargs):
        return type(self).forward(self, *args, **kwargs)

    module.forward = MethodType(replaced, module)


def class_method(module):
    module.forward = MethodType(type(module).forward, module)


def closure(module):
    module.forward = lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)


def of_class(module):
    del module.forward


SETTERS = (own_method, class_method, closure, of_class)


@pytest.mark.parametrize(
    ("part", "setter", "compiled"),
    [
        *((part, setter, False) for part in ("head", "both") for setter in SETTERS),
        ("both", own_method, True),
        *(pytest.param("both", setter, True, marks=pytest.mark.slow) for setter in SETTERS[1:]),
    ],
)
def test_raises_until_patched_again(part, setter, compiled):
    model = fv.patch_model(new_model("llama"), "sdpa")
    for module in (model, model.model)[: 2 if part == "both" else 1]:
        setter(module)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with pytest.raises(Exception if compiled else ValueError, match=SAYS):
        run(BATCH.ids, **NUMBERED)
    check(fv.patch_model(model, "sdpa"))
    fv.unpatch_model(model)
    plain = new_model("llama")
    assert torch.equal(model(BATCH.ids).logits, plain(BATCH.ids).logits)


@pytest.mark.parametrize("setter", SETTERS)
def test_of_the_base_model_alone(setter):
    """It does not note that its head handed it documents."""
    model = fv.patch_model(new_model("llama"), "sdpa")
    setter(model.model)
    with pytest.raises(ValueError, match=SAYS):
        check(model)
    with pytest.raises(ValueError, match=SAYS):
        model.model(BATCH.ids, attention_mask=BATCH.document_ids)
    with pytest.raises(ValueError, match=SAYS):  # what the layers see does not count
        model.model(BATCH.ids, position_ids=BATCH.position_ids)
    check(fv.patch_model(model, "sdpa"))
    states = model.model(BATCH.ids, attention_mask=BATCH.document_ids).last_hidden_state
    exact, baseline = exact_and_baseline("llama", BATCH.order)
    assert_as_accurate(model.lm_head(states)[0], exact.logits, baseline.logits, 2)


def test_a_base_model_on_its_own_is_one_graph():
    """Whether its head is still wrapped is asked while tracing."""
    model = fv.patch_model(new_model("llama"), "sdpa")
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)
    exact, baseline = exact_and_baseline("llama", BATCH.order)
    with torch.no_grad():
        states = compiled(BATCH.ids, attention_mask=BATCH.document_ids).last_hidden_state
        assert_as_accurate(model.lm_head(states)[0], exact.logits, baseline.logits, 2)


def test_below_a_peft_model():
    """Which calls no hook of the model, but `model.forward`."""
    model = fv.patch_model(new_model("llama"), "sdpa")
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    own_method(tuned.get_base_model())
    with pytest.raises(ValueError, match=SAYS):
        tuned(BATCH.ids, **NUMBERED)
    check(fv.patch_model(tuned, "sdpa"))


def test_hooks_of_accelerate_that_took_ours_with_them():
    model = new_model("llama")
    accelerate.cpu_offload(model, execution_device="cpu")
    check(fv.patch_model(model, "sdpa"))
    accelerate.hooks.remove_hook_from_submodules(model)
    with pytest.raises(ValueError, match=SAYS):
        model(BATCH.ids, **NUMBERED)
    check(fv.patch_model(model, "sdpa"))
    fv.unpatch_model(model)
    assert not [name for x in model.modules() for name in vars(x) if "flexvarlen" in name]


def test_a_copy_is_told_of_its_own_head():
    model = fv.patch_model(new_model("llama"), "sdpa")
    twin = copy.deepcopy(model)
    own_method(twin)
    check(model)
    with pytest.raises(ValueError, match=SAYS):
        twin(BATCH.ids, **NUMBERED)
    base = copy.deepcopy(model.model)  # without a head
    own_method(model)
    assert base(BATCH.ids, attention_mask=BATCH.document_ids).last_hidden_state.isfinite().all()


class _Object:
    def __init__(self, forward):
        self.of_before = forward

    def __call__(self, *args, **kwargs):
        return self.of_before(*args, **kwargs)


def _wrapped(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


AROUND = {
    "closure": lambda forward: lambda *args, **kwargs: forward(*args, **kwargs),
    "default": lambda forward: lambda *args, _own=forward, **kwargs: _own(*args, **kwargs),
    "wraps": _wrapped,
    "partial": functools.partial,
    "object": _Object,
}


@pytest.mark.parametrize("how", AROUND)
def test_a_wrapper_around_ours_is_no_replacement(how):
    model = fv.patch_model(new_model("llama"), "sdpa")
    for module in (model, model.model):
        module.forward = AROUND[how](module.forward)
    check(model)
    base = {"input_ids": BATCH.ids, "attention_mask": BATCH.document_ids}
    if how == "wraps":
        assert model.model(**base) is not None
    else:
        with pytest.raises(ValueError, match=SAYS):  # of a head that may be anything
            model.model(**base)
    check(fv.patch_model(model, "sdpa"))
    assert model.model(**base) is not None


# ---- how a forward is called ----


@pytest.mark.parametrize("patch", [False, True])
def test_arguments_that_the_forward_does_not_take(patch):
    model = new_model("llama")
    if patch:
        fv.patch_model(model, "sdpa")
    named = 9
    with pytest.raises(TypeError, match="positional argument"):
        model(BATCH.ids, *[None] * named, BATCH.position_ids)
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(BATCH.ids, input_ids=BATCH.ids)
    model(BATCH.ids, None, BATCH.position_ids)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.sampled(2)
def test_a_loss_of_the_users_own_gets_what_it_got(when, compiled):
    def loss(logits, labels, vocab_size):
        assert vocab_size == logits.shape[-1]
        return logits.sum() + (labels != -100).sum()

    model = new_model("llama")
    if when == "before":
        model.loss_function = loss
    fv.patch_model(model, "sdpa")
    if when == "after":
        model.loss_function = loss
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    for _ in range(2):
        with torch.no_grad():
            out = run(BATCH.ids, **NUMBERED)
        kept = BATCH.ids.numel() - len(BATCH.order)
        assert out.loss.item() == pytest.approx(out.logits.sum().item() + kept, rel=1e-4)
    fv.unpatch_model(model)
    assert model.loss_function is loss


def test_a_base_model_patched_again_still_refuses_a_head_without_its_wrapper():
    model = fv.patch_model(new_model("llama"), "sdpa")
    with fv.patched(model.model, "sdpa"):
        pass
    own_method(model)
    with pytest.raises(ValueError, match=SAYS):
        model(BATCH.ids, **NUMBERED)
