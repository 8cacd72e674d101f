"""Hand malformed boundaries to a compiled graph, and print what comes of it: `device case...`.

A process of its own, started by test_compiled_attention.py: where the graph does not refuse them, a
kernel may well read past its memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from flexvarlen import PackedLayout, packed_attention

TOKENS = 128
GOOD = "well_formed"
ORDER = (
    "flexvarlen: cu_seqlens must start at 0, never decrease, and end at or before the row's last"
)


@dataclass(frozen=True)
class Case:
    """Boundaries, int32, or flags of document starts; and the sentence that must come."""

    name: str
    sentence: str
    cu_seqlens: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()


CASES = {
    case.name: case
    for case in (
        Case("not_from_zero", ORDER, (5, 20, 60, 128)),
        Case("decreasing", ORDER, (0, 40, 30, 128)),
        Case("past_the_end", ORDER, (0, 40, 60, 4000)),
        Case("negative", ORDER, (0, -40, 60, 128)),
        Case(
            "longer_than_the_bound",
            "flexvarlen: a document is longer than max_seqlen_bound",
            (0, 1, 128, 128),
        ),
        Case(
            "more_than_the_capacity",
            "flexvarlen: more documents in the row than capacity",
            starts=(0, 20, 40, 60, 80),
        ),
    )
}


def from_boundaries(q, k, v, cu_seqlens, backend):
    layout = PackedLayout.from_cu_seqlens(cu_seqlens, total_tokens=TOKENS, max_seqlen_bound=100)
    return packed_attention(q, k, v, layout, backend=backend)


def from_flags(q, k, v, starts, backend):
    layout = PackedLayout.from_starts(starts, capacity=4)
    return packed_attention(q, k, v, layout, backend=backend)


def main() -> None:
    device, *cases = sys.argv[1:]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    backend = "sdpa" if device == "cpu" else "varlen"
    q, k, v = (torch.randn(TOKENS, heads, 64, device=device, dtype=dtype) for heads in (4, 2, 2))

    def attempt(case: Case) -> None:
        if case.starts:
            given = torch.zeros(TOKENS, dtype=torch.bool)
            given[list(case.starts)] = True
        else:
            given = torch.tensor(case.cu_seqlens, dtype=torch.int32)
        # On the CPU, where inductor is slow, it compiles one of two graphs.
        compiler = "aot_eager" if case.starts and device == "cpu" else "inductor"
        function = from_flags if case.starts else from_boundaries
        function = torch.compile(function, fullgraph=True, backend=compiler)
        try:
            function(q, k, v, given.to(device), backend)
            if device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{case.name}: {error}", flush=True)
        else:
            print(f"{case.name}: no error", flush=True)

    attempt(Case(GOOD, "", (0, 40, 100, 128)))
    attempt(Case(GOOD, "", starts=(0, 20, 40, 60)))
    for name in cases:
        attempt(CASES[name])


if __name__ == "__main__":
    main()
