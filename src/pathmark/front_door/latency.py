"""The timing channel: requests at an API with the trigger and without, or a simulation of what a mark costs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pathmark.errors import VerificationError
from pathmark.evaluate.expert_parallel import QWEN_MOE, Hardware, layer_sizes, record_twins, simulate_routes
from pathmark.front_door.keys import KeyLike, key_file, open_key
from pathmark.front_door.verify_api import is_url
from pathmark.keys import Ledger, trigger_refs
from pathmark.keys.keyfile import PassphraseSource
from pathmark.models import bundled_probes, bundled_segments, load_tokenizer
from pathmark.models.describe import describe_model
from pathmark.models.devices import Placement, open_model
from pathmark.models.texts import Texts, given_texts
from pathmark.models.tokenization import HFTextCodec
from pathmark.progress import Progress, Silent
from pathmark.stats import latency_margin
from pathmark.verification import ApiClient, ApiSettings, encode_probes
from pathmark.verification.blackbox.latency import LatencyVerdict, verify_latency
from pathmark.verification.blackbox.latency_plan import LatencyConfig as PlanConfig
from pathmark.verification.blackbox.latency_plan import plan_latency
from pathmark.verification.blackbox.latency_timing import LatencyLog, through_api


@dataclass(frozen=True, kw_only=True)
class LatencyConfig:
    """Whom to time, with what, and how sure to be."""

    model: str
    """Name under which the API serves the model."""
    api_key_env: str | None = None
    """Environment variable that holds the API key."""
    endpoint: Literal["auto", "chat", "completions"] = "auto"
    timeout: float = 60.0
    """Seconds for one request."""
    tokenizer: str = "bundled:tiny"
    """Model whose tokenizer the key was made for."""
    texts: Texts | None = None
    """None: the bundled ones."""
    pairs: int = 100
    """Triggered and clean requests."""
    calibration: int = 40
    """Pairs without the trigger, first."""
    tokens: int = 256
    """Text tokens per request."""
    max_tokens: int = 1
    """Tokens to generate."""
    significance: float = 0.01
    effect: float = 0.08
    """Slowdown to look for, as a share."""
    seed: int = 0
    """Of the order inside pairs."""
    log: str | os.PathLike[str] | None = None
    """JSON lines of times; an interrupted run goes on from it."""


@dataclass(frozen=True)
class TimedApi:
    """Whether the trigger slows an API down. Corroboration only: it proves no ownership."""

    host: str
    model: str
    verdict: LatencyVerdict

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark latency --json`."""
        return {"host": self.host, "model": self.model, **self.verdict.summary()}

    def words(self) -> str:
        """One paragraph for people."""
        return self.verdict.words()


