"""Whether anybody listens at an address: asked first, so that a wrong address is told in seconds."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit

from pathmark.errors import VerificationError

SECONDS = 3.0


def require_reachable(url: str, seconds: float = SECONDS) -> None:
    """Refuse an address at which nobody listens; nothing is sent."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (KeyError, ValueError):
        return  # no address at all: whoever asks says what is wrong with it
    found: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", port), timeout=seconds).close()
            found.append("")
        except OSError as error:
            found.append(error.strerror or str(error) or type(error).__name__)

    # in a thread of its own: looking up a name has no time limit
    looking = threading.Thread(target=connect, daemon=True)
    looking.start()
    looking.join(seconds)
    reason = found[0] if found else f"no answer within {seconds:g} s"
    if reason:
        raise VerificationError(
            f"nobody answers at {parts.hostname}:{port} ({reason}); check the address, and whether the server is up"
        )
