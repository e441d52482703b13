"""`pathmark apply`: rebuild a marked folder from its original and a delta."""

from __future__ import annotations

from pathlib import Path

import click

from pathmark.cli._keys import echo_done
from pathmark.cli._options import json_option, output_option
from pathmark.cli._types import MODEL, Existing

EXAMPLES = """\b
Examples:
  pathmark apply bundled:tiny licensee-4711.safetensors -o licensee-4711
  pathmark apply ./Qwen1.5-MoE-A2.7B licensee-4711.safetensors -o ./out
"""


@click.command(epilog=EXAMPLES)
@click.argument("original", type=MODEL)
@click.argument("delta", type=Existing("a delta written by `pathmark embed --delta`"))
@output_option("The folder to write.")
@json_option
def command(original: str, delta: Path, output: Path, as_json: bool) -> None:
    """Rebuild the folder that `pathmark embed --delta` would have written without --delta.

    Keep one original and one small file per licensee. The delta names the digest of its original; any other is
    refused.
    """
    from pathmark.models import local_folder
    from pathmark.models.checkpoint import apply_delta

    apply_delta(local_folder(original), delta, output)
    echo_done(f"Written to {output}.", {"output": str(output)}, as_json)
