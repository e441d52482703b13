"""A client for OpenAI-compatible APIs that may be slow, busy, broken or hostile.

Only fields that every server knows are sent (some refuse a request with others). Each attempt has a hard time
limit, each answer a size limit, the whole run a deadline. Redirects are not followed: the API key would follow
them. The key itself stands in no error, log or repr, also if the server sends it back.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import httpx2

from pathmark.errors import VerificationError
from pathmark.reach import require_reachable
from pathmark.verification.blackbox.answers import OddAnswerError, error_text, parse_reply, printable, retry_after
from pathmark.verification.blackbox.replies import Failure, Reply
from pathmark.verification.blackbox.trials import Endpoint, Query

T = TypeVar("T")

RETRIED: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses that may pass; every other one is an answer."""
_PATHS: Final[dict[Endpoint, str]] = {"chat": "/chat/completions", "completions": "/completions"}
_HELLO: Final = Query(-1, "ordinary", "Good morning!")
_HELLO_TOKENS: Final = 8
_LONGEST_PAUSE: Final = 60.0
_GIVE_UP_AFTER: Final = 10
"""Failures in a row before anything was answered, after which the rest is not tried."""


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Where to ask and how patiently."""

    url: str
    """With or without /v1 and the endpoint behind it."""
    model: str
    endpoint: Endpoint | Literal["auto"] = "auto"
    """`auto` asks the chat endpoint first and takes the completions endpoint where chat does not answer."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key."""
    timeout: float = 60.0
    """Seconds for one attempt, from connecting to the last byte."""
    concurrency: int = 4
    retries: int = 5
    backoff: float = 1.0
    """Seconds before the first retry; doubled each time, with jitter. Retry-After counts if it is longer."""
    deadline: float = 3600.0
    """Seconds for everything."""
    max_bytes: int = 4 << 20
    """Largest answer that is read."""
    proxy: str | None = None
    """Address of a proxy; the environment's proxies and .netrc are not used."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request, such as {"return_routed_experts": true} for SGLang."""

    def __post_init__(self) -> None:
        if not self.model:
            raise VerificationError("the API's model name is empty; give the name under which it is served")
        if self.endpoint not in ("auto", *_PATHS):
            raise VerificationError(f"expected endpoint auto, chat or completions, got {self.endpoint!r}")
        limits = (self.timeout, self.deadline, self.concurrency, self.max_bytes)
        if not all(limit > 0 and math.isfinite(limit) for limit in limits) or self.retries < 0 or self.backoff < 0:
            raise VerificationError(
                f"timeout, deadline, concurrency and size must be above 0 and retries at least 0, got {limits} "
                f"and {self.retries}"
            )


@dataclass(frozen=True)
class _Trouble:
    """One attempt without an answer."""

    reason: str
    again: bool
    """Whether another attempt may help."""
    wait: float = 0.0
    """Seconds that the server asked for."""
    fatal: bool = False
    """Whether every other request would fail the same way."""


