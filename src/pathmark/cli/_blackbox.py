"""The black-box side of `pathmark verify`: an API, or a local folder asked as if it were one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_json
from pathmark.errors import ModelError, VerificationError

if TYPE_CHECKING:
    from pathmark.keys import OwnerKey, TextCodec
    from pathmark.verification import Criteria, ReplyVerdict


def options(command: Any) -> Any:
    """Options that only the black-box side reads."""
    added = [
        click.option("--api", "url", help="OpenAI-compatible API instead of a model (docs/blackbox.md)."),
        click.option("--api-model", help="Name under which the API serves the model."),
        click.option("--api-key-env", help="Environment variable that holds the API key."),
        click.option("--black-box", is_flag=True, help="Ask the MODEL folder as if it were an API."),
        click.option(
            "--backend", type=click.Choice(["local"]), default="local", show_default=True,
            help="Who answers for a folder with --black-box.",
        ),
        click.option(
            "--endpoint", type=click.Choice(["auto", "chat", "completions"]), default="auto", show_default=True,
            help="Which endpoint to ask.",
        ),
        click.option("--trials", type=click.IntRange(1), default=50, show_default=True, help="Triggers to send."),
        click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Of a reply."),
        click.option("--concurrency", type=click.IntRange(1, 64), default=4, show_default=True, help="At once."),
        click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds for one request."),
        click.option("--redact", is_flag=True, help="Keep digests instead of prompts and replies in the log."),
    ]  # fmt: skip
    for option in reversed(added):
        command = option(command)
    return command


def run(
    key: OwnerKey, key_file: Path, model: str | None, given: dict[str, Any], criteria: Criteria, bar: Any
) -> ReplyVerdict:
    """Ask and judge; `given` are the command's options."""
    from pathmark.keys import Ledger
    from pathmark.verification import ApiClient, ApiSettings, AskConfig, LocalBackend, verify_api

    backend: Any
    if given["url"] is not None:
        if not given["api_model"]:
            raise VerificationError("--api needs --api-model, the name under which the model is served")
        backend = ApiClient(
            ApiSettings(
                url=given["url"], model=given["api_model"], endpoint=given["endpoint"],
                api_key_env=given["api_key_env"], timeout=given["timeout"], concurrency=given["concurrency"],
            )
        )  # fmt: skip
        codec = _codec(given["reference"], key)
    else:
        from pathmark.models import load_tokenizer
        from pathmark.models.suspects import load_suspect

        assert model is not None
        bar.stage("loading", None)
        loaded = load_suspect(model, base=given["base"], trust_remote_code=given["trust_remote_code"])
        tokenizer = load_tokenizer(given["base"] or model, trust_remote_code=given["trust_remote_code"])
        endpoint = None if given["endpoint"] == "auto" else given["endpoint"]
        backend = LocalBackend(loaded, tokenizer, name=model, endpoint=endpoint)
        codec = _codec(given["base"] or model, key)
    return verify_api(
        backend,
        key,
        AskConfig(trials=given["trials"], max_tokens=given["max_tokens"], redact=given["redact"]),
        criteria=criteria,
        codec=codec,
        ledger=Ledger.beside(key_file),
        log=given["log_folder"],
        progress=bar,
    )


def show(verdict: ReplyVerdict, suspect: str, as_json: bool) -> None:
    """JSON, or the verdict in words with its warnings."""
    from rich.console import Console
    from rich.markup import escape

    if as_json:
        echo_json({"suspect": suspect, "access": "replies", **verdict.summary()})
        return
    console = Console(soft_wrap=True)
    console.print(f"[bold]{escape(suspect)}[/], from replies ({verdict.endpoint})")
    console.print(f"[bold {'green' if verdict.marked else 'yellow'}]{verdict.decision.upper()}[/]")
    console.print(escape(verdict.words()), highlight=False)
    for weakness in verdict.weaknesses():
        console.print(f"  - {escape(weakness)}", highlight=False)


def _codec(name: str | None, key: OwnerKey) -> TextCodec | None:
    """The owner's tokenizer if it is at hand; decoys are then made of its words."""
    from pathmark.models import load_tokenizer
    from pathmark.models.tokenization import HFTextCodec

    try:
        codec = HFTextCodec(load_tokenizer(name or "bundled:tiny"))
    except ModelError:
        return None
    return codec if codec.digest == key.model.tokenizer_digest else None
