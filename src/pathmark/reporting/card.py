"""A section for a model's card and a badge, from published commitments alone: there is nothing secret to give away."""

from __future__ import annotations

from html import escape

from pathmark.keys.commitment import Commitment

MONTHS = 10
"""Letters of a date that a badge has room for: 2026-11-18."""


def card_section(commitment: Commitment, file: str) -> str:
    """Markdown: who committed to which key and files, when, and how anybody checks that."""
    dated = "by a time-stamping authority" if commitment.timestamps else "by its owner alone"
    rows = {
        "owner": _cell(commitment.owner) or "not named",
        "key": f"`{commitment.fingerprint}`",
        "commitment": f"`{commitment.root.hex()}`",
        "dated": f"{commitment.created}, {dated}",
    }
    bound = commitment.kind == "release"
    if bound:
        rows["files"] = f"{len(commitment.files)}, {sum(file.size for file in commitment.files):,} bytes"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    checked = f"pathmark commit --check {file}" + (" --release ." if bound else "")
    files = " and to the files of this release" if bound else ""
    return f"""## Ownership

The owner of this model has committed to a secret key{files}. Copies may carry an ownership mark that this key finds,
in the paths that tokens take through the experts. The commitment tells neither the mark nor whether there is one.

| | |
|---|---|
{table}

Anybody can check that the commitment is signed{" and that the files are those" if bound else ""}:

```bash
pip install pathmark
{checked}
```
"""


def badge(commitment: Commitment) -> str:
    """An SVG: that there is a commitment, and since when."""
    left, right = "PathMark", f"committed {commitment.created[:MONTHS]}"
    widths = [round(6.6 * len(text) + 12) for text in (left, right)]
    total = sum(widths)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="20" role="img" '
        f'aria-label="{escape(left)}: {escape(right)}"><title>{escape(left)}: {escape(right)}</title>'
        f'<rect width="{widths[0]}" height="20" fill="#333c4a"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="#a8370a"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{widths[0] / 2}" y="14">{escape(left)}</text>'
        f'<text x="{widths[0] + widths[1] / 2}" y="14">{escape(right)}</text></g></svg>\n'
    )


def _cell(text: str) -> str:
    """A name inside a Markdown table: one line, no column, no markup."""
    plain = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>|#!" else letter for letter in plain)
