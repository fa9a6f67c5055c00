"""Counts what XLA compiles, before and after a runner is ready. JAX counts by process, and so does this."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
"""Recorded for each program that is compiled or fetched from the compilation cache."""


class _Listener:
    """Hears of every compilation in the process; JAX calls it from the thread that compiles."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **details: Any) -> None:
        if event == EVENT:
            with self._lock:
                self.count += 1


@functools.cache
def _listener() -> _Listener:
    return _Listener()


class CompilationCounter:
    """Compilations since it was made: those until ``is_ready`` and those after."""

    def __init__(self) -> None:
        self._listener = _listener()
        self._start = self._listener.count
        self._ready: int | None = None

    def is_ready(self) -> None:
        """From now on serving is what compiles."""
        self._ready = self._listener.count

    @property
    def num_warmup(self) -> int:
        return (self._listener.count if self._ready is None else self._ready) - self._start

    @property
    def num_serving(self) -> int:
        return 0 if self._ready is None else self._listener.count - self._ready
