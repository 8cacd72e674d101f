"""`operator_drift`: attention alone, on random inputs, every way that should make no difference.

A row a case, backend and comparison:

| comparison | of what |
|---|---|
| exact | all documents in one call, against fp64 and the plain peer; what is wrong is named |
| batch-serial | all in one call, against one call a document, which is held against fp64 too |
| run-run | the same call again |
| place | the documents in another order: each among other neighbours, at another place |
| eager-compiled | torch.compile(fullgraph=True), against eager |
| backend-backend | one call a document, of each two backends |
| runtime | milliseconds, interleaved; not of what is wrong |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import flexvarlen as fv
from flexvarlen.drift.op.case_run import CaseRun, Settings
from flexvarlen.drift.op.cases import OpCase
from flexvarlen.rows import Row, run_environment

OF_ONE = ("exact", "batch-serial", "run-run", "place", "eager-compiled")
COMPARISONS = (*OF_ONE, "backend-backend", "runtime")

QUICKLY_COMPILED = ("sdpa", "reference")
"""What is compiled on the CPU; the others take many seconds for each row's length."""


def operator_drift(
    cases: Sequence[OpCase],
    backends: Sequence[str] | str = "all",
    *,
    device: torch.device | str,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    train: bool = True,
    comparisons: Sequence[str] = COMPARISONS,
    compile: Sequence[str] | None = None,
    repeats: int = 20,
    seed: int = 0,
    append: Callable[[Row], None] | None = None,
    commit: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Run the comparisons; nothing that a backend raises ends the run.

    Args:
        cases: see `flexvarlen.drift.op.cases.SUITES`.
        backends: names of `flexvarlen.BACKENDS`, or "all". One that cannot serve a case gets rows
            "unsupported" with its reason; one without a backward is compared forward only.
        device: where all of it runs.
        dtypes: of the tensors, one after another.
        train: whether gradients are compared and timed.
        comparisons: of `COMPARISONS`.
        compile: the backends that "eager-compiled" takes. Default: all, on the CPU
            `QUICKLY_COMPILED`.
        repeats: timed calls of each kind.
        seed: of the inputs, and of the other order.
        append: called with each row as soon as it is there.
        commit: recorded in place of what git finds.
        progress: called with what is being done.

    Returns:
        The rows, in the order of the cases.

    Raises:
        ValueError: an unknown backend or comparison.
        DeviceLostError: a kernel broke the device, after its row.

    Synchronizes the device.
    """
    named = _names(backends)
    _check("comparisons", comparisons, COMPARISONS)
    device = torch.device(device)
    if compile is None:
        compile = compiled_backends(named, device)
    rows: list[Row] = []
    environment = run_environment(device, commit)

    def write(row: Row) -> None:
        rows.append(row)
        if append is not None:
            append(row)

    for dtype in dtypes:
        for case in cases:
            settings = Settings(
                device, dtype, train, tuple(comparisons), tuple(compile), repeats, seed
            )
            CaseRun(case, settings, environment, write, progress or _silent).run(named)
    return rows


def compiled_backends(backends: Sequence[str], device: torch.device) -> list[str]:
    """Those of the backends that "eager-compiled" takes where nothing else is said."""
    return [name for name in backends if device.type == "cuda" or name in QUICKLY_COMPILED]


def _names(backends: Sequence[str] | str) -> list[str]:
    if isinstance(backends, str):
        if backends == "all":
            return list(fv.BACKENDS)
        backends = [name.strip() for name in backends.split(",")]
    _check("backends", backends, fv.BACKENDS)
    return list(dict.fromkeys(backends))


def _check(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(
                f"{what} must be of {', '.join(known)}, got {name!r}; choose among these."
            )


def _silent(_: str) -> None:
    pass
