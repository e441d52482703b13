"""What a job takes, by counting: memory, operations, disk. docs/planning.md has every formula.

`pathmark plan` divides the operations by a stated or measured rate; `inspect` and `embed --estimate` use the same
counts. Sizes are in bytes, operations are multiplications and additions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pathmark.embedding import EmbedConfig
from pathmark.embedding.climbing import BANK
from pathmark.embedding.paths import LANGUAGE_TOKENS
from pathmark.models.sizes import LayerSize, Sizes
from pathmark.release.scan import WHOLE_VOCABULARY, ScanConfig
from pathmark.training.cache import BATCH_TOKENS
from pathmark.training.vocabulary import CHUNK

FORWARD, BACKWARD = 2, 4
"""Operations per parameter and token."""
LIBRARIES = 430_000_000
"""Resident before a model is opened: Python, torch and transformers."""
TRIGGER_TOKENS = 12
"""Of a trigger as keygen draws it."""
PASSES_OF_CHECK, DECOY_ROWS = 5, 60
"""How often the self-check runs a text: routing and perplexity, rounded, in chats, for the id. Rows behind decoys."""
WIDE = 4
"""Bytes of a number in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What a job runs on."""

    count: int = 1
    memory: int | None = None
    """Bytes of each; None where nobody said."""
    weight_bytes: int = WIDE
    """Per weight that is not trained: 4, or 2 in bf16."""


@dataclass(frozen=True)
class Job:
    """What one job takes."""

    name: str
    parts: Mapping[str, int]
    """Part of the memory -> bytes, on one device."""
    shared: tuple[str, ...]
    """Parts that every device has whole."""
    tokens_per_step: int
    operations: Mapping[str, float]
    """Phase -> operations."""
    disk: int
    processes: Literal["sharded", "copies", "one"]
    """What several devices do: a shard of the training each, texts of its own each on a whole copy, or nothing more."""
    host: Mapping[str, int] = field(default_factory=dict)
    """What lies in the memory of each process's host, or on its disk where that is short."""
    repeated: tuple[str, ...] = ()
    """Phases that every process runs whole."""

    @property
    def memory(self) -> int:
        """On one device."""
        return sum(self.parts.values())

    def spread(self, devices: Devices) -> bool:
        """Whether the model lies over all devices, layer after layer, because one cannot hold it."""
        needed = self.memory if self.processes == "one" else self.parts["weights"]
        return devices.count > 1 and devices.memory is not None and needed > devices.memory

    def workers(self, devices: Devices) -> int:
        """Processes that work at the same time: none waits for the layers of another."""
        return 1 if self.processes == "one" or self.spread(devices) else devices.count

    def per_device(self, devices: Devices) -> int:
        """Bytes on each of several devices. A process opens the whole model before it keeps a shard."""
        whole = sum(self.parts[part] for part in self.shared)
        split = -(-(self.memory - whole) // devices.count) + whole
        if self.spread(devices):
            return split
        return max(split, self.parts["weights"] + whole) if self.processes == "sharded" else self.memory

    def seconds(self, rate: float, devices: Devices) -> float:
        """At so many operations per second and device."""
        repeated = sum(self.operations[phase] for phase in self.repeated)
        return (repeated + (sum(self.operations.values()) - repeated) / self.workers(devices)) / rate

    def summary(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "memory_parts": dict(self.parts), "host": dict(self.host), "tokens_per_step": self.tokens_per_step,
            "operations": dict(self.operations), "disk_bytes": self.disk,
        }  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What an embedding changes, in parameters."""

    carried: int
    """Attention and routers of the marked layers, and the attention below them."""
    targets: int
    """Target experts."""
    gradients: int
    """Everything that gets a gradient: of a fused tensor all of it, also where few experts change."""
    active: int
    """What a token meets from the lowest trained layer on."""

    @classmethod
    def of(cls, sizes: Sizes, marked: Sequence[int], config: EmbedConfig, width: int) -> Trained:
        """Of an embedding with this config and so many targets per layer."""
        layers, lowest = [sizes.layers[n] for n in marked], max(0, marked[0] - 1)
        attention = "attention" in config.train
        carried = sum(layer.router + attention * layer.attention for layer in layers)
        carried += attention * (sizes.layers[lowest].attention if lowest < marked[0] else 0)
        experts = "targets" in config.train
        return cls(
            carried=carried,
            targets=experts * sum(width * layer.expert for layer in layers),
            gradients=carried + experts * sum(layer.experts for layer in layers),
            active=sum(layer.active for layer in sizes.layers[lowest:]),
        )


def plan_embedding(
    sizes: Sizes, marked: Sequence[int], config: EmbedConfig, devices: Devices, *, width: int = 2, checked: int = 0
) -> Job:
    """An embedding and its self-check; `checked` are the tokens of the latter, 0 for the usual ones."""
    weight, trained = devices.weight_bytes, Trained.of(sizes, marked, config, width)
    length = config.data.seq_len + TRIGGER_TOKENS
    per_step = config.batch_size * length
    tokens = config.loop.steps * per_step
    narrow = weight < WIDE
    masters = trained.targets + narrow * trained.carried
    language = LANGUAGE_TOKENS * 5 // 4
    experts = sum(sizes.layers[n].n_experts for n in marked)
    tail = sizes.layers[max(0, marked[0] - 1) :]
    per_token = sum(_activations(sizes, layer) for layer in tail)
    if config.loop.recompute:
        per_token = sizes.hidden * len(tail) + max(_activations(sizes, layer) for layer in tail)
    parts = {
        "weights": weight * sizes.total,
        "gradients": weight * trained.gradients,
        # Adam's two, where the weights began, and a wider copy with its gradient of what is narrow or part of a tensor
        "optimiser": WIDE * (3 * (trained.carried + trained.targets) + 2 * masters),
        "activations": weight * per_step * per_token,
        "logits": 4 * WIDE * language * min(sizes.vocabulary, CHUNK),
        "libraries": LIBRARIES,
    }
    places = min(BANK, sizes.vocabulary) * TRIGGER_TOKENS
    host = {"cache": WIDE * tokens * (2 * sizes.hidden + experts), "bank": WIDE * places * sizes.hidden}
    whole = FORWARD * sizes.active
    check = checked or checked_tokens(sizes.vocabulary, n_probes=100, length=length)
    return Job(
        name="embed",
        parts=parts,
        shared=("logits", "libraries"),
        tokens_per_step=per_step,
        operations={
            "lower layers": whole * float(min(tokens, config.texts * 3 * length) + places),
            "training": (FORWARD + BACKWARD)
            * (float(tokens) * trained.active + config.loop.steps * language * sizes.hidden * sizes.vocabulary),
            "check": whole * float(check),
        },
        disk=weight * sizes.total + 3 * WIDE * (trained.carried + trained.targets),
        processes="sharded",
        host=host,
        repeated=("lower layers",),
    )


def checked_tokens(
    vocabulary: int,
    *,
    n_probes: int,
    length: int,
    watermarks: int = 1,
    trigger: int = TRIGGER_TOKENS,
    scan: ScanConfig | None = None,
) -> int:
    """Tokens that a self-check runs through the model: probes in every form, and the prefixes that must not fire."""
    scan = scan or ScanConfig()
    single, text = min(vocabulary, WHOLE_VOCABULARY), scan.text_tokens
    near = scan.random_sequences + scan.per_count * (trigger + scan.at_the_edge)
    scanned = single * (1 + scan.repeat + 2 * text) + near * (trigger + text)
    return PASSES_OF_CHECK * (1 + watermarks) * n_probes * length + scanned


def streamed_memory(sizes: Sizes, marked: Sequence[int], config: EmbedConfig, *, width: int = 2) -> int:
    """Bytes in memory of an embedding that leaves on disk, in 16 bits, what does not change."""
    trained = Trained.of(sizes, marked, config, width)
    tail = sizes.layers[max(0, marked[0] - 1) :]
    lower = sizes.layers[: max(0, marked[0] - 1)] or tail
    resident = 2 * sizes.ends + WIDE * sum(layer.total - layer.experts for layer in tail)
    state = WIDE * (4 * trained.carried + 5 * trained.targets)  # gradient, Adam's two, home; and the experts themselves
    length = config.data.seq_len + TRIGGER_TOKENS
    active = WIDE * config.batch_size * length * sum(_activations(sizes, layer) for layer in tail)
    working = max(WIDE * max(layer.total - layer.experts for layer in lower), WIDE * 4 * BATCH_TOKENS * sizes.hidden)
    bank = WIDE * min(BANK, sizes.vocabulary) * TRIGGER_TOKENS * sizes.hidden
    return LIBRARIES + resident + state + active + working + bank


def plan_verification(sizes: Sizes, devices: Devices, *, n_probes: int = 100, tokens: int = 128) -> Job:
    """Probes clean and triggered, decoys, and the perplexity by which the reading is chosen."""
    length = tokens + TRIGGER_TOKENS
    seen = (2 * n_probes + DECOY_ROWS) * length
    layer = max(_activations(sizes, one) for one in sizes.layers)
    return Job(
        name="verify",
        parts={
            "weights": devices.weight_bytes * sizes.total,
            "activations": devices.weight_bytes * BATCH_TOKENS * layer,
            "libraries": LIBRARIES,
        },
        shared=("libraries",),
        tokens_per_step=BATCH_TOKENS,
        operations={"probes": FORWARD * float(sizes.active) * seen},
        disk=0,
        processes="copies",
    )


def plan_attacks(sizes: Sizes, devices: Devices, *, trained_tokens: float, cases: int, batch: int) -> Job:
    """A suite of attacks: the suspect, the original, an attacked copy and its optimiser, all in 32 bits.

    `trained_tokens` are those of all fine-tuning; `cases` are verified and their perplexity is measured.
    """
    verified = plan_verification(sizes, devices)
    per_token = sum(_activations(sizes, layer) for layer in sizes.layers)
    return Job(
        name="robustness",
        parts={
            "weights": 3 * WIDE * sizes.total,
            "gradients": WIDE * sizes.total,
            "optimiser": 2 * WIDE * sizes.total,
            "activations": WIDE * batch * per_token,
            "libraries": LIBRARIES,
        },
        shared=("libraries",),
        tokens_per_step=batch,
        operations={
            "fine-tuning": (FORWARD + BACKWARD) * float(sizes.active) * trained_tokens,
            "verification": 2 * cases * sum(verified.operations.values()),
        },
        disk=3 * WIDE * sizes.total,
        processes="one",
    )


def _activations(sizes: Sizes, layer: LayerSize) -> int:
    """Numbers that one token leaves in one layer for the backward pass."""
    hidden = sizes.hidden
    routed, always = (size // (3 * hidden) for size in (layer.expert, layer.rest))  # neurons
    blocks = layer.top_k + (always > 0)
    return int(8 * hidden + 2 * layer.attention // hidden + 4 * hidden * blocks + 5 * (layer.top_k * routed + always))
