"""The server process behind the page's tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


class Server:
    """``python -m jaxpage.serve`` with a tiny model, which can be killed and started again at the same port."""

    def __init__(self, model: Path, *options: str) -> None:
        fixed = ["--served-model-name", "tiny", "--uvicorn-log-level", "warning", "--block-size", "16"]
        fixed += ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--num-gpu-blocks-override", "1024"]
        fixed += ["--enforce-eager"]
        self._command = [sys.executable, "-m", "jaxpage.serve", str(model), *fixed, *options]
        self._port = "0"
        self.start()

    def start(self) -> None:
        """Returns when it is ready."""
        # Standard error stays the test's own, so that a failing start is seen and no pipe can fill up.
        command = [*self._command, "--port", self._port]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        ready = (re.match(r"jaxpage: ready: tiny at (http://\S+:(\d+))/v1", line) for line in self._process.stdout)
        match = next(filter(None, ready), None)
        if match is None:
            self.kill()
            pytest.fail("the server did not start")
        self.url, self._port = match.groups()

    def kill(self) -> None:
        """Ends it without a word."""
        self._process.kill()
        self._process.communicate()
