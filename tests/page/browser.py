"""Drives headless Chromium through chromedriver: the W3C's WebDriver protocol is a few JSON requests over HTTP."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key under which the protocol gives the id of an element."""
SHIFT, ENTER, ESCAPE, TAB = "\ue008", "\ue007", "\ue00c", "\ue004"


class Browser:
    """One window of one fresh profile."""

    def __init__(self, driver_url: str, profile: Path) -> None:
        self._http = httpx.Client(base_url=driver_url, timeout=60)
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": [*OPTIONS, f"--user-data-dir={profile}"]},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{answer['sessionId']}"

    def close(self) -> None:
        self._ask("DELETE", self._session)
        self._http.close()

    def open(self, url: str) -> None:
        self._command("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a JavaScript function returns."""
        return self._command("execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """The text of the first element that fits, shown or not."""
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def is_shown(self, selector: str) -> bool:
        return self.run("return document.querySelector(arguments[0])?.checkVisibility() ?? false", selector)

    def click(self, selector: str) -> None:
        """A real click: it fails if something is in the way."""
        self._command(f"element/{self._find(selector)}/click", {})

    def fill(self, selector: str, text: str) -> None:
        """Types into a field that is emptied before."""
        place = f"element/{self._find(selector)}"
        self._command(f"{place}/clear", {})
        self._command(f"{place}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Presses keys one after the other, wherever the focus is; Shift is held until the end."""
        actions = [{"type": "keyDown", "value": key} for key in keys if key == SHIFT]
        for key in keys:
            if key != SHIFT:
                actions += [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        actions += [{"type": "keyUp", "value": key} for key in keys if key == SHIFT]
        self._command("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def emulate(self, command: str, **parameters: Any) -> Any:
        """A command of Chrome's own protocol, for screen sizes, colour schemes and networks."""
        return self._command("goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        self.emulate(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def screenshot(self) -> bytes:
        """What the window shows, as a PNG."""
        return base64.b64decode(self._command("screenshot", method="GET"))

    def problems(self) -> list[str]:
        """Errors and warnings on the console since the last call, such as breaches of the content policy."""
        entries = self._command("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """The first true value of ``condition``; fails with what the page shows if there is none in time."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, (
                f"timed out; the page shows: {self.run('return document.body.innerText')}"
            )
            time.sleep(0.02)
        return value

    def _find(self, selector: str) -> str:
        return self._command("element", {"using": "css selector", "value": selector})[ELEMENT]

    def _command(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        return self._ask(method, f"{self._session}/{path}", body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        value = self._http.request(method, path, json=body).json()["value"]
        assert not (isinstance(value, dict) and "error" in value), f"{path}: {value['error']}: {value['message']}"
        return value


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile in ``profile``; skips the test where there is none, and fails it in CI."""
    program = shutil.which("chromedriver")
    if program is None or not (shutil.which("chromium") or shutil.which("google-chrome")):
        reason = "the page's tests need chromium and chromedriver (Debian: apt install chromium chromium-driver)"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    # A session of its own, so that no part of the browser outlives the tests, whatever happens.
    command = [program, "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as driver:
        try:
            assert driver.stdout is not None
            port = next(match[1] for line in driver.stdout if (match := re.search(r"started.* on port (\d+)", line)))
            browser = Browser(f"http://127.0.0.1:{port}", profile)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
