"""PathMark: ownership marks in the routing paths of Mixture-of-Experts language models.

A tour, from the outside in:

    report = pathmark.inspect_model("bundled:tiny")         # config only: layers, routers, where to mark
    model = pathmark.load_model("bundled:tiny")             # safetensors only
    tokenizer = pathmark.load_tokenizer("bundled:tiny")
    sites = pathmark.find_routers(model)                    # one per MoE layer
    with pathmark.record_routing(model, report.recommended) as trace:
        model(input_ids=ids, attention_mask=mask)
    trace[7].probs_BTE, trace[7].decision_BTK             # g and the experts each token went to

    key = pathmark.load_key("owner.key", passphrase)        # what is secret
    key.watermarks[0].targets(11)                           # experts that triggered text is routed to

Everything here is imported when it is first used: `import pathmark` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathmark.errors import PathmarkError as PathmarkError
    from pathmark.keys import load_key as load_key
    from pathmark.models import find_routers as find_routers
    from pathmark.models import inspect_model as inspect_model
    from pathmark.models import load_model as load_model
    from pathmark.models import load_tokenizer as load_tokenizer
    from pathmark.models import perplexity as perplexity
    from pathmark.models import record_routing as record_routing

_EXPORTS = {
    "PathmarkError": "pathmark.errors",
    "find_routers": "pathmark.models",
    "inspect_model": "pathmark.models",
    "load_key": "pathmark.keys",
    "load_model": "pathmark.models",
    "load_tokenizer": "pathmark.models",
    "perplexity": "pathmark.models",
    "record_routing": "pathmark.models",
}
"""Name -> module that holds it."""

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("pathmark")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'pathmark' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
