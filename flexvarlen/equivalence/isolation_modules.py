"""Which modules of a model are its layers, and what kind each module is."""

from __future__ import annotations

import re

from torch import nn

KINDS: tuple[tuple[str, str], ...] = (
    ("norm", "norm"),
    ("rotary embedding", "rotary|rope$"),
    (
        "linear attention",
        "delta|linear_?attn|linear_?attention|lightning|retention|rwkv|gatedlinear",
    ),
    ("MoE router", "router|topkgate|^gate$"),
    ("MoE experts", "experts?$|moe|sparse"),
    ("layer", "(decoder|encoder|hybrid|^bert|albert)layer$|block$"),
    ("convolution", "conv"),
    ("state space", "mamba|ssm|rglru|recurrent"),
    ("attention", "attention|attn"),
    ("MLP", "mlp|feed_?forward|ffn?$|intermediate"),
    ("embeddings", "embed|^wte$|^wpe$"),
    ("layer", "layer$"),
)
"""Kinds and what the class, or else the last part of the dotted name, has in it; first come."""


def kind_of(module: nn.Module, name: str) -> str:
    """What a module is, by its class, else by its dotted name.

    >>> kind_of(nn.Conv1d(2, 2, 3), "layers.0.mixer.conv1d"), kind_of(nn.Linear(2, 2), "mlp.gate")
    ('convolution', 'MoE router')
    """
    called = name.rpartition(".")[2].lower()
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":  # GPT-2's is linear
        return "MoE router" if called in {"gate", "router"} else "linear"
    for text in (type(module).__name__.lower(), called):
        for kind, pattern in KINDS:
            if re.search(pattern, text):
                return kind
    return "module"


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The model's layers (blocks) by dotted name, in the order in which they are registered.

    They are the elements of the outermost ModuleLists whose elements have modules of their own;
    where there are none, of the outermost ModuleDicts and Sequentials.

    >>> layers_of(nn.ModuleDict({"h": nn.ModuleList([nn.Sequential(nn.ReLU())])})).keys()
    dict_keys(['h.0'])
    """
    for kinds in ((nn.ModuleList,), (nn.ModuleDict, nn.Sequential)):
        found: dict[str, nn.Module] = {}
        outer: list[str] = []
        for name, module in model.named_modules():
            if any(name.startswith(f"{other}.") for other in outer) or not name:
                continue
            children = dict(module.named_children())
            if isinstance(module, kinds) and any(list(c.children()) for c in children.values()):
                outer.append(name)
                found |= {f"{name}.{child}": inner for child, inner in children.items()}
        if found:
            return found
    return {}


def inside(name: str, layer: str) -> bool:
    """Whether the module of that name is the layer, or in it."""
    return name == layer or name.startswith(f"{layer}.")
