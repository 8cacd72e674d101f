"""Arguments of public functions: what they must be, in a sentence, before anything is computed."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

INT32_MAX = 2**31 - 1


def to_int_or_none(value: Any) -> int | None:
    """`value` as an int if it is an integer, of Python, numpy or torch; None if not, or a bool."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    if isinstance(value, Tensor) and value.dtype == torch.bool:  # which has an __index__
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def require_int_at_least(name: str, value: Any, least: int) -> int:
    """`value` as an int.

    Raises:
        ValueError: it is no integer, or below `least`.
    """
    number = to_int_or_none(value)
    if number is None or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}; fix it.")
    return number


def require_tensor(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} must be a tensor, got {type(value).__name__}; make one with torch.tensor()."
        )


def one_row(x: Tensor, total: int) -> Tensor:
    """`[T, ...]` or `[1, T, ...]` -> `[T, ...]`.

    Raises:
        ValueError: x has another shape.
    """
    require_tensor("x", x)
    x_T = x[0] if x.shape[:2] == (1, total) else x
    if x_T.shape[:1] != (total,):
        raise ValueError(
            f"x must have shape [{total}, ...] or [1, {total}, ...] for this layout, got "
            f"{tuple(x.shape)}; flatten rows with x.flatten(0, 1)."
        )
    return x_T


def require_layout(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a `PackedLayout`."""
    if not hasattr(value, "cu_seqlens_host"):  # its module imports this one
        raise ValueError(
            f"{name} must be a PackedLayout, got {type(value).__name__}; make one with "
            "PackedLayout.from_lengths()."
        )


def is_integer_tensor(x: Tensor) -> bool:
    """Whether the dtype is one of integers: bool is not."""
    return not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)


def whole_numbers(name: str, numbers: Tensor) -> Tensor:
    """int64 of a tensor of integers, as differences in a small dtype wrap around.

    Raises:
        ValueError: another dtype; bfloat16 has no integer between 256 and 258.
    """
    if not is_integer_tensor(numbers):
        raise ValueError(
            f"{name} must be integers, got {numbers.dtype}; keep them in torch.int64 when a batch "
            "is cast."
        )
    return numbers.to(torch.int64)


def integers(
    name: str,
    values: Tensor | Iterable[int],
    advice: str = "pass a number of tokens for each document",
) -> list[int]:
    """Integers of a tensor, of numpy or of Python, as a list.

    Raises:
        ValueError: one is no integer.
    """
    found = []
    if not isinstance(values, Iterable) or getattr(values, "ndim", 1) != 1:
        raise ValueError(f"{name} must be a list or a 1D array of integers, got {values!r:.80}.")
    for i, value in enumerate(values.tolist() if isinstance(values, Tensor) else values):
        whole = value if type(value) is int else to_int_or_none(value)
        if whole is None:
            raise ValueError(f"{name} must be integers, got {value!r} at index {i}; {advice}.")
        found.append(whole)
    return found


def int64s(name: str, values: Tensor | Iterable[int], advice: str) -> NDArray[np.int64]:
    """The same as int64 `[N]` on the host, at the speed of arrays.

    Raises:
        ValueError: one is no integer.
    """
    if isinstance(values, Tensor) and values.ndim == 1 and is_integer_tensor(values):
        return values.cpu().numpy().astype(np.int64)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        return values.astype(np.int64)
    if isinstance(values, list) and values and type(values[0]) is int:
        with suppress(TypeError):  # of what is no integer, which is named below
            return np.array(array("q", values))
    return np.array(integers(name, values, advice), np.int64)


def require_device(device: torch.device | str) -> torch.device:
    """The device.

    Raises:
        ValueError: it is a CUDA device, and torch sees none.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device must be one of torch's, got {device!r}; pass 'cuda' or 'cpu'."
        ) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device must be one that torch sees, got {str(device)!r} without a CUDA device; pass "
            "'cpu', or check the driver with `flexvarlen doctor`."
        )
    return found


def checked_sizes(
    total_tokens: int | None, capacity: int | None, max_seqlen_bound: int | None
) -> tuple[int | None, int | None, int | None]:
    """The sizes as ints, None where not given.

    Raises:
        ValueError: one is no integer, negative, or does not fit in int32.
    """
    sizes = []
    for name, value in (
        ("total_tokens", total_tokens),
        ("capacity", capacity),
        ("max_seqlen_bound", max_seqlen_bound),
    ):
        size = None if value is None else to_int_or_none(value)
        if value is not None and (size is None or not 0 <= size <= INT32_MAX):
            raise ValueError(
                f"{name} must be an integer that fits in int32, at least 0, got {value!r}; count "
                "tokens (documents, for capacity), and split the row if it is longer."
            )
        sizes.append(size)
    return sizes[0], sizes[1], sizes[2]
