"""Owns an engine's process: loads the engine that the first message asks for, and serves it over the connection.

It must not know who is at the other end. When the connection ends, so does the process.

Messages to here, each a list that begins with its kind:
- start: options, name for the log (may be empty), level of the log.
- add: key, then the fields of ``Job`` with its age in place of its arrival. From now on the key names the request.
- abort, leave: key.
- reset. ask: number, question. profile: number, directory or None to stop. stop.
- handed: seconds of a processor that it took to hand out the last paced batch of outputs.

From here:
- ready: facts, cache, platform; or failed: error.
- outputs: a list of (key, rows), a row of numbers or None, whether ``handed`` is wanted. Rows are outputs or errors.
- numbers: a row. answer: number, value, error or None.
- log: logger, level, message, extra. ended: reason, when a fault has ended the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpage.console import NoTerminal
from jaxpage.engine.delivery import LOOP_SHARE, Bag, Item, Letters, is_last, joined
from jaxpage.engine.front import Engine
from jaxpage.engine.replicas.local import LocalEngine
from jaxpage.engine.replicas.replica import Job
from jaxpage.engine.replicas.rows import error_row, numbers_row, output_row
from jaxpage.engine.replicas.wire import Connection, encode
from jaxpage.engine.settling import settle
from jaxpage.errors import EngineDeadError, StartupError
from jaxpage.params import RequestOutputKind, SamplingParams

READER_SHARE = 0.5
"""Share of a processor that the other process may take for outputs before these wait for each other. It does not slow
down the engine as an event loop in the same process does, unless the engine computes on processors, too."""
LOG_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime"}
"""What every record has; the rest came with the call as its ``extra``."""
NUMBERS_INTERVAL_S = 0.1
"""How old the metrics at the other end may be. Whatever ends is in them at once."""


def main(descriptor: int) -> None:
    """Serves an engine on the inherited socket ``descriptor``."""
    for each in (signal.SIGINT, signal.SIGTERM):
        # They go to the whole group; what becomes of the engine is for the one to decide whose requests it serves.
        signal.signal(each, signal.SIG_IGN)
    stream = socket.socket(fileno=descriptor)
    stream.set_inheritable(False)
    RemoteChild(Connection(stream)).serve()


class Addressee:
    """A request whose outputs go to the other process; a ``Recipient``.

    Attributes:
        num_waiting: outputs that have not been sent.
        is_added: the engine has it; before that its grammar is compiled. is_to_abort: as soon as the engine has it.
    """

    def __init__(self, key: int, job: Job) -> None:
        self.key = key
        self.job = job
        self.is_open = True
        self.num_put = 0
        self.num_waiting = 0
        self.is_added = False
        self.is_to_abort = False
        self.are_deltas = isinstance(job.params, SamplingParams) and job.params.output_kind is RequestOutputKind.DELTA

    @property
    def num_unread(self) -> int:
        return self.num_waiting


class RemoteMail:
    """Takes the outputs of the engine's thread to the other process."""

    def __init__(
        self,
        connection: Connection,
        numbers: Callable[[], list[Any]],
        ended: Callable[[int], None],
        reader_share: float,
    ) -> None:
        """``numbers`` gives the row of the metrics; ``ended`` is told the keys of requests that are over."""
        self._connection = connection
        self._numbers = numbers
        self._ended = ended
        self._bag = Bag(self._send, reader_share)
        self.handed_out = self._bag.handed_out

    def put(self, recipient: Addressee, item: Item) -> None:
        """Adds the next output of ``recipient``."""
        recipient.num_waiting += 1
        self._bag.put(recipient, item)
        if is_last(item):
            self._ended(recipient.key)

    def flush(self) -> None:
        """Sends what is due, and all that is urgent."""
        self._bag.flush()

    def _send(self, letters: Letters, is_paced: bool) -> bool:
        is_end = False
        for recipient, items in letters.items():
            recipient.num_waiting = 0
            is_end = is_end or is_last(items[-1])
        numbers = self._numbers() if is_end else None
        self._connection.post_later(lambda: ["outputs", _rows(letters), numbers, is_paced])
        return True


def _rows(letters: Letters) -> list[list[Any]]:
    return [[recipient.key, _rows_of(recipient, items)] for recipient, items in letters.items()]


def _rows_of(recipient: Addressee, items: list[Any]) -> list[list[Any]]:
    rows = []
    if isinstance(items[-1], BaseException):
        *items, error = items
        rows = [error_row(error)]
    if recipient.are_deltas and len(items) > 1:
        items = [joined(items)]
    return [output_row(item) for item in items] + rows


