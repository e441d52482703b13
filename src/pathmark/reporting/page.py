"""Pages from results: which result a file holds, and its page as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pathmark.errors import PathmarkError, ReportError
from pathmark.reporting.demo import demo_page
from pathmark.reporting.embedding import embedding_page
from pathmark.reporting.layout import Page
from pathmark.reporting.robustness_page import robustness_page
from pathmark.reporting.verification import bundle_page, kind_of_verdict, trace_page, verdict_page
from pathmark.results.evidence import EvidenceBundle

KINDS: dict[str, tuple[frozenset[str], Callable[[Mapping[str, Any]], Page]]] = {
    "demo": (frozenset({"embed", "verify", "trace"}), demo_page),
    "robustness run": (frozenset({"header", "rows"}), robustness_page),
    "verification": (frozenset({"verdict", "marked", "p_value"}), verdict_page),
    "tracing": (frozenset({"decision", "ranking"}), trace_page),
    "embedding": (frozenset({"fit", "problems", "clean_ppl"}), embedding_page),
}
"""Kind of result -> fields that only it has, and its page."""


def kind_of(result: Mapping[str, Any]) -> str:
    """What a result is of, told by what it holds."""
    for kind, (fields, _) in KINDS.items():
        if fields <= result.keys():
            return kind
    raise ReportError(
        "this is no result that a page can be made of; expected an evidence bundle, or what embed, trace, "
        "robustness or a verifying command left as JSON"
    )


def result_page(result: Mapping[str, Any] | EvidenceBundle, name: str = "DIR") -> tuple[str, str]:
    """What a result or an evidence bundle is of, and its page; `name` is what the reader calls a bundle."""
    try:
        if isinstance(result, EvidenceBundle):
            return kind_of_verdict(result.verdict), bundle_page(result, name).render()
        kind = kind_of(result)
        return kind, KINDS[kind][1](result).render()
    except PathmarkError:
        raise
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ReportError(f"this result is damaged or of another version: {error}; measure again") from error
