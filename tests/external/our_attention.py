"""transformers made to run our attention wherever a test asks for its default.

Three ways, one a test class:

- `name`: where transformers would set "sdpa" (asked for, or as the default), it sets
  `flexvarlen_<backend>`. All that a plugin name alone can do is tested.
- `patched`: every model is patched as a user would: after it is constructed, or after its weights
  are loaded. A head that `patch_model` refuses gets its base model patched, as the refusal says.
  Where a test sets another attn_implementation, the model is unpatched first, as the error says.
- `stock`: transformers as it is. A test that fails here fails without us.

A model that a test asks to be "eager" stays so: it is what ours is compared with.

Hooks on construction, rather than subclasses of the models: many tests reload a model by
`from_pretrained` or an Auto class, which know transformers' own classes only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.patches import IMPLEMENTATIONS
from flexvarlen.patches import api as model
from flexvarlen.patches.attention.packed_forward import PackedForward

WAYS = ("name", "patched", "stock")


def name_of(backend: str) -> str:
    """The attn_implementation of a backend."""
    return next(name for name, its in IMPLEMENTATIONS.items() if its == backend)


class OurAttention:
    """The hooks of one test.

    Args:
        way: of `WAYS`.
        calls: counts attention calls of layers that are packed.
    """

    def __init__(self, way: str, backend: str, classes: tuple[type, ...]) -> None:
        self.way, self.backend, self.classes = way, backend, classes
        self.calls = 0
        self._depth = 0  # inside a constructor, a loader or patch_model: what is inside waits

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hook transformers, for one test."""
        self._count_calls(monkeypatch)
        if self.way != "stock":
            self._lift_limits(monkeypatch)
        if self.way == "name":
            self._replace_sdpa(monkeypatch)
        elif self.way == "patched":
            self._patch_after_construction(monkeypatch)

    def _count_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        route = PackedForward.route

        @functools.wraps(route)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return route(*args, **kwargs)

        monkeypatch.setattr(PackedForward, "route", counted)

    def _lift_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let every model ask for sdpa, in whose place ours stands.

        transformers gives Gemma 2 and gpt-oss eager instead, as sdpa has no softcap and no sinks.
        """
        for of in self.classes:
            monkeypatch.setattr(of, "_supports_sdpa", True)
            monkeypatch.setattr(of, "_compatible_flash_implementations", None)

    # ---- by the plugin's name ----

    def _replace_sdpa(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check = PreTrainedModel._check_and_adjust_attn_implementation

        @functools.wraps(check)
        def ours_for_sdpa(model: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
            found = check(model, *args, **kwargs)
            return name_of(self.backend) if found == "sdpa" else found

        monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", ours_for_sdpa)

    # ---- patched ----

    @contextmanager
    def _inside(self) -> Iterator[bool]:
        """Whether nothing else of ours is under way."""
        self._depth += 1
        try:
            yield self._depth == 1
        finally:
            self._depth -= 1

    def _patch_after_construction(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for of in self.classes:
            monkeypatch.setattr(of, "__init__", self._patching(of.__init__))
        load = PreTrainedModel.from_pretrained.__func__

        @functools.wraps(load)
        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            with self._inside() as outermost:
                loaded = load(cls, *args, **kwargs)
                if outermost:
                    self._patch(loaded[0] if isinstance(loaded, tuple) else loaded)
            return loaded

        set_name = PreTrainedModel.set_attn_implementation

        @functools.wraps(set_name)
        def set_attn_implementation(inner: PreTrainedModel, name: Any, **kwargs: Any) -> None:
            with self._inside() as outermost:
                if outermost:
                    fv.unpatch_model(inner)
                    fv.unpatch_model(inner.base_model)
                set_name(inner, name, **kwargs)
                if outermost:
                    self._patch(inner)

        monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
        monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", set_attn_implementation)

    def _patching(self, construct: Any) -> Any:
        @functools.wraps(construct)
        def __init__(inner: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
            with self._inside() as outermost:
                construct(inner, *args, **kwargs)
                if outermost:
                    self._patch(inner)

        return __init__

    def _patch(self, inner: PreTrainedModel) -> None:
        if inner.config._attn_implementation == "eager":
            return
        try:
            fv.patch_model(inner, self.backend)
        except NotImplementedError as refusal:  # a head whose labels are not known
            if "patch its base model" not in str(refusal):
                raise
            fv.patch_model(inner.base_model, self.backend)


def is_patched(inner: PreTrainedModel) -> bool:
    """Whether the model, or its base model, bears a patch."""
    return model.ATTRIBUTE in inner.base_model.__dict__
