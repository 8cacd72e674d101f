"""What `same_answers.py` keeps of a tensor, and two of its dumps held against each other."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import zlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GRADIENT = "grad:"
SKETCH = 4
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROUNDINGS = 2
"""Roundings of the dtype by which gradients may differ, relatively, where the backward sums in no
fixed order: well inside the acceptance rule, which allows three times a rounded computation's
error."""

# ---- a tensor ----


@cache
def signs(name: str, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {size}".encode()))
    return torch.randint(0, 2, (SKETCH, size), generator=generator).double() * 2 - 1


def described(name: str, x: Tensor) -> list[Any]:
    """Hash, norm, and sums under random signs, whose differences tell how far two tensors are."""
    x = x.detach().cpu().contiguous()
    kind = f"{x.dtype} {tuple(x.shape)}".encode()
    digest = hashlib.sha256(kind + x.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    flat = x.flatten().double().nan_to_num(posinf=0.0, neginf=0.0)
    sums = signs(name, len(flat)) @ flat
    return [digest[:16], *(float(f"{n:.9g}") for n in (flat.norm().item(), *sums.tolist()))]


def difference(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> float:
    """The largest relative difference of a tensor, estimated; a small one counts by the largest."""
    largest = max((found[1] for found in a.values()), default=0.0)
    worst = 0.0
    for name, found in a.items():
        other = b[name]
        if found[0] != other[0]:
            squares = [(x - y) ** 2 for x, y in zip(found[2:], other[2:], strict=True)]
            apart = (sum(squares) / SKETCH) ** 0.5
            worst = max(worst, apart / max(found[1], 1e-3 * largest, 1e-30))
    return worst


# ---- two dumps ----

Records = dict[tuple[str, ...], dict[str, Any]]


@dataclass
class Counts:
    """Of one line of the table."""

    cases: int = 0
    raised: int = 0
    outputs_equal: int = 0
    with_gradients: int = 0
    gradients_equal: int = 0
    within_rounding: int = 0
    largest: float = 0.0
    unexpected: int = 0


def read(path: Path) -> tuple[dict[str, str], Records]:
    """The machine of a dump, and its records by case."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    machine: dict[str, str] = {}
    found: Records = {}
    for line in text.decode().splitlines():
        record = json.loads(line)
        if "machine" in record:
            machine = record["machine"]
        else:
            found[tuple(record["case"].values())] = record
    return machine, found


def not_repeatable(*dumps: Records) -> set[tuple[str, str]]:
    """Backends and modes in which some direct call gave other gradients the second time."""
    return {
        (backend, mode)
        for records in dumps
        for (family, backend, _, mode), record in records.items()
        if family == "attention" and record.get("varies")
    }


def mode_of_attention(mode: str) -> str:
    """The mode of direct calls in which a model's attention runs."""
    return mode if mode in ("deterministic", "batch invariant") else "train"


def judge(a: dict[str, Any], b: dict[str, Any], counts: Counts, loose: bool, eps: float) -> str:
    """What is wrong with a case, or an empty string; counts it.

    Args:
        loose: whether its gradients need not repeat bit for bit.
        eps: of the dtype.
    """
    if a["outcome"] != b["outcome"]:
        return f"{a['outcome']} became {b['outcome']}: {b.get('why', a.get('why', ''))}"
    if a["outcome"] != "ok":
        counts.raised += 1
        return ""
    first, second = a["tensors"], b["tensors"]
    if first.keys() != second.keys():
        return f"other tensors: {', '.join(sorted(first.keys() ^ second.keys()))}"
    reasons = []
    for what, ours in (("outputs", False), ("gradients", True)):
        part = {n: x for n, x in first.items() if n.startswith(GRADIENT) == ours}
        other = {n: second[n] for n in part}
        equal = [n for n in part if part[n][0] == other[n][0]]
        if ours:
            counts.with_gradients += bool(part)
            counts.gradients_equal += bool(part) and len(equal) == len(part)
        else:
            counts.outputs_equal += len(equal) == len(part)
        if len(equal) == len(part):
            continue
        apart = difference(part, other)
        counts.largest = max(counts.largest, apart)
        varied = {n for n in (*a["varies"], *b["varies"]) if n in part}
        if apart <= ROUNDINGS * eps and ((loose and ours) or varied):
            counts.within_rounding += 1
        else:
            names = [n.removeprefix(GRADIENT) for n in part if n not in equal]
            reasons.append(f"{what} differ by {apart:.1e} ({', '.join(names[:3])})")
    return "; ".join(reasons)


