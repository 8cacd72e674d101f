"""Draw the mask of a packed row: its full, partial and empty blocks, and the document boundaries.

Shapes: Tq, Tk = tokens of the query and the key row; NQ = ceil(Tq / BQ), NK = ceil(Tk / BK).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.table_shapes import DEFAULT_BLOCK_SIZE, Tables, block_pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EMPTY, PARTIAL, FULL = 0, 1, 2
COLORS = ("#FFFFFF", "#E69F00", "#0072B2")
"""Colors of empty, partial and full blocks."""
BOUNDARY_COLOR = "#000000"

BLOCKS_A_SIDE = 512
"""Maximum number of blocks per side with the default block size: at least one pixel each."""
MOST_BLOCKS_A_SIDE = 8192  # the picture's array then takes 64 MiB
_MOST_BOUNDARIES = 400  # a side; more would cover the blocks
_PANEL_INCHES = 6.5


class Drawn(Protocol):
    """What is drawn of a `DocumentMask`; its `repr` is the title."""

    layout: PackedLayout
    layout_k: PackedLayout

    def tables(self, block_size: tuple[int, int], *, compact: bool) -> Tables:
        """The blocks that are visited."""
        ...


def save_picture(mask: Drawn, path: Path, block_size: int | tuple[int, int] | None = None) -> Path:
    """Write the PNG; see `DocumentMask.save_picture`. Syncs.

    Args:
        mask: what to draw.
        path: output file ending in .png; missing folders are created.
        block_size: tokens of a block, or (query, key); default: `default_block_size(mask)`.

    Returns:
        The path.

    Raises:
        ValueError: the path does not end in .png, a row has no tokens, or the block size is invalid
            or makes more than 8192 blocks a side.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"path must end in .png, got {path.name!r}; only PNGs are written.")
    blocks = default_block_size(mask) if block_size is None else block_pair(block_size)
    tokens = (mask.layout.total_tokens, mask.layout_k.total_tokens)
    if 0 in tokens:
        raise ValueError(
            f"a picture needs at least one query and one key, got {tokens[0]} and {tokens[1]}; "
            "there is nothing to draw."
        )
    most = max(-(-t // b) for t, b in zip(tokens, blocks, strict=True))
    if most > MOST_BLOCKS_A_SIDE:
        raise ValueError(
            f"block_size must leave at most {MOST_BLOCKS_A_SIDE} blocks a side, got {blocks} for "
            f"{most} blocks; pass a larger block_size, or None to choose it automatically."
        )
    figure = _figure(mask, blocks)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)
    return path


def default_block_size(mask: Drawn) -> tuple[int, int]:
    """128, doubled until neither side has more than 512 blocks; (query, key), both the same."""
    block = DEFAULT_BLOCK_SIZE
    while max(mask.layout.total_tokens, mask.layout_k.total_tokens) > block * BLOCKS_A_SIDE:
        block *= 2
    return block, block


def block_states(mask: Drawn, block_size: tuple[int, int]) -> Tensor:
    """int8 `[NQ, NK]` on the CPU: 0 empty, 1 partial, 2 full. Syncs."""
    tables = mask.tables(block_size, compact=True)
    num_q, num_k = tables.kv_num_blocks.shape[2], tables.q_num_blocks.shape[2]
    states = torch.zeros(num_q, num_k, dtype=torch.int8, device="cpu")
    lists = (
        (PARTIAL, tables.kv_num_blocks, tables.kv_indices),
        (FULL, tables.full_kv_num_blocks, tables.full_kv_indices),
    )
    for state, counts, indices in lists:
        columns = torch.arange(indices.shape[3], device=indices.device)
        row, column = (columns < counts[0, 0, :, None]).nonzero(as_tuple=True)
        states[row.cpu(), indices[0, 0, row, column].cpu().long()] = state
    return states


def _figure(mask: Drawn, blocks: tuple[int, int]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    states = block_states(mask, blocks)
    num_q, num_k = states.shape
    tokens_q, tokens_k = mask.layout.total_tokens, mask.layout_k.total_tokens
    figure = Figure(figsize=(_PANEL_INCHES, _PANEL_INCHES + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(
        states.numpy(),
        cmap=ListedColormap(COLORS),
        vmin=EMPTY,
        vmax=FULL,
        interpolation="nearest",
        extent=(0, num_k * blocks[1], num_q * blocks[0], 0),
        # True to scale, unless that would leave a thin strip.
        aspect="equal" if max(tokens_q, tokens_k) <= 4 * min(tokens_q, tokens_k) else "auto",
    )
    boundaries_q, boundaries_k = boundaries(mask.layout), boundaries(mask.layout_k)
    drawn = max(len(boundaries_q), len(boundaries_k)) <= _MOST_BOUNDARIES
    if drawn:
        axes.hlines(boundaries_q, 0, tokens_k, color=BOUNDARY_COLOR, linewidth=0.4, alpha=0.4)
        axes.vlines(boundaries_k, 0, tokens_q, color=BOUNDARY_COLOR, linewidth=0.4, alpha=0.4)
    axes.set_xlim(0, tokens_k)
    axes.set_ylim(tokens_q, 0)
    _label(axes)
    share = 100.0 * (1 - torch.count_nonzero(states).item() / states.numel())
    size = f"{blocks[0]}" if blocks[0] == blocks[1] else f"{blocks[0]} × {blocks[1]}"
    axes.set_title(
        f"{mask!r}\n{num_q:,} × {num_k:,} blocks of {size} tokens, {share:.1f}% of them empty",
        fontsize=9,
    )
    _legend(figure, drawn, max(len(boundaries_q), len(boundaries_k)))
    return figure


def boundaries(layout: PackedLayout) -> list[int]:
    """Offsets inside the row at which a document, a tree's segment or padding begins. Syncs."""
    starts = layout.cu_seqlens if layout.segments is None else layout.segments.table[0]
    inside = starts.unique().tolist()
    return [token for token in inside if 0 < token < layout.total_tokens]


def _label(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("key token")
    axes.set_ylabel("query token")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axis.set_major_formatter(FuncFormatter(lambda token, _: f"{token:,.0f}"))
        axis.set_tick_params(labelsize=8)


def _legend(figure: Figure, drawn: bool, count: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = ("empty: not visited", "partial: pair by pair", "full: no mask applied")
    handles: list[Patch | Line2D] = [
        Patch(facecolor=color, edgecolor="#A0A0A0", label=name)
        for color, name in zip(COLORS, names, strict=True)
    ]
    said = "boundary" if drawn else f"{count:,} boundaries, too many to draw"
    handles.append(
        Line2D([], [], color=BOUNDARY_COLOR, linewidth=0.8 if drawn else 0.0, label=said)
    )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=4,
        columnspacing=1.2,
        fontsize=8,
        frameon=False,
    )
