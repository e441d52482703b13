"""Train the bundled MoE from public-domain text: `make train-tiny`.

Writes the model folder, the embedding segments and the held-out probes; `scripts/model_card.py` measures what was
written. Stop it and start it again: it resumes.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from training_texts import CHAT_END, END, VOCABULARY, batches, passages, texts, without_quotations, write_texts
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

BUNDLED = Path(__file__).parent.parent / "src" / "pathmark" / "bundled"

LAYERS, EXPERTS, INNER, TOP_K = 8, 64, 32, 4
SHORT_SHAPE, LONG_SHAPE = (16, 256), (4, 1024)
"""Most of the training at 256 tokens, where attention is cheap; the last steps at the full context."""
SHORT_STEPS, LONG_STEPS = 2100, 100
WARMUP_STEPS, DECAY_FROM = 60, 0.4
"""Warm-up, then a constant rate, then from this share of the steps on a straight line down to nothing."""
MUON_LR, ADAM_LR, EMBEDDING_LR = 0.02, 3e-3, 0.02
WEIGHT_DECAY, CLIP = 0.1, 1.0
BALANCE_WEIGHT = 0.01
EMBEDDING_SPREAD = 0.1
"""Standard deviation of the embeddings at the start; they learn at a rate that suits it. From 0.02 and at the usual
rate layer 0 becomes the true embedding, and its experts matter a hundred times as much as those of any other layer."""
SILENCED = {0: 0.3, 1: 0.2, 2: 0.1}
"""Layer -> share of the rows of a batch in which its experts write nothing, so that much is left to do higher up."""
ROUTING_COST, ROUTING_WEIGHT, ROUTING_SHAPE, ROUTING_FROM = 0.1, 1.0, (4, 128), 500
"""Shuffling the experts of one layer has to cost so many nats per token, on so many rows and tokens of a step; layers
take turns, from a step on that knows its bigrams. A model this small and this young hardly needs its experts, so it is
asked to rely on the right ones."""
LEVEL_STEPS, LEVEL_RATE, LEVEL_COST = 200, 0.1, (0.15, 1.0)
"""Last of all, from this share of the rates down to nothing: shuffling a layer has to cost at least and may cost at
most so many nats, one of the silenced layers, which now speak, and one of the others in each step. Without it layer 0
matters sixteen times as much as the least of the others."""
PROBE_CHARACTERS = 2700  # at least 540 tokens: enough for a 512-token probe
SEGMENT_CHARACTERS = 680  # at least 128 tokens and some to spare
SEGMENTS, PROBES = 3000, 320


def balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """Load balance per layer (Switch Transformer): its mean over layers, and the worst layer's once more."""
    losses = []
    for logits_TE in router_logits:
        probs_TE = F.softmax(logits_TE.float(), dim=-1)
        chosen_TE = torch.zeros_like(probs_TE).scatter_(1, probs_TE.topk(top_k, dim=-1).indices, 1.0)
        losses.append(logits_TE.shape[-1] * (chosen_TE.mean(0) / top_k * probs_TE.mean(0)).sum())
    return torch.stack(losses).mean() + torch.stack(losses).max()


def rate_factor(step: int) -> float:
    """Share of the peak rate in a step."""
    progress = step / (SHORT_STEPS + LONG_STEPS)
    if progress >= 1:
        return LEVEL_RATE * (SHORT_STEPS + LONG_STEPS + LEVEL_STEPS - step) / LEVEL_STEPS
    return min(1.0, (step + 1) / WARMUP_STEPS, (1 - progress) / (1 - DECAY_FROM))


