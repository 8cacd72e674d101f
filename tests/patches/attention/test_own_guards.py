"""A compiled model is guarded on nothing that flexvarlen's modules define, and on all else."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import transformers

import flexvarlen as fv
from flexvarlen.patches.attention import own_guards
from tests.tiny_models import new_model

LAYOUT = fv.PackedLayout.from_lengths([20, 12])
IDS = torch.arange(32)[None]


def guarded(model):
    """The names of what the compiled graph is guarded on."""
    names = []

    def note(entries):
        names.extend(entry.name for entry in entries)
        return [True] * len(entries)

    torch._dynamo.reset()
    options = {"guard_filter_fn": note}
    compiled = torch.compile(model, backend="eager", fullgraph=True, options=options)
    with torch.no_grad():
        compiled(IDS, packed_layout=LAYOUT)
    return names


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_no_guard_on_what_is_ours(backend, monkeypatch):
    model = fv.patch_model(new_model("qwen3"), backend)
    ours = ("forward_inputs'].prepare_inputs", "interface'].LayerKind", "forward_inputs'].CONTEXT")
    kept = guarded(model)
    monkeypatch.setattr(own_guards, "_drop", lambda context: None)
    found = guarded(model)
    for name in ours:
        assert [x for x in found if x.endswith(name)]
        assert not [x for x in kept if x.endswith(name)]
    assert len(found) - len(kept) > 100


@pytest.fixture
def elsewhere(monkeypatch):
    """A package of somebody else's whose name begins as ours."""
    module = ModuleType("flexvarlen_of_mine")
    exec("SCALE = 1.0\ndef scaled(x):\n    return x * SCALE", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def flags(elsewhere):
    """What a model may read: where it stands, its name, two values, what it does to x."""
    cudnn, whole = torch.backends.cudnn, transformers.PreTrainedModel

    def where_fast(x):
        return x * 2 if torch.backends.cudnn.benchmark else x

    return {
        "torch": (cudnn, "benchmark", False, True, where_fast),
        "a class of torch": (torch.Tensor, "mine", 1.0, 3.0, lambda x: x * torch.Tensor.mine),
        "a class of transformers": (
            *(whole, "mine", 1.0, 3.0),
            lambda x: x * transformers.PreTrainedModel.mine,
        ),
        "a package of that name": (elsewhere, "SCALE", 1.0, 3.0, lambda x: elsewhere.scaled(x)),
    }


@pytest.mark.parametrize("which", flags(ModuleType("none")))
def test_what_others_change_is_seen(which, elsewhere, monkeypatch):
    """Dynamo comes to torch and transformers through our modules first: they must stay guarded."""
    where, name, before, after, read = flags(elsewhere)[which]
    model = new_model("qwen3")
    norm = model.model.norm
    plain = type(norm).forward
    norm.__class__ = type("Norm", (type(norm),), {"forward": lambda self, x: read(plain(self, x))})
    fv.patch_model(model, "sdpa")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        monkeypatch.setattr(where, name, before, raising=False)
        first = compiled(IDS, packed_layout=LAYOUT).logits
        monkeypatch.setattr(where, name, after, raising=False)
        second = compiled(IDS, packed_layout=LAYOUT).logits
        assert not torch.equal(first, second)
        torch.testing.assert_close(second, model(IDS, packed_layout=LAYOUT).logits)


@pytest.mark.parametrize(
    ("module", "members", "ours"),
    [
        ("flexvarlen", (), True),
        ("flexvarlen_dot_patches_dot_routing", ("MaskSpec",), True),
        ("flexvarlen_dot_patches_dot_routing", ("MaskSpec", "of", "__func__"), True),
        ("flexvarlen_dot_patches_dot_forward_inputs", ("CONTEXT",), True),
        ("flexvarlen_dot_patches_dot_forward_inputs", ("BOUNDARIES",), True),
        ("flexvarlen_dot_patches_dot_forward_inputs", ("torch", "rsqrt"), False),
        ("flexvarlen_dot_patches_dot_forward_inputs", ("IMPLEMENTATIONS",), False),
        ("flexvarlen_dot_patches_dot_rotary", ("ROPE_INIT_FUNCTIONS",), False),
        ("flexvarlen_dot_attention", ("auto", "Decision"), True),
        ("flexvarlen_dot_attention", ("auto", "torch", "backends"), False),
        ("flexvarlen_dot_attention", ("nothing of this name",), False),
        ("flexvarlen_of_mine", ("SCALE",), False),
        ("torch_dot_nn", ("Module",), False),
    ],
)
def test_what_is_ours(module, members, ours):
    """Containers are not, which others may fill, nor what a module of ours imports."""
    assert own_guards._is_defined_by_us(f"__import_{module}", members) is ours


def test_another_torch_keeps_the_guards():
    class Context:
        """What comptime hands out, without what is private to torch."""

    own_guards._drop(Context())  # raises nothing
