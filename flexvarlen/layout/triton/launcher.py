"""`Launcher`: a Triton kernel whose repeated calls cost the host only the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; Triton compiles a separate kernel for less aligned pointers


class Launcher:
    """A Triton kernel with its constants.

    Triton looks up the compiled kernel by all arguments at every call, which takes longer on the
    host than our kernels run (for BlockMask tables 24 µs, of which the launch is 9 µs). A launcher
    keeps the compiled kernel, so all its calls must have the same signature: tensors of the same
    dtypes, the same inputs None, and each number an int32 that the kernel lists under
    `do_not_specialize`.

    Args:
        kernel: a `triton.jit` function of inputs, outputs, numbers and constants, in this order.
        constants: its `tl.constexpr` parameters, and options such as `num_warps`.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel = kernel
        # debug keeps device_assert; its integer overflow checks would dominate the kernel's time.
        self.constants = constants | {"debug": True, "sanitize_overflow": False}
        self.values = [constants[name] for name in kernel.arg_names if name in constants]
        self._compiled: dict[int, Any] = {}

    def __call__(
        self,
        programs: int,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        numbers: Sequence[int],
    ) -> None:
        """Run `programs` programs on the first input's device, on its current stream.

        `outputs` must be 16-byte aligned, as newly allocated tensors are.
        """
        assert inputs[0] is not None
        device = inputs[0].device
        if device.index == torch.cuda.current_device():
            self._launch(device.index, programs, inputs, outputs, numbers)
        else:
            with torch.cuda.device(device):
                self._launch(device.index, programs, inputs, outputs, numbers)

    def _launch(
        self,
        device: int,
        programs: int,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        numbers: Sequence[int],
    ) -> None:
        aligned = all(x is None or x.data_ptr() % _ALIGNMENT == 0 for x in inputs)
        compiled = self._compiled.get(device) if aligned else None
        if compiled is not None:
            compiled[(programs, 1, 1)](*inputs, *outputs, *numbers, *self.values)
            return
        compiled = self.kernel[(programs,)](*inputs, *outputs, *numbers, **self.constants)
        if aligned and compiled is not None:  # None: Triton's interpreter
            self._compiled[device] = compiled
