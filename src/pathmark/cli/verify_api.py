"""`pathmark verify-api`: is a key's mark in what an API replies?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import passphrase
from pathmark.cli._options import (
    PATH,
    api_key_option,
    base_option,
    endpoint_option,
    evidence_options,
    json_option,
    judge_options,
    judged_by,
    key_option,
    place_options,
    placed,
    require_somebody,
    trust_option,
)

EXAMPLES = """\b
Examples:
  pathmark verify-api https://api.example.com/v1 --model their-name --api-key-env API_KEY --key owner.key
  pathmark verify-api http://localhost:8000/v1 --model suspect --key owner.key --log replies.jsonl
  pathmark verify-api ./suspect --key owner.key
"""


@click.command(epilog=EXAMPLES)
@click.argument("suspect", metavar="URL_OR_FOLDER")
@key_option()
@click.option("--model", help="For a URL: the name under which the API serves the model.")
@api_key_option
@click.option("--timeout", type=float, help="For a URL: seconds for one request. Default: 60.")
@click.option("--concurrency", type=click.IntRange(1, 64), help="For a URL: requests at once. Default: 4.")
@endpoint_option
@click.option(
    "--tokenizer", help="The model whose tokenizer the key was made for. Default: the folder's, or bundled:tiny."
)
@click.option("--trials", type=click.IntRange(1), default=50, show_default=True, help="How many triggers are sent.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="How long a reply may be.")
@base_option
@judge_options(gamma=False)
@click.option("--log", type=PATH, help="Keep every exchange in this file; an interrupted run goes on from it.")
@click.option("--redact", is_flag=True, help="Keep digests instead of prompts and replies in the log.")
@evidence_options
@place_options
@trust_option
@json_option
def command(suspect: str, key_file: Path, as_json: bool, **options: Any) -> None:
    """Test whether a key's mark is in what an OpenAI-compatible API replies, or a folder asked as if it were one.

    Triggers are sent alone, among decoys and ordinary prompts, and the replies are searched for their reply marks.
    Whoever runs the API sees the triggers: they are entered in a ledger beside the key. --model, --api-key-env,
    --timeout and --concurrency are for a URL, --base and --trust-remote-code for a folder. Exit code 0: marked,
    1: not marked, 2: cannot decide or failed.
    """
    if options["model"] and not options["base"]:  # other mistakes are told first
        require_somebody(suspect, options["log"])
    from pathmark.cli._progress import Bar
    from pathmark.cli._verdict import finish
    from pathmark.front_door.verify_api import ApiConfig, verify_api

    names = (
        "model", "api_key_env", "timeout", "concurrency", "endpoint", "tokenizer", "trials", "max_tokens", "base",
        "log", "redact", "trust_remote_code",
    )  # fmt: skip
    given = {name: options[name] for name in names}
    config = ApiConfig(**given, placement=placed(options), keep=options["evidence"] is not None, **judged_by(options))
    with Bar(quiet=as_json) as bar:
        found = verify_api(suspect, key_file, config, passphrase=passphrase(), progress=bar)
    finish(found, {**options, "log_folder": None}, as_json)
