"""Ownership marks of other people behind one protocol, written from their papers, to compare ours with.

    scheme = find_scheme("learnmark")
    config = configure(scheme, SchemeKey(scheme="learnmark", settings={"vocabulary": 4096}))
    marked = scheme.embed(model, tokenizer, config, texts)
    verdict = scheme.verify(marked, tokenizer, config, probes)
    verdict.marked, verdict.p, verdict.wsr

`register` adds a scheme of your own. docs/baselines.md says where each comes from and what differs.
"""

from pathmark.baselines.catalog import SCHEMES, find_scheme, register
from pathmark.baselines.scheme import Scheme, SchemeConfig, SchemeVerdict, configure, judged

__all__ = [
    "SCHEMES",
    "Scheme",
    "SchemeConfig",
    "SchemeVerdict",
    "configure",
    "find_scheme",
    "judged",
    "register",
]
