"""Owns this side of an engine in another process: a ``Replica`` whose requests and outputs are messages.

It must not know how the other process was started, nor what its engine does. Needs no jax: a front end whose engines
are all elsewhere leaves the devices to them. ``remote_child`` is the other side.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from jaxpage.config import EngineArgs
from jaxpage.engine.delivery import MAX_UNREAD_OUTPUTS, Item, Letters, Stream, hand_out, is_last
from jaxpage.engine.facts import EngineFacts
from jaxpage.engine.replicas.replica import Job, dead
from jaxpage.engine.replicas.rows import Row, error_of, is_error, numbers_of, output_of
from jaxpage.engine.replicas.wire import Connection
from jaxpage.errors import ParameterError, StartupError
from jaxpage.metrics import CacheInfo, EngineMetrics
from jaxpage.metrics.engine_metrics import last_of, summed

logger = logging.getLogger("jaxpage")

STOP_GRACE_S = 10.0
"""Time that a process gets to end by itself."""
EXIT_GRACE_S = 0.5
"""Time between the end of a connection and that of its process, of which the reason is told."""


class Peer(Protocol):
    """The process at the other end of ``connection``."""

    connection: Connection

    def kill(self) -> None:
        """Ends it without asking."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end; False if that did not come in time."""
        ...

    def how_it_ended(self) -> str:
        """In words."""
        ...


