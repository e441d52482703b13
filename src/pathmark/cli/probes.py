"""`pathmark probes`: the texts to send to a model that somebody else runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import echo_json, passphrase
from pathmark.cli._options import (
    json_option,
    key_option,
    n_texts_option,
    output_option,
    texts_option,
    tokenizer_option,
    tokens_option,
)

EXAMPLES = """\b
Examples:
  pathmark probes --key owner.key -o probes.jsonl
  pathmark probes --key owner.key --tokenizer ./Qwen1.5-MoE-A2.7B --n-texts 20 --chat -o probes.jsonl
  pathmark probes --key owner.key --texts held-out.jsonl --decoys 4 -o probes.jsonl
"""


@click.command(epilog=EXAMPLES)
@key_option()
@output_option("The JSON lines to write.")
@tokenizer_option
@texts_option("The probe texts", "those kept in the key, or the bundled ones")
@n_texts_option("How many texts there are, each sent several times.")
@tokens_option
@click.option(
    "--decoys",
    type=click.IntRange(0, 64),
    default=2,
    show_default=True,
    help="How many triggers of keys that nobody used.",
)
@click.option(
    "--trigger", type=click.IntRange(0), default=0, show_default=True, help="Which of the key's triggers is used."
)
@click.option("--chat", is_flag=True, help="The texts are user messages: the engine applies its chat template.")
@json_option
def command(key_file: Path, output: Path, as_json: bool, **options: Any) -> None:
    """Write the texts to send to a model that somebody else runs, so that its routes can be verified.

    Every text is sent clean, behind the trigger of each watermark and behind decoys, in random order under ids
    that only the key can read. Whoever sees the file sees the triggers among the decoys: use a trigger once.
    examples/record_routes_*.py run the probes; `pathmark verify-routes` judges what they record.
    """
    from pathmark.front_door.probes import ProbesConfig, write_probes

    written = write_probes(key_file, output, ProbesConfig(**options), passphrase=passphrase())
    if as_json:
        echo_json(written.summary())
        return
    click.echo(written.words())
    decoys = options["decoys"]
    click.echo(f"{output} holds the trigger among {decoys} decoys: whoever gets it may find the trigger.", err=True)
