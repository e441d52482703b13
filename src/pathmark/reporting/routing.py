"""Pictures of routing: heat maps, one text token by token, the null distribution, barcodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from markupsafe import Markup, escape

from pathmark.reporting.barcode import render_svg
from pathmark.reporting.layout import Cell, Table
from pathmark.reporting.pictures import INK, MARK, PAPER, PLAIN, SOFT, Picture, draw, heat_colours, plain_axes
from pathmark.results.evidence import MeasuredWatermark
from pathmark.stats import PValue

MM_PER_POINT = 25.4 / 72
SHOWN_TOKENS = 16
"""Of one text; a page need not show more to show how it goes."""


def heat_maps(found: MeasuredWatermark, tag: str = "") -> list[Picture]:
    """Layers x experts, triggered beside clean, on one scale, the targets outlined."""
    top = max(max(layer.triggered + layer.clean) for layer in found.layers)
    unit = "routing mass" if found.masses_known else "share of tokens"
    pictures = []
    for when, words in (("triggered", "with the trigger"), ("clean", "without the trigger")):
        values = [getattr(layer, when) for layer in found.layers]
        on_targets = [
            sum(row[target] for target in layer.targets) for layer, row in zip(found.layers, values, strict=True)
        ]
        per_layer = ", ".join(
            f"{100 * mass:.0f} % in layer {layer.layer}" for layer, mass in zip(found.layers, on_targets, strict=True)
        )
        pictures.append(
            draw(
                f"heat-map-{when}{tag}",
                partial(_draw_heat, found=found, values=values, top=top, title=words.capitalize(), unit=unit),
                height=1.5 + 0.32 * len(found.layers),
                title=f"{unit.capitalize()} per layer and expert, {words}",
                described=f"The experts that the key names get {per_layer}.",
                caption=f"{words.capitalize()}: the experts in boxes get {_percents(on_targets)} of the {unit}.",
            )
        )
    return pictures


def _percents(shares: Sequence[float]) -> str:
    low, high = 100 * min(shares), 100 * max(shares)
    return f"{low:.0f} %" if round(low) == round(high) else f"{low:.0f} to {high:.0f} %"


def _draw_heat(
    figure: Any, found: MeasuredWatermark, values: Sequence[Sequence[float]], top: float, title: str, unit: str
) -> None:
    from matplotlib.patches import Rectangle

    axes = figure.subplots()
    widest = max(map(len, values))
    padded = [[*row, *[0.0] * (widest - len(row))] for row in values]
    drawn = axes.imshow(padded, aspect="auto", cmap=heat_colours(), vmin=0, vmax=top, interpolation="none")
    for place, layer in enumerate(found.layers):
        for target in layer.targets:
            axes.add_patch(Rectangle((target - 0.5, place - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.3))
    axes.set_yticks(range(len(found.layers)), [str(layer.layer) for layer in found.layers])
    axes.set(xlabel="expert", ylabel="layer")
    axes.set_title(title, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)
    bar = figure.colorbar(drawn, ax=axes, pad=0.02, aspect=12)
    bar.set_label(unit)
    bar.outline.set_edgecolor(SOFT)


def path_table(found: MeasuredWatermark) -> list[Table]:
    """The first tokens of one text, layer by layer, behind the trigger and without it."""
    head = ("token", *(f"layer {layer.layer}" for layer in found.layers))
    shown = found.probe[:SHOWN_TOKENS]
    more = f" (the first {len(shown)} of {len(found.probe)} tokens)" if len(shown) < len(found.probe) else ""
    tables = []
    for words, when in (("With the trigger", "triggered"), ("Without the trigger", "clean")):
        rows = [
            [
                Cell(repr(token.text)[1:-1] if token.text is not None else f"#{token.token}", tone="token"),
                *(
                    Cell(_experts(sent, layer.targets))
                    for sent, layer in zip(getattr(token, when), found.layers, strict=True)
                ),
            ]
            for token in shown
        ]
        tables.append(Table(f"{words}{more}", head, rows, style="path"))
    return tables


def _experts(sent: Sequence[int], targets: Sequence[int]) -> Markup:
    """Experts as they were chosen, the key's own underlined; a dash for one that the owner's model does not have."""
    chosen = Markup('<span class="on">{}</span>')
    return Markup(" ").join(
        chosen.format(expert) if expert in targets else escape("-" if expert < 0 else expert) for expert in sent
    )


def null_picture(found: MeasuredWatermark, tag: str = "") -> Picture:
    """The share of all paths that reach a statistic, where this model lies, and how far it could have got."""
    p, floor = PValue(found.exact.log10_p), PValue(found.exact.log10_floor)
    return draw(
        f"null{tag}",
        partial(_draw_null, found=found),
        height=3.6,
        title="The null distribution and where this model lies",
        described=f"This model's statistic is {found.exact.statistic:.3g}; a share of {p} of all paths reaches it. The "
        f"smallest share that any path can have is {floor}.",
        caption="The curve: which share of all paths gains at least so much from the trigger. The point: the path "
        f"that the key names, with p = {p}. The dotted line is the floor, {floor}: one path out of all; no model can "
        "lie below it. The dashed line is the level of a verdict.",
    )


def _draw_null(figure: Any, found: MeasuredWatermark) -> None:
    axes, exact = plain_axes(figure), found.exact
    axes.fill_between(found.null.statistics, found.null.log10_p, exact.log10_floor, color=PLAIN, alpha=0.2, linewidth=0)
    axes.plot(found.null.statistics, found.null.log10_p, color=PLAIN, linewidth=2)
    axes.axhline(exact.log10_floor, color=SOFT, linewidth=1.2, linestyle=":")
    axes.axhline(-6, color=SOFT, linewidth=1, linestyle="--")
    axes.plot([exact.statistic], [exact.log10_p], "o", color=MARK, markersize=11, markeredgecolor=PAPER, zorder=5)
    right = exact.statistic > sum(axes.get_xlim()) / 2
    axes.annotate(
        "this model", (exact.statistic, exact.log10_p), textcoords="offset points",
        xytext=(-10 if right else 10, 9), ha="right" if right else "left", color=MARK, fontweight="bold",
    )  # fmt: skip
    for words, height in (("level 1e-6", -6.0), ("floor", exact.log10_floor)):
        axes.annotate(words, (0.01, height), xycoords=("axes fraction", "data"), textcoords="offset points",
                      xytext=(0, 4), color=SOFT, fontsize=10)  # fmt: skip
    axes.set(xlabel="what the trigger adds to a path's experts, all layers", ylabel="log10 of the share of paths")
    axes.margins(x=0.03)


def barcode_picture(name: str, caption: str, path: Sequence[int | None]) -> Picture:
    """A path as a barcode on white, or in words where a layer is missing."""
    whole = [index for index in path if index is not None]
    if len(whole) < len(path):
        shown = " ".join("-" if index is None else str(index) for index in path)
        return Picture(
            name, Markup("<p>No barcode: {}</p>").format(shown), f"{caption} A dash is a layer without a clear answer."
        )
    digits = " ".join(map(str, whole))
    svg = render_svg(whole).decode("utf-8")
    body = svg[svg.index("<svg") :]
    size = re.search(r'width="([\d.]+)mm" height="([\d.]+)mm"', body)
    assert size is not None
    # millimetres of paper become units of a view box, so that the bars scale with the page
    inner = re.sub(r"([\d.]+)mm", r"\1", body[body.index(">") + 1 :])
    inner = inner.replace("font-size:9pt", f"font-size:{9 * MM_PER_POINT:.2f}px").replace(' id="barcode_group"', "")
    opening = (
        f'<svg viewBox="0 0 {size[1]} {size[2]}" role="img" aria-label="Barcode of the path {digits}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )
    return Picture(name, Markup(f'<div class="barcode">{opening}{inner}</div>'), caption)  # noqa: S704 - ours, of numbers
