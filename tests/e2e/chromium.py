"""A headless Chromium, spoken to over its DevTools pipe: JSON messages that end with a zero byte."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
# The browser reads from 3 and writes to 4.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
ABOVE_ALL = 10
TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """Its path, or None where it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One page of one browser; a context manager that ends it.

    ``complaints``: what its console said in anger; ``requests``: every address that it asked.
    """

    def __init__(self, profile: Path, width: int, height: int, *flags: str) -> None:
        path = find_chromium()
        assert path is not None, "the caller skips where there is none"
        theirs_in, self._in = _pipe()
        self._out, theirs_out = _pipe()
        command = [sys.executable, "-c", START, str(theirs_in), str(theirs_out), path, *FLAGS, *flags]
        command += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest = b""
        self._number = 0
        self._session = ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._attach(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        os.close(self._in)  # it leaves when its pipe is shut
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)

    def _attach(self, width: int, height: int) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result. Raises AssertionError for one that fails."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        """Go there, and return when it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {url!r} && document.readyState === 'complete'", url)

    def dark(self, dark: bool) -> None:
        """Set the colour scheme that the user prefers."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, what: str) -> Any:
        """Poll until an expression is true, and give its value."""
        limit_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < limit_s:
            if value := self.value(script):
                return value
            time.sleep(0.05)
        raise AssertionError(f"{what} did not come; the page says: {self.value('document.body.innerText')}")

    def screenshot(self, path: Path) -> None:
        """Save what is seen as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._out], [], [], TIMEOUT_S)
            assert ready, "the browser is silent"
            part = os.read(self._out, 1 << 16)
            assert part, "the browser is gone"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        return received

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method", ""), message.get("params", {})
        if method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"])[:500])


def _pipe() -> tuple[int, int]:
    """Both ends above the numbers that the browser wants."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, ABOVE_ALL) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
