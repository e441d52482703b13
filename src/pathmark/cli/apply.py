"""`pathmark apply`: rebuild a marked folder from its original and a delta."""

from __future__ import annotations

from pathlib import Path

import click

from pathmark.cli._options import PATH, output_option

EXAMPLES = """\b
Examples:
  pathmark apply bundled:tiny licensee-4711.safetensors -o licensee-4711
  pathmark apply ./Qwen1.5-MoE-A2.7B licensee-4711.safetensors -o ./out
"""


@click.command(epilog=EXAMPLES)
@click.argument("original")
@click.argument("delta", type=PATH)
@output_option("The folder to write.")
def command(original: str, delta: Path, output: Path) -> None:
    """Rebuild the folder that `pathmark embed --delta` would have written without --delta.

    Keep one original and one small file per licensee. The delta names the digest of its original; any other is
    refused.
    """
    from pathmark.models import local_folder
    from pathmark.models.checkpoint import apply_delta

    apply_delta(local_folder(original), delta, output)
    click.echo(f"Written to {output}.")
