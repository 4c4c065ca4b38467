"""Headless Chromium through the DevTools protocol, over pipes: no port, no further package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S = 60.0

# What is wider than the page, apart from what scrolls in a box of its own or is cut off by it.
_MEASURE = """(() => {
  const wide = [...document.querySelectorAll('body *')].filter(e =>
    !e.closest('.scroll > *, defs, .defs') && e.getBoundingClientRect().width > 0
    && (e.getBoundingClientRect().right > innerWidth + 1
        || e.getBoundingClientRect().left < -1));
  const style = getComputedStyle(document.body);
  return JSON.stringify({
    scroll: document.documentElement.scrollWidth, inner: innerWidth,
    wide: wide.slice(0, 5).map(e => e.outerHTML.slice(0, 160)),
    background: style.backgroundColor, color: style.color,
    text: document.body.innerText.length,
    drawn: [...document.querySelectorAll('figure svg')].filter(
      e => e.getBoundingClientRect().width > 9).length,
    fills: [...document.querySelectorAll('rect, path.h5, path.h4')].map(
      e => getComputedStyle(e).fill),
  });
})()"""


def find_browser() -> str | None:
    """Returns the path of a browser, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class View:
    """A page as it was shown."""

    scroll: int
    inner: int
    wide: list
    background: str
    color: str
    text: int
    drawn: int
    fills: list
    problems: list
    requests: list


class Browser:
    """A browser that is closed at the end of the with block."""

    def __init__(self, path: str, profile: str) -> None:
        # Away from the two numbers that the browser expects its pipes at.
        (their_in, own_out), (own_in, their_out) = ([_high(fd) for fd in os.pipe()] for _ in "ab")
        command = [path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--no-first-run", "--disable-dev-shm-usage", "--disable-extensions"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "bash", *command],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._out, self._in = own_out, own_in
        self._buffer, self._number, self.events = b"", 0, []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict:
        """Calls a method and returns its result; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def await_event(self, method: str) -> None:
        """Waits for an event."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._receive())

    def _receive(self) -> dict:
        deadline = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self._in, 1 << 16)
            assert got, f"the browser has ended with code {self._process.poll()}"
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def view(
        self, url: str, width: int, *, dark: bool, printed: bool = False, kept: str = ""
    ) -> View:
        """Opens a page at a width and returns what it looks like; a picture of it is kept."""
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        media = "print" if printed else "screen"
        self.call("Emulation.setEmulatedMedia", session, media=media, features=[scheme])
        self.call("Page.navigate", session, url=url)
        self.await_event("Page.loadEventFired")
        found = self.call("Runtime.evaluate", session, expression=_MEASURE, returnByValue=True)
        if kept:
            shot = self.call("Page.captureScreenshot", session, captureBeyondViewport=True)
            Path(kept).write_bytes(base64.b64decode(shot["data"]))
        self.call("Target.closeTarget", targetId=target)
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return View(
            **json.loads(found["result"]["value"]),
            problems=[event for event in self.events if event.get("method") in bad],
            requests=[
                event["params"]["request"]["url"]
                for event in self.events
                if event.get("method") == "Network.requestWillBeSent"
            ],
        )


def _high(fd: int) -> int:
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return copy
