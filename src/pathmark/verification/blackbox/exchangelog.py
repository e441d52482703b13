"""The log of a black-box run: one JSON line per exchange, on disk before the next step, private.

A run that was interrupted goes on from it: what was answered is not asked again. Redacted, it holds keyed
digests in the place of prompts and replies; only the owner of the key can tell what they stand for.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from io import BufferedRandom
from pathlib import Path
from typing import Any, Final

from pathmark.errors import VerificationError
from pathmark.keys import OwnerKey, Phrase, TriggerRef
from pathmark.keys.key import utc_now
from pathmark.keys.replyrule import read_reply
from pathmark.keys.safefile import require_private
from pathmark.verification.blackbox.replies import Failure, Reply, shape
from pathmark.verification.blackbox.trials import Kind, Query

_VERSION: Final = 1


@dataclass(frozen=True)
class Exchange:
    """One query and what came back, as the verdict sees it: no texts, only what the rule read in them."""

    number: int
    kind: Kind
    trigger: TriggerRef | None
    asked: str
    """Keyed digest of what the model saw: system prompt and prompt."""
    said: str
    """Keyed digest of the reply."""
    shape: str
    """The same of the reply without its numbers and ids."""
    words: int
    finish_reason: str | None
    echo: bool
    overlong: bool
    marks: tuple[TriggerRef, ...]
    """Marks of the key that the reply holds."""
    routes: Any = None
    """Routing that came with the reply, as the server sent it."""


class Digester:
    """Digests that only the key's owner can compute: marks are too short for an open hash."""

    def __init__(self, key: OwnerKey) -> None:
        self._key = b"".join(key.derive_seed(f"blackbox log/{i}").to_bytes(8, "big") for i in range(4))

    def __call__(self, *parts: str | None) -> str:
        """128 bits of HMAC-SHA256 over the parts."""
        message = json.dumps(parts).encode()
        return hmac.new(self._key, message, sha256).hexdigest()[:32]


def read_exchange(
    query: Query, reply: Reply, marks: Mapping[TriggerRef, Phrase], max_tokens: int, digest: Digester
) -> Exchange:
    """What the rule sees in a reply."""
    reading = read_reply(reply.text, query.prompt, marks, max_tokens)
    return Exchange(
        number=query.number,
        kind=query.kind,
        trigger=query.trigger,
        asked=digest(query.system, query.prompt),
        said=digest(reply.text),
        shape=digest(shape(reply.text)),
        words=reading.words,
        finish_reason=reply.finish_reason,
        echo=reading.echo,
        overlong=reading.overlong,
        marks=reading.marks,
        routes=reply.routes,
    )


def plan_digest(queries: tuple[Query, ...], digest: Digester) -> str:
    """Says whether two runs ask the same."""
    return digest(json.dumps([asdict(query) for query in queries]))


class ExchangeLog:
    """Appends exchanges to a file that this run alone holds; use as a context manager."""

    def __init__(self, path: Path | str, *, redact: bool = False) -> None:
        self.path = Path(path)
        self.redact = redact
        self.header: dict[str, Any] | None = None
        """Settings of the run that began the file; None for a new file."""
        self.answered: dict[int, Exchange] = {}
        """What earlier runs got, by number of the query."""
        self.resumed = False
        """Whether an earlier run began the file."""
        self._file: BufferedRandom | None = None

    def __enter__(self) -> ExchangeLog:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o600)
            file = os.fdopen(descriptor, "r+b")
        except OSError as error:
            raise VerificationError(f"cannot open the log {self.path}: {error.strerror}") from None
        try:
            require_private(self.path, os.fstat(descriptor))
            self._lock(descriptor)
            self._load(file)
        except BaseException:
            file.close()
            raise
        self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Write the first line, or refuse to go on with a log of another run."""
        if self.header is None:
            self.header = {"pathmark_log": _VERSION, "redacted": self.redact, **settings, "started": utc_now()}
            self._append(self.header)
            return
        for name, value in {"redacted": self.redact, **settings}.items():
            if self.header.get(name) != value:
                raise VerificationError(
                    f"the log {self.path} is of another run: {name} was {self.header.get(name)!r}, is {value!r}; "
                    "give the same settings to go on with it, or another file"
                )

    def answer(self, query: Query, reply: Reply, exchange: Exchange) -> None:
        """Keep an exchange."""
        facts = {name: value for name, value in asdict(exchange).items() if name != "routes"}
        line: dict[str, Any] = {"at": utc_now(), **facts, "temperature": query.temperature, "seed": query.seed}
        if not self.redact:
            line |= {"system": query.system, "prompt": query.prompt, "reply": reply.text, "routes": reply.routes}
        self._append(line)

    def failure(self, query: Query, failure: Failure) -> None:
        """Keep a request without answer; the next run asks it again."""
        self._append({"at": utc_now(), "number": query.number, "kind": query.kind, "failure": failure.reason})

    def _append(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None, "the log is not open"
        try:
            self._file.write(json.dumps(line, ensure_ascii=True).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise VerificationError(f"cannot write the log {self.path}: {error.strerror}") from None

    def _lock(self, descriptor: int) -> None:
        with contextlib.suppress(ImportError):  # not POSIX: two runs on one log are the user's to avoid
            import fcntl

            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise VerificationError(f"the log {self.path} is in use by another run") from None

    def _load(self, file: BufferedRandom) -> None:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        # A crash in the middle of a line leaves it without its end: that exchange did not happen.
        file.truncate(whole)
        file.seek(whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                self._take(number, json.loads(line))
            except VerificationError:
                raise
            except (ValueError, KeyError, TypeError):
                raise VerificationError(
                    f"the log {self.path} is damaged in line {number}; move it away and start again"
                ) from None

    def _take(self, number: int, line: dict[str, Any]) -> None:
        if number == 1:
            if line["pathmark_log"] != _VERSION:
                raise VerificationError(
                    f"the log {self.path} has format {line['pathmark_log']}, this program knows {_VERSION}"
                )
            self.header, self.resumed = line, True
        elif "failure" not in line:
            exchange = Exchange(
                number=int(line["number"]),
                kind=line["kind"],
                trigger=None if line["trigger"] is None else TriggerRef(*line["trigger"]),
                asked=str(line["asked"]),
                said=str(line["said"]),
                shape=str(line["shape"]),
                words=int(line["words"]),
                finish_reason=line["finish_reason"],
                echo=bool(line["echo"]),
                overlong=bool(line["overlong"]),
                marks=tuple(TriggerRef(*mark) for mark in line["marks"]),
                routes=line.get("routes"),
            )
            self.answered[exchange.number] = exchange
