"""`lm_head`: a model's head as a function of hidden states, with its family's scales and caps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.parallel.sharded_parameters import is_fsdp2
from flexvarlen.patches.inner_model import transformers_model
from flexvarlen.patches.parts import base_of, name_of
from flexvarlen.patches.state import ATTRIBUTE, Patch


def lm_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function from a base model's last hidden states to the whole model's logits.

    `model.lm_head` alone omits what some families do after it: Granite and Cohere scale the logits,
    Gemma 2 and 4 cap them. This function runs the forward of the model's class on the given states,
    so it needs no list of families. Use it as
    `document_logprobs(hidden, ..., head=fv.lm_head(model))`.

    Args:
        model: a transformers model with a language-model head, patched or not, also inside PEFT or
            torch.compile wrappers.

    Returns:
        A function of hidden states `[..., H]` that returns logits `[..., V]`. It uses the model's
        modules with their current parameters: call `lm_head` again after a module was replaced
        (LoRA on the head, resized embeddings). Differentiable. No sync; traces
        under `fullgraph=True`.

    Raises:
        ValueError: the model has no such head.
        NotImplementedError: FSDP2 shards the head as a unit, and it has a hook or units inside.

    >>> import torch, flexvarlen as fv
    >>> from flexvarlen.verify.models import build_model
    >>> model = build_model("llama")[0]
    >>> fv.lm_head(model)(torch.zeros(5, model.config.hidden_size)).shape[0]
    5
    """
    inner = transformers_model(model)
    name = name_of(base_of(inner), inner)
    if not name or inner.get_output_embeddings() is None:
        raise ValueError(
            "model must have a language-model head around its base model, got "
            f"{type(inner).__name__}; pass a ...ForCausalLM model, or call the head directly."
        )
    return _Head(inner, name)


class _Head:
    """Calls the forward of a model's class with given states instead of the base model's output.

    Args:
        model: the whole model.
        base: the attribute that holds its base model.
    """

    def __init__(self, model: Any, base: str) -> None:
        # Shares parameters; the model itself stays as it is. FSDP2's classes have no copy.copy.
        self._head: Any = object.__new__(type(model))
        modules = {**model._modules, base: _GivenStates(model._modules[base])}
        head = model.get_output_embeddings()
        self._learning = [x for name, x in modules.items() if name != base]
        self._weight = getattr(head, "weight", None)
        if any(map(is_fsdp2, head.modules())):
            modules |= {name: _Gathered(head) for name, x in modules.items() if x is head}
        copied = self._head.__dict__
        for name in _attributes(model):
            if name in model.__dict__:
                copied[name] = model.__dict__[name]
        copied["_modules"] = modules

    def parameters(self) -> list[Tensor]:
        """The parameters beside the base model's; FSDP1 may have a tensor in their place."""
        found = [x for module in self._learning for x in module.parameters()]
        return found if found or self._weight is None else [self._weight]

    def __call__(self, hidden: Tensor) -> Tensor:
        states = hidden.reshape(1, -1, hidden.shape[-1])
        # The class's forward, as an instance's forward (patch_model's) is bound to the whole model.
        out = type(self._head).forward(self._head, inputs_embeds=states, return_dict=True)
        logits: Tensor = out.logits  # not the first output where routers have a loss
        return logits.view(*hidden.shape[:-1], logits.shape[-1])


def _attributes(model: nn.Module) -> Iterable[str]:
    """The names of a model's attributes, which torch 2.11 cannot list while it traces."""
    patch: Patch | None = model.__dict__.get(ATTRIBUTE)
    return vars(model) if patch is None or not torch.compiler.is_compiling() else patch.attributes


class _Gathered(nn.Module):
    """A head that FSDP2 shards as a unit, with its weights gathered until the end of the backward.

    FSDP2's own hooks free them in the backward of one call, though other calls still need them. So
    the forward runs without the hooks, on inputs of the dtype that they would give it.
    """

    module: Any

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        hooks = module._forward_hooks, module._forward_pre_hooks  # FSDP2 has one of each
        inside = any(is_fsdp2(x) for x in module.modules() if x is not module)
        if inside or max(map(len, hooks)) > 1 or module._backward_hooks:
            raise NotImplementedError(
                "lm_head runs no hooks of a head that FSDP2 shards as a unit, and no units inside "
                f"it, got a {type(module).__name__} with one; remove it, or call fully_shard on "
                "the model and its layers alone."
            )
        self.__dict__["module"] = module  # not as a child: it stays the model's
        self.module.unshard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)  # Mamba-2 reads its head's weight

    def forward(self, x: Tensor) -> Any:
        """Return the module's output."""
        self.module.unshard()
        out = self.module.forward(x.to(self.module.weight.dtype))
        if out.requires_grad:  # another backward may have freed them since
            out.register_hook(lambda _: self.module.unshard())
        return out


class _GivenStates(nn.Module):
    """Replaces a base model: returns the states that it is called with."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.__dict__["base"] = base  # not as a child

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)  # Falcon-H1's head multiplies by a number of it

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Outputs:
        """Return the given states as a base model's outputs."""
        return _Outputs(inputs_embeds)


class _Outputs:
    """A base model's outputs with hidden states alone."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