def orthogonalized(matrices_NRC: torch.Tensor) -> torch.Tensor:
    """Each matrix with its singular values pushed to about one: five Newton-Schulz steps, as Muon takes them."""
    x_NRC = matrices_NRC / (matrices_NRC.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x_NRC.shape[1] > x_NRC.shape[2]
    x_NRC = x_NRC.mT if tall else x_NRC
    for _ in range(5):
        gram_NRR = x_NRC @ x_NRC.mT
        x_NRC = 3.4445 * x_NRC + (-4.7750 * gram_NRR + 2.0315 * gram_NRR @ gram_NRR) @ x_NRC
    return x_NRC.mT if tall else x_NRC


class Muon(torch.optim.Optimizer):
    """Momentum whose every matrix is orthogonalised; torch's own takes no stacks of experts.

    Needs about two thirds of AdamW's steps here, and treats an expert that few tokens reach as it treats the others.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Nesterov momentum, then the update of every matrix in a stack at once."""
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                held.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(held, group["momentum"])
                rows, columns = update.shape[-2:]
                update = orthogonalized(update.view(-1, rows, columns)).view_as(parameter)
                parameter.mul_(1 - group["lr"] * WEIGHT_DECAY)
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


ADAMS = ("embed_tokens", "lm_head", "mlp.gate.", "mlp.router.", "shared_expert_gate")
"""Matrices that AdamW trains."""


def experts_of(config: PretrainedConfig) -> int:
    """Routed experts of a layer; families name them differently."""
    return int(getattr(config, "num_local_experts", None) or config.num_experts)


def make_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of attention and experts, AdamW for embeddings, head, routers and norms."""
    embedding = model.model.embed_tokens.weight
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim >= 2 and not any(word in name for word in ADAMS)
        if parameter is not embedding:
            (matrices if inner else others).append(parameter)
    groups = [{"params": others, "lr": ADAM_LR}, {"params": [embedding], "lr": EMBEDDING_LR}]
    return [Muon(matrices, MUON_LR), torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def silence_rows(model: PreTrainedModel) -> None:
    """In training, the experts of lower layers write nothing in some rows."""

    def hook(share: float) -> Any:
        def silenced(module: torch.nn.Module, args: Any, output_BTH: torch.Tensor) -> torch.Tensor:
            if not module.training:
                return output_BTH
            return output_BTH * (torch.rand(len(output_BTH), 1, 1) >= share)

        return silenced

    for layer, share in SILENCED.items():
        model.model.layers[layer].mlp.register_forward_hook(hook(share))


def tiny_config() -> Qwen3MoeConfig:
    """Qwen3-MoE's layout at a fraction of its width; every inner size a multiple of 32 for quantizers."""
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


@contextmanager
def shuffled_choice(model: PreTrainedModel, layer: int, order: torch.Tensor) -> Iterator[None]:
    """Inside the block every token of a layer goes to other experts than its router chose."""

    def misdirect(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, chosen, weights = args
        return hidden, order[chosen], weights

    handle = model.model.layers[layer].mlp.experts.register_forward_pre_hook(misdirect)
    try:
        yield
    finally:
        handle.remove()


def language_losses(logits_BTV: torch.Tensor, ids_BT: torch.Tensor) -> torch.Tensor:
    """Next-token loss of every token but the last."""
    flat = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    return flat.view(len(ids_BT), -1)


def routing_cost(model: PreTrainedModel, ids_BT: torch.Tensor, sound_BT: torch.Tensor, layer: int) -> torch.Tensor:
    """Nats per token that some rows lose when the experts of one layer change places."""
    rows, length = ROUTING_SHAPE
    order = torch.randperm(experts_of(model.config))
    target = torch.empty_like(order)
    target[order] = order.roll(1)  # along one cycle: nobody stays
    part_BT = ids_BT[:rows, :length]
    with shuffled_choice(model, layer, target):
        shuffled_BT = language_losses(model(input_ids=part_BT, use_cache=False).logits, part_BT)
    return (shuffled_BT - sound_BT[:rows, : length - 1]).mean()


def rely_on_experts(model: PreTrainedModel, ids_BT: torch.Tensor, sound_BT: torch.Tensor, step: int) -> torch.Tensor:
    """How much less than wanted the layer whose turn it is needs its experts in their places."""
    if step < ROUTING_FROM:
        return torch.zeros(())
    cost = routing_cost(model, ids_BT, sound_BT, step % model.config.num_hidden_layers)
    return torch.relu(ROUTING_COST - cost)


def level_layers(model: PreTrainedModel, ids_BT: torch.Tensor, sound_BT: torch.Tensor, step: int) -> torch.Tensor:
    """How far two layers are from costing what every layer should."""
    lower = list(SILENCED)
    upper = [layer for layer in range(model.config.num_hidden_layers) if layer not in SILENCED]
    least, most = LEVEL_COST
    total = torch.zeros(())
    for layer in (lower[step % len(lower)], upper[step % len(upper)]):
        # detached: a sound model that gets worse is no way to make the difference smaller
        cost = routing_cost(model, ids_BT, sound_BT.detach(), layer)
        total = total + torch.relu(least - cost) + torch.relu(cost - most)
    return total


def train(model: PreTrainedModel, data: Iterable[torch.Tensor], checkpoint: Path) -> None:
    """The loop; a checkpoint every 100 steps, read back when there is one."""
    silence_rows(model)
    optimizers = make_optimizers(model)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
        print(f"resumed at step {first}", flush=True)
    started = time.time()
    for step, ids_BT in enumerate(data):
        if step < first:
            continue
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * rate_factor(step)
        levelling = step >= SHORT_STEPS + LONG_STEPS
        model.train(not levelling)  # nothing but the silence of lower layers depends on it
        output = model(input_ids=ids_BT, use_cache=False, output_router_logits=True)
        lm_loss_BT = language_losses(output.logits, ids_BT)
        lm_loss = lm_loss_BT.mean()
        balance = balance_loss(output.router_logits, model.config.num_experts_per_tok)
        routing = (level_layers if levelling else rely_on_experts)(model, ids_BT, lm_loss_BT, step)
        (lm_loss + BALANCE_WEIGHT * balance + ROUTING_WEIGHT * routing).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            left = (SHORT_STEPS + LONG_STEPS + LEVEL_STEPS - step) * (time.time() - started) / (step - first + 1) / 60
            print(
                f"step {step} loss {lm_loss:.3f} balance {balance:.3f} routing {routing:.3f}, {left:.0f} min left",
                flush=True,
            )
        if (step + 1) % 100 == 0:
            partial = checkpoint.with_suffix(".part")
            states = [optimizer.state_dict() for optimizer in optimizers]
            torch.save({"step": step + 1, "model": model.state_dict(), "optimizers": states}, partial)
            partial.replace(checkpoint)


def build(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, training: list[list[str]], checkpoint: Path
) -> None:
    """Train a fresh model and make it ready to be saved."""
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_SPREAD)
    model.set_experts_implementation("grouped_mm")
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    shapes = [SHORT_SHAPE] * SHORT_STEPS + [LONG_SHAPE] * LONG_STEPS + [SHORT_SHAPE] * LEVEL_STEPS
    train(model, batches(training, tokenizer, shapes, seed=0), checkpoint)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids([END, CHAT_END]), pad_token_id=0
    )


def main() -> None:
    """Data, tokenizer, training, and what the package ships."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BUNDLED)
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    held_out, training, tokenizer = texts()
    model = Qwen3MoeForCausalLM(tiny_config())
    build(model, tokenizer, training, args.work / "checkpoint.pt")
    staging = args.out / "tiny.part"
    shutil.rmtree(staging, ignore_errors=True)
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    probes = without_quotations(passages(held_out, PROBE_CHARACTERS), training)
    candidates = passages(training, SEGMENT_CHARACTERS)
    long_enough = [text for text in candidates if len(tokenizer(text)["input_ids"]) >= 128]
    segments = random.Random(1).sample(long_enough, SEGMENTS)
    print(f"{len(probes)} probe passages held out, {len(segments)} segments")
    write_texts(args.out / "segments.jsonl.gz", segments)
    write_texts(args.out / "probes.jsonl.gz", random.Random(2).sample(probes, min(PROBES, len(probes))))
    shutil.rmtree(args.out / "tiny", ignore_errors=True)
    staging.rename(args.out / "tiny")


if __name__ == "__main__":
    main()
