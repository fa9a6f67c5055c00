"""Runs the process that compiles for a target, and goes on behind every case at which it dies.

It must not know what is compiled, nor how.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.aot.report import FAILED, Row

CASE_SECONDS = 900.0
"""A case that takes longer has failed."""


class TargetError(RuntimeError):
    """Nothing can be compiled for a target; the message says why."""


def supervise(
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    progress: Callable[[Row], None] = lambda row: None,
    case_seconds: float = CASE_SECONDS,
) -> tuple[list[Row], list[str]]:
    """All rows of a target and the notes on them.

    Args:
        command: what to run, given the entry to start with; it writes the lines that ``child`` documents.
        progress: gets each row as soon as it is known.
        case_seconds: after which a case is ended, as failed.

    Raises:
        TargetError: if the process ends without having started an entry.
    """
    rows: list[Row] = []
    notes: list[str] = []
    first = 0
    while True:
        started: dict[str, Any] | None = None
        is_finished = False
        with tempfile.TemporaryFile("w+b") as errors:
            process = subprocess.Popen(command(first), env=dict(environment), stdout=subprocess.PIPE, stderr=errors)
            watch = _Watch(process, case_seconds)
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    watch.restart()
                    message = json.loads(line)
                    if "note" in message:
                        notes.append(message["note"])
                    elif "start" in message:
                        started = message
                    elif "end" in message:
                        started = None
                        rows.append(Row(**message["end"]))
                        progress(rows[-1])
                    is_finished = is_finished or "finished" in message
            status = process.wait()
            watch.stop()
            errors.seek(0)
            said = errors.read().decode(errors="replace")
        if is_finished:
            return rows, notes
        why = f"more than {case_seconds:.0f} s" if watch.has_ended else _last_words(said, status)
        if started is None:
            raise TargetError(why)
        rows.append(Row(**{**started["start"], "status": FAILED, "reason": why}))
        progress(rows[-1])
        first = started["index"] + 1


class _Watch:
    """Ends a process that is silent for too long."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        self.has_ended = False
        self._process = process
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        self.restart()

    def restart(self) -> None:
        self.stop()
        self._timer = threading.Timer(self._seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self.has_ended = True
        self._process.kill()


def _last_words(said: str, status: int) -> str:
    """Why a process ended: a compiler's last error, else the last line, else how it ended."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"LLVM ERROR|Check failed|Assertion|fatal|Error: ", line)]
    ending = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    last = errors[-1:] or lines[-1:]
    return f"{last[0]} (the compiler {ending})" if last else f"the compiler {ending}"


def child_command(target: str, selection: Mapping[str, Any], dump: Path) -> Callable[[int], list[str]]:
    """The command for ``supervise``."""
    return lambda first: [
        sys.executable,
        "-m",
        "pallas_kernels.aot.child",
        target,
        f"--selection={json.dumps(selection)}",
        f"--dump={dump}",
        f"--first={first}",
    ]
