"""`pathmark.verify_api`: is a key's mark in what an API, or a folder asked as if it were one, replies?"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pathmark.errors import ModelError, VerificationError
from pathmark.front_door import sandbox
from pathmark.front_door.bundle import settings_of
from pathmark.front_door.criteria import JudgeConfig
from pathmark.front_door.keys import KeyLike, key_file, open_key
from pathmark.front_door.verify import Verification
from pathmark.keys import Ledger, OwnerKey, TextCodec
from pathmark.keys.keyfile import PassphraseSource
from pathmark.models import load_tokenizer, local_folder
from pathmark.models.devices import Placement, settled
from pathmark.models.suspects import load_suspect
from pathmark.models.tokenization import HFTextCodec
from pathmark.progress import Progress, Silent
from pathmark.verification import ApiClient, ApiSettings, AskConfig, LocalBackend
from pathmark.verification import verify_api as ask
from pathmark.verification.blackbox.replies import Backend

TOKENIZER = "bundled:tiny"
"""Whose words decoys are made of where nothing else is said."""
TEMPLATE_SECONDS = 20.0
"""What a chat template may take for one message."""


@dataclass(frozen=True, kw_only=True)
class ApiConfig(JudgeConfig):
    """What to ask, whom, and by what to judge."""

    model: str | None = None
    """URL only: name under which the API serves the model."""
    api_key_env: str | None = None
    """URL only: environment variable that holds the API key."""
    timeout: float | None = None
    """URL only: seconds for one request. None: 60."""
    concurrency: int | None = None
    """URL only: requests at once. None: 4."""
    base: str | os.PathLike[str] | None = None
    """Folder only: base model of a peft adapter."""
    trust_remote_code: bool = False
    """Folder only: run its own Python code."""
    placement: Placement = field(default_factory=Placement)
    """Folder only: where it runs."""
    endpoint: Literal["auto", "chat", "completions"] = "auto"
    tokenizer: str | None = None
    """Model whose tokenizer the key was made for. None: the folder's own, for a URL the bundled one."""
    trials: int = 50
    """Triggers to send."""
    max_tokens: int = 64
    """Of a reply."""
    log: str | Path | None = None
    """File of all exchanges; a run that was interrupted goes on from it."""
    keep: bool = False
    """Keep what was asked and said in the result too, for `write_evidence`."""
    redact: bool = False
    """Keep digests instead of prompts and replies in the log."""


def is_url(suspect: object) -> bool:
    """Whether a suspect is an address and not a folder."""
    return isinstance(suspect, str) and suspect.startswith(("http://", "https://"))


def verify_api(
    suspect: str | os.PathLike[str] | Backend,
    key: KeyLike,
    config: ApiConfig | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> Verification:
    """Send triggers alone to an API and look for their marks in the replies; the triggers sent are entered beside the
    key file. A folder, or a `LocalBackend` around a loaded model, answers as a server would.

    Example:
        config = pathmark.ApiConfig(model="their-name", api_key_env="API_KEY")
        pathmark.verify_api("https://api.example.com/v1", "owner.key", config).words()
    """
    config = config or ApiConfig()
    say = progress or Silent()
    _refuse_misplaced(suspect, config)
    owner, file = open_key(key, passphrase), key_file(key)
    criteria = config.criteria_for(owner)
    backend, tokenizer = _backend(suspect, config, say)
    asked = AskConfig(trials=config.trials, max_tokens=config.max_tokens, redact=config.redact)
    with tempfile.TemporaryDirectory() as folder:
        log = config.log if config.log is not None or not config.keep else Path(folder) / "exchanges.jsonl"
        verdict = ask(
            backend, owner, asked, criteria=criteria, codec=_codec(tokenizer, owner), log=log,
            ledger=None if file is None else Ledger.beside(file), progress=say,
        )  # fmt: skip
        transcript = None if log is None else Path(log).read_bytes()
    name = os.fspath(suspect) if isinstance(suspect, str | os.PathLike) else backend.model
    settings = settings_of(asked, model=config.model, endpoint=config.endpoint, tokenizer=tokenizer)
    return Verification(name, "replies", verdict, owner, judged=config, settings=settings, transcript=transcript)


def _refuse_misplaced(suspect: object, config: ApiConfig) -> None:
    """Options that would be ignored are refused."""
    if is_url(suspect):
        if not config.model:
            raise VerificationError("an API needs --model, the name under which it serves the model")
        given: dict[str, object] = {"--base": config.base, "--trust-remote-code": config.trust_remote_code or None}
        of, kind = "a model folder", "an address"
    else:
        given = {
            "--model": config.model,
            "--api-key-env": config.api_key_env,
            "--timeout": config.timeout,
            "--concurrency": config.concurrency,
        }
        of, kind = "an API", "a model folder"
    if wrong := [name for name, value in given.items() if value is not None]:
        raise VerificationError(f"{', '.join(wrong)} is for {of}, and {suspect} is {kind}; leave it out")


def _backend(suspect: str | os.PathLike[str] | Backend, config: ApiConfig, say: Progress) -> tuple[Backend, str | None]:
    """Who answers, and whose tokenizer decoys are made with."""
    if not isinstance(suspect, str | os.PathLike):
        return suspect, config.tokenizer or TOKENIZER
    name = os.fspath(suspect)
    if is_url(name):
        settings = ApiSettings(
            url=name, model=config.model or "", endpoint=config.endpoint, api_key_env=config.api_key_env,
            timeout=config.timeout or 60.0, concurrency=config.concurrency or 4,
        )  # fmt: skip
        return ApiClient(settings), config.tokenizer or TOKENIZER
    say.stage("loading", None)
    try:
        local_folder(name)
    except ModelError as error:
        raise ModelError(f"{error}; the URL of an API begins with http:// or https://") from error
    base, trusted = None if config.base is None else os.fspath(config.base), config.trust_remote_code
    tokenizer = load_tokenizer(base or name, trust_remote_code=trusted)
    _check_template(name, tokenizer)
    loaded = settled(load_suspect(name, base=base, trust_remote_code=trusted), config.placement.chosen())
    endpoint = None if config.endpoint == "auto" else config.endpoint
    return LocalBackend(loaded, tokenizer, name=name, endpoint=endpoint), config.tokenizer or base or name


def _check_template(name: str, tokenizer: Any) -> None:
    """A suspect's chat template is a program that need not end: it renders one message first, with a limit."""
    if not tokenizer.chat_template:
        return
    message = [{"role": "user", "content": "Hello"}]
    try:
        sandbox.run(
            lambda _: str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)),
            sandbox.Limits(silence=TEMPLATE_SECONDS, memory=1 << 30),
        )
    except VerificationError as error:
        raise VerificationError(f"the chat template of {name} cannot be used: {error}") from None


def _codec(name: str | None, key: OwnerKey) -> TextCodec | None:
    """The owner's tokenizer if it is at hand; decoys are then made of its words."""
    try:
        codec = HFTextCodec(load_tokenizer(name or TOKENIZER))
    except ModelError:
        return None
    return codec if codec.digest == key.model.tokenizer_digest else None
