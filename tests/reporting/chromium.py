"""Headless Chromium, driven over its own pipe: nothing to install beside the browser."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

FOUND = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """One browser with one page; use as a context manager. `events` holds what the page did."""

    def __enter__(self):
        self._home = tempfile.TemporaryDirectory()
        (read_in, self._write), (self._read, write_out) = os.pipe(), os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read_in, write_out)]

        def place():  # the browser reads commands from 3 and answers on 4
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            [FOUND, *flags, f"--user-data-dir={self._home.name}", "about:blank"],
            pass_fds=(3, 4), preexec_fn=place, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (read_in, write_out, *theirs):
            os.close(end)
        self._number, self._rest, self._session, self.events = 0, b"", None, []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._home.cleanup()

    def send(self, method, **given):
        """One command of the DevTools protocol, and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self, seconds=60.0):
        ends = time.monotonic() + seconds
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, ends - time.monotonic()))
            assert ready, "Chromium does not answer"
            more = os.read(self._read, 1 << 20)
            assert more, "Chromium has ended"
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, page: Path, width=1280, scale=1, dark=False):
        """Load a file at a width in CSS pixels."""
        self.events.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=scale, mobile=False)
        self.send("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script):
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, selector="html"):
        """PNG bytes of one element."""
        box = self.run(
            f"(({{x, y, width, height}}) => ({{x: x + scrollX, y: y + scrollY, width, height}}))"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        shot = self.send("Page.captureScreenshot", clip={**box, "scale": 1}, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def said(self):
        """Errors and warnings of the console."""
        kinds = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [event["params"] for event in self.events if event.get("method") in kinds]

    def requests(self):
        """Addresses that were asked for, the page's own and data inside it aside."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("file:", "data:", "about:"))]
