"""What the blocks of a model put out, by forward hooks.

Shapes: B rows of S tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from flexvarlen.patches.isolation.blame import layers_of
from flexvarlen.patches.parts import ModelParts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Recorder:
    """Entered, it keeps what the embeddings and each block put out, by forward hooks.

    Hooks trace under torch.compile (what they keep becomes an output of the graph), where
    transformers' own output_hidden_states does not, and gives the last block's after the norm.

    Attributes:
        states: `[B, S, hidden]` each, detached, of the call since `taken`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        tower = ModelParts.of(model).text_tower(model)
        self.modules = [model.get_input_embeddings(), *layers_of(tower).values()]
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
