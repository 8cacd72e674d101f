"""fla's kernels as custom operators, which torch.compile does not break at.

fla (the packages fla-core and flash-linear-attention) disables torch.compile in its entry points.
This package calls the forwards and backwards below them, of fla-core 0.6, with the boundaries and
chunks of `RecurrentDocuments`, so no host sync is needed.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

_INSTALL = "pip install 'flash-linear-attention>=0.6,<0.7'"


def why_not(x: Tensor) -> str | None:
    """Why fla cannot run on this tensor, or None."""
    if x.device.type != "cuda":
        return f"fla needs a GPU, got tensors on {x.device.type}"
    if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return (
            "fla's kernels round float32 to TF32, which torch.set_float32_matmul_precision('high') "
            "would allow"
        )
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"fla computes in bfloat16, float16 or float32, got {x.dtype}"
    return _WHY_NOT_INSTALLED


def let_fla_run() -> None:
    """If fla is installed, give it configurations and the step that it refuses on this machine."""
    if torch.cuda.is_available() and _WHY_NOT_INSTALLED is None:
        from flexvarlen.recurrent.fla_configs import use_fla_configs
        from flexvarlen.recurrent.fla_kernels.hopper import avoid_wrong_kernel

        use_fla_configs()
        avoid_wrong_kernel()


def _why_not_installed() -> str | None:
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return f"fla is not installed ({_INSTALL})"
    if not found.startswith("0.6."):
        return f"fla-core must be 0.6, got {found} ({_INSTALL})"
    return None


_WHY_NOT_INSTALLED = _why_not_installed()  # asked once: importlib.metadata does not trace
