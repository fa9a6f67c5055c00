"""A worker on several hosts: the leader's sends every command to the others, whose workers obey the same.

Before the host half of the leader sees a step's tokens, all processes have said that they were told and sampled the
same. So a process that went astray ends the job, and gives no wrong token.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import struct
import threading
import zlib

import numpy as np

from jaxpage.batch import StepOutput
from jaxpage.parallel.hosts import Followers, Line, LostHostError
from jaxpage.runner.commands import Command
from jaxpage.runner.wire import pack_command, unpack_command
from jaxpage.runner.worker import Worker

logger = logging.getLogger("jaxpage")

GOODBYE = b""
ANSWER = struct.Struct("<qIII")
"""Of a step: call, and the digests that ``digests_of`` makes."""
UNKNOWN = 0
"""In place of a digest that a process cannot make."""
LAST_WORDS_S = 5.0
"""From the loss of a host to the end of the process, which may be stuck in a computation with that host."""


class LeadingWorker(Worker):
    """The worker of process 0."""

    def lead(self) -> None:
        """Meets the others; to be called once, when all have built their workers. Raises StartupError."""
        self._changed = threading.Condition()
        self._digests: dict[int, int] = {}
        self._answers: dict[int, dict[int, tuple[int, ...]]] = {}
        self._loss: str | None = None
        self._followers = Followers(self._hear, self._lose)
        atexit.register(self.close)

    def obey(self, command: Command) -> StepOutput | None:
        data = pack_command(command)
        self._followers.send(data)
        output = super().obey(command)
        if output is not None:
            self._digests[command.call] = zlib.crc32(data)
        return output

    def confirm(self, call: int, output: StepOutput) -> None:
        """Waits until every follower has said the same of a step.

        Raises:
            LostHostError: if one says something else, or is gone.
        """
        own = digests_of(self._digests.pop(call), output)
        with self._changed:
            self._changed.wait_for(
                lambda: self._loss is not None or len(self._answers.get(call, ())) == len(self._followers.ids)
            )
            answers = self._answers.pop(call, {})
            if self._loss is not None:
                raise LostHostError(self._loss)
        known = [
            {digest for digest in digests if digest != UNKNOWN} for digests in zip(own, *answers.values(), strict=True)
        ]
        astray = [
            process_id
            for process_id, answer in sorted(answers.items())
            if any(len(digests) > 1 and mine != UNKNOWN for digests, mine in zip(known, answer, strict=True))
        ]
        if astray:
            reason = f"host {astray[0]} has not computed in step {call} what this one has"
            self._lose(reason)
            raise LostHostError(reason)

    def close(self) -> None:
        """Sends the others home."""
        self._followers.send(GOODBYE)
        self._followers.close()

    def _hear(self, process_id: int, data: bytes) -> None:
        call, *digests = ANSWER.unpack(data)
        with self._changed:
            self._answers.setdefault(call, {})[process_id] = tuple(digests)
            self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._loss is not None:
                return
            self._loss = reason
            self._changed.notify_all()
        logger.error("%s: the job ends", reason)
        self._followers.close()  # the others see the end of their line, and end too
        timer = threading.Timer(LAST_WORDS_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        self.on_loss(reason)


def follow(worker: Worker, line: Line) -> None:
    """Obeys the leader until it says goodbye. A leader that is gone ends the process, with a message."""
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[int, int, StepOutput | None] | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(line, commands), name="jaxpage-leader", daemon=True).start()
    answering = threading.Thread(target=_answer, args=(line, answers), name="jaxpage-answers", daemon=True)
    answering.start()
    while (data := commands.get()) != GOODBYE:
        command = unpack_command(data)
        output = worker.obey(command)
        if command.num_tokens:
            answers.put((command.call, zlib.crc32(data), output))
    answers.put(None)
    answering.join()


def digests_of(command_digest: int, output: StepOutput | None) -> tuple[int, int, int]:
    """Of a step: of what a process was told, of what it sampled, and of the hidden states that led to that.

    Processes that agree in all they know computed the same. Tokens alone would not tell: in a step that devices share,
    a state gone wrong on one of them spoils the tokens of all alike.
    """
    if output is None:
        return command_digest, UNKNOWN, UNKNOWN
    sampled = _digest(np.asarray(output.token_ids))
    if output.fingerprint is None:
        return command_digest, sampled, UNKNOWN
    parts = [np.asarray(part.data) for part in output.fingerprint.addressable_shards]
    is_one = all((part == parts[0]).all() for part in parts)
    return command_digest, sampled, _digest(parts[0] if is_one else np.concatenate(parts))


def _digest(array: np.ndarray) -> int:
    """Never UNKNOWN."""
    return zlib.crc32(np.ascontiguousarray(array, np.int32).tobytes()) or 1


def _receive(line: Line, commands: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            data = line.receive()
            commands.put(data)
            if data == GOODBYE:
                return
    except (EOFError, OSError) as error:
        # The other threads may be stuck in a computation with a host that is gone.
        logger.error("the leading host has ended the job or is gone (%s)", error)
        os._exit(1)


def _answer(line: Line, answers: queue.SimpleQueue[tuple[int, int, StepOutput | None] | None]) -> None:
    """Sends a digest of each step as soon as its tokens are there."""
    try:
        while (item := answers.get()) is not None:
            call, command_digest, output = item
            line.send(ANSWER.pack(call, *digests_of(command_digest, output)))
    except OSError:
        pass  # the thread that receives sees the end too
    except Exception:
        logger.exception("a step failed")
        os._exit(1)
