"""What a server's answer says, read strictly: a reply, an error in words, how long to wait."""

from __future__ import annotations

import email.utils
import json
import time
from typing import Any

from pathmark.verification.blackbox.replies import Reply
from pathmark.verification.blackbox.trials import Endpoint


class OddAnswerError(Exception):
    """An answer with status 200 that is none."""


def parse_reply(endpoint: Endpoint, body: bytes) -> Reply:
    """The one choice of a completion, strictly; anything else is refused with its reason."""
    try:
        document = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise OddAnswerError("the answer is not JSON") from None
    choices = document.get("choices") if isinstance(document, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise OddAnswerError("the answer is JSON without a list `choices` of one choice")
    choice = choices[0]
    if endpoint == "completions":
        text = choice.get("text")
    else:
        message = choice.get("message")
        if not isinstance(message, dict):
            raise OddAnswerError("the choice has no `message`")
        text = "" if message.get("content") is None else message["content"]  # null: only a refusal or a tool call
    if not isinstance(text, str):
        raise OddAnswerError("the choice holds no text")
    finish = choice.get("finish_reason")
    if finish is not None and not isinstance(finish, str):
        raise OddAnswerError("finish_reason is not text")
    return Reply(text, None if finish is None else printable(finish)[:40], _routes(document, choice))


def _routes(document: dict[str, Any], choice: dict[str, Any]) -> Any:
    """Routing beside the reply as vLLM (`routed_experts`) or SGLang (`sgl_ext.routed_experts`) return it."""
    extension = choice.get("sgl_ext")
    if isinstance(extension, dict) and extension.get("routed_experts") is not None:
        return {"sgl_ext": extension}
    found = {
        name: value
        for holder in (document, choice)
        for name, value in holder.items()
        if name in ("routed_experts", "prompt_routed_experts") and value is not None
    }
    return found or None


def retry_after(value: str | None) -> float:
    """Seconds until the server wants to be asked again; 0 where it does not say so intelligibly."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return seconds if 0 < seconds < 1e9 else (0.0 if not seconds > 0 else 1e9)


def error_text(body: bytes) -> str:
    """What an error answer says, if it says so in JSON."""
    try:
        document = json.loads(body[:65_536].decode("utf-8"))
    except (ValueError, RecursionError):
        return ""
    error = document.get("error", document) if isinstance(document, dict) else None
    said = error if isinstance(error, str) else None
    if isinstance(error, dict):
        said = error.get("message") or error.get("detail")
    return f": {said}" if isinstance(said, str) else ""


def printable(text: str) -> str:
    """One line of at most 300 characters, without what a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:2000]).split())
    return line if len(line) <= 300 else line[:299] + "…"
