"""What the blocks of a model put out, by forward hooks.

Shapes: B rows of S tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The model's blocks in order: what holds an attention layer of the text tower.

    Raises:
        NotImplementedError: none is found.
    """
    from flexvarlen.patches.models.layers import attention_layers
    from flexvarlen.patches.parts import ModelParts

    tower = ModelParts.of(model).text_tower(model)
    attention = {id(layer) for layer in attention_layers(tower)}
    found = [m for m in tower.modules() if any(id(part) in attention for part in m.children())]
    if not found:
        raise NotImplementedError(
            f"drift needs blocks that hold attention layers, found none in {type(model).__name__}; "
            "use a model of a verified family."
        )
    return found


class Recorder:
    """Entered, it keeps what the embeddings and each block put out, by forward hooks.

    Hooks trace under torch.compile (what they keep becomes an output of the graph), where
    transformers' own output_hidden_states does not, and gives the last block's after the norm.

    Attributes:
        states: `[B, S, hidden]` each, detached, of the call since `taken`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules = [model.get_input_embeddings(), *blocks_of(model)]
        self.states: list[Tensor] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        self._handles = [module.register_forward_hook(self._keep) for module in self.modules]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def taken(self) -> list[Tensor]:
        """Those of the last call, which are then forgotten."""
        states, self.states = self.states, []
        return states

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        self.states.append(states.detach())
