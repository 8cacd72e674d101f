"""Make docs/images/several-gpus.png: which tokens lie where, and which keys are sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexvarlen.parallel.plan import plan_row
from flexvarlen.report.figure import chart, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = Path(__file__).resolve().parent / "images"
LENGTHS, CUT = (2800, 600, 800, 6900, 1100, 600, 600, 2700), 3
RANKS, TOKENS = 4, 4096
CUT_COLOR, COLORS, PADDING = "#E69F00", ("#56B4E9", "#9AD1F2"), "#DDDDDD"
RECEIVED = {"facecolor": "white", "edgecolor": CUT_COLOR, "hatch": "//////"}


def main(folder: Path = IMAGES) -> None:
    """Draw the row, and below it each GPU's tokens and the keys that it receives."""
    plan = plan_row(LENGTHS, RANKS, total_tokens=RANKS * TOKENS)
    assert plan.cut_documents == (CUT,)
    pieces = sorted(piece for own in plan.pieces for piece in own)
    cut = [piece for piece in pieces if piece.document == CUT]
    names = {piece: chr(ord("A") + piece.document) for piece in pieces}
    names |= {piece: f"D{number}" for number, piece in enumerate(cut, 1)}
    figure, (axes,) = chart(
        "Seven documents stay whole; only keys of the split one are sent",
        "A row of 8 documents, A to H, on 4 GPUs of 4,096 tokens. Hatched: keys of D from other "
        f"GPUs. Attention work is within {max(plan.work()) * RANKS / sum(plan.work()) - 1:.2%} of "
        "the mean.",
        height_px=310,
    )
    end = _draw(axes, 0, 0, pieces, names)
    _draw_run(axes, 0, end, RANKS * TOKENS - end, color=PADDING)
    for rank, own in enumerate(plan.pieces):
        end = _draw(axes, rank + 1, 0, own, names)
        _draw_run(axes, rank + 1, end, TOKENS - end, color=PADDING)
        last = max(piece.stop for piece in own if piece.document == CUT)
        received = [piece for piece in cut if piece.stop <= last and piece not in own]
        _draw(axes, rank + 1, TOKENS + 300, received, names, **RECEIVED)
    axes.set_yticks(range(RANKS + 1), ["row", *(f"GPU {rank}" for rank in range(RANKS))])
    axes.set(ylim=(RANKS + 0.5, -0.5), xlim=(0, RANKS * TOKENS))
    axes.set_xlabel("tokens", size=8.5)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    save(figure, folder / "several-gpus.png")


def _draw(
    axes: Axes, lane: int, begin: int, pieces: Any, names: dict[Any, str], **style: Any
) -> int:
    """Draw pieces one after another, and return where the last ends."""
    for piece in pieces:
        color = CUT_COLOR if piece.document == CUT else COLORS[piece.document % 2]
        _draw_run(axes, lane, begin, piece.tokens, **(style or {"color": color}))
        axes.text(
            *(begin + piece.tokens / 2, lane, names[piece]), ha="center", va="center", fontsize=8
        )
        begin += piece.tokens
    return begin


def _draw_run(axes: Axes, lane: int, begin: int, tokens: int, **style: Any) -> None:
    edge = {"edgecolor": "white", **style}
    axes.barh(lane, tokens, left=begin, height=0.62, linewidth=0.8, **edge)


if __name__ == "__main__":
    main()
