"""PEFT's adapters: those whose effect on a token depends on the rest of its row are refused.

A row of several documents would share one effect. A patched model sees the adapters inside it, and
those that only wrap it (prompt learning) reach `PeftModel.get_prompt` in each forward.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

from flexvarlen.import_hook import after_import
from flexvarlen.patches.state import ATTRIBUTE

_ON_EACH_TOKEN = {
    *("ADALORA", "ADAMSS", "ADAPTION_PROMPT", "BEFT", "BOFT", "C3A", "DEFT", "DELORA"),
    *("FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA"),
    *("LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD"),
    *("SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA"),
    *("VERA", "WAVEFT"),
}
"""PEFT's methods (`PeftType`) that act on each token alone, as the tests find of each."""


def why_adapters_depend_on_rows(adapters: Any) -> str | None:
    """Which of a module's `peft_config` depends on the row, if one does.

    Args:
        adapters: what PEFT stores as `peft_config`: configs by name; or None.
    """
    for config in adapters.values() if isinstance(adapters, Mapping) else ():
        name = type(config).__name__
        if getattr(config, "alora_invocation_tokens", None):
            return f"{name} with alora_invocation_tokens"
        kind = getattr(config, "peft_type", None)
        if str(getattr(kind, "value", kind)) not in _ON_EACH_TOKEN:
            return name
    return None


def has_adapters_of_rows(model: nn.Module) -> bool:
    """Whether a module inside has adapters whose effect depends on the row."""
    found = (getattr(module, "peft_config", None) for module in model.modules())
    return any(why_adapters_depend_on_rows(adapters) is not None for adapters in found)


def refuse_adapters_of_rows(*modules: nn.Module) -> None:
    """Refuse modules with adapters whose effect depends on the row.

    Raises:
        NotImplementedError: one has such.
    """
    for module in modules:
        why = why_adapters_depend_on_rows(getattr(module, "peft_config", None))
        if why is not None:
            raise NotImplementedError(
                "a PEFT adapter must be known to act on each token alone, as LoRA does, and not on "
                f"a row, whose documents would share its effect, got {why}; use LoRA or another "
                "adapter of weights, or one document per row without patch_model."
            )


def _guard_prompts(peft_model: ModuleType) -> None:
    """Make PEFT's prompt learning refuse a patched model.

    It wraps the model, which cannot see it, and drops the position_ids that mark documents.
    """
    cls: Any = peft_model.PeftModel  # type: ignore[attr-defined]
    get_prompt = cls.get_prompt

    @functools.wraps(get_prompt)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.get_base_model()
        if any(ATTRIBUTE in vars(part) for part in (inner, getattr(inner, "base_model", inner))):
            refuse_adapters_of_rows(self)
        return get_prompt(self, *args, **kwargs)

    cls.get_prompt = guarded


after_import("peft.peft_model", _guard_prompts)
