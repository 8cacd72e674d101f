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


def why_not_adapters(*modules: nn.Module) -> str | None:
    """Why the adapters of these modules do not go with several documents in a row, or None."""
    for module in modules:
        adapters = getattr(module, "peft_config", None)  # configs by name, as PEFT stores them
        for config in adapters.values() if isinstance(adapters, Mapping) else ():
            name, kind = type(config).__name__, getattr(config, "peft_type", None)
            if getattr(config, "alora_invocation_tokens", None):
                name = f"{name} with alora_invocation_tokens"
            elif str(getattr(kind, "value", kind)) in _ON_EACH_TOKEN:
                continue
            return (
                "a PEFT adapter must be known to act on each token alone, as LoRA does, and not on "
                f"a row, whose documents would share its effect, got {name}; use LoRA or another "
                "adapter of weights, or one document per row without patch_model."
            )
    return None


def _guard_prompts(peft_model: ModuleType) -> None:
    """Make PEFT's prompt learning refuse a patched model.

    It wraps the model, which cannot see it, and drops the position_ids that mark documents.
    """
    cls: Any = peft_model.PeftModel  # type: ignore[attr-defined]
    get_prompt = cls.get_prompt

    @functools.wraps(get_prompt)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.get_base_model()
        is_patched = any(
            ATTRIBUTE in vars(part) for part in (inner, getattr(inner, "base_model", inner))
        )
        why = why_not_adapters(self) if is_patched else None
        if why is not None:
            raise NotImplementedError(why)
        return get_prompt(self, *args, **kwargs)

    cls.get_prompt = guarded


after_import("peft.peft_model", _guard_prompts)
