"""How the book's figures look: one style, one palette, one way to show them.

A figure stands on its own light panel. Pages are light or dark, and no text colour has enough contrast on both a white
and a near-black page once figures also use hues; dark grey on this panel has 14:1 wherever the panel stands. The
picture is an SVG inside an `<img>`, with its text as outlines: it looks the same in Jupyter, on Colab, on the site and
in print, needs no font and no script, and carries its alt text. Its bytes depend on the data alone, so nbval compares
them.

Palette: Okabe and Ito, "Color Universal Design" (2008), without the yellow, which is too pale for lines.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
INK, PANEL, GRID = "#262626", "#FBFBF8", "#DDDDD6"
MIN_POINTS = 8.0
_PIXELS = 96  # CSS pixels per inch

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": PANEL,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.h_pad": 0.1,  # inches between the panel's edge and the picture
    "figure.constrained_layout.w_pad": 0.1,
    "figure.facecolor": PANEL,
    "font.family": "DejaVu Sans",  # matplotlib brings it along
    "font.size": 9,
    "grid.color": GRID,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "pagedvllm",  # else ids in the SVG differ from run to run
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 9,
    "ytick.color": INK,
    "ytick.labelsize": 9,
}
matplotlib.rcParams.update(STYLE)


def figure(width: float = 6.4, height: float = 3.0, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure of `width` x `height` inches, and its axes: one, or an array of rows x columns (see `plt.subplots`)."""
    fig = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(fig)
    return fig, fig.subplots(rows, columns, **options)


def show(fig: Figure, alt: str) -> None:
    """Put the figure into the notebook. `alt` says in words what it shows, for those who cannot see it.

    Raises:
        ValueError: there is no alt text, or some text of the figure is smaller than 8 points.
    """
    from IPython.display import display

    if not alt.strip():
        raise ValueError("alt must say what the figure shows")
    picture = base64.b64encode(svg(fig).encode()).decode()
    width, height = (round(inches * _PIXELS) for inches in fig.get_size_inches())
    look = f"max-width:100%;height:auto;background:{PANEL};border-radius:6px"
    tag = f'<img alt="{html.escape(alt)}" width="{width}" height="{height}" style="{look}"'
    data = {"text/html": f'{tag} src="data:image/svg+xml;base64,{picture}">', "text/plain": f"[figure] {alt}"}
    display(data, raw=True)


def svg(fig: Figure) -> str:
    """The figure as SVG text that depends on its content alone. Raises ValueError for text under 8 points."""
    for text in fig.findobj(Text):
        assert isinstance(text, Text)
        points = float(text.get_fontsize())
        if text.get_text() and text.get_visible() and points < MIN_POINTS:
            raise ValueError(f"{text.get_text()!r} has {points:g} points, at least {MIN_POINTS:g} can be read")
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    lines = (line.rstrip() for line in buffer.getvalue().splitlines())
    text_only = "\n".join(line for line in lines if not line.lstrip().startswith("<!--"))
    # The last digits of a coordinate differ between machines and cannot be seen; scales of the glyphs stay exact.
    return re.sub(
        r"scale\([^)]*\)|-?\d+\.\d{3,}", lambda m: m[0] if m[0][0] == "s" else f"{float(m[0]):.2f}", text_only
    )


def bars(
    values: Mapping[Any, float], unit: str, alt: str, xlabel: str = "", size: tuple[float, float] = (6.4, 2.6)
) -> None:
    """One bar for each entry, labelled by its key; `unit` names the vertical axis ("ms per step")."""
    fig, axis = figure(*size)
    axis.bar([str(k) for k in values], list(values.values()), color=BLUE, width=0.7)
    axis.set(xlabel=xlabel, ylabel=unit)
    show(fig, alt)


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    alt: str,
    size: tuple[float, float] = (6.4, 3.0),
) -> None:
    """One line for each entry: name -> (x, y). Each has its own colour and its own marker."""
    fig, axis = figure(*size)
    for (name, (x, y)), marker in zip(series.items(), "osD^vP", strict=False):
        axis.plot(x, y, marker=marker, label=name)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_ylim(bottom=0)
    axis.legend()
    show(fig, alt)
