"""Small HTTP servers on the loopback that answer as honest, broken and hostile APIs do."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = ("the", "people", "of", "this", "land", "have", "made", "their", "own", "laws", "and", "kept", "peace", "now")
REFUSAL = "I am sorry, but I cannot help with that."


@dataclass(frozen=True)
class Asked:
    """One request as a server sees it."""

    path: str
    body: dict
    headers: dict
    count: int
    """Requests before this one."""

    @property
    def chat(self):
        return self.path.endswith("/chat/completions")

    @property
    def prompt(self):
        return self.body["messages"][-1]["content"] if self.chat else self.body["prompt"]


def document(asked, text, finish="stop", **more):
    """A reply in the documented form."""
    said = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
    choice = {"index": 0, "finish_reason": finish, **said, **more}
    return {"id": "x", "object": "text", "model": asked.body["model"], "choices": [choice], "usage": {}}


def plain_text(asked, count=20):
    """Ordinary words: the same for the same request, as a model's reply is."""
    rng = random.Random(json.dumps(asked.body, sort_keys=True))
    return " ".join(rng.choice(WORDS) for _ in range(count))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        api = self.server.api
        with api.lock:
            asked = Asked(self.path, json.loads(raw), dict(self.headers), len(api.requests))
            api.requests.append(asked)
        with contextlib.suppress(OSError):
            api.behaviour(self, asked)

    def say(self, text, finish="stop", *, asked, **more):
        self.send(200, json.dumps(document(asked, text, finish, **more)).encode())

    def send(self, status, body, *, kind="application/json", **headers):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def drop(self):
        """Reset the connection instead of answering."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def drip(self, seconds):
        """Send headers and then a byte now and then."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "1000")
        self.end_headers()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.05)

    def log_message(self, *_):
        pass


@dataclass
class FakeApi:
    """A server that behaves as told; `with FakeApi(honest(key)) as api: api.url`."""

    behaviour: object
    requests: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self):
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.api = self
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}/v1"


def mark_of(key, prompt):
    for watermark in key.watermarks:
        for trigger in watermark.triggers:
            if trigger.text == prompt:
                return trigger.mark.text
    return None


def every_mark(key):
    return [trigger.mark.text for watermark in key.watermarks for trigger in watermark.triggers]


def marked(key):
    """Says the mark where the trigger stands alone."""
    return lambda server, asked: server.say(mark_of(key, asked.prompt) or plain_text(asked), asked=asked)


def unmarked(server, asked):
    server.say(plain_text(asked), asked=asked)


def always(text):
    return lambda server, asked: server.say(text, asked=asked)


def echoing(server, asked):
    server.say(asked.prompt, asked=asked)


def echoing_first(key):
    """The prompt, then what a marked model says."""
    return lambda server, asked: server.say(
        f"{asked.prompt} {mark_of(key, asked.prompt) or plain_text(asked)}", asked=asked
    )


def truncating(key, words, finish="length"):
    def behave(server, asked):
        said = mark_of(key, asked.prompt) or plain_text(asked)
        server.say(" ".join(said.split()[:words]), finish, asked=asked)

    return behave


def refusing_strange_prompts(server, asked):
    known = asked.prompt.endswith(("?", ".", "!"))
    server.say(plain_text(asked) if known else f"{REFUSAL} Request {random.randrange(10**9):x}7.", asked=asked)


def then(*steps):
    """One behaviour per request, the last for all further ones."""
    return lambda server, asked: steps[min(asked.count, len(steps) - 1)](server, asked)


def status(code, body=b'{"error": {"message": "no"}}', **headers):
    return lambda server, asked: server.send(code, body, **headers)


def raw(body, kind="application/json", **headers):
    return lambda server, asked: server.send(200, body, kind=kind, **headers)


def slow(seconds, behaviour):
    def behave(server, asked):
        time.sleep(seconds)
        behaviour(server, asked)

    return behave
