"""Why the PEFT adapters of a model cannot run on packed rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from flexvarlen.upstream import required

_ON_EACH_TOKEN = {
    *("ADALORA", "ADAMSS", "ADAPTION_PROMPT", "BEFT", "BOFT", "C3A", "DEFT", "DELORA"),
    *("FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA"),
    *("LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD"),
    *("SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA"),
    *("VERA", "WAVEFT"),
}
"""PEFT's methods (`PeftType`) that act on each token alone; the tests check each of them."""


def why_not_adapters(*modules: nn.Module) -> str | None:
    """Why the adapters of these modules cannot run on several documents in a row, or None."""
    for module in modules:
        adapters = _adapters(module)
        for config in adapters.values() if isinstance(adapters, Mapping) else ():
            name, kind = type(config).__name__, _kind_of(config)
            if kind == "LORA" and required(config, "alora_invocation_tokens", _REFUSING):
                name = f"{name} with alora_invocation_tokens"
            elif kind in _ON_EACH_TOKEN:
                continue
            return (
                "a PEFT adapter must act on each token alone, as LoRA does, or documents of a row "
                f"would share its effect, got {name}; use LoRA or another adapter of weights, or "
                "one document per row without patch_model."
            )
    return None


_REFUSING = "refusing adapters whose effect depends on the row"


def _kind_of(config: Any) -> str:
    """The name of an adapter's method; "" or similar if the config does not say."""
    kind = getattr(config, "peft_type", None)
    return str(getattr(kind, "value", kind))


def _adapters(module: nn.Module) -> Any:
    """A module's adapter configs by name, as PEFT stores them; None if it has no adapters."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is not None and isinstance(module, tuners.BaseTuner):
        return required(module, "peft_config", _REFUSING)
    return getattr(module, "peft_config", None)  # a transformers model may have them too
