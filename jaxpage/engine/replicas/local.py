"""Owns an engine's thread: what others want of the engine is queued, and done between two steps.

It must not know who reads the outputs, or where.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpage.engine.delivery import MAX_UNREAD_OUTPUTS, Mail, Outbox, Recipient
from jaxpage.engine.facts import EngineFacts
from jaxpage.engine.front import Engine, Output
from jaxpage.engine.profiling import Profiler
from jaxpage.engine.replicas.replica import KV_CACHE_STATS, SNAPSHOT, Job, dead
from jaxpage.errors import EngineDeadError
from jaxpage.metrics import EngineMetrics, StatusLine
from jaxpage.parallel.hosts import LostHostError
from jaxpage.request import RequestOutput
from jaxpage.scheduler.snapshot import take_snapshot

logger = logging.getLogger("jaxpage")

STATUS_INTERVAL_S = 10.0
STUCK_AFTER_S = 2.0
"""What a thread that computes together with a lost host gets to see so by itself."""

Command = Callable[[], None]


class LocalEngine:
    """An engine in a thread of this process; a ``Replica``.

    The thread owns the engine; all others talk to it through a queue of commands. A fault that the core does not
    recover from ends the requests that were running, is logged with its cause, and marks the engine dead.

    Args:
        mail: where outputs go; None: to the event loops of their streams.
        on_end: called in the thread as its last act.
    """

    def __init__(self, engine: Engine, mail: Mail | None = None, on_end: Callable[[], None] | None = None) -> None:
        self.engine = engine
        self.metrics: EngineMetrics = engine.metrics
        self.failure: BaseException | None = None
        self._mail: Mail = Outbox() if mail is None else mail
        self._on_end = on_end
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._recipients: dict[str, Recipient] = {}
        self._profiler = Profiler()
        self._stopping = False
        self._is_closed = False
        self._closing = threading.Lock()
        self._questions: dict[str, Callable[[], Any]] = {
            SNAPSHOT: lambda: take_snapshot(engine.core.scheduler),
            KV_CACHE_STATS: lambda: engine.core.scheduler.kv_cache_stats(),
        }
        engine.core.runner.worker.notify_of_loss(self._lose)
        self._thread = threading.Thread(target=self._run, name="jaxpage-engine", daemon=True)
        self._thread.start()

    @property
    def facts(self) -> EngineFacts:
        return self.engine.facts

    @property
    def is_dead(self) -> bool:
        return self.failure is not None or self._is_closed

    @property
    def num_unfinished(self) -> int:
        return len(self._recipients)

    def add(self, stream: Recipient, job: Job) -> None:
        self._submit(lambda: self._add(stream, job))

    def abort(self, request_id: str) -> None:
        self._submit(lambda: self._abort(request_id))

    def leave(self, stream: Recipient, request_id: str) -> None:
        self._submit(lambda: self._leave(stream, request_id))

    def reset_prefix_cache(self) -> None:
        self._submit(self.engine.core.scheduler.kv.reset_prefix_cache)

    def ask(self, question: str) -> concurrent.futures.Future[Any]:
        """Costs the engine about 30 ns a block for a snapshot."""
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._submit(lambda: _resolve(answer, self._questions[question]))
        return answer

    def start_profile(self, directory: Path) -> None:
        self._profiler.start(directory)

    def stop_profile(self) -> None:
        self._profiler.stop()

    def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(EngineDeadError):
            self._submit(lambda: None)

    def join(self) -> None:
        self._thread.join()
        self._profiler.close()

    def _submit(self, command: Command) -> None:
        with self._closing:  # a command must not slip in after the thread has answered the last ones
            if self._is_closed:
                raise dead(self.failure)
            self._commands.put(command)

    def _lose(self, reason: str) -> None:
        """Another host of the engine is gone: the engine's thread may wait for ever for what they compute together."""
        self.failure = self.failure or LostHostError(reason)
        if threading.current_thread() is not self._thread:  # else it sees it by itself
            self._thread.join(STUCK_AFTER_S)
            self._end()

    # Everything below runs in the engine's thread; of an engine whose thread is stuck, its end does not.

    def _run(self) -> None:
        status = StatusLine(self.metrics, time.monotonic())
        try:
            while not self._stopping:
                self._run_commands(wait=not self.engine.has_work)
                if self._stopping or not self.engine.has_work:
                    continue
                for output in self.engine.step():
                    self._deliver(output)
                self._mail.flush()
                if not self.engine.args.disable_log_stats and status.age_s(time.monotonic()) >= STATUS_INTERVAL_S:
                    text, figures = status.next(time.monotonic())
                    logger.info(text, extra=figures)
        except LostHostError as error:  # what failed here says less than the loss itself
            logger.error("the engine failed: %s", error)
            self.failure = self.failure or error
        except BaseException as error:
            logger.exception("the engine failed")
            self.failure = self.failure or error
        finally:
            self._end()

    def _end(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.suppress(Exception):
            self._run_commands(wait=False)  # requests queued meanwhile get their stream, and so the reason
        reason = dead(self.failure)
        for recipient in self._recipients.values():
            self._mail.put(recipient, reason)
        self._recipients.clear()
        self._mail.flush()
        if self._on_end is not None:
            self._on_end()

    def _run_commands(self, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()
        self._mail.flush()

    def _add(self, stream: Recipient, job: Job) -> None:
        if not stream.is_open:
            return
        try:
            self.engine.add(
                job.request_id,
                job.token_ids,
                job.params,
                prompt=job.text,
                cache_salt=job.cache_salt,
                priority=job.priority,
                arrival_s=job.arrival_s,
            )
        except Exception as error:  # whatever is wrong with this request, the others go on
            self._mail.put(stream, error)
            return
        self._recipients[job.request_id] = stream
        if self.engine.args.enable_log_requests:
            named = {"request_id": job.request_id}
            num_tokens = len(job.token_ids)
            logger.info("request %s: %d prompt tokens, %s", job.request_id, num_tokens, job.params, extra=named)

    def _deliver(self, output: Output) -> None:
        recipient = self._recipients.get(output.request_id)
        if recipient is None:
            return
        if output.finished:
            del self._recipients[output.request_id]
            if self.engine.args.enable_log_requests:
                reasons = (
                    [each.finish_reason for each in output.outputs] if isinstance(output, RequestOutput) else "pooled"
                )
                named = {"request_id": output.request_id}
                logger.info("request %s ended: %s", output.request_id, reasons, extra=named)
        elif recipient.num_unread >= MAX_UNREAD_OUTPUTS:
            self._abort(output.request_id)
            return
        self._mail.put(recipient, output)

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        recipient = self._recipients.pop(request_id, None)
        if recipient is not None:  # a vector has no half of it
            self._mail.put(recipient, RuntimeError("the request was aborted") if output is None else output)

    def _leave(self, stream: Recipient, request_id: str) -> None:
        # Only the stream's own request: the id may have been used again since.
        if self._recipients.get(request_id) is stream:
            self._abort(request_id)


def _resolve(future: concurrent.futures.Future[Any], function: Callable[[], Any]) -> None:
    """Answers whoever waits for ``future``, if anybody still does; a fault is theirs, not the engine's."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
