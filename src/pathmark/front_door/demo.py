"""The main job on the bundled model, from a key to the name of a leaking licensee, in a new folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pathmark.embedding import default_config
from pathmark.errors import EmbeddingError
from pathmark.evaluate.demo import ORIGINAL, OUR_COPY, STOLEN, STRANGER, run_demo
from pathmark.keys.safefile import write_private
from pathmark.progress import Progress, Silent
from pathmark.reporting.page import result_page
from pathmark.reporting.pictures import require_matplotlib


@dataclass(frozen=True)
class Demonstration:
    """What was made, and whether everything went as it should."""

    results: dict[str, Any]
    folder: Path

    @property
    def good(self) -> bool:
        """Fit for release, found in the copy and in the thief's, nowhere else, and the right licensee named."""
        found, traced = self.results["verify"], self.results["trace"]
        return bool(
            self.results["embed"]["fit"]
            and all(found[name]["marked"] for name in (OUR_COPY, STOLEN))
            and not any(found[name]["marked"] for name in (ORIGINAL, STRANGER))
            and traced["licensee"] == traced["leak"]
        )

    def summary(self) -> dict[str, Any]:
        """The content of results.json."""
        return self.results

    def words(self) -> str:
        """Whose copy leaked, and what the mark cost."""
        before, after = self.results["embed"]["clean_ppl"]
        return (
            f"Whose copy leaked? {self.results['trace']['words']}\nWhat the mark costs: perplexity on ordinary text "
            f"{before:.2f} -> {after:.2f} ({100 * (after / before - 1):+.2f} %)."
        )


def demo(
    output: str | os.PathLike[str],
    *,
    steps: int | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Demonstration:
    """Mark a licensee's copy of the bundled MoE, disguise it, find the mark, name the licensee; `say` hears it all."""
    folder = Path(output)
    if folder.exists():
        raise EmbeddingError(f"{folder} already exists; choose another name, nothing is overwritten")
    require_matplotlib()  # at the end there is a page with pictures
    folder.mkdir(mode=0o700, parents=True)
    config = default_config()
    if steps is not None:
        config = replace(config, loop=replace(config.loop, steps=steps))
    results = run_demo(folder, config, progress=progress or Silent(), say=say or (lambda text: None))
    (folder / "results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    write_private(folder / "report.html", result_page(results)[1].encode())
    return Demonstration(results, folder)