class RemoteEngine:
    """An engine in another process; a ``Replica``.

    It loads from the moment it is made; ``wait_until_ready`` has to be called before anything else. Three threads serve
    it: one sends, one receives (and fills ``metrics``), and callers only leave messages.

    Args:
        name: in front of its lines in the log; may be empty.
        metrics: of an engine that this one replaces; its counters go on.
        on_death: called, in a thread of its own kind, when the process has died without being told to.
    """

    metrics: EngineMetrics

    def __init__(
        self,
        peer: Peer,
        args: EngineArgs,
        name: str = "",
        metrics: EngineMetrics | None = None,
        on_death: Callable[[RemoteEngine], None] | None = None,
    ) -> None:
        self.peer = peer
        self.failure: BaseException | None = None
        self._connection = peer.connection
        self._name = name
        self._metrics_before = metrics
        self._numbers_before = None if metrics is None else metrics.read()
        self._on_death = on_death
        self._facts: EngineFacts | None = None
        self._ready: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._lock = threading.Lock()
        self._is_ended = False
        self._is_stopping = False
        self._stop_deadline_s = 0.0
        self._last_words: str | None = None
        self._ids = itertools.count()
        self._open: dict[int, tuple[Stream, Job]] = {}
        self._key_of: dict[Stream, int] = {}
        self._questions: dict[int, concurrent.futures.Future[Any]] = {}
        level = logging.getLogger("jaxpage").getEffectiveLevel()
        self._connection.post(["start", args, name, level])
        self._receiver = threading.Thread(target=self._receive_all, name="jaxpage-receiver", daemon=True)
        self._receiver.start()

    def wait_until_ready(self) -> str:
        """Waits until the engine can serve; gives its platform: "cpu", "gpu" or "tpu".

        Raises:
            ValueError, OSError, StartupError: whatever keeps the engine from starting, in one line.
        """
        return self._ready.result()

    @property
    def is_ready(self) -> bool:
        """It has loaded, whatever became of it since."""
        return self._facts is not None

    @property
    def facts(self) -> EngineFacts:
        assert self._facts is not None, "the engine is ready"
        return self._facts

    @property
    def is_dead(self) -> bool:
        return self._is_ended

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    def add(self, stream: Stream, job: Job) -> None:
        key = next(self._ids)
        with self._lock:
            self._raise_if_dead()
            self._open[key] = stream, job
            self._key_of[stream] = key
        age_s = time.monotonic() - job.arrival_s  # the clock there may be another one
        fields = [job.request_id, job.text, job.token_ids, job.params, job.cache_salt, job.priority, age_s]
        try:
            self._connection.post(["add", key, *fields])
        except (OverflowError, TypeError) as error:
            self._close_stream(key)
            raise ParameterError("sampling_params", f"cannot be sent to the engine: {error}") from error

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._raise_if_dead()
            keys = [key for key, (_, job) in self._open.items() if job.request_id == request_id]
        for key in keys:
            self._connection.post(["abort", key])

    def leave(self, stream: Stream, request_id: str) -> None:
        with self._lock:
            self._raise_if_dead()
            key = self._key_of.get(stream)
        if key is not None:
            self._close_stream(key)
            self._connection.post(["leave", key])

    def reset_prefix_cache(self) -> None:
        self._post(["reset"])

    def ask(self, question: str) -> concurrent.futures.Future[Any]:
        return self._question("ask", question)

    def start_profile(self, directory: Path) -> None:
        self._question("profile", str(directory)).result()

    def stop_profile(self) -> None:
        self._question("profile", None).result()

    def stop(self) -> None:
        self._is_stopping = True
        self._stop_deadline_s = time.monotonic() + STOP_GRACE_S
        if self.is_ready:
            self._connection.post(["stop"])
        else:
            self.peer.kill()  # it does not listen while it loads

    def join(self) -> None:
        if not self.peer.wait(max(0.0, self._stop_deadline_s - time.monotonic())):
            self.peer.kill()
        self._receiver.join()

    def _post(self, message: list[Any]) -> None:
        with self._lock:
            self._raise_if_dead()
        self._connection.post(message)

    def _question(self, kind: str, question: Any) -> concurrent.futures.Future[Any]:
        number = next(self._ids)
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            self._raise_if_dead()
            self._questions[number] = answer
        self._connection.post([kind, number, question])
        return answer

    def _raise_if_dead(self) -> None:
        if self._is_ended:
            raise dead(self.failure)

    def _close_stream(self, key: int) -> None:
        with self._lock:
            if key in self._open:
                del self._key_of[self._open.pop(key)[0]]

    # Everything below runs in the thread that receives.

    def _receive_all(self) -> None:
        handlers: dict[str, Callable[..., None]] = {
            "ready": self._take_ready,
            "failed": self._take_failed,
            "outputs": self._take_outputs,
            "numbers": self._take_numbers,
            "answer": self._take_answer,
            "log": self._take_log,
            "ended": self._take_ended,
        }
        try:
            while True:
                kind, *fields = self._connection.receive()
                handlers[kind](*fields)
        except EOFError:
            pass
        except Exception:  # what does not read like a message: this is not an engine of this version
            logger.exception("%sthe engine's process is not understood", self._prefix)
        self._end()

    def _take_ready(self, facts: EngineFacts, cache: CacheInfo, platform: str) -> None:
        self._facts = facts
        self.metrics = self._metrics_before or EngineMetrics(cache)
        self._ready.set_result(platform)

    def _take_failed(self, error: Row) -> None:
        self._is_stopping = True
        self._ready.set_exception(error_of(error))

    def _take_outputs(self, letters: list[tuple[int, list[Row]]], numbers: Row | None, is_paced: bool) -> None:
        began_s = time.thread_time()
        if numbers is not None:
            self._take_numbers(numbers)
        by_loop: dict[asyncio.AbstractEventLoop, Letters] = {}
        for key, rows in letters:
            opened = self._open.get(key)
            if opened is None:
                continue  # its reader has left
            stream, job = opened
            items = self._items(key, stream, job, rows)
            stream.num_put += len(items)
            by_loop.setdefault(stream.loop, {})[stream] = items
        own_cost_s = time.thread_time() - began_s

        def done(loop_cost_s: float) -> None:
            self._connection.post(["handed", own_cost_s + loop_cost_s])

        # Where several loops read, the last one speaks for all.
        places = list(by_loop)
        is_told = False
        for loop, each in by_loop.items():
            is_told |= hand_out(loop, each, done if is_paced and loop is places[-1] else None)
        if is_paced and not is_told:
            done(0.0)

    def _items(self, key: int, stream: Stream, job: Job, rows: list[Row]) -> list[Item]:
        items: list[Item] = []
        for row in rows:
            if is_error(row):
                items.append(error_of(row))
            else:
                items.append(output_of(row, job.request_id, job.text, job.token_ids))
        if is_last(items[-1]):
            self._close_stream(key)
        if stream.num_unread >= MAX_UNREAD_OUTPUTS:
            self._connection.post(["abort", key])
        return items

    def _take_numbers(self, row: Row) -> None:
        numbers = numbers_of(row, self.metrics.cache.max_model_len)
        before = self._numbers_before
        self.metrics.replace(numbers if before is None else summed([before, numbers]))

    def _take_answer(self, number: int, value: Any, error: Row | None) -> None:
        _settle(self._questions.pop(number), value, None if error is None else error_of(error))

    def _take_log(self, logger_name: str, level: int, message: str, extra: dict[str, Any]) -> None:
        target = logging.getLogger(logger_name)
        if target.isEnabledFor(level):
            target.log(level, "%s%s", self._prefix, message, extra=extra)

    def _take_ended(self, reason: str) -> None:
        self._last_words = reason

    @property
    def _prefix(self) -> str:
        return f"{self._name}: " if self._name else ""

    def _end(self) -> None:
        """The connection is gone: whoever waits for something learns it."""
        if not self.peer.wait(EXIT_GRACE_S):
            self.peer.kill()  # what cannot be talked to must not keep its devices
        reason = self._last_words or self.peer.how_it_ended()
        with self._lock:
            self._is_ended = True
            if not self._is_stopping:
                self.failure = RuntimeError(self._prefix + reason)
            streams = [stream for stream, _ in self._open.values()]
            questions = list(self._questions.values())
            self._open.clear()
            self._key_of.clear()
        self._connection.close()
        self._connection.release()
        error = dead(self.failure)
        for stream in streams:
            hand_out(stream.loop, {stream: [error]})
        for question in questions:
            _settle(question, None, error)
        if not self._ready.done():
            self._ready.set_exception(StartupError(f"{self._prefix}the engine cannot start: {reason}"))
        elif self._facts is not None:
            self.metrics.replace(last_of(self.metrics.read()))
            if self.failure is not None and self._on_death is not None:
                self._on_death(self)


def _settle(future: concurrent.futures.Future[Any], value: Any, error: BaseException | None) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody waits any more
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
