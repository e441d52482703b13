"""Pictures of a page: drawn by matplotlib, inline as SVG, in the page's colours, with a title and a description."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from pathmark.errors import MissingLibraryError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 5.4
"""Inches at font size 11: readable on a phone, where it takes the whole width, and two side by side on a desk."""
INK, SOFT, LINE, MARK, PLAIN, PAPER, RAISED = (
    "#010101", "#020202", "#030303", "#040404", "#050505", "#060606", "#070707"
)  # fmt: skip
"""Placeholders that become the page's colours, light or dark."""
_COLOURS: Mapping[str, str] = {
    INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)", MARK: "var(--mark)", PLAIN: "var(--plain)",
    PAPER: "var(--paper)", RAISED: "var(--raised)",
}  # fmt: skip
HUES = ("#2f7ed8", "#d9730d", "#3f9142", "#c83e4d", "#8e62c9", "#92704f", "#cf5fa8", "#768492", "#959416", "#1798a8")
"""For groups: of middle lightness, so that they stand out on both papers."""
STYLE = {
    "font.size": 11, "axes.titlesize": 11, "svg.fonttype": "none", "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": SOFT, "axes.labelcolor": INK, "axes.titlecolor": INK,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "text.color": INK,
    "legend.labelcolor": INK, "grid.color": LINE, "axes.facecolor": "none", "figure.facecolor": "none",
    "legend.frameon": False,
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """An inline SVG and the words below it."""

    name: str
    svg: Markup
    caption: str


def draw(name: str, draw_on: Any, *, height: float, title: str, described: str, caption: str) -> Picture:
    """A picture by `draw_on`, which gets an empty matplotlib figure; `described` says in words what is to be seen."""
    matplotlib = _matplotlib()
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # a fixed salt and no date: the same result gives the same page
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw_on(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    return Picture(name, _inline(written.getvalue(), name, title, described), caption)


def require_matplotlib() -> None:
    """Refuse before the work what could not be drawn after it."""
    _matplotlib()


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingLibraryError("pictures need matplotlib; install pathmark[plots]") from error
    return matplotlib


def _inline(svg: str, name: str, title: str, described: str) -> Markup:
    """An SVG file as a part of a page: no prolog, ids of its own, a title, the page's colours and fonts."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    for placeholder, colour in _COLOURS.items():
        body = body.replace(placeholder, colour)
    size = re.search(r'viewBox="([^"]*)"', body)
    assert size is not None
    opening = (
        f'<svg viewBox="{size[1]}" role="img" aria-labelledby="{name}-title {name}-desc" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(described)}</desc>'
    )
    return Markup(opening + body[body.index(">") + 1 :])  # noqa: S704 - ours: drawn by matplotlib, which escapes texts


def heat_colours() -> Any:
    """From nothing to the mark's colour, so that the paper shows through."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("mark", [(0.85, 0.33, 0.05, 0.0), (0.85, 0.33, 0.05, 1.0)])


def plain_axes(figure: Figure) -> Any:
    """One set of axes with a faint grid behind what is drawn."""
    axes = figure.subplots()
    axes.grid(linewidth=0.6)
    axes.set_axisbelow(True)
    return axes
