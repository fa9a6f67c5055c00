"""Owns that engines in processes of their own live: it starts them, and starts those again that have died.

It must not know what they serve.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from jaxpage.engine.replicas.remote import RemoteEngine
from jaxpage.errors import StartupError
from jaxpage.metrics import EngineMetrics

logger = logging.getLogger("jaxpage")

MAX_RESTARTS = 5
WINDOW_S = 600.0
"""An engine that would have to be started again more than MAX_RESTARTS times in this time is given up."""
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
"""Time before an engine is started again: it doubles with every restart in the window."""

Start = Callable[[int, EngineMetrics | None, Callable[[RemoteEngine], None]], RemoteEngine]
"""Starts engine number i; its metrics go on from those given; the callback is for ``RemoteEngine.on_death``."""


class Supervisor:
    """Keeps engines alive.

    Args:
        start: starts one engine; it need not be ready when that returns.
        on_death: told the number of an engine that has died, before anything else is done about it.

    Attributes:
        engines: by number; that of a dead one is replaced once its successor is ready.
        platform: what they all run on.
    """

    def __init__(self, num_engines: int, start: Start, on_death: Callable[[int], None]) -> None:
        """Starts all at once; ``wait_until_ready`` has to follow."""
        self.platform = ""
        self._start = start
        self._on_death = on_death
        self._restarts: list[deque[float]] = [deque() for _ in range(num_engines)]
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._loading: set[RemoteEngine] = set()
        self.engines: list[RemoteEngine] = []
        for number in range(num_engines):
            self.engines.append(self._started(number, None))

    def wait_until_ready(self) -> None:
        """Waits for all engines; if one cannot start, ends the others.

        Raises:
            ValueError, OSError, StartupError: whatever keeps an engine from starting, in one line.
        """
        try:
            platforms = [engine.wait_until_ready() for engine in self.engines]
            for number, platform in enumerate(platforms):
                if platform != platforms[0]:
                    # jax takes the CPU where it finds no other device.
                    raise StartupError(
                        f"engine {number} of {len(platforms)} finds only a {platform}, engine 0 a {platforms[0]}: "
                        f"there are too few devices for data_parallel_size {len(platforms)}"
                    )
        except BaseException:
            self.close()
            raise
        self.platform = platforms[0]

    def close(self) -> None:
        """Ends all engines, and starts none again. Starts no threads: a program that ends cannot."""
        self._closing.set()
        with self._lock:
            engines = [*self._loading, *self.engines]
        for engine in engines:
            engine.stop()
        for engine in engines:
            engine.join()

    def _started(self, number: int, metrics: EngineMetrics | None) -> RemoteEngine:
        return self._start(number, metrics, lambda engine: self._died(number, engine))

    def _died(self, number: int, engine: RemoteEngine) -> None:
        self._on_death(number)
        threading.Thread(
            target=self._revive, args=(number, engine), name=f"jaxpage-supervisor-{number}", daemon=True
        ).start()

    def _revive(self, number: int, engine: RemoteEngine) -> None:
        """Replaces a dead engine, if that works out, by one that lives."""
        reason: object = engine.failure
        while not self._closing.is_set():
            delay_s = self._next_delay_s(number)
            if delay_s is None:
                logger.error("%s; it is given up after %d restarts in %g s", reason, MAX_RESTARTS, WINDOW_S)
                return
            logger.error("%s; it is started again in %g s", reason, delay_s)
            if self._closing.wait(delay_s):
                return
            try:
                self._replace(number, engine.metrics)
                return
            except Exception as error:
                reason = error

    def _replace(self, number: int, metrics: EngineMetrics) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            engine = self._started(number, metrics)
            self._loading.add(engine)
        try:
            platform = engine.wait_until_ready()
            if platform != (self.platform or platform):
                engine.stop()
                engine.join()
                raise StartupError(f"engine {number} finds only a {platform} where it had a {self.platform}")
            with self._lock:
                self.engines[number] = engine
            logger.info("engine %d serves again", number)
        finally:
            with self._lock:
                self._loading.discard(engine)

    def _next_delay_s(self, number: int) -> float | None:
        """How long to wait before the next start; None: it has been started too often."""
        restarts, now_s = self._restarts[number], time.monotonic()
        while restarts and restarts[0] < now_s - WINDOW_S:
            restarts.popleft()
        if len(restarts) >= MAX_RESTARTS:
            return None
        restarts.append(now_s)
        return min(FIRST_DELAY_S * 2 ** (len(restarts) - 1), MAX_DELAY_S)
