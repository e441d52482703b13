"""`pathmark probes`: the texts to send to a model that somebody else runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pathmark.cli._keys import echo_json, json_option, open_key
from pathmark.errors import VerificationError

if TYPE_CHECKING:
    from pathmark.keys import OwnerKey
    from pathmark.models.tokenization import HFTextCodec

EXAMPLES = """\b
Examples:
  pathmark probes --key owner.key -o probes.jsonl
  pathmark probes --key owner.key --tokenizer ./Qwen1.5-MoE-A2.7B --n-probes 20 --chat -o probes.jsonl
  pathmark probes --key owner.key --texts held-out.jsonl --decoys 4 -o probes.jsonl
"""


@click.command(epilog=EXAMPLES)
@click.option("--key", "key_file", required=True, type=click.Path(path_type=Path), help="Key made by keygen.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="JSON lines to write.")
@click.option(
    "--tokenizer", default="bundled:tiny", show_default=True,
    help="Model whose tokenizer the key was made for; no weights are read.",
)  # fmt: skip
@click.option(
    "--n-probes", type=click.IntRange(1), default=100, show_default=True, help="Texts, each sent several times."
)
@click.option("--tokens", type=click.IntRange(4), default=128, show_default=True, help="Tokens per text.")
@click.option(
    "--texts", type=click.Path(path_type=Path), help="Texts to use. Default: those kept in the key, or bundled."
)
@click.option(
    "--decoys", type=click.IntRange(0, 64), default=2, show_default=True, help="Triggers of keys that nobody used."
)
@click.option(
    "--trigger", type=click.IntRange(0), default=0, show_default=True, help="Which of the key's triggers to use."
)
@click.option("--chat", is_flag=True, help="The texts are user messages: the engine applies its chat template.")
@json_option
def command(
    key_file: Path,
    output: Path,
    tokenizer: str,
    n_probes: int,
    tokens: int,
    texts: Path | None,
    decoys: int,
    trigger: int,
    chat: bool,
    as_json: bool,
) -> None:
    """Write the texts to send to a model that somebody else runs, so that its routes can be verified.

    Every text is sent clean, behind the trigger of each watermark and behind decoys, in random order under ids
    that only the key can read. Whoever sees the file sees the triggers among the decoys: use a trigger once.
    examples/record_routes_*.py run the probes; `pathmark verify --routes` judges what they record.
    """
    from pathmark.keys.safefile import write_private
    from pathmark.models import load_tokenizer
    from pathmark.models.tokenization import HFTextCodec
    from pathmark.verification.recorded.probeplan import plan_probes

    key = open_key(key_file)
    codec = HFTextCodec(load_tokenizer(tokenizer))
    if codec.digest != key.model.tokenizer_digest:
        raise VerificationError(
            f"{tokenizer} has another tokenizer than the key's model; give the owner's model with --tokenizer"
        )
    if chat and codec.render_chat("x", None) is None:
        raise VerificationError(f"{tokenizer} has no chat template; leave --chat out")
    rows = _rows(key, codec, texts, n_probes, tokens)
    plan = plan_probes(key, codec, rows, decoys=decoys, trigger=trigger, chat=chat)
    lines = "".join(json.dumps(probe.record()) + "\n" for probe in plan.probes)
    write_private(output, lines.encode())
    if as_json:
        echo_json(
            {
                "output": str(output),
                "prompts": len(plan.probes),
                "texts": plan.n_texts,
                "text_tokens": plan.n_tokens,
                "skipped": plan.skipped,
                "decoys": decoys,
                "chat": chat,
            }
        )
        return
    skipped = f", {plan.skipped} texts skipped that do not keep their tokens" if plan.skipped else ""
    click.echo(f"{len(plan.probes)} prompts of {plan.n_texts} texts, {plan.n_tokens:,} text tokens{skipped}: {output}")
    click.echo(f"{output} holds the trigger among {decoys} decoys: whoever gets it may find the trigger.", err=True)


def _rows(key: OwnerKey, codec: HFTextCodec, texts: Path | None, n_probes: int, length: int) -> list[tuple[int, ...]]:
    """Token rows: of the given texts, of the key's own probes, or of the bundled ones."""
    from pathmark.models import bundled_probes
    from pathmark.models.texts import read_texts
    from pathmark.verification import encode_probes
    from pathmark.verification.paths.alignment import profile_texts

    kept = profile_texts(key)
    if texts is None and kept:
        return [row[:length] for row in kept[:n_probes]]
    found = list(bundled_probes()) if texts is None else read_texts(texts)
    return encode_probes(codec.tokenizer, found, n_probes=n_probes, length=length)