def compare(path_a: Path, path_b: Path, *, show: int, common: bool) -> int:
    """Print the table; 1 if anything differs that is not expected to, else 0."""
    (machine_a, a), (machine_b, b) = read(path_a), read(path_b)
    if common:
        both = a.keys() & b.keys()
        a, b = ({key: found[key] for key in found if key in both} for found in (a, b))
    if machine_a != machine_b or not a:
        sys.stderr.write(
            f"the dumps must be of one machine and hold cases, got {machine_a} and {machine_b}; "
            "dump both again in one run.\n"
        )
        return 1
    eps = torch.finfo(DTYPE[machine_a["device"]]).eps
    varying = not_repeatable(a, b)
    table: dict[tuple[str, str], Counts] = defaultdict(Counts)
    wrong = []
    for key in {**a, **b}:
        family, backend, _, mode = key
        part = "packed_attention" if family == "attention" else f"models, {mode}"
        counts = table[part, backend]
        counts.cases += 1
        if key not in a or key not in b:
            reason = f"only in {path_a.name if key in a else path_b.name}"
        else:
            loose = (backend, mode_of_attention(mode)) in varying
            reason = judge(a[key], b[key], counts, loose, eps)
        if reason:
            counts.unexpected += 1
            wrong.append(f"{', '.join(key)}: {reason}")
    print_table(table, machine_a)
    for line in wrong[:show]:
        sys.stdout.write(line + "\n")
    if len(wrong) > show:
        sys.stdout.write(f"and {len(wrong) - show} more\n")
    if varying:
        pairs = ", ".join(f"{backend} ({mode})" for backend, mode in sorted(varying))
        sys.stdout.write(f"gradients that do not repeat bit for bit: {pairs}\n")
    families = len({key[0] for key in a} - {"attention"})
    sys.stdout.write(
        f"{len({**a, **b})} cases of {families} families: "
        + (f"{len(wrong)} DIFFER\n" if wrong else "the same answers\n")
    )
    return 1 if wrong else 0


def print_table(table: dict[tuple[str, str], Counts], machine: dict[str, str]) -> None:
    """As Markdown, a line for each backend of each part."""
    heads = ["part", "backend", "cases", "raise the same", "outputs equal", "gradients equal"]
    heads += ["within rounding", "largest rel. difference", "unexpected"]
    total = Counts()
    lines = []
    for (part, backend), found in sorted(table.items()):
        lines.append([part, backend, *cells(found)])
        for name, value in vars(found).items():
            before = getattr(total, name)
            setattr(total, name, max(before, value) if name == "largest" else before + value)
    lines.append(["all", "", *cells(total)])
    widths = [max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads))]
    sys.stdout.write(", ".join(f"{name} {value}" for name, value in machine.items()) + "\n\n")
    for line in (heads, ["-" * width for width in widths], *lines):
        row = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("| " + " | ".join(row) + " |\n")
    sys.stdout.write("\n")


def cells(found: Counts) -> list[str]:
    ran = found.cases - found.raised
    return [
        str(found.cases),
        str(found.raised),
        f"{found.outputs_equal} of {ran}",
        f"{found.gradients_equal} of {found.with_gradients}",
        str(found.within_rounding),
        f"{found.largest:.1e}" if found.largest else "0",
        str(found.unexpected),
    ]