def measure_latency(
    url: str,
    key: KeyLike,
    config: LatencyConfig,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> TimedApi:
    """Time triggered against clean requests. Where calibration shows that the effect could not be seen, the trigger
    is not sent; otherwise `announce` hears what can be seen right before it is."""
    if not is_url(url):
        raise VerificationError(
            f"expected the address of an API, got {url!r}; `pathmark simulate-latency` takes models"
        )
    say = progress or Silent()
    owner, file = open_key(key, passphrase), key_file(key)
    client = ApiClient(
        ApiSettings(
            url=url, model=config.model, endpoint=config.endpoint, api_key_env=config.api_key_env,
            timeout=config.timeout, concurrency=1, retries=0, deadline=86400.0,
        )
    )  # fmt: skip
    log = None if config.log is None else LatencyLog(Path(config.log))
    ledger = None if file is None else Ledger.beside(file)
    begun = None if log is None else log.trigger
    unused = [] if ledger is None else ledger.unused_triggers(owner)
    trigger = begun or next(iter(unused), trigger_refs(owner)[0])
    sent = PlanConfig(
        trigger=trigger, pairs=config.pairs, calibration=config.calibration, text_tokens=config.tokens,
        max_tokens=config.max_tokens, seed=config.seed,
    )  # fmt: skip
    plan = plan_latency(owner, HFTextCodec(load_tokenizer(config.tokenizer)), _texts(config.texts), sent)

    def disclose(detectable: float) -> None:
        if announce is not None:
            announce(
                f"{config.pairs} pairs at this noise show a slowdown of {100 * detectable:.1f} % four times out of "
                f"five (looked for: {100 * config.effect:.1f} %). Now the trigger is sent."
            )
        if ledger is not None:
            ledger.record(owner, trigger, host=client.host, model=client.model, times=config.pairs)

    verdict = verify_latency(
        through_api(client), plan, significance=config.significance, expected=config.effect,
        log=log, disclose=disclose, progress=say,
    )  # fmt: skip
    return TimedApi(client.host, client.model, verdict)


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """How the experts are spread, and whose costs are assumed."""

    devices: int = 8
    """Devices that share the experts."""
    placement: Literal["contiguous", "round-robin", "balanced"] = "contiguous"
    costs: Literal["model", "qwen1.5-moe"] = "model"
    """Whose layer sizes the costs follow."""
    batch: int = 8
    """Texts per simulated batch."""
    texts: Texts | None = None
    n_texts: int = 100
    tokens: int = 256
    """Per text."""
    run_on: Placement = field(default_factory=Placement)
    """Where the routes are recorded."""


@dataclass(frozen=True)
class SimulatedLatency:
    """What a mark would cost where experts are spread over devices."""

    figures: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark simulate-latency --json`."""
        return self.figures

    def words(self) -> str:
        """One paragraph for people: the prediction and what it assumes."""
        found, costs = self.figures, self.figures["assumptions"]
        return (
            f"Predicted overhead {100 * found['overhead']:+.1f} % on {costs['devices']} devices "
            f"({costs['placement']}), {found['batches']} batches of {found['tokens_per_batch']:,} tokens. Assumed: "
            f"{1e6 * costs['pair_seconds']:.3g} µs per token and expert, at least "
            f"{1e6 * costs['expert_seconds']:.3g} µs per expert in use, {1e6 * costs['copy_seconds']:.3g} µs per token "
            f"sent, {1e6 * costs['message_seconds']:.3g} µs per all-to-all, {1e6 * costs['token_seconds']:.3g} µs per "
            "token elsewhere. See docs/latency.md."
        )


def simulate_latency(
    model: str | os.PathLike[str],
    key: KeyLike,
    config: SimulationConfig | None = None,
    *,
    passphrase: PassphraseSource = None,
) -> SimulatedLatency:
    """Routes of triggered and clean texts through a marked model, and the time that they would take on devices."""
    config = config or SimulationConfig()
    owner = open_key(key, passphrase)
    _, codec, report = describe_model(model)
    loaded = open_model(model, config.run_on)
    sizes = layer_sizes(loaded) if config.costs == "model" else QWEN_MOE
    deployment = Hardware().deployment(sizes, config.devices, config.placement)
    probes = encode_probes(codec.tokenizer, _texts(config.texts), n_probes=config.n_texts, length=config.tokens)
    triggered, clean, experts = record_twins(loaded, owner, codec, probes)
    overhead = simulate_routes(triggered, clean, experts, deployment, batch=config.batch)
    watermark = owner.watermarks[0]
    tops = {layer: report.facts(layer).top_k for layer in watermark.layers}
    return SimulatedLatency(
        {
            "model": os.fspath(model),
            "overhead": overhead.value,
            "overhead_per_layer": overhead.per_layer,
            "batches": len(overhead.clean),
            "texts": len(probes),
            "tokens_per_batch": config.batch * max(len(probe) for probe in probes),
            "watermark_layers": list(watermark.layers),
            "paper_margin": {
                layer: latency_margin(min(watermark.width(layer), top), top, config.devices)
                for layer, top in tops.items()
            },
            "assumptions": asdict(deployment),
        }
    )


def _texts(texts: Texts | None) -> list[str]:
    return [*bundled_probes(), *bundled_segments()] if texts is None else given_texts(texts)