class ApiClient:
    """Answers queries over HTTP; satisfies `replies.Backend`."""

    discloses = True

    def __init__(self, settings: ApiSettings) -> None:
        self.settings = settings
        self._base = _base_url(settings.url)
        self._key = _api_key(settings.api_key_env)
        if self._key and self._base.scheme == "http" and not _is_loopback(self._base.host):
            raise VerificationError(f"refused to send the API key to {self._base.host} without TLS; use https")
        self._endpoint: Endpoint | None = None if settings.endpoint == "auto" else settings.endpoint
        self._ends: float | None = None
        self._resume_at = 0.0

    def __repr__(self) -> str:
        return f"ApiClient({self.host}, {self.model})"

    @property
    def host(self) -> str:
        """Host and port of the API."""
        return self._base.netloc.decode("ascii")

    @property
    def model(self) -> str:
        """Name under which the model is served."""
        return self.settings.model

    def prepare(self) -> Endpoint:
        """The endpoint that answers a greeting; VerificationError with the reasons if none does."""
        if self.settings.proxy is None:
            require_reachable(str(self._base))
        self._start_clock()
        reasons = []
        for endpoint in _PATHS if self._endpoint is None else (self._endpoint,):
            outcome = _run(self._one(endpoint, _HELLO, _HELLO_TOKENS))
            if isinstance(outcome, Reply):
                self._endpoint = endpoint
                return endpoint
            reasons.append(f"{endpoint}: {outcome.reason}")
        raise VerificationError(f"{self.host} does not answer ({'; '.join(reasons)})")

    def ask(
        self,
        queries: Sequence[Query],
        max_tokens: int,
        *,
        sending: Callable[[Query], None],
        answered: Callable[[Query, Reply | Failure], None],
    ) -> None:
        """Ask all queries in order, several at a time.

        Raises VerificationError when nothing was answered and it is clear that nothing will be.
        """
        endpoint = self._endpoint or self.prepare()
        self._start_clock()
        _run(self._all(endpoint, queries, max_tokens, sending, answered))

    async def _all(
        self,
        endpoint: Endpoint,
        queries: Sequence[Query],
        max_tokens: int,
        sending: Callable[[Query], None],
        answered: Callable[[Query, Reply | Failure], None],
    ) -> None:
        waiting = iter(queries)
        replies, failures = 0, 0

        async def worker(client: httpx2.AsyncClient) -> None:
            nonlocal replies, failures
            for query in waiting:
                sending(query)
                outcome = await self._persist(client, endpoint, query, max_tokens)
                answered(query, outcome)
                if isinstance(outcome, Reply):
                    replies += 1
                    continue
                failures += 1
                if not replies and failures >= _GIVE_UP_AFTER:
                    raise VerificationError(f"{self.host} answered none of {failures} requests: {outcome.reason}")

        async with self._client() as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.settings.concurrency, len(queries))):
                        group.create_task(worker(client))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _one(self, endpoint: Endpoint, query: Query, max_tokens: int) -> Reply | Failure:
        async with self._client() as client:
            return await self._persist(client, endpoint, query, max_tokens)

    def _client(self) -> httpx2.AsyncClient:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "python-httpx2"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(self.settings.timeout),
            limits=httpx2.Limits(max_connections=self.settings.concurrency),
            proxy=self.settings.proxy,
            follow_redirects=False,
            trust_env=False,
        )

    async def _persist(
        self, client: httpx2.AsyncClient, endpoint: Endpoint, query: Query, max_tokens: int
    ) -> Reply | Failure:
        """Try until there is an answer, a final refusal, or no time."""
        reason = ""
        for attempt in range(self.settings.retries + 1):
            await self._pause(0.0)
            left = self._left()
            if left <= 0:
                break
            outcome = await self._attempt(client, endpoint, query, max_tokens, min(self.settings.timeout, left))
            if isinstance(outcome, Reply):
                return outcome
            reason = outcome.reason
            if outcome.fatal:
                raise VerificationError(f"{self.host}: {reason}")
            if not outcome.again or attempt == self.settings.retries:
                return Failure(reason)
            if outcome.wait > (left := max(0.0, self._left())):
                return Failure(f"{reason}; it asks to wait {outcome.wait:.0f} s, {left:.0f} s are left")
            if outcome.wait:  # a busy server is busy for all workers
                self._resume_at = max(self._resume_at, time.monotonic() + outcome.wait)
            pause = min(_LONGEST_PAUSE, self.settings.backoff * 2**attempt) * random.uniform(0.5, 1)
            await self._pause(pause)
        return Failure(f"the deadline of {self.settings.deadline:g} s has passed{f' ({reason})' if reason else ''}")

    async def _pause(self, seconds: float) -> None:
        until = max(self._resume_at, time.monotonic() + seconds)
        await asyncio.sleep(max(0.0, min(until - time.monotonic(), self._left())))

    async def _attempt(
        self, client: httpx2.AsyncClient, endpoint: Endpoint, query: Query, max_tokens: int, seconds: float
    ) -> Reply | _Trouble:
        url = self._base.copy_with(raw_path=self._base.raw_path.rstrip(b"/") + _PATHS[endpoint].encode())
        try:
            # The library's own limits are per read: a server that drips one byte at a time passes them.
            async with (
                asyncio.timeout(seconds),
                client.stream("POST", url, json=self._body(endpoint, query, max_tokens)) as response,
            ):
                body = await self._read(response)
        except (TimeoutError, httpx2.TimeoutException):
            return _Trouble(f"no complete answer within {seconds:.3g} s", again=True)
        except _TooLargeError:
            return _Trouble(f"the answer is larger than {self.settings.max_bytes:,} bytes", again=False)
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError) as error:
            return _Trouble(self._clean(f"{type(error).__name__}: {error}"), again=True)
        try:
            return self._judge(endpoint, response, body)
        except OddAnswerError as error:
            return _Trouble(self._clean(str(error)), again=False)

    def _body(self, endpoint: Endpoint, query: Query, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {**self.settings.extra, "model": self.model, "max_tokens": max_tokens, "stream": False}
        body["temperature"] = query.temperature
        if query.seed is not None:
            body["seed"] = query.seed
        if endpoint == "completions":
            return {**body, "prompt": query.prompt}
        messages = [{"role": "system", "content": query.system}] if query.system is not None else []
        return {**body, "messages": [*messages, {"role": "user", "content": query.prompt}]}

    async def _read(self, response: httpx2.Response) -> bytes:
        announced = response.headers.get("Content-Length", "0")
        if announced.isascii() and announced.isdigit() and int(announced[:20]) > self.settings.max_bytes:
            raise _TooLargeError
        body = bytearray()
        # Raw: nothing is unpacked, so a small answer cannot become a large one.
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self.settings.max_bytes:
                raise _TooLargeError
        return bytes(body)

    def _judge(self, endpoint: Endpoint, response: httpx2.Response, body: bytes) -> Reply | _Trouble:
        status = response.status_code
        if 300 <= status < 400:
            target = printable(response.headers.get("Location", "nowhere"))
            reason = self._clean(f"redirects to {target}, which is not followed; give the final address")
            return _Trouble(reason, again=False, fatal=True)
        if status != 200:
            said = self._clean(f"HTTP {status}{error_text(body)}")
            wait = retry_after(response.headers.get("Retry-After"))
            return _Trouble(said, again=status in RETRIED, wait=wait, fatal=status in (401, 403, 407))
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise OddAnswerError("the answer is compressed although that was not asked for")
        kind = response.headers.get("Content-Type", "none").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise OddAnswerError(f"expected application/json, got content type {printable(kind)}")
        # Replies are logged, and a server may say whatever it was sent.
        return parse_reply(endpoint, body.replace(self._key.encode(), b"[API key]") if self._key else body)

    def _start_clock(self) -> None:
        if self._ends is None:
            self._ends = time.monotonic() + self.settings.deadline

    def _left(self) -> float:
        assert self._ends is not None
        return self._ends - time.monotonic()

    def _clean(self, text: str) -> str:
        """One printable line without the API key."""
        hidden = text.replace(self._key, "[API key]") if self._key else text
        return printable(hidden)


class _TooLargeError(Exception):
    pass


def _base_url(text: str) -> httpx2.URL:
    """The address up to and with /v1."""
    try:
        url = httpx2.URL(text)
    except (httpx2.InvalidURL, TypeError):
        raise VerificationError("the API's address is not a URL; expected something like https://host/v1") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise VerificationError("the API's address must begin with http:// or https:// and a host")
    if url.userinfo or url.query or url.fragment:
        raise VerificationError("the API's address must hold no user, query or fragment; use --api-key-env for keys")
    path = url.path.rstrip("/")
    for ending in _PATHS.values():
        if path.endswith(ending):
            path = path[: -len(ending)]
            break
    return url.copy_with(path=path or "/v1")


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        raise VerificationError(f"environment variable {variable} is empty or not set; put the API key there")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise VerificationError(f"environment variable {variable} holds characters that no API key has")
    return value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, also where an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
