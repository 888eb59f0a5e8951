"""Figures by matplotlib as inline SVG: in the colours of the page, reproducible, without outside files."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvaudit.core.text import inline
from kvaudit.reports.sections.shared.words import shorten

if TYPE_CHECKING:  # the import takes half a second, and a verdict needs no figures
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

INK = "#010203"  # replaced by currentColor, so text and axes follow the light and the dark page
PALETTE = ("#7a8490", "#d1700f", "#a05bb5", "#2386c8", "#1f9e74", "#c9427a", "#9a8a1c", "#5a6fd8")
MARKERS = ("s", "X", "D", "o", "^", "v", "P", "*")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), "-", "--")
PIXELS_PER_INCH = 100  # on screen, if the page is wide enough
_LONGEST_ROW = 64  # letters of a row's name, which take half of the width of a figure
GAIN, LOSS, UNDECIDED = "#2386c8", "#d1500f", "#8a8f98"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvaudit",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.unicode_minus": False,
    "hatch.linewidth": 0.8,
    **{key: INK for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")},
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Drawing:
    """A figure as inline SVG, and its text alternative."""

    name: str
    svg: str
    alt: str


def figure_style() -> mpl.rc_context:
    """Return a context manager that sets the style of all figures; they are made and saved inside it."""
    import matplotlib as mpl

    return mpl.rc_context(_STYLE)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure with automatic layout; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, name: str, alt: str) -> Drawing:
    """Return the figure as SVG without date and creator, with unique ids, in the fonts of the page."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)  # attaches itself to the figure
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML head
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    width = round(figure.get_figwidth() * PIXELS_PER_INCH)
    # the height follows from the view box, however wide the page shows it
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', rf'\1 width="{width}" style="min-width:min(34rem,{width}px)"', svg, count=1
    )
    # a page has several figures, whose ids must differ
    svg = re.sub(r"\bid=\"", f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{name}-", svg)
    # use the font of the page
    svg = re.sub(r"font-family: [^;\"]*;? ?|(?<=px) '[^\"]*?(?=;)", "", svg)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(\d\.\d\d)\d{3,}", r"\1", svg)  # hundredths of a point are enough
    svg = svg.replace(INK, "currentColor")
    return Drawing(name, svg.strip(), alt)


def series_style(names: tuple[str, ...], name: str) -> tuple[str, str, object]:
    """Return colour, marker and line style of a series by its position in ``names``.

    The three differ together, so that colour is never the only difference.
    """
    place = names.index(name) if name in names else len(names)
    return PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)], STYLES[place % len(STYLES)]


def add_grid(axes: Axes) -> None:
    """Draw a light grid behind the data."""
    axes.grid(True, color=UNDECIDED, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def label_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows of a chart from the top; long names are cut in the middle, to leave room for the data."""
    axes.set_yticks(range(len(names)), [shorten(inline(name), _LONGEST_ROW) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)


def legend_line(label: str, **look: Any) -> Line2D:
    """Return a legend entry that is a line or a mark."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **look)


def legend_patch(label: str, **look: Any) -> Patch:
    """Return a legend entry that is an area."""
    from matplotlib.patches import Patch

    return Patch(label=label, **look)
