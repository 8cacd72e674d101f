"""The 13 packings of a public study of varlen kernels, which drift and the benchmarks measure.

The study: https://github.com/vllm-project/vllm-omni/issues/4418.
"""

from __future__ import annotations

PACKINGS: tuple[tuple[int, ...], ...] = (
    (256,),
    (319,),
    (320,),
    (320, 320),
    (321,),
    (384,),
    (299, 1115),
    (1088, 2368),
    (1088, 4160),
    (4160,),
    (4160,) * 2,
    (4160,) * 4,
    (4160,) * 8,
)
"""Tokens of each document; 24 heads of 128, not causal."""


def packing_name(lengths: tuple[int, ...]) -> str:
    """The name of a packing, as the study writes it.

    >>> packing_name((4160, 4160)), packing_name((320, 320)), packing_name((3, 5))
    ('4160×2', '320,320', '3,5')
    """
    is_long = len(lengths) > 1 and len(set(lengths)) == 1 and lengths[0] > 1000
    return f"{lengths[0]}×{len(lengths)}" if is_long else ",".join(map(str, lengths))
