"""Draw samples that share prefixes: a line for each branch, a bar for each segment.

matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTEXT_COLOR, LABEL_COLOR = "#56B4E9", "#E69F00"
_INCHES, _INCHES_A_LINE = 8.0, 0.34
_HEIGHT = 0.62  # height of a bar; lines are 1 apart


class Drawn(NamedTuple):
    """What is drawn of `SharedPrefixes`, which describes the fields."""

    input_ids: Tensor
    shift_labels: Tensor
    layout: PackedLayout
    paths: tuple[Tensor, ...]


def save_tree_picture(shared: Drawn, path: Path, names: Sequence[str] | None = None) -> Path:
    """Write the PNG; see `SharedPrefixes.save_picture`.

    Raises:
        ValueError: the path does not end in .png, or there is not one name per sample.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"path must end in .png, got {path.name!r}; only PNGs are written.")
    if names is None:
        names = [f"sample {i}" for i in range(1, len(shared.paths) + 1)]
    if len(names) != len(shared.paths):
        raise ValueError(
            f"names must have one entry for each of {len(shared.paths)} samples, got {len(names)}."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lines = _lines(shared)
    height = 1.1 + _INCHES_A_LINE * (1 + max(lines))
    figure = Figure(figsize=(_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_segments(axes, shared, lines)
    _name_samples(axes, shared, lines, names)
    axes.set_ylim(max(lines) + 0.6, -0.6)
    axes.set_yticks([])
    axes.set_xlabel("position in a sample, in tokens")
    axes.spines[["top", "right", "left"]].set_visible(False)
    tokens = sum(map(len, shared.paths))
    axes.set_title(
        f"{len(shared.paths)} samples of {tokens:,} tokens: "
        f"{sum(shared.layout.lengths or ()):,} are computed",
        fontsize=10,
        loc="left",
    )
    kinds = ((CONTEXT_COLOR, "context only"), (LABEL_COLOR, "trained on in some sample"))
    handles = [Patch(facecolor=color, label=label) for color, label in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)
    return path


def _segments(shared: Drawn) -> tuple[Sequence[int], Sequence[int]]:
    """Lengths and parents; documents that share nothing are roots."""
    segments, documents = shared.layout.segments, shared.layout.lengths or ()
    if segments is None:
        return documents, [-1] * len(documents)
    return segments.lengths, segments.parents


def _lines(shared: Drawn) -> list[int]:
    """For each segment the line that it is on: its parent's if it is the first child."""
    _, parents = _segments(shared)
    lines: list[int] = []
    last = -1
    for segment, parent in enumerate(parents):
        is_first_child = parent >= 0 and parent == segment - 1
        last += not is_first_child
        lines.append(last)
    return lines


def _draw_segments(axes: Axes, shared: Drawn, lines: list[int]) -> None:
    positions = shared.layout.position_ids().tolist()
    is_label = _is_label(shared)
    token = 0
    for segment, (length, parent) in enumerate(zip(*_segments(shared), strict=True)):
        x = positions[token]
        if parent >= 0 and lines[parent] != lines[segment]:
            ends = (lines[parent] + _HEIGHT / 2, lines[segment])
            axes.vlines(x, *ends, color="#555555", linewidth=0.8)
        for has_label, run in groupby(is_label[token : token + length]):
            color, width = LABEL_COLOR if has_label else CONTEXT_COLOR, len(list(run))
            axes.barh(lines[segment], width, left=x, height=_HEIGHT, color=color, linewidth=0)
            x += width
        token += length


def _is_label(shared: Drawn) -> list[bool]:
    """For each token whether the one before it on a path has it as its label."""
    ids, labels = shared.input_ids[0].cpu(), shared.shift_labels[0].cpu()
    found = torch.zeros_like(ids, dtype=torch.bool)
    for path in shared.paths:
        found[path[1:]] |= labels[path[:-1]] == ids[path[1:]]
    return [bool(x) for x in found.tolist()]


def _name_samples(axes: Axes, shared: Drawn, lines: list[int], names: Sequence[str]) -> None:
    """Write each sample's name where it ends."""
    lengths, _ = _segments(shared)
    segment_of = [i for i, length in enumerate(lengths) for _ in range(length)]
    at_end: dict[tuple[int, int], list[str]] = {}
    for path, name in zip(shared.paths, names, strict=True):
        at_end.setdefault((lines[segment_of[int(path[-1])]], len(path)), []).append(name)
    for (line, x), own in at_end.items():
        top, bottom = line - _HEIGHT / 2, line + _HEIGHT / 2
        axes.vlines(x, top, bottom, color="#000000", linewidth=1.2)
        axes.annotate(
            ", ".join(own), (x, line), (3, 0), textcoords="offset points", va="center", fontsize=8
        )
