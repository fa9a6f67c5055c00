"""Owns the start and the end of a process with an engine in it.

It must not know what is said over the connection to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from jaxpage.engine.replicas.wire import Connection

PROGRAM = "from jaxpage.engine.replicas.remote_child import main; main({descriptor})"


class ChildProcess:
    """A process that runs ``remote_child`` at the other end of ``connection``.

    It ends by itself as soon as the connection does, so none is left over, however this process ends.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """``environment``: variables over those of this process."""
        ours, theirs = socket.socketpair()
        with theirs:
            found = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(descriptor=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the command that runs here
                env=os.environ | found | dict(environment or {}),
                pass_fds=[theirs.fileno()],
            )
        self.connection = Connection(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Ends it without asking."""
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end; False if that did not come in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            return True
        return False

    def how_it_ended(self) -> str:
        """In words."""
        code = self._process.returncode
        if code is None:
            return "its process no longer answers"
        if code >= 0:
            return f"its process ended with code {code}"
        with contextlib.suppress(ValueError):
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process was ended by signal {-code}"
