"""Records JAX profiles of this process: one at a time, which is all that JAX can."""

from __future__ import annotations

import threading
from pathlib import Path

import jax

from jaxpage.errors import ParameterError


class Profiler:
    """Starts and stops the recording. Its methods block, ``stop`` for seconds: it writes the files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_recording = False

    def start(self, directory: Path) -> None:
        """Records from now on, into a folder of its own under ``directory``.

        Raises:
            ParameterError: if a profile is being recorded.
            OSError: if the directory cannot be made.
        """
        with self._lock:
            if self._is_recording:
                raise ParameterError("profile", "is being recorded already")
            directory.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(directory))
            self._is_recording = True

    def stop(self) -> None:
        """Ends the recording and writes it.

        Raises:
            ParameterError: if nothing is being recorded.
        """
        with self._lock:
            if not self._is_recording:
                raise ParameterError("profile", "is not being recorded")
            self._is_recording = False
            jax.profiler.stop_trace()

    def close(self) -> None:
        """Writes what is being recorded, if anything is."""
        with self._lock:
            if self._is_recording:
                self._is_recording = False
                jax.profiler.stop_trace()
