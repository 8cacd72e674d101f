"""One colour and one marker a backend, in every plot of the project.

Our backends have saturated colours and solid lines; transformers' own have the pale colour and the
marker of the kernel they share with ours, hollow and dashed. So a pair that should be compared is a
pair for the eye, in print without colour too. So are a kernel under its own name ("raw:"), dotted,
and its fixed-length form ("fixed:"), dashed. The hues are the Okabe-Ito set, which people with any
kind of colour vision can tell apart.

Imports: the standard library only (matplotlib is the caller's business).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Style:
    """How one variant is drawn; the names are matplotlib's."""

    color: str
    marker: str
    filled: bool = True
    linestyle: str = "-"

    def line(self) -> dict[str, str]:
        """Keyword arguments for `Axes.plot`."""
        face = self.color if self.filled else "white"
        return {
            "color": self.color,
            "marker": self.marker,
            "markerfacecolor": face,
            "markeredgecolor": self.color,
            "linestyle": self.linestyle,
        }


STYLES: dict[str, Style] = {
    "reference": Style("#000000", "*"),
    "sdpa": Style("#999999", "o"),
    "flex": Style("#D55E00", "s"),
    "varlen": Style("#009E73", "^"),
    "fa2": Style("#0072B2", "D"),
    "fa3": Style("#56B4E9", "P"),
    "fa4": Style("#CC79A7", "X"),
    "flex_fa4": Style("#E69F00", "p"),
    "nested": Style("#B8A800", "v"),
    "cudnn": Style("#7F5539", "<"),
    "auto": Style("#7A4EAB", "h"),
    "transformers:eager": Style("#444444", "*", filled=False, linestyle="--"),
    "transformers:sdpa": Style("#BBBBBB", "o", filled=False, linestyle="--"),
    "transformers:flex_attention": Style("#F0A878", "s", filled=False, linestyle="--"),
    "transformers:flash_attention_2": Style("#80B5D8", "D", filled=False, linestyle="--"),
    "transformers:flash_attention_3": Style("#ABDAF4", "P", filled=False, linestyle="--"),
    "transformers:flash_attention_4": Style("#E5BBD2", "X", filled=False, linestyle="--"),
    "standard": Style("#000000", ">", filled=False, linestyle="-."),
    "eager": Style("#444444", "*", filled=False, linestyle="--"),
    "sdpa:default": Style("#666666", "o", filled=False, linestyle="--"),
    "sdpa:flash": Style("#009E73", "d", filled=False, linestyle="--"),
    "sdpa:efficient": Style("#882255", "H", filled=False, linestyle="--"),
    "sdpa:cudnn": Style("#7F5539", "<", filled=False, linestyle="--"),
    "sdpa:math": Style("#332288", "8", filled=False, linestyle="--"),
    "padded:masked": Style("#666666", "o", filled=False, linestyle="--"),
    "padded:unmasked": Style("#AAAAAA", "o", filled=False, linestyle=":"),
}

LINES_OF_FORMS = {"raw": ":", "fixed": "--"}
"""Of a backend's kernel: called as its own users do; its fixed-length form."""

UNSUPPORTED = Style("#BBBBBB", "x", linestyle="none")
"""A point that could not be measured: it is marked where it would stand, never left out."""


def style_of(variant: str) -> Style:
    """The style of a variant; what follows an "@" (where boundaries come from) has no say.

    >>> style_of("flex@position_ids") == STYLES["flex"]
    True
    >>> style_of("raw:fa2")
    Style(color='#0072B2', marker='D', filled=False, linestyle=':')

    Raises:
        ValueError: a name that has no style yet.
    """
    name = variant.partition("@")[0]
    form, _, backend = name.rpartition(":")
    if form in LINES_OF_FORMS and backend in STYLES:
        return replace(STYLES[backend], filled=False, linestyle=LINES_OF_FORMS[form])
    if name not in STYLES:
        known = ", ".join(STYLES)
        raise ValueError(
            f"variant must be one of {known}, got {variant!r}; give it a style in plotstyle.py"
        )
    return STYLES[name]
