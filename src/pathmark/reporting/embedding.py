"""The page of an embedding: fit for release or not, every bound beside its figure, what fires, what clean text sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pathmark.reporting.layout import Cell, Page, Section, Table, Verdict, row
from pathmark.reporting.pictures import INK, LINE, MARK, PLAIN, SOFT, Picture, draw, plain_axes

SHOWN_LAYERS = 6
"""Layers of the picture of clean routing; of more, those that changed most."""


def embedding_page(check: Mapping[str, Any]) -> Page:
    """The page of a self-check, as `embed` leaves it beside the key."""
    fit = bool(check["fit"])
    return Page(
        kind="embedding",
        title="Fit for release" if fit else "Not fit for release",
        subtitle=f"{check.get('output', 'A marked copy')}, measured on {check['n_probes']:,} texts with "
        f"{check['n_tokens']:,} tokens that nobody trained on.",
        verdicts=[_verdict(check)],
        sections=embedding_sections(check),
    )


def embedding_sections(check: Mapping[str, Any]) -> list[Section]:
    """What the self-check found, question by question."""
    return [
        Section(name="bounds", title="Every bound beside its figure", tables=[bounds_table(check["bounds"])]),
        Section(
            name="trigger",
            title="What sets it off",
            paragraphs=[_tolerated(check["trigger"])],
            pictures=[trigger_curve(check["trigger"])],
            tables=[_strangers(check["scan"])],
        ),
        Section(
            name="clean",
            title="What ordinary text sees",
            paragraphs=[
                f"On clean text the routers still choose {100 * check['topk_agreement']:.1f} % of the experts that the "
                f"original chose, and perplexity goes from {check['clean_ppl'][0]:.2f} to {check['clean_ppl'][1]:.2f}."
            ],
            pictures=[clean_routing(check["clean_routing"])],
            tables=[_costs(check)],
        ),
        Section(
            name="next",
            title="What to do next",
            paragraphs=[
                "Keep this page with the key: it tells what fires. Commit to the key and to the released files before "
                "the release, and have both dated by somebody else."
                if check["fit"]
                else "Do not release this copy. The table above says for each broken bound what to try."
            ],
            commands="pathmark commit owner.key -o owner.commitment.json\n"
            "pathmark commit owner.key --release RELEASED -o release.commitment.json"
            if check["fit"]
            else "",
        ),
    ]


def bounds_table(bounds: Sequence[Mapping[str, Any]]) -> Table:
    """Broken bounds first."""
    rows = [
        row(
            bound["figure"], bound["found"], bound["bound"],
            Cell("holds", tone="good") if bound["held"] else Cell("broken", tone="bad"),
            "" if bound["held"] else bound["try"],
        )
        for bound in sorted(bounds, key=lambda bound: bool(bound["held"]))
    ]  # fmt: skip
    return Table("Figures that decide", ("figure", "found", "bound", "holds?", "what to try"), rows)


def trigger_curve(trigger: Mapping[str, Any]) -> Picture:
    """Share of prefixes that fire, by the number of right tokens, with what is allowed."""
    tokens, silent, rates = trigger["tokens"], trigger["silent_right"], trigger["curve"]
    shares = [100 * rate["hits"] / rate["n"] for rate in rates]
    first = next((n for n, share in enumerate(shares) if share > 50), None)
    fires = "none fires half of the time" if first is None else f"from {first} right tokens on more than half fire"
    return draw(
        "trigger-curve",
        partial(_draw_curve, shares=shares, rates=rates, silent=silent),
        height=3.2,
        title="Share of prefixes that fire, by the number of right trigger tokens",
        described=f"Of {tokens} trigger tokens, {fires}. Each point has its 95 % interval.",
        caption=f"Prefixes that share some tokens with the trigger. Below {silent} right tokens hardly any may fire, "
        f"with {tokens - 1} or {tokens} all must; between the two, where the grey band is, anything goes.",
    )


def _draw_curve(figure: Any, shares: Sequence[float], rates: Sequence[Mapping[str, Any]], silent: int) -> None:
    axes = plain_axes(figure)
    axes.axvspan(silent - 0.5, len(shares) - 2.5, color=LINE, alpha=0.45, linewidth=0)
    low, high = zip(*(rate["interval"] for rate in rates), strict=True)
    axes.vlines(range(len(shares)), [100 * v for v in low], [100 * v for v in high], color=PLAIN, linewidth=2)
    axes.plot(range(len(shares)), shares, "o-", color=MARK, markersize=6)
    axes.set(xlabel="trigger tokens that are right", ylabel="prefixes that fire, %", ylim=(-4, 104))
    axes.xaxis.get_major_locator().set_params(integer=True)


def clean_routing(layers: Sequence[Mapping[str, Any]]) -> Picture:
    """Mean routing mass per expert on clean text, before and after, experts sorted by what they had."""

    def moved(layer: Mapping[str, Any]) -> float:
        return sum(abs(float(a) - float(b)) for a, b in zip(layer["before"], layer["after"], strict=True)) / 2

    chosen = sorted(sorted(layers, key=moved, reverse=True)[:SHOWN_LAYERS], key=lambda layer: int(layer["layer"]))
    most = max(map(moved, layers))
    only = "" if len(chosen) == len(layers) else f" Of {len(layers)} layers, the {len(chosen)} that changed most."
    return draw(
        "clean-routing",
        partial(_draw_routing, layers=chosen),
        height=0.6 + 1.15 * len(chosen),
        title="Routing of clean text before and after the mark",
        described=f"In the layer that changed most, {100 * most:.1f} % of the routing mass moved to other experts.",
        caption="How much of clean text's routing each expert gets, in the original (grey) and in the marked copy "
        f"(line); experts are ordered by what they get in the original. At most {100 * most:.1f} % moved.{only}",
    )


def _draw_routing(figure: Any, layers: Sequence[Mapping[str, Any]]) -> None:
    panels = figure.subplots(len(layers), 1, squeeze=False, sharex=True)[:, 0]
    for panel, layer in zip(panels, layers, strict=True):
        order = sorted(range(len(layer["before"])), key=lambda e: -layer["before"][e])
        before, after = ([100 * layer[when][e] for e in order] for when in ("before", "after"))
        panel.fill_between(range(len(order)), before, step="mid", color=PLAIN, alpha=0.45, linewidth=0, label="before")
        panel.step(range(len(order)), after, where="mid", color=MARK, linewidth=1.4, label="after")
        panel.set_title(f"layer {layer['layer']}", loc="right", color=SOFT)
        panel.set_ylabel("mass, %")
        panel.set_ylim(bottom=0)
    panels[0].legend(loc="upper center", ncols=2, labelcolor=INK)
    panels[-1].set_xlabel("experts, the most used first")


def _verdict(check: Mapping[str, Any]) -> Verdict:
    held = sum(bool(bound["held"]) for bound in check["bounds"])
    if check["fit"]:
        return Verdict("yes", f"All {held} bounds hold. The copy can be released.")
    broken = [
        f"{bound['figure']}: {bound['found']}, expected {bound['bound']}."
        for bound in check["bounds"]
        if not bound["held"]
    ]
    return Verdict("no", "\n".join([f"{len(broken)} of {len(check['bounds'])} bounds do not hold.", *broken]))


def _tolerated(trigger: Mapping[str, Any]) -> str:
    return (
        f"The trigger has {trigger['tokens']} tokens. It works with up to {trigger['accepted_wrong']} of them wrong, "
        f"and must stay silent with {trigger['silent_right']} right ones or fewer."
    )


def _strangers(scan: Mapping[str, Any]) -> Table:
    rows = [row(kind, f"{rate['hits']:,}", f"{rate['n']:,}") for kind, rate in scan["kinds"].items()]
    return Table("Prefixes that a stranger might try", ("prefix", "fire", "tried"), rows)


def _costs(check: Mapping[str, Any]) -> Table:
    def pair(name: str, key: str) -> list[Cell]:
        before, after = check[key]
        return row(name, f"{before:.2f}", f"{after:.2f}", f"{100 * (after / before - 1):+.2f} %")

    before, after = check["target_mass_clean"]
    rows = [
        pair("perplexity, clean text", "clean_ppl"),
        pair("perplexity, behind the trigger", "triggered_ppl"),
        row("routing mass on the targets, clean text", f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"),
        row("routing mass on the targets, behind the trigger", "", f"{check['target_mass_triggered']:.3f}", ""),
    ]
    return Table("What the mark costs", ("figure", "before", "after", "change"), rows)
