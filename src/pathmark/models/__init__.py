"""The only room that knows Hugging Face internals: routers, traces, loading.

>>> report = inspect_model("bundled:tiny")          # config only, no weights
>>> model = load_model("bundled:tiny")              # safetensors only
>>> with record_routing(model, report.recommended) as trace:
...     model(input_ids=ids)
>>> trace[7].probs_BTE                             # the paper's g, (batch, token, expert)
"""

from pathmark.models.bundled import bundled_folder, bundled_probes, bundled_segments
from pathmark.models.families import Scoring, log_distribution
from pathmark.models.inspection import LayerFacts, ModelReport, inspect_model, recommended_layers
from pathmark.models.loading import (
    check_safetensors,
    load_config,
    load_model,
    load_tokenizer,
    local_folder,
    resolve_model,
)
from pathmark.models.perplexity import Perplexity, perplexity
from pathmark.models.routers import RouterSite, count_layers, find_routers, select_sites
from pathmark.models.streaming import is_streamed, layer_weights, should_stream, stream_model
from pathmark.models.trace import LayerRouting, RoutingTrace, record_routing
from pathmark.models.usage import device_of, encode_batches, expert_usage, pad_rows
from pathmark.models.weights import is_finite, refuse_bad_weights

__all__ = [
    "LayerFacts",
    "LayerRouting",
    "ModelReport",
    "Perplexity",
    "RouterSite",
    "RoutingTrace",
    "Scoring",
    "bundled_folder",
    "bundled_probes",
    "bundled_segments",
    "check_safetensors",
    "count_layers",
    "device_of",
    "encode_batches",
    "expert_usage",
    "find_routers",
    "inspect_model",
    "is_finite",
    "is_streamed",
    "layer_weights",
    "load_config",
    "load_model",
    "load_tokenizer",
    "local_folder",
    "log_distribution",
    "pad_rows",
    "perplexity",
    "recommended_layers",
    "record_routing",
    "refuse_bad_weights",
    "resolve_model",
    "select_sites",
    "should_stream",
    "stream_model",
]
