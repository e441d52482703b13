"""`pathmark unpack`: a GGUF file as a model folder."""

from __future__ import annotations

from pathlib import Path

import click

from pathmark.cli._keys import echo_done
from pathmark.cli._options import json_option, output_option, sandbox_option
from pathmark.cli._types import Existing

EXAMPLES = """\b
Examples:
  pathmark unpack suspect-Q4_K_M.gguf -o suspect
  pathmark verify suspect --key owner.key
"""


@click.command(epilog=EXAMPLES)
@click.argument("file", type=Existing("a GGUF file"))
@output_option("The folder to write.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True,
    help="How weights are written: exactly, or in half the space.",
)  # fmt: skip
@sandbox_option
@json_option
def command(file: Path, output: Path, dtype: str, no_sandbox: bool, as_json: bool) -> None:
    """Unpack a GGUF file, as llama.cpp serves it, into a folder that `verify`, `trace` and `inspect` read.

    FILE holds a Qwen2-MoE or Qwen3-MoE, packed in any way that the package gguf (pathmark[gguf]) reads; one in several
    parts is joined first (llama-gguf-split --merge). Of other architectures record the routes, or ask the API. The
    whole model has to fit in memory. Nothing in the file is run.
    """
    from pathmark.cli._progress import training_bar
    from pathmark.front_door.unpack import unpack

    with training_bar(quiet=as_json) as bar:
        found = unpack(file, output, dtype=dtype, sandboxed=not no_sandbox, progress=bar)  # type: ignore[arg-type]
    echo_done(found.words(), found.summary(), as_json)