class RemoteChild:
    """The engine's side of a connection."""

    def __init__(self, connection: Connection, end: Callable[[int], object] = os._exit) -> None:
        """``end`` ends the process, given its code."""
        self._connection = connection
        self._end = end
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._addressees: dict[int, Addressee] = {}
        # Grammars are compiled here, so that neither the engine nor other requests wait for them.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="intake")

    def serve(self) -> None:
        """Loads the engine and returns when it has ended."""
        _, args, name, level = self._connection.receive()
        _forward_log(self._connection, level)
        if name:
            sys.stderr = NoTerminal(sys.stderr)  # several engines at once would draw over each other's progress
        threading.Thread(target=self._receive_all, name="jaxpage-receiver", daemon=True).start()
        try:
            engine = Engine(args)
        except BaseException as error:
            if not isinstance(error, (ValueError, OSError, StartupError)):
                traceback.print_exc()
            self._connection.post(["failed", error_row(error)])
        else:
            self._serve(engine)
        self._connection.close(timeout_s=5.0)

    def _serve(self, engine: Engine) -> None:
        metrics = engine.metrics
        platform = jax.local_devices()[0].platform
        reader_share = LOOP_SHARE if platform == "cpu" else READER_SHARE
        self._mail = RemoteMail(self._connection, lambda: numbers_row(metrics.read()), self._forget, reader_share)
        self._engine = LocalEngine(engine, self._mail, self._ended.set)
        settle()
        self._connection.post(["ready", engine.facts, metrics.cache, platform])
        sent = b""
        while not self._ended.wait(NUMBERS_INTERVAL_S):
            row = numbers_row(metrics.read())
            if encode(row) != sent:
                sent = encode(row)
                self._connection.post(["numbers", row])
        if self._engine.failure is not None:
            self._connection.post(["ended", str(self._engine.failure) or repr(self._engine.failure)])

    def _receive_all(self) -> None:
        actions: dict[str, Callable[..., None]] = {
            "add": self._add,
            "abort": self._abort,
            "leave": self._leave,
            "reset": lambda: self._engine.reset_prefix_cache(),
            "ask": self._ask,
            "profile": self._profile,
            "handed": lambda cost_s: self._mail.handed_out(cost_s),
            "stop": self._stop,
        }
        try:
            while True:
                kind, *fields = self._connection.receive()
                with contextlib.suppress(EngineDeadError):  # the end of the connection says so
                    actions[kind](*fields)
        except EOFError:
            self._end(0)  # nobody is left to whom anything here is of use, be it loading or running
        except BaseException:
            traceback.print_exc()
            self._end(1)

    def _stop(self) -> None:
        self._engine.stop()
        self._engine.join()

    def _add(self, key: int, *fields: Any) -> None:
        job = Job(*fields)
        addressee = Addressee(key, dataclasses.replace(job, arrival_s=time.monotonic() - job.arrival_s))
        params = addressee.job.params
        with self._lock:
            self._addressees[key] = addressee
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            self._threads.submit(self._compile_and_add, addressee)
        else:
            addressee.is_added = True
            self._engine.add(addressee, addressee.job)

    def _compile_and_add(self, addressee: Addressee) -> None:
        job = addressee.job
        # It was compiled at the other end, too, so nothing is wrong with it; if there is, the engine says so.
        with contextlib.suppress(Exception):
            self._engine.engine.check(job.token_ids, job.params, job.priority, job.cache_salt)
        with self._lock, contextlib.suppress(EngineDeadError):
            addressee.is_added = True
            self._engine.add(addressee, job)
            if addressee.is_to_abort:
                self._engine.abort(job.request_id)

    def _abort(self, key: int) -> None:
        with self._lock:
            addressee = self._addressees.get(key)
            if addressee is not None and not addressee.is_added:
                addressee.is_to_abort = True
                return
        if addressee is not None:
            self._engine.abort(addressee.job.request_id)

    def _leave(self, key: int) -> None:
        with self._lock:
            addressee = self._addressees.pop(key, None)
        if addressee is not None:
            addressee.is_open = False
            self._engine.leave(addressee, addressee.job.request_id)

    def _forget(self, key: int) -> None:
        with self._lock:
            self._addressees.pop(key, None)

    def _ask(self, number: int, question: str) -> None:
        self._engine.ask(question).add_done_callback(partial(self._answer, number))

    def _profile(self, number: int, directory: str | None) -> None:
        action = (
            self._engine.stop_profile if directory is None else partial(self._engine.start_profile, Path(directory))
        )
        self._threads.submit(action).add_done_callback(partial(self._answer, number))

    def _answer(self, number: int, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            self._connection.post(["answer", number, future.result(), None])
        else:
            self._connection.post(["answer", number, None, error_row(error)])


class _LogForwarder(logging.Handler):
    """Log lines are shown by the process that started this one, as all of its own."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        extra = {name: value for name, value in vars(record).items() if name not in LOG_FIELDS}
        self._connection.post(["log", record.name, record.levelno, message, extra])


def _forward_log(connection: Connection, level: int) -> None:
    ours = logging.getLogger("jaxpage")
    ours.handlers = [_LogForwarder(connection)]
    ours.propagate = False
    ours.setLevel(level)
