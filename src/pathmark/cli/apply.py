"""`pathmark apply`: rebuild a marked folder from its base and a delta."""

from __future__ import annotations

from pathlib import Path

import click

EXAMPLES = """\b
Examples:
  pathmark apply bundled:tiny licensee-4711.safetensors -o licensee-4711
  pathmark apply ./Qwen1.5-MoE-A2.7B licensee-4711.safetensors -o ./out
"""


@click.command(epilog=EXAMPLES)
@click.argument("base")
@click.argument("delta", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
def command(base: str, delta: Path, output: Path) -> None:
    """Rebuild the folder that `pathmark embed --delta` would have written without --delta.

    Keep one base and one small file per licensee. The delta names the digest of its base; any other is
    refused.
    """
    from pathmark.models import local_folder
    from pathmark.models.checkpoint import apply_delta

    apply_delta(local_folder(base), delta, output)
    click.echo(f"Written to {output}.")
