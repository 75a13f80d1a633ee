# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium by its DevTools protocol over pipes: pages, what they say, clicks, screenshots."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time

DEADLINE_S = 60


def find_chromium() -> str | None:
    return os.environ.get("KVS_CHROMIUM") or shutil.which("chromium")


def pipe() -> list[int]:
    """A pipe whose descriptors are neither 3 nor 4."""
    made = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in made]
    for end in made:
        os.close(end)
    return high


class Browser:
    """REQUIRES: find_chromium()."""

    def __init__(self, width: int = 1200, height: int = 830) -> None:
        # Processes of the browser end a little after it, and may still write there.
        self._folder = tempfile.TemporaryDirectory(prefix="kvs-chromium-", ignore_cleanup_errors=True)
        to_browser, self._to = pipe()
        self._from, from_browser = pipe()
        # The browser reads descriptor 3 and writes 4. bash, since other shells know descriptors of one digit only.
        shell = f"exec 3<&{to_browser} 4>&{from_browser}; exec \"$0\" \"$@\""
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", shell, find_chromium(), "--headless=new", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe",
             f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}", "about:blank"],
            pass_fds=[to_browser, from_browser], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self._last, self._unread = 0, b""
        self.console: list[str] = []  # errors of pages
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self._call("Emulation.setDeviceMetricsOverride",
                   {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", {})
        self.requested: list[str] = []

    def _message(self, end: float) -> dict:
        while b"\0" not in self._unread:
            left = end - time.monotonic()
            assert left > 0 and select.select([self._from], [], [], left)[0], "the browser says nothing"
            said = os.read(self._from, 1 << 16)
            assert said, "the browser ended"
            self._unread += said
        message, self._unread = self._unread.split(b"\0", 1)
        return json.loads(message)

    def _note(self, message: dict) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.console.append(parameters["entry"]["text"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(parameters["exceptionDetails"]))
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])

    def _call(self, method: str, parameters: dict) -> dict:
        self._last += 1
        call = {"id": self._last, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            call["sessionId"] = self._session
        os.write(self._to, json.dumps(call).encode() + b"\0")
        end = time.monotonic() + DEADLINE_S
        while True:
            message = self._message(end)
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def open(self, url: str) -> None:
        self._call("Page.navigate", {"url": url})
        self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")

    def value(self, expression: str):
        """What the page's script says of it."""
        answer = self._call("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str):
        end = time.monotonic() + DEADLINE_S
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"{expression}:\n{self.value('document.body.innerText')}"
            self.value("new Promise(done => requestAnimationFrame(done)).then(() => true)")
        return value

    def screenshot(self, path: pathlib.Path) -> None:
        picture = self._call("Page.captureScreenshot", {"format": "png"})["data"]
        path.write_bytes(base64.b64decode(picture))

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
